"""Token ids back to text, piece by piece, without ever showing half a character.

A byte-level or byte-fallback tokenizer is a function id -> bytes; the text is the UTF-8 reading of the joined bytes,
so an incremental UTF-8 decoder gives exactly the text of a whole decode at O(1) a token. Other decoders (WordPiece,
CTC, ...) are read through a short window of whole decodes.

The one difference to a whole decode: a byte-fallback run that holds an invalid byte keeps its valid characters here,
where the library replaces the whole run.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from router.text import TextModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_HELD_TOKENS = 16
"""Window decoding: longer than any character's bytes; a tail that is still unreadable then is invalid and released."""
_WINDOW_TOKENS = 6


def _byte_level_alphabet() -> dict[str, int]:
    """Printable stand-in -> byte, the byte-level BPE alphabet (GPT-2, `bytes_to_unicode`)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = (byte for byte in range(256) if byte not in set(kept))
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(shifted)}


_ALPHABET = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class _ByteRule:
    """How a token's written form becomes bytes."""

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    strip_left: int = 0
    """Spaces taken from the start of the whole text."""

    def piece(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([_ALPHABET[char] for char in token])
            except KeyError:
                return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def _byte_rule(decoder: dict[str, object] | None) -> _ByteRule | None:
    """Reads tokenizer.json's `decoder`. None: its text is not a function of single tokens."""
    if decoder is None:
        return None
    if decoder.get("type") == "ByteLevel":
        return _ByteRule(byte_level=True)
    parts = decoder.get("decoders")
    if decoder.get("type") != "Sequence" or not isinstance(parts, list):
        return None
    if [part.get("type") for part in parts] == ["ByteLevel"]:
        return _ByteRule(byte_level=True)
    replacements: list[tuple[str, str]] = []
    strip_left = 0
    fallback = False
    for part in parts:
        match part:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fallback:
                replacements.append((old, new))
            case {"type": "ByteFallback"}:
                fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fallback:
                strip_left = start
            case _:
                return None
    return _ByteRule(False, tuple(replacements), strip_left) if fallback else None


class PieceTable:
    """id -> bytes of one tokenizer, filled as ids are met. Ids unknown to the tokenizer are empty, as in a whole
    decode.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The decoder alone in its JSON form; the whole tokenizer is megabytes.
        state = None if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
        self._rule = _byte_rule(None if state is None else json.loads(state))
        self._pieces: dict[int, bytes] = {}

    @property
    def by_bytes(self) -> bool:
        return self._rule is not None

    @property
    def strip_left(self) -> int:
        return self._rule.strip_left if self._rule else 0

    def piece(self, token_id: int) -> bytes:
        found = self._pieces.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = self._rule.piece(token) if self._rule and token is not None else b""
            self._pieces[token_id] = found
        return found


class IncrementalDetokenizer:
    """Text of one branch's output tokens. `push` returns what became readable, `flush` the rest; both mutate.

    The deltas joined are the whole decode of the same ids. U+FFFD appears only for bytes that no later token can
    complete.
    """

    def __init__(self, text: TextModel, skip_special_tokens: bool = True) -> None:
        self._skip = text.special_ids if skip_special_tokens else frozenset()
        self._pieces = text.pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if text.pieces.by_bytes else None
        self._strip_left = text.pieces.strip_left
        self._window = _Window(text)

    def push(self, token_ids: Iterable[int]) -> str:
        kept = [token_id for token_id in token_ids if token_id not in self._skip]
        if self._utf8 is None:
            return self._window.push(kept)
        piece = self._pieces.piece
        return self._strip(self._utf8.decode(b"".join([piece(token_id) for token_id in kept])))

    def flush(self) -> str:
        if self._utf8 is None:
            return self._window.flush()
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strip_left and text:
            spaces = len(text) - len(text.lstrip(" "))
            taken = min(spaces, self._strip_left)
            self._strip_left = self._strip_left - taken if spaces == len(text) else 0
            return text[taken:]
        return text


class _Window:
    """Decodes [a few old tokens + new ones] and releases what the old ones alone do not give."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._old: list[int] = []
        self._new: list[int] = []

    def push(self, token_ids: list[int]) -> str:
        self._new += token_ids
        return self._release(final=False)

    def flush(self) -> str:
        return self._release(final=True)

    def _release(self, final: bool) -> str:
        if not self._new:
            return ""
        whole = self._text.decode(self._old + self._new, skip_special_tokens=False)
        if whole.endswith("\ufffd") and not final and len(self._new) < _MAX_HELD_TOKENS:
            return ""
        before = self._text.decode(self._old, skip_special_tokens=False) if self._old else ""
        self._old = (self._old + self._new)[-_WINDOW_TOKENS:]
        self._new = []
        return whole[len(before) :]

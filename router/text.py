"""The model's words: tokenizer, chat template, special tokens and default sampling, read from the prepared model
folder.

No transformers import: it costs seconds at start and its fast tokenizers are the same library.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer

from headrace.errors import StartupError, invalid
from router.detokenizer import IncrementalDetokenizer, PieceTable
from router.stops import StopMatcher
from router.template import ChatTemplate

__all__ = ["IncrementalDetokenizer", "StopMatcher", "TextModel"]

_INLINE_CHARS = 2048
"""Shorter texts are encoded on the event loop: under a millisecond, less than a thread hop under load."""
_SHRINK = 4
"""A normalizer or a fused unknown token may join this many characters into one before the vocabulary sees them."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_DEFAULTS = ("temperature", "top_p", "top_k")


class TextModel:
    """One model's text side. Immutable after `load`; safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        config: Mapping[str, object] | None = None,
        generation_config: Mapping[str, object] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        threads: int = 2,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._config = dict(config or {})
        self._special_tokens = dict(special_tokens or {})
        self._template_source = chat_template
        self._template = ChatTemplate(chat_template, self._special_tokens) if chat_template is not None else None
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self.pieces = PieceTable(tokenizer)
        self.tokenizer_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        configured = self._config.get("vocab_size")
        self.vocab_size = configured if isinstance(configured, int) else self.tokenizer_size
        """Rows of the model's embedding; may exceed the tokenizer's own size."""
        self.special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.eos_token_ids = self._find_eos(generation_config or {})
        self.default_sampling = _default_sampling(generation_config or {})
        """temperature, top_p, top_k of generation_config.json, where it has them."""
        self.max_token_chars: int = max((len(token) for token in tokenizer.get_vocab(True)), default=1)
        plain = self.pieces.by_bytes and tokenizer.normalizer is None
        self._most_chars = self.max_token_chars * (1 if plain else _SHRINK)

    @classmethod
    def load(cls, model_path: str, chat_template_file: str | None = None) -> TextModel:
        """Reads the folder. Raises StartupError with one clear line when a file is missing or broken."""
        folder = Path(model_path)
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception for every fault
            raise StartupError(f"cannot read {folder / 'tokenizer.json'}: {error}") from error
        config = _read_json(folder / "config.json")
        tokenizer_config = _read_json(folder / "tokenizer_config.json")
        return cls(
            tokenizer,
            chat_template=_template_source(folder, tokenizer_config, chat_template_file),
            config=config,
            generation_config=_read_json(folder / "generation_config.json"),
            special_tokens=_special_tokens(tokenizer_config),
        )

    @property
    def architecture(self) -> str:
        names = self._config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else str(self._config.get("model_type", ""))

    @property
    def dtype(self) -> str:
        return str(self._config.get("dtype") or self._config.get("torch_dtype") or "")

    def encode(self, text: str, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """Token ids. Raises INVALID_ARGUMENT on `field` for a lone surrogate, naming its offset."""
        check_unicode(field, text)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    async def encode_async(self, text: str, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """`encode` without holding the event loop for long texts. Bound the text with `max_chars` before."""
        if len(text) <= _INLINE_CHARS:
            return self.encode(text, add_special_tokens, field)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.encode, text, add_special_tokens, field)

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt text; encode it with add_special_tokens=False, the template writes them itself."""
        if self._template is None:
            raise invalid("messages", "this model has no chat template; send a prompt instead")
        for index, message in enumerate(messages):
            check_unicode(f"messages[{index}]", message.get("content", ""))
        return self._template.render(messages, add_generation_prompt)

    async def render_chat_async(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        if sum(len(message.get("content", "")) + 32 for message in messages) <= _INLINE_CHARS:
            return self.render_chat(messages, add_generation_prompt)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self.render_chat, messages, add_generation_prompt
        )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary writes it; '' for an id that only the embedding has."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text; its written form where the decoder looks at its neighbours. b'' for an id that
        only the embedding has.
        """
        return self.pieces.piece(token_id) if self.pieces.by_bytes else self.token_text(token_id).encode()

    def max_chars(self, num_tokens: int) -> int:
        """A longer text surely has more tokens than that: a bound that needs no tokenizing."""
        return num_tokens * self._most_chars

    def identity_digest(self) -> bytes:
        """16 bytes over tokenizer, template and special tokens: what turns a request's text into ids."""
        digest = blake2b(digest_size=16, person=b"headrace/text")
        template = "" if self._template_source is None else self._template_source
        special = json.dumps(self._special_tokens, sort_keys=True)
        for part in (self._tokenizer.to_str(), template, special):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find_eos(self, generation_config: Mapping[str, object]) -> tuple[int, ...]:
        found: set[int] = set()
        for source in (self._config, generation_config):
            value = source.get("eos_token_id")
            found.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
        if (eos := self._special_tokens.get("eos_token")) is not None:
            token_id = self._tokenizer.token_to_id(eos)
            found.update(() if token_id is None else (token_id,))
        return tuple(sorted(found))


def check_unicode(field: str, text: str) -> None:
    """Raises INVALID_ARGUMENT with the offset of a lone surrogate, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(field, f"lone surrogate at character {error.start}; the text must be valid Unicode") from None


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"cannot read {path}: not a JSON object")
    return value


def _template_source(folder: Path, tokenizer_config: Mapping[str, object], override: str | None) -> str | None:
    """The caller's file, else chat_template.jinja, else tokenizer_config.json (`default` where it lists several)."""
    path = Path(override) if override is not None else folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if override is not None:
            raise StartupError(f"no chat template at {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read chat template {path}: {error}") from error
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_NAMES:
        value = tokenizer_config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _default_sampling(generation_config: Mapping[str, object]) -> dict[str, float]:
    return {
        name: value
        for name in _DEFAULTS
        if isinstance(value := generation_config.get(name), (int, float)) and not isinstance(value, bool)
    }

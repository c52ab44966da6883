"""Incremental detokenization equals whole decoding, however the tokens arrive."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from router.text import IncrementalDetokenizer, TextModel
from tests.doors_fixtures import text_model

BYTE_LEVEL = text_model()
FAMILY = "👨‍👩‍👧‍👦 Ünïcödé 漢字かな العربية 🏴󠁧󠁢󠁥󠁮󠁧󠁿 e\u0301\u0302"


def byte_fallback_model() -> TextModel:
    """SentencePiece-like: `▁` for a space, unknown characters as byte tokens, one leading space stripped."""
    words = ["<s>", "</s>", "▁", "a", "▁a", "b", "é", "▁the", " "]
    vocab = {token: i for i, token in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return TextModel(tokenizer)


def metaspace_model() -> TextModel:
    words = ["<s>", "▁hello", "▁wor", "ld", "▁", "é", "!"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    return TextModel(tokenizer)


def deltas(model: TextModel, ids: list[int], cuts: random.Random | None = None, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(model, skip)
    out, i = [], 0
    while i < len(ids):
        step = cuts.randint(0, 4) if cuts else 1
        out.append(detokenizer.push(ids[i : i + step]))
        i += step
    return [*out, detokenizer.flush()]


def test_a_character_over_several_tokens_never_shows_as_replacement() -> None:
    ids = BYTE_LEVEL.encode(FAMILY)
    assert len(ids) > len(FAMILY)
    out = deltas(BYTE_LEVEL, ids)
    assert "".join(out) == FAMILY
    assert not any("\ufffd" in piece for piece in out)
    assert out[-1] == ""


@given(st.text(max_size=40), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_deltas_of_any_text_and_any_cuts_join_to_the_whole_decode(text: str, seed: int) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert "".join(deltas(BYTE_LEVEL, ids, random.Random(seed))) == BYTE_LEVEL.decode(ids) == text


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 5), max_size=40), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_of_a_byte_level_model_decode_as_the_library_does(ids: list[int], skip: bool) -> None:
    """Also invalid bytes, special tokens and ids that only the embedding has."""
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas(BYTE_LEVEL, ids, skip=skip)) == whole


def test_truly_invalid_bytes_show_and_do_not_hold_the_stream() -> None:
    lead = BYTE_LEVEL.encode("é")[0]  # the first byte of two
    letter = BYTE_LEVEL.encode("x")[0]
    assert deltas(BYTE_LEVEL, [lead, letter, letter, lead]) == ["", "\ufffdx", "x", "", "\ufffd"]


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = BYTE_LEVEL.encode("a<|im_end|>b")
    assert "".join(deltas(BYTE_LEVEL, ids)) == "ab"
    assert "".join(deltas(BYTE_LEVEL, ids, skip=False)) == "a<|im_end|>b"


def test_an_added_token_outside_the_byte_alphabet_is_kept_as_written() -> None:
    model = text_model()
    model._tokenizer.add_tokens([AddedToken("two words é", normalized=False)])
    ids = model.encode("a two words é b")
    assert "".join(deltas(model, ids)) == model.decode(ids) == "a two words é b"


BYTE_FALLBACK = byte_fallback_model()


@given(
    st.lists(st.integers(0, 8), max_size=12), st.text(min_size=1, max_size=6), st.lists(st.integers(0, 8), max_size=12)
)
@settings(max_examples=200, deadline=None)
def test_byte_fallback_with_valid_bytes_decodes_as_the_library_does(
    head: list[int], text: str, tail: list[int]
) -> None:
    ids = head + [9 + byte for byte in text.encode()] + tail
    out = deltas(BYTE_FALLBACK, ids)
    assert "".join(out) == BYTE_FALLBACK.decode(ids)


def test_byte_fallback_strips_one_leading_space_of_the_whole_text_only() -> None:
    assert deltas(BYTE_FALLBACK, [0, 2, 2, 4, 7]) == ["", "", " ", " a", " the", ""]


def test_byte_fallback_keeps_the_valid_characters_beside_an_invalid_byte() -> None:
    assert "".join(deltas(BYTE_FALLBACK, [9 + byte for byte in "é".encode() + b"\xff"])) == "é\ufffd"


@pytest.mark.parametrize("ids", [[1, 2, 3, 6], [2, 3, 4, 1, 1, 1, 2, 3, 6, 6, 5], [1] * 30, [3, 1], []])
def test_other_decoders_go_through_a_window(ids: list[int]) -> None:
    model = metaspace_model()
    assert not model.pieces.by_bytes
    assert "".join(deltas(model, ids)) == model.decode(ids)


def test_cost_a_token_does_not_grow_with_the_answer() -> None:
    ids = BYTE_LEVEL.encode("x y é ") * 8000
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)

    def half(part: list[int]) -> float:
        start = time.perf_counter()
        for token_id in part:
            detokenizer.push([token_id])
        return time.perf_counter() - start

    middle = len(ids) // 2
    first, second = half(ids[:middle]), half(ids[middle:])
    assert second < 5 * first + 0.05
    assert (first + second) / len(ids) < 50e-6

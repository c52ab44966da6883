"""Names of blocks: any one field flipped misses; every process agrees; the KV formula is the article's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.errors import InvariantError
from kvtransfer.core.identity import (
    IDENTITY_FIELDS,
    block_hashes,
    model_identity,
    namespace_id,
    request_root,
    root_hash,
)
from kvtransfer.core.layout import KvLayout

FIELDS: dict[str, bytes | str | int] = {name: f"value of {name}" for name in IDENTITY_FIELDS}
MODEL = {
    "weights": b"w" * 32,
    "quantization": "none",
    "tokenizer": "t",
    "chat_template": "c",
    "tool_schema": "1",
    "attention": "rope=10000",
    "kv_dtype": "float32",
    "kv_layout": "l",
}


@pytest.mark.parametrize("name", sorted(IDENTITY_FIELDS))
def test_flipping_one_identity_field_misses(name: str) -> None:
    assert root_hash(FIELDS | {name: "other"}) != root_hash(FIELDS)


@pytest.mark.parametrize("name", sorted(MODEL))
def test_every_argument_of_model_identity_counts(name: str) -> None:
    assert model_identity(**(MODEL | {name: "other"})) != model_identity(**MODEL)


def test_missing_and_unknown_fields_are_refused() -> None:
    with pytest.raises(InvariantError, match="weights"):
        root_hash({k: v for k, v in FIELDS.items() if k != "weights"})
    with pytest.raises(InvariantError, match="colour"):
        root_hash(FIELDS | {"colour": "blue"})


def test_field_order_does_not_matter_and_types_do() -> None:
    assert root_hash(dict(reversed(FIELDS.items()))) == root_hash(FIELDS)
    assert len({root_hash(FIELDS | {"weights": value}) for value in ("1", b"1", 1)}) == 3


def test_namespace_parts_cannot_slide_into_each_other() -> None:
    m = model_identity(**MODEL)
    roots = {
        request_root(m, namespace_id(tenant, salt, secret))
        for tenant, salt, secret in [
            ("ab", "c", ""),
            ("a", "bc", ""),
            ("", "abc", ""),
            ("abc", "", ""),
            ("ab", "", "c"),
        ]
    }
    roots |= {
        request_root(b"x" * 16, namespace_id("ab", "c", "")),
        request_root(m, b"n"),
        request_root(m, b"n", "lora"),
    }
    assert len(roots) == 8


def test_a_block_is_named_by_all_tokens_before_it() -> None:
    root, tokens = b"r" * 16, list(range(64))
    base = block_hashes(root, tokens, 16)
    assert len(base) == 4 and len(set(base)) == 4
    for flipped in range(64):
        other = block_hashes(root, [*tokens[:flipped], 999, *tokens[flipped + 1 :]], 16)
        same = [a == b for a, b in zip(base, other, strict=True)]
        assert same == [block < flipped // 16 for block in range(4)]
    assert not set(base) & set(block_hashes(b"s" * 16, tokens, 16))


def test_equal_tokens_at_another_position_have_another_name() -> None:
    first, second = block_hashes(b"r" * 16, [7] * 32, 16)
    assert first != second


def test_block_size_is_part_of_the_name() -> None:
    assert not set(block_hashes(b"r" * 16, [1] * 64, 16)) & set(block_hashes(b"r" * 16, [1] * 64, 32))


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 48])
def test_extending_a_chain_equals_computing_it_anew(length: int) -> None:
    tokens = list(range(length))
    whole = block_hashes(b"r" * 16, tokens, 16)
    assert len(whole) == length // 16
    for known in range(len(whole) + 1):
        assert block_hashes(b"r" * 16, tokens, 16, whole[:known]) == whole


@pytest.mark.parametrize("bad", [-1, 1 << 32])
def test_token_ids_out_of_range_are_an_error(bad: int) -> None:
    with pytest.raises(OverflowError):
        block_hashes(b"r" * 16, [bad] * 16, 16)


def test_names_are_equal_in_every_process() -> None:
    code = (
        "from kvtransfer.core.identity import *;"
        "m = model_identity(weights=b'w', quantization='q', tokenizer='t', chat_template='c', tool_schema='s',"
        " attention='a', kv_dtype='d', kv_layout='l');"
        "root = request_root(m, namespace_id('tenant', 'salt', 'secret'));"
        "print(block_hashes(root, list(range(100)), 16)[-1].hex())"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed in ("0", "1", "2", "random")
    ]
    outputs = {run.communicate(timeout=60)[0] for run in runs}
    assert all(run.returncode == 0 for run in runs)
    assert len(outputs) == 1 and len(outputs.pop().strip()) == 32


def test_the_articles_example_takes_one_gibibyte() -> None:
    """32 layers, 8 KV heads, 128, bf16, 8192 tokens. The trap: the model's 32 attention heads would give 4 GiB."""
    assert KvLayout(32, 8, 128, 16, 2).kv_bytes(8192) == 1 << 30
    assert KvLayout(32, 32, 128, 16, 2).kv_bytes(8192) == 4 << 30


def test_layout_numbers_agree() -> None:
    layout = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype_bytes=4)
    size = 1
    for extent in layout.block_shape:
        size *= extent
    assert layout.block_bytes == size * 4 == layout.kv_bytes(16)
    assert layout.pool_shape(7) == (7, 3, 30, 2, 16, 64)
    assert [layout.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]

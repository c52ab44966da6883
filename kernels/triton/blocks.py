"""Copies of KV blocks on one device: block to block, and between blocks and a contiguous staging tensor.

Bytes are moved in the widest words that all addresses allow, 16 bytes a load where they do. Program (block, chunk): a
thread has CHUNK / 128 bytes under way, so that a few blocks already fill the memory's pipeline. Ids are read on the
device; an id below 0 is padding, and nothing is copied for it.
"""

from __future__ import annotations

from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.compiled import Variant

CHUNK_BYTES = 16384
_WORDS = {8: torch.int64, 4: torch.int32, 1: torch.uint8}


@triton.jit(do_not_specialize_on_alignment=["source_ids", "target_ids"])
def copy_kernel(
    source,
    target,
    source_ids,
    target_ids,
    source_stride,
    target_stride,
    words,
    CHUNK: tl.constexpr,
    FROM_IDS: tl.constexpr,
    TO_IDS: tl.constexpr,
):
    """target[row] = source[row], `words` words of each; a row is the program's number or, by FROM_IDS and TO_IDS, what
    the ids say of it.
    """
    number = tl.program_id(0).to(tl.int64)
    read, written = number, number
    if FROM_IDS:
        read = tl.load(source_ids + number).to(tl.int64)
    if TO_IDS:
        written = tl.load(target_ids + number).to(tl.int64)
    if (read >= 0) & (written >= 0):
        i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = i < words
        data = tl.load(source + read * source_stride + i, mask=inside)
        tl.store(target + written * target_stride + i, data, mask=inside)


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """pool[targets[i]] = pool[sources[i]] for all i at once: no block may be a target twice, or a target and a source.

    pool: uint8 [blocks, bytes], any row stride; sources, targets: int32 or int64 [n].
    """
    _copy(pool, pool, sources, targets, len(sources), pool.shape[1])


def gather_blocks(pool: Tensor, ids: Tensor, staging: Tensor, first_byte: int = 0) -> None:
    """staging[i] = the bytes from first_byte of block ids[i], as many as a row of staging has.

    pool: uint8 [blocks, bytes]; ids: int32 or int64 [n]; staging: uint8 [n, width]; any row strides. A range of KV
    heads is such a byte range, since blocks keep one head after the other.
    """
    part = pool[:, first_byte : first_byte + staging.shape[1]]
    _copy(part, staging, ids, None, len(ids), staging.shape[1])


def scatter_blocks(staging: Tensor, pool: Tensor, ids: Tensor, first_byte: int = 0) -> None:
    """The bytes from first_byte of block ids[i] = staging[i]: `gather_blocks` the other way. No block comes twice."""
    part = pool[:, first_byte : first_byte + staging.shape[1]]
    _copy(staging, part, None, ids, len(ids), staging.shape[1])


def _copy(
    source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, count: int, width: int
) -> None:
    if source.shape[1] != width or target.shape[1] != width:
        raise ValueError(f"{width} bytes do not lie in rows of {source.shape[1]} and {target.shape[1]}")
    if count == 0 or width == 0:
        return
    facts = (width, *(fact for x in (source, target) for fact in (x.data_ptr(), x.stride(0))))
    size = next(size for size in _WORDS if all(fact % size == 0 for fact in facts))
    source, target = source.view(_WORDS[size]), target.view(_WORDS[size])
    chunk = CHUNK_BYTES // size
    copy_kernel[(count, triton.cdiv(width // size, chunk))](
        source,
        target,
        source_ids,
        target_ids,
        source.stride(0),
        target.stride(0),
        width // size,
        chunk,
        source_ids is not None,
        target_ids is not None,
        num_warps=4,
    )


def variants() -> list[Variant]:
    """All three ways with 8-byte words, and with whatever else a caller's addresses may want."""
    ways = {"copy": (True, True), "gather": (True, False), "scatter": (False, True)}
    found = []
    for (way, (from_ids, to_ids)), (size, word) in product(ways.items(), ((8, "i64"), (4, "i32"), (1, "u8"))):
        if size < 8 and way != "copy":
            continue
        signature = {"source": f"*{word}:16", "target": f"*{word}:16", "words": "i32:16"}
        signature |= dict.fromkeys(("source_stride", "target_stride"), "i32:16")
        constexprs = {"CHUNK": CHUNK_BYTES // size, "FROM_IDS": from_ids, "TO_IDS": to_ids}
        for name, there in (("source_ids", from_ids), ("target_ids", to_ids)):
            if there:
                signature[name] = "*i64"
            else:
                constexprs[name] = None
        found.append(Variant(f"{way}_blocks/{word}", copy_kernel, signature, constexprs))
    return found

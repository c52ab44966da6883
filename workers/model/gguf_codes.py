"""GGUF's block types as integer codes with float32 scales and offsets, exactly. numpy only.

value = code * scale + offset, where the product is exact in float32 wherever there is an offset: a type's scale has at
most 17 bits (11 of a float16, 6 of a K-quant's sub-scale) and its code at most 5. One rounding is then left, that of
the sum, so the values equal gguf's own bit for bit, whether the machine fuses the two operations or not. Without offset
there is only one operation. Q4_0 alone loses something: its negative zeros become zeros.

Layouts of the blocks: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Parts = tuple[Array, Array, Array | None]
"""Codes int8 [blocks, block size], scales and offsets float32 [blocks, groups of a block]."""

_K = 256
"""Weights of a K-quant's block."""
_PIECE_WEIGHTS = 1 << 21
"""Weights that are unpacked at a time: bounds the memory beside the result."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a type is kept. group: weights that share a scale; bits: 4 (codes 0..15) or 8."""

    block: int
    block_bytes: int
    group: int
    bits: int
    shifted: bool
    unpack: Callable[[Array], Parts]


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A matrix as codes int8 [N, K], scales and offsets float32 [N, K / group]; offsets None: there are none."""

    codes: Array
    scales: Array
    offsets: Array | None
    layout: Layout

    def values(self) -> Array:
        """float32 [N, K]."""
        groups = self.codes.astype(np.float32).reshape(*self.scales.shape, self.layout.group)
        groups *= self.scales[..., None]
        if self.offsets is not None:
            groups += self.offsets[..., None]
        return groups.reshape(self.codes.shape)

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """What is written, by the ending of its name; two 4-bit codes a byte, the first in the low half."""
        low, high = self.codes[:, ::2].view(np.uint8), self.codes[:, 1::2].view(np.uint8)
        yield "codes", low | high << 4 if self.layout.bits == 4 else self.codes
        yield "scales", self.scales
        if self.offsets is not None:
            yield "offsets", self.offsets


def layout_of(type_name: str) -> Layout | None:
    """None: this type has no exact form as codes here."""
    return _LAYOUTS.get(type_name)


def code_shapes(layout: Layout, rows: int, depth: int) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """(ending of the name, safetensors dtype, shape) of what `CodedTensor.arrays` gives, in its order."""
    yield ("codes", "U8", (rows, depth // 2)) if layout.bits == 4 else ("codes", "I8", (rows, depth))
    yield "scales", "F32", (rows, depth // layout.group)
    if layout.shifted:
        yield "offsets", "F32", (rows, depth // layout.group)


def unpack(data: Array, layout: Layout) -> CodedTensor:
    """data: uint8 [N, bytes of a row], whole blocks."""
    rows = data.shape[0]
    blocks = data.shape[1] // layout.block_bytes
    depth, groups = blocks * layout.block, blocks * layout.block // layout.group
    codes = np.empty((rows, depth), np.int8)
    scales = np.empty((rows, groups), np.float32)
    offsets = np.empty((rows, groups), np.float32) if layout.shifted else None
    step = max(1, _PIECE_WEIGHTS // depth)
    for first in range(0, rows, step):
        piece = slice(first, first + step)
        some_codes, some_scales, some_offsets = layout.unpack(data[piece].reshape(-1, layout.block_bytes))
        codes[piece] = some_codes.reshape(-1, depth)
        scales[piece] = some_scales.reshape(-1, groups)
        if offsets is not None and some_offsets is not None:
            offsets[piece] = some_offsets.reshape(-1, groups)
    return CodedTensor(codes, scales, offsets, layout)


def _half(blocks: Array, at: int) -> Array:
    """The float16 at a byte of each block: float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _fields(data: Array, bits: int, run: int) -> Array:
    """Bit fields: of each `run` bytes all lowest fields first, then the next ones. data: [blocks, bytes]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    pieces = data.reshape(len(data), -1, 1, run)
    return (pieces >> shifts & np.uint8((1 << bits) - 1)).reshape(len(data), -1)


def _fifth_bits(blocks: Array, at: int) -> Array:
    """Bit i of the 32-bit word at a byte of each block, times 16, for weight i."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _q4_0(blocks: Array) -> Parts:
    scale = _half(blocks, 0)
    return _fields(blocks[:, 2:], 4, 16).view(np.int8), scale, scale * np.float32(-8)


def _q4_1(blocks: Array) -> Parts:
    return _fields(blocks[:, 4:], 4, 16).view(np.int8), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Array) -> Parts:
    codes = (_fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks, 2)).view(np.int8)
    return codes - np.int8(16), _half(blocks, 0), None


def _q5_1(blocks: Array) -> Parts:
    codes = _fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks, 4)
    return codes.view(np.int8), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Array) -> Parts:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q2_k(blocks: Array) -> Parts:
    sub = blocks[:, :16]
    scales = _half(blocks, 80) * (sub & 15).astype(np.float32)
    offsets = -(_half(blocks, 82) * (sub >> 4).astype(np.float32))
    return _fields(blocks[:, 16:80], 2, 32).view(np.int8), scales, offsets


def _q3_k(blocks: Array) -> Parts:
    low, high = _fields(blocks[:, 96:104], 4, 8), _fields(blocks[:, 104:108], 2, 4)
    sub = (low | high << 4).view(np.int8) - np.int8(32)
    codes = _fields(blocks[:, 32:96], 2, 32).view(np.int8)
    # The third bit is kept the other way round: set means that nothing is taken off.
    off = (_fields(blocks[:, :32], 1, 32) ^ 1) << 2
    return codes - off.view(np.int8), _half(blocks, 108) * sub.astype(np.float32), None


def _k_scales(blocks: Array) -> tuple[Array, Array]:
    """Scales and offsets of Q4_K and Q5_K: 8 of 6 bits each, in 12 bytes, times the block's own two float16."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), -(_half(blocks, 2) * minima.astype(np.float32))


def _q4_k(blocks: Array) -> Parts:
    return _fields(blocks[:, 16:], 4, 32).view(np.int8), *_k_scales(blocks)


def _q5_k(blocks: Array) -> Parts:
    codes = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return codes.view(np.int8), *_k_scales(blocks)


def _q6_k(blocks: Array) -> Parts:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    sub = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return codes.view(np.int8) - np.int8(32), _half(blocks, 208) * sub, None


_LAYOUTS = {
    "Q4_0": Layout(32, 18, 32, 4, True, _q4_0),
    "Q4_1": Layout(32, 20, 32, 4, True, _q4_1),
    "Q5_0": Layout(32, 22, 32, 8, False, _q5_0),
    "Q5_1": Layout(32, 24, 32, 8, True, _q5_1),
    "Q8_0": Layout(32, 34, 32, 8, False, _q8_0),
    "Q2_K": Layout(_K, 84, 16, 4, True, _q2_k),
    "Q3_K": Layout(_K, 110, 16, 8, False, _q3_k),
    "Q4_K": Layout(_K, 144, 32, 4, True, _q4_k),
    "Q5_K": Layout(_K, 176, 32, 8, True, _q5_k),
    "Q6_K": Layout(_K, 210, 16, 8, False, _q6_k),
}

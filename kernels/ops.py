"""The checked public face of the kernels: float32 on CPU, compiled by numba.

`CpuOps` is one engine thread's set of kernels; it keeps argument blocks and scratch, so two threads need two sets.
Every function gives each row a result that depends on that row alone, bit for bit, for any number of rows and threads.
Mistakes of the caller raise ValueError before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import kernels.environment  # noqa: F401  (first: it decides where numba keeps compiled code)

# isort: split
import numpy as np
import torch
from torch import Tensor

from kernels import cpu_attention, cpu_gemm, cpu_rows, launch

SUPPORTED_HEAD_DIM_MULTIPLE = 16
SUPPORTED_BLOCK_MULTIPLE = 8
_SMALL_ATTENTION = 1 << 15
"""Query-key pairs times KV heads of a step below which one thread is faster than two."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Shape of a KV pool `[block, kv_head, layer, k|v, slot, dim]`; strides below are in floats."""

    num_blocks: int
    kv_heads: int
    layers: int
    block_size: int
    head_dim: int

    @property
    def kv_floats(self) -> int:
        return self.block_size * self.head_dim

    @property
    def head_floats(self) -> int:
        return self.layers * 2 * self.kv_floats

    @property
    def block_floats(self) -> int:
        return self.kv_heads * self.head_floats

    def view(self, pool: Tensor) -> Tensor:
        """The flat pool as a 6-dimensional tensor (a view)."""
        return pool.view(self.num_blocks, self.kv_heads, self.layers, 2, self.block_size, self.head_dim)

    def check(self) -> None:
        if self.head_dim % SUPPORTED_HEAD_DIM_MULTIPLE or self.head_dim <= 0:
            raise ValueError(f"head_dim {self.head_dim} is not a multiple of {SUPPORTED_HEAD_DIM_MULTIPLE}")
        if self.block_size % SUPPORTED_BLOCK_MULTIPLE or self.block_size <= 0:
            raise ValueError(f"block size {self.block_size} is not a multiple of {SUPPORTED_BLOCK_MULTIPLE}")


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight matrix [columns, depth] in panels; `panels`: [ceil(columns / 16), depth, 16]."""

    panels: Tensor
    columns: int
    depth: int
    bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.panels.numel() * 4


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows as the kernels want them. Valid for the step whose lists it was made from.

    positions, slots: int64 [tokens]; items: int64 [n, 4] of (first token, tokens, position, index into tables),
    heaviest first; tables: int64, all block tables in one run.
    """

    positions: Any
    slots: Any
    items: Any
    tables: Any
    max_rows: int
    work: int


def step_rows(
    shape: PoolShape,
    heads: int,
    start_pos: Sequence[int],
    num_tokens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
) -> StepRows:
    """Flatten a step: row i computes positions [start_pos[i], start_pos[i] + num_tokens[i]) with block_tables[i].

    Raises ValueError on an empty row, a table too short for its row, or a block outside the pool.
    """
    size = shape.block_size
    group = heads // shape.kv_heads
    tile = max(1, cpu_attention.MAX_ROWS // group)
    positions, slots, tables, items = [], [], [], []
    first = table_at = 0
    for start, count, blocks in zip(start_pos, num_tokens, block_tables, strict=True):
        needed = -(-(start + count) // size)
        if count <= 0 or start < 0 or needed > len(blocks):
            raise ValueError(f"a row of {count} tokens at {start} does not fit {len(blocks)} blocks of {size}")
        table = np.asarray(blocks[:needed], np.int64)
        at = np.arange(start, start + count)
        positions.append(at)
        slots.append(table[at // size] * size + at % size)
        tables.append(table)
        items += [(first + t, min(tile, count - t), start + t, table_at) for t in range(0, count, tile)]
        first += count
        table_at += needed
    flat = np.concatenate(tables)
    if flat.min() < 0 or flat.max() >= shape.num_blocks:
        raise ValueError(f"a block id is outside the pool of {shape.num_blocks}")
    array = np.asarray(items, np.int64).reshape(-1, 4)
    work = array[:, 1] * (array[:, 1] + array[:, 2])
    array = np.ascontiguousarray(array[np.argsort(-work, kind="stable")])
    return StepRows(
        np.concatenate(positions),
        np.concatenate(slots),
        array,
        flat,
        int(array[:, 1].max()) * group,
        int(work.sum()) * heads,
    )


def _rows_of(x: Tensor, width: int, name: str) -> int:
    if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != width or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous float32 [rows, {width}], not {x.dtype} {tuple(x.shape)}")
    return x.shape[0]


class CpuOps:
    """The kernels for one engine thread. `threads`: how many of torch's OpenMP team they use."""

    name = "numba-cpu"

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError("threads must be at least 1")
        self.threads = threads if launch.has_team() else 1
        self._gemm = launch.Call(cpu_gemm.gemm_body, 10)
        self._pack = launch.Call(cpu_gemm.pack_body, 5)
        self._norm = launch.Call(cpu_rows.rms_norm_body, 7)
        self._rope = launch.Call(cpu_rows.rope_write_body, 19)
        self._swiglu = launch.Call(cpu_rows.swiglu_body, 4)
        self._attention = launch.Call(cpu_attention.attention_body, 22)
        self._scratch = np.zeros(0, np.float32)
        self._numbers = np.zeros(2, np.float32)

    @property
    def chosen(self) -> dict[str, str]:
        """Which implementation runs each operation."""
        return dict.fromkeys(("linear", "rms_norm", "rope_write", "attention", "swiglu"), self.name)

    def pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> PackedWeight:
        """Pack matrices [n_i, depth], one under the other, for `linear`. Copies them.

        biases: one vector [n_i] for each matrix, or none at all.
        """
        depth = weights[0].shape[1]
        columns = sum(_rows_of(w, depth, "weight") for w in weights)
        bias = torch.cat(list(biases)).float().contiguous() if biases else None
        if bias is not None and bias.shape != (columns,):
            raise ValueError(f"biases must have {columns} floats in all")
        panels = -(-columns // cpu_gemm.PANEL)
        packed = torch.empty(panels, depth, cpu_gemm.PANEL)
        packed[-1].zero_()
        offset = 0
        for w in weights:
            self._pack([w.data_ptr(), packed.data_ptr(), offset, w.shape[0], depth], self.threads)
            offset += w.shape[0]
        return PackedWeight(packed, columns, depth, bias)

    def linear(self, x: Tensor, weight: PackedWeight, out: Tensor) -> Tensor:
        """out [rows, columns] = x [rows, depth] @ weight.T + bias. Returns out."""
        rows = _rows_of(x, weight.depth, "x")
        if _rows_of(out, weight.columns, "out") != rows:
            raise ValueError("x and out have different numbers of rows")
        panels = weight.panels.shape[0]
        group = panels if self.threads == 1 else max(1, min(24, panels // (4 * self.threads)))
        bias = 0 if weight.bias is None else weight.bias.data_ptr()
        depth, columns = weight.depth, weight.columns
        self._gemm(
            [x.data_ptr(), depth, weight.panels.data_ptr(), bias, out.data_ptr(), columns, rows, depth, columns, group],
            self.threads,
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, delta: Tensor | None = None) -> Tensor:
        """x += delta in place (if given), then out = x / rms(x) * weight. All [rows, width], width % 16 == 0. Returns
        out.
        """
        width = weight.shape[0]
        rows = _rows_of(x, width, "x")
        if (
            width % 16
            or _rows_of(out, width, "out") != rows
            or (delta is not None and _rows_of(delta, width, "delta") != rows)
        ):
            raise ValueError("rms_norm wants equal row counts and a width that is a multiple of 16")
        self._numbers[0] = eps
        self._norm(
            [
                x.data_ptr(),
                0 if delta is None else delta.data_ptr(),
                weight.data_ptr(),
                out.data_ptr(),
                rows,
                width,
                launch.address(self._numbers),
            ],
            self._few(rows),
        )
        return out

    def swiglu(self, gate_up: Tensor, out: Tensor) -> Tensor:
        """out [rows, width] = silu(gate) * up of gate_up [rows, 2 width], width % 16 == 0. Returns out."""
        width = out.shape[1]
        rows = _rows_of(gate_up, 2 * width, "gate_up")
        if width % 16 or _rows_of(out, width, "out") != rows:
            raise ValueError("swiglu wants equal row counts and a width that is a multiple of 16")
        self._swiglu([gate_up.data_ptr(), out.data_ptr(), rows, width], self._few(rows))
        return out

    def rope_write(
        self,
        qkv: Tensor,
        heads: int,
        shape: PoolShape,
        pool: Tensor,
        layer: int,
        rows: StepRows,
        cos: Tensor,
        sin: Tensor,
        qk_norm: tuple[Tensor, Tensor, float] | None = None,
    ) -> None:
        """Norm (if given) and rotate Q and K of qkv [tokens, (heads + 2 kv_heads) * dim] in place; write K and V to
        the pool.

        cos, sin: [positions, dim / 2] tables that cover every position of the step.
        """
        width = (heads + 2 * shape.kv_heads) * shape.head_dim
        count = _rows_of(qkv, width, "qkv")
        if count != len(rows.positions) or not 0 <= layer < shape.layers:
            raise ValueError("qkv does not fit the step or the layer does not exist")
        if int(rows.positions.max()) >= cos.shape[0]:
            raise ValueError(f"a position is beyond the rotation table of {cos.shape[0]}")
        q_weight = k_weight = 0
        if qk_norm is not None:
            q_weight, k_weight = qk_norm[0].data_ptr(), qk_norm[1].data_ptr()
            self._numbers[0] = qk_norm[2]
        self._rope(
            [
                qkv.data_ptr(),
                width,
                count,
                heads,
                shape.kv_heads,
                shape.head_dim,
                launch.address(rows.positions),
                launch.address(rows.slots),
                cos.data_ptr(),
                sin.data_ptr(),
                q_weight,
                k_weight,
                launch.address(self._numbers),
                pool.data_ptr(),
                shape.block_floats,
                shape.head_floats,
                layer * 2 * shape.kv_floats,
                shape.kv_floats,
                shape.block_size,
            ],
            self._few(count),
        )

    def attention(
        self,
        qkv: Tensor,
        heads: int,
        shape: PoolShape,
        pool: Tensor,
        layer: int,
        rows: StepRows,
        out: Tensor,
        window: int = 0,
    ) -> Tensor:
        """Causal paged attention of the whole step. Returns out [tokens, heads * dim].

        The first heads * dim columns of qkv are the rotated queries; keys and values, those of this step included,
        are in the pool. window > 0: a query sees the `window` latest positions, itself included.
        """
        dim = shape.head_dim
        width = (heads + 2 * shape.kv_heads) * dim
        count = _rows_of(qkv, width, "qkv")
        if count != len(rows.positions) or _rows_of(out, heads * dim, "out") != count or not 0 <= layer < shape.layers:
            raise ValueError("qkv or out does not fit the step, or the layer does not exist")
        threads = 1 if rows.work < _SMALL_ATTENTION else self.threads
        stride = cpu_attention.scratch_floats(rows.max_rows, dim)
        if self._scratch.size < stride * threads:
            self._scratch = np.zeros(stride * threads, np.float32)
        self._numbers[1] = dim**-0.5
        self._attention(
            [
                qkv.data_ptr(),
                width,
                out.data_ptr(),
                heads * dim,
                pool.data_ptr(),
                shape.block_floats,
                shape.head_floats,
                layer * 2 * shape.kv_floats,
                shape.kv_floats,
                shape.block_size,
                shape.kv_heads,
                heads // shape.kv_heads,
                dim,
                window,
                len(rows.items),
                launch.address(rows.items),
                launch.address(rows.tables),
                len(rows.tables),
                launch.address(self._scratch),
                stride,
                rows.max_rows,
                launch.address(self._numbers) + 4,
            ],
            threads,
        )
        return out

    def _few(self, rows: int) -> int:
        return 1 if rows < 32 else self.threads

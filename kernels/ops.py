"""The checked public face of the kernels: float32 arithmetic on CPU, compiled by numba.

A `Program` is a model step over fixed buffers, recorded once and run for every step as one parallel region. Every
operation gives each row a result that depends on that row alone, bit for bit, for any number of rows and threads.
Mistakes of the caller raise ValueError before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import Any

import kernels.environment  # noqa: F401  (first: it decides where numba keeps compiled code)

# isort: split
import numpy as np
import torch
from torch import Tensor

from kernels import cpu_attention, cpu_gemm, cpu_rows
from kernels.launch import Hole, Tape, address
from kernels.logprobs import LOGPROB_FLOOR as LOGPROB_FLOOR
from kernels.logprobs import LogprobScorer as LogprobScorer
from kernels.sampler import Sampler as Sampler
from kernels.shapes import PoolShape as PoolShape
from kernels.shapes import SampleTable as SampleTable
from kernels.weights import PackedWeight

_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows as the kernels want them, flattened; all arrays int64.

    token_ids, positions, slots: [tokens]; items: [n, 4] of (first token, tokens, position, index into tables), heaviest
    first; tables: all block tables in one run; sampled: flat indices of the tokens whose logits are wanted.
    """

    tokens: int
    token_ids: Any = field(default_factory=lambda: _NOTHING)
    positions: Any = field(default_factory=lambda: _NOTHING)
    slots: Any = field(default_factory=lambda: _NOTHING)
    items: Any = field(default_factory=lambda: _NOTHING.reshape(0, 4))
    tables: Any = field(default_factory=lambda: _NOTHING)
    sampled: Any = field(default_factory=lambda: _NOTHING)


def step_rows(
    shape: PoolShape,
    heads: int,
    start_pos: Sequence[int],
    num_tokens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    token_ids: Sequence[int] = (),
    samples: Sequence[bool] = (),
) -> StepRows:
    """Flatten a step: row i computes positions [start_pos[i], start_pos[i] + num_tokens[i]) with block_tables[i].

    Where samples[i], the logits of its last token are wanted.

    Raises ValueError on an empty row, a table too short for its row, a block outside the pool, or columns of unequal
    length.
    """
    size = shape.block_size
    starts, counts = np.asarray(start_pos, np.int64), np.asarray(num_tokens, np.int64)
    lengths = np.fromiter(map(len, block_tables), np.int64, len(block_tables))
    needed = -(-(starts + counts) // size)
    wrong = (counts <= 0) | (starts < 0) | (needed > lengths)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(f"a row of {counts[i]} tokens at {starts[i]} does not fit {lengths[i]} blocks of {size}")
    tables = np.fromiter(chain.from_iterable(block_tables), np.int64, int(lengths.sum()))
    table_at = np.cumsum(lengths) - lengths
    ends = np.cumsum(counts)
    firsts = ends - counts
    total = int(ends[-1]) if len(ends) else 0
    if len(token_ids) not in (0, total) or len(samples) not in (0, len(counts)):
        raise ValueError(f"{len(token_ids)} token ids for {total} tokens, {len(samples)} marks for {len(counts)} rows")
    row_of = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(total) - (firsts - starts)[row_of]
    # Only blocks that the step looks at are checked: a table may end with room for later.
    used = tables[np.arange(len(tables)) - np.repeat(table_at, lengths) < np.repeat(needed, lengths)]
    if len(used) and (used.min() < 0 or used.max() >= shape.num_blocks):
        raise ValueError(f"a block id is outside the pool of {shape.num_blocks}")
    slots = tables[table_at[row_of] + positions // size] * size + positions % size
    tile = max(1, cpu_attention.MAX_ROWS // (heads // shape.kv_heads))
    pieces = -(-counts // tile)
    piece_row = np.repeat(np.arange(len(counts)), pieces)
    offset = (np.arange(len(piece_row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * tile
    items = np.empty((len(piece_row), 4), np.int64)
    items[:, 0] = firsts[piece_row] + offset
    items[:, 1] = np.minimum(tile, counts[piece_row] - offset)
    items[:, 2] = starts[piece_row] + offset
    items[:, 3] = table_at[piece_row]
    work = items[:, 1] * (items[:, 1] + items[:, 2])
    return StepRows(
        total,
        np.asarray(token_ids, np.int64),
        positions,
        slots,
        np.ascontiguousarray(items[np.argsort(-work, kind="stable")]),
        tables,
        (ends - 1)[np.asarray(samples, bool)] if len(samples) else _NOTHING,
    )


def _width_of(x: Tensor, width: int, name: str) -> int:
    """Rows that the buffer x has room for."""
    if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != width or (width > 1 and x.stride(1) != 1):
        raise ValueError(f"{name} must be float32 [rows, {width}] with whole rows, not {x.dtype} {tuple(x.shape)}")
    return x.shape[0]


def padded_stride(width: int) -> int:
    """Floats from row to row of a buffer that products read: an odd number of cache lines.

    Rows a multiple of 1 KiB apart fall into the same few sets of the first-level cache; a tile of six such rows ran at
    half the speed (docs/decisions.md).
    """
    return (-(-width // 16) | 1) * 16


class Then(IntEnum):
    """What `Program.linear` does with the product y."""

    STORE = cpu_gemm.STORE
    """out = y"""
    ADD = cpu_gemm.ADD
    """out += y"""
    SWIGLU = cpu_gemm.SWIGLU
    """out = silu(gate) * up of a paired weight: half as wide as y"""


class Program:
    """Operations over fixed buffers, recorded once. Buffers must have room for the most rows that a run brings.

    `sampled` says that an operation works on the rows that sample rather than on all tokens. One engine thread owns it.
    """

    name = "numba-cpu"

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError("threads must be at least 1")
        self._tape = Tape(threads)
        self.threads = self._tape.threads
        self._room = {False: 1 << 62, True: 1 << 62}
        self._positions = 1 << 62
        self._vocabulary = 1 << 62
        self._scratch = torch.empty(self.threads * cpu_gemm.SCRATCH_FLOATS)
        self._kept: list[Any] = []

    def __len__(self) -> int:
        return len(self._tape)

    @classmethod
    def chosen(cls) -> dict[str, str]:
        """Which implementation runs each operation."""
        operations = ("embed", "linear", "rms_norm", "rope_write", "attention", "pick", "sample", "logprobs")
        return dict.fromkeys(operations, cls.name)

    def run(self, rows: StepRows, count: int | None = None) -> None:
        """Run the first `count` operations (all, if None) on a step.

        Raises ValueError when the step has more rows than the buffers, or a position beyond the rotation tables.
        """
        picked = len(rows.sampled)
        if rows.tokens > self._room[False] or picked > self._room[True]:
            raise ValueError(f"{rows.tokens} tokens and {picked} sampled rows are more than the buffers hold")
        if len(rows.positions) and int(rows.positions.max()) >= self._positions:
            raise ValueError(f"a position is beyond the rotation table of {self._positions}")
        if len(rows.token_ids) and not 0 <= int(rows.token_ids.min()) <= int(rows.token_ids.max()) < self._vocabulary:
            raise ValueError(f"a token id is outside the vocabulary of {self._vocabulary}")
        if self._vocabulary < 1 << 62 and len(rows.token_ids) != rows.tokens:
            raise ValueError(f"{len(rows.token_ids)} token ids for {rows.tokens} tokens")
        if rows.tokens == 0:
            return
        values = {
            Hole.TOKENS: rows.tokens,
            Hole.SAMPLED: picked,
            Hole.TOKEN_IDS: address(rows.token_ids),
            Hole.POSITIONS: address(rows.positions),
            Hole.SLOTS: address(rows.slots),
            Hole.ITEMS: address(rows.items),
            Hole.NUM_ITEMS: len(rows.items),
            Hole.TABLES: address(rows.tables),
            Hole.NUM_TABLES: len(rows.tables),
            Hole.PICKED: address(rows.sampled),
        }
        self._tape.run(values, count)

    def embed(self, table: PackedWeight, out: Tensor) -> None:
        """out [tokens, depth] = column token_ids[i] of the packed table, as float32."""
        self._take(out, table.depth, "out", False)
        self._vocabulary = min(self._vocabulary, table.columns)
        args = [Hole.TOKEN_IDS, table.panels.data_ptr(), table.panel_bytes, table.storage, table.group]
        args += [out.data_ptr(), out.stride(0), Hole.TOKENS, table.depth, self._scratch.data_ptr()]
        self._add(cpu_gemm.embed_body, args, table, out)

    def pick(self, x: Tensor, out: Tensor) -> None:
        """out [sampled, width] = the rows of x [tokens, width] that sample."""
        width = x.shape[1]
        self._take(x, width, "x", False)
        self._take(out, width, "out", True)
        args = [x.data_ptr(), x.stride(0), Hole.PICKED, out.data_ptr(), out.stride(0), Hole.SAMPLED, width]
        self._add(cpu_rows.pick_body, args, x, out)

    def linear(
        self, x: Tensor, weight: PackedWeight, out: Tensor, then: Then = Then.STORE, sampled: bool = False
    ) -> None:
        """y = x [rows, depth] @ weight.T + bias, and with it what `then` says to out."""
        self._take(x, weight.depth, "x", sampled)
        width = weight.columns // 2 if then is Then.SWIGLU else weight.columns
        self._take(out, width, "out", sampled)
        if then is Then.SWIGLU and weight.columns % cpu_gemm.STRIP:
            raise ValueError("SwiGLU wants a paired weight")
        bias = 0 if weight.bias is None else weight.bias.data_ptr()
        args = [x.data_ptr(), x.stride(0), weight.panels.data_ptr(), weight.panel_bytes, weight.storage, weight.group]
        args += [bias, then, out.data_ptr(), out.stride(0), Hole.SAMPLED if sampled else Hole.TOKENS]
        args += [weight.depth, weight.columns, self._scratch.data_ptr()]
        self._add(cpu_gemm.gemm_body, args, x, weight, out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, sampled: bool = False) -> None:
        """out = x / rms(x) * weight, row by row. x, out: [rows, width], width % 16 == 0."""
        width = weight.shape[0]
        self._take(x, width, "x", sampled)
        self._take(out, width, "out", sampled)
        if width % 16:
            raise ValueError("rms_norm wants a width that is a multiple of 16")
        number = np.array([eps], np.float32)
        args = [x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), out.stride(0)]
        args += [Hole.SAMPLED if sampled else Hole.TOKENS, width, address(number)]
        self._add(cpu_rows.rms_norm_body, args, x, weight, out, number)

    def rope_write(
        self,
        qkv: Tensor,
        heads: int,
        shape: PoolShape,
        pool: Tensor,
        layer: int,
        cos: Tensor,
        sin: Tensor,
        qk_norm: tuple[Tensor, Tensor, float] | None = None,
    ) -> None:
        """Norm (if given) and rotate Q and K of qkv [tokens, (heads + 2 kv_heads) * dim] in place; write K and V to
        the pool.

        cos, sin: [positions, dim / 2] tables.
        """
        width = (heads + 2 * shape.kv_heads) * shape.head_dim
        self._take(qkv, width, "qkv", False)
        if not 0 <= layer < shape.layers:
            raise ValueError(f"layer {layer} does not exist")
        self._positions = min(self._positions, cos.shape[0])
        q_weight = k_weight = 0
        number = np.zeros(1, np.float32)
        if qk_norm is not None:
            q_weight, k_weight, number[0] = qk_norm[0].data_ptr(), qk_norm[1].data_ptr(), qk_norm[2]
        args = [qkv.data_ptr(), qkv.stride(0), Hole.TOKENS, heads, shape.kv_heads, shape.head_dim]
        args += [Hole.POSITIONS, Hole.SLOTS, cos.data_ptr(), sin.data_ptr(), q_weight, k_weight]
        args += [address(number), pool.data_ptr()]
        args += [shape.block_floats, shape.head_floats, layer * 2 * shape.kv_floats, shape.kv_floats, shape.block_size]
        self._add(cpu_rows.rope_write_body, args, qkv, pool, cos, sin, qk_norm, number)

    def attention(
        self, qkv: Tensor, heads: int, shape: PoolShape, pool: Tensor, layer: int, out: Tensor, window: int = 0
    ) -> None:
        """Causal paged attention of the whole step: out [tokens, heads * dim].

        The first heads * dim columns of qkv are the rotated queries; keys and values, those of this step included,
        are in the pool. window > 0: a query sees the `window` latest positions, itself included.
        """
        dim, group = shape.head_dim, heads // shape.kv_heads
        width = (heads + 2 * shape.kv_heads) * dim
        self._take(qkv, width, "qkv", False)
        self._take(out, heads * dim, "out", False)
        if not 0 <= layer < shape.layers:
            raise ValueError(f"layer {layer} does not exist")
        max_rows = max(cpu_attention.MAX_ROWS, group)
        stride = cpu_attention.scratch_floats(max_rows, dim)
        if self._scratch.numel() < stride * self.threads:
            # Operations recorded before keep their own, smaller one.
            self._kept.append(self._scratch)
            self._scratch = torch.empty(stride * self.threads)
        number = np.array([dim**-0.5], np.float32)
        args = [qkv.data_ptr(), qkv.stride(0), out.data_ptr(), out.stride(0), pool.data_ptr(), shape.block_floats]
        args += [shape.head_floats, layer * 2 * shape.kv_floats, shape.kv_floats, shape.block_size, shape.kv_heads]
        args += [group, dim, window, Hole.NUM_ITEMS, Hole.ITEMS, Hole.TABLES, Hole.NUM_TABLES]
        args += [self._scratch.data_ptr(), stride, max_rows, address(number)]
        self._add(cpu_attention.attention_body, args, qkv, pool, out, number)

    def _take(self, x: Tensor, width: int, name: str, sampled: bool) -> None:
        self._room[sampled] = min(self._room[sampled], _width_of(x, width, name))

    def _add(self, body: Any, args: Sequence[int | Hole], *kept: Any) -> None:
        self._tape.add(body, args)
        self._kept += kept

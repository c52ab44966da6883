"""A step's rows in device memory: one byte buffer, cut into tensors by a layout that four sizes decide, filled on the
host and copied in one piece.

A layout with more rows, tokens or blocks than a step has is padded: rows of length 0, tokens that write nothing. So a
recorded graph, whose sizes are fixed, serves every step that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.shapes import SETTINGS, PoolShape

_ALIGNMENT = 16
_TURNS = 2
"""Steps that may be under way at once: a step's host bytes are rewritten only when the one before the last is over."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """A step for the kernels; views of one buffer, valid until the next step is sent there.

    Rows with one token come first (`num_decode` of them, padding included), then longer ones, the longest of which has
    `max_tokens`.
    """

    num_decode: int
    max_tokens: int
    settings: Tensor  # float64 [sampled, 8], as in `kernels.sampler.SampleTable`
    slots: Tensor  # int64 [tokens]: block * block_size + slot; -1: padding, nothing is written
    token_ids: Tensor  # int64 [tokens]; -1 - k: the k-th token that the step before this one sampled
    sampled: Tensor  # int64 [sampled]: flat indices of the tokens whose logits are wanted
    tables: Tensor  # int32 [rows, width], 0 behind a row's blocks
    lengths: Tensor  # int32 [rows]: tokens in KV after this step; 0: padding
    starts: Tensor  # int32 [rows + 1]: first token of each row
    start_pos: Tensor  # int32 [rows]
    positions: Tensor  # int32 [tokens]

    @property
    def num_rows(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slots.shape[0]


class RowLayout:
    """Where each tensor of a step with these sizes lies in a byte buffer."""

    def __init__(self, rows: int, tokens: int, width: int, sampled: int) -> None:
        self.rows, self.tokens, self.width, self.sampled = rows, tokens, width, sampled
        self._sections: list[tuple[str, int, Any, tuple[int, ...]]] = []
        self.num_bytes = 0
        for name, dtype, shape in (
            ("settings", torch.float64, (sampled, SETTINGS)),
            ("slots", torch.int64, (tokens,)),
            ("token_ids", torch.int64, (tokens,)),
            ("sampled", torch.int64, (sampled,)),
            ("tables", torch.int32, (rows, width)),
            ("lengths", torch.int32, (rows,)),
            ("starts", torch.int32, (rows + 1,)),
            ("start_pos", torch.int32, (rows,)),
            ("positions", torch.int32, (tokens,)),
        ):
            self._sections.append((name, self.num_bytes, dtype, shape))
            size = int(np.prod(shape)) * dtype.itemsize
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Views of a uint8 buffer of at least `num_bytes`."""
        views = {}
        for name, at, dtype, shape in self._sections:
            size = int(np.prod(shape)) * dtype.itemsize
            views[name] = buffer[at : at + size].view(dtype).view(shape)
        return views


@lru_cache(maxsize=512)
def layout_for(rows: int, tokens: int, width: int, sampled: int) -> RowLayout:
    return RowLayout(rows, tokens, width, sampled)


class RowBuffers:
    """The device buffer of one engine's steps, and host buffers (pinned beside a GPU) that are filled in turn."""

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        self.device_bytes = torch.zeros(max_bytes, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(max_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(_TURNS)]
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        return self.device_bytes.numel()

    def next_host(self, layout: RowLayout) -> dict[str, np.ndarray[Any, Any]]:
        """Arrays to fill for the next `send`. The step whose turn it was before must be over.

        Raises ValueError when the layout is larger than the buffer.
        """
        if layout.num_bytes > self.num_bytes:
            raise ValueError(
                f"a step of {layout.num_bytes:,} bytes of rows is more than the {self.num_bytes:,} prepared"
            )
        self._turn = (self._turn + 1) % _TURNS
        return {name: view.numpy() for name, view in layout.tensors(self._host[self._turn]).items()}

    def send(self, layout: RowLayout) -> None:
        """Copy what was filled; ordered before what the current stream gets next, the host does not wait."""
        size = layout.num_bytes
        self.device_bytes[:size].copy_(self._host[self._turn][:size], non_blocking=True)

    def rows(self, layout: RowLayout, num_decode: int, max_tokens: int) -> DeviceRows:
        return DeviceRows(num_decode, max_tokens, **layout.tensors(self.device_bytes))


@dataclass(frozen=True, slots=True)
class RowColumns:
    """A step's columns, checked: row i computes [start_pos[i], start_pos[i] + num_tokens[i])."""

    start_pos: np.ndarray[Any, np.dtype[np.int64]]
    num_tokens: np.ndarray[Any, np.dtype[np.int64]]
    needed_blocks: np.ndarray[Any, np.dtype[np.int64]]
    block_tables: Sequence[Sequence[int]]
    token_ids: np.ndarray[Any, np.dtype[np.int64]]
    samples: np.ndarray[Any, np.dtype[np.bool_]]
    num_decode: int
    """Rows of one token at the beginning."""

    @property
    def rows(self) -> int:
        return len(self.num_tokens)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def width(self) -> int:
        """Blocks of the longest table."""
        return int(self.needed_blocks.max(initial=1))

    @property
    def num_sampled(self) -> int:
        return int(self.samples.sum())

    @property
    def all_decode(self) -> bool:
        return self.num_decode == self.rows == self.num_sampled

    @property
    def max_tokens(self) -> int:
        """Of a row behind the decode rows."""
        return int(self.num_tokens[self.num_decode :].max(initial=0))


def check_rows(
    block_size: int,
    max_positions: int,
    start_pos: Sequence[int],
    num_tokens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    token_ids: Sequence[int],
    samples: Sequence[bool],
    vocab: int,
    num_fed: int,
) -> RowColumns:
    """The columns as arrays. num_fed: tokens that the step before this one samples, which token ids may name.

    Raises ValueError on an empty row, a table too short for its row, a position or token id that the model does not
    have, or columns of unequal length.
    """
    starts, counts = np.asarray(start_pos, np.int64), np.asarray(num_tokens, np.int64)
    lengths = np.fromiter(map(len, block_tables), np.int64, len(block_tables))
    ids, wanted = np.asarray(token_ids, np.int64), np.asarray(samples, bool)
    if not len(starts) == len(counts) == len(lengths) == len(wanted) or len(ids) != counts.sum():
        raise ValueError(f"columns of {len(starts)}, {len(counts)}, {len(lengths)}, {len(wanted)} rows; {len(ids)} ids")
    needed = -(-(starts + counts) // block_size)
    wrong = (counts <= 0) | (starts < 0) | (needed > lengths) | (starts + counts > max_positions)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(
            f"a row of {counts[i]} tokens at {starts[i]} does not fit {lengths[i]} blocks of {block_size} and "
            f"{max_positions} positions"
        )
    if len(ids) and (ids.min() < -num_fed or ids.max() >= vocab):
        raise ValueError(f"a token id is outside the vocabulary of {vocab} and the {num_fed} tokens fed back")
    several = counts != 1
    num_decode = int(np.argmax(several)) if several.any() else len(counts)
    return RowColumns(starts, counts, needed, block_tables, ids, wanted, num_decode)


def fill_rows(host: dict[str, np.ndarray[Any, Any]], columns: RowColumns, shape: PoolShape) -> None:
    """Write the columns into the arrays of a layout that is at least as large; what is left over becomes padding.

    Raises ValueError for a block outside the pool.
    """
    rows, tokens, size = columns.rows, columns.tokens, shape.block_size
    starts, counts = columns.start_pos, columns.num_tokens
    ends = np.cumsum(counts)
    tables = host["tables"]
    tables[:] = 0
    for row, (table, needed) in enumerate(zip(columns.block_tables, columns.needed_blocks.tolist(), strict=True)):
        tables[row, :needed] = table[:needed]
    if tables.min(initial=0) < 0 or tables.max(initial=0) >= shape.num_blocks:
        raise ValueError(f"a block id is outside the pool of {shape.num_blocks}")
    row_of = np.repeat(np.arange(rows), counts)
    positions = np.arange(tokens) - (ends - counts - starts)[row_of]
    _put(host["slots"], tables[row_of, positions // size].astype(np.int64) * size + positions % size, -1)
    _put(host["positions"], positions)
    _put(host["token_ids"], columns.token_ids)
    _put(host["sampled"], (ends - 1)[columns.samples])
    _put(host["lengths"], starts + counts)
    _put(host["start_pos"], starts)
    host["starts"][0] = 0
    _put(host["starts"][1:], ends, tokens)


def _put(target: np.ndarray[Any, Any], values: np.ndarray[Any, Any], padding: int = 0) -> None:
    target[: len(values)] = values
    target[len(values) :] = padding

"""What all kernels share and needs no compiler: the shape of a KV pool, and how tokens are to be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

SUPPORTED_HEAD_DIM_MULTIPLE = 16
SUPPORTED_BLOCK_MULTIPLE = 8


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


LOGPROB_FLOOR = -9999.0
"""What is told of a token that cannot come."""
SETTINGS = 8
"""Columns of `SampleTable.settings`."""


@dataclass(frozen=True, slots=True)
class SampleTable:
    """How to choose a token in each of `rows` rows: columns, one entry a row; the last three may be () when no row
    needs them.

    settings: float64 [rows, 8] of temperature (0: greedy), top_k (0: off), top_p (1: off), min_p (0: off), a draw in
    [0, 1), and the repetition (1: off), presence and frequency penalties (0: off), which are read where a row has a
    history.
    """

    settings: np.ndarray[Any, np.dtype[np.float64]]
    banned: Sequence[Sequence[int]]
    """Ids that must not come."""
    biases: Sequence[Sequence[tuple[int, float]]] = ()
    """(id, what is added to its logit)."""
    histories: Sequence[np.ndarray[Any, np.dtype[np.int64]]] = ()
    """The row's prompt and output, int64 [tokens]; empty: no penalties."""
    prompt_lens: Sequence[int] = ()
    """How many ids at the beginning of each history are the prompt's: they count for repetition only."""

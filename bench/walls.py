"""What the machine itself can do at this moment: reading memory, fused multiply-adds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import kernels.environment  # noqa: F401  (first: it decides where numba keeps compiled code)

# isort: split
import numpy as np
from numba import njit

from kernels.micro import sum_of_squares
from kernels.tiles import plain_6
from kernels.weights import huge_bytes

_READ_BYTES = 512 << 20
_TILE_DEPTH, _TILES = 64, 100_000


@njit(nogil=True)
def _read(address: int, floats: int) -> float:
    return sum_of_squares(address, floats // 16)  # type: ignore[no-any-return]


@njit(nogil=True)
def _multiply(c: int, a: int, b: int, tiles: int) -> None:
    for _ in range(tiles):
        plain_6(c, 16, a, _TILE_DEPTH, b, 64, 0, _TILE_DEPTH, True, 0, 0)


@cache
def _memory() -> Any:
    return huge_bytes(_READ_BYTES).fill_(1)


def _together(work: Callable[[int], None], threads: int) -> float:
    """Seconds until all threads are done."""
    team = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    began = time.perf_counter()
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return time.perf_counter() - began


def read_gbytes(threads: int) -> float:
    """GB/s of reading half a GiB from end to end, divided between the threads."""
    start, share = _memory().data_ptr(), _READ_BYTES // threads
    _read(start, 1024)
    return _READ_BYTES / _together(lambda i: _read(start + i * share, share // 4), threads) / 1e9


def fma_gflops(threads: int) -> float:
    """GFLOP/s of the product's own widest tile with everything in the first-level cache."""
    a, b = np.zeros((6, _TILE_DEPTH), np.float32), np.zeros((_TILE_DEPTH, 16), np.float32)
    sums = [np.zeros((6, 16), np.float32) for _ in range(threads)]
    _multiply(sums[0].ctypes.data, a.ctypes.data, b.ctypes.data, 1)
    spent = _together(lambda i: _multiply(sums[i].ctypes.data, a.ctypes.data, b.ctypes.data, _TILES), threads)
    return threads * _TILES * 6 * 16 * _TILE_DEPTH * 2 / spent / 1e9

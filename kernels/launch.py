"""Runs a tape of compiled kernel bodies as one parallel region on the calling thread's OpenMP team: the one that torch
uses, so that no second pool spins beside it.

A body is a C function of a block of int64 arguments and the number of the calling thread. Slot 0 of its block is a work
counter: each thread takes items from it until none is left, then waits for the others before the next body begins.
Which thread takes which item cannot change a result, because every item is computed alone. A whole model step is one
tape: waking the team and returning to Python cost microseconds once, not for every operation.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit

from kernels.micro import call_body, call_int, call_sleep, fetch_add, load_shared, pause, pointer

_WIDTH = 32
"""int64 slots of one operation: work counter, address of the body, arguments."""
_FIRST_ARG = 2
_SPIN_ROUNDS = 4000
"""Looks at a barrier (some 50 us) before a waiting thread sleeps between them."""
_SLEEP_US = 20
"""One that is late has lost its core to another process. A core that falls idle can fetch its thread over; one whose
thread only yields cannot."""


class Hole(IntEnum):
    """An argument that each run fills in anew."""

    TOKENS = 0
    SAMPLED = 1
    TOKEN_IDS = 2
    POSITIONS = 3
    SLOTS = 4
    ITEMS = 5
    NUM_ITEMS = 6
    TABLES = 7
    NUM_TABLES = 8
    PICKED = 9
    SETTINGS = 10
    BANS = 11
    BANNED = 12
    CHOSEN = 13
    LOGITS = 14
    BIASES = 15
    BIASED = 16
    AMOUNTS = 17
    HISTORIES = 18
    HISTORY = 19
    PROMPTS = 20
    NUM_TOP = 21
    TOP_WIDTH = 22
    TOP_IDS = 23
    LOGPROBS = 24


def _openmp() -> Any | None:
    """The OpenMP runtime that torch brought, or None where there is none with GNU's entry point."""
    folders = [Path(torch.__file__).parent / "lib", Path(torch.__file__).parent.parent / "torch.libs"]
    names = ("libgomp*.so*", "libiomp*.so*", "libomp*.so*")
    for library in (path for folder in folders for name in names for path in sorted(folder.glob(name))):
        try:
            runtime = ctypes.CDLL(os.fspath(library))
            runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            runtime.GOMP_parallel.restype = None
        except (OSError, AttributeError):
            continue
        return runtime
    return None


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_OPENMP = _openmp()
_TEAM_SIZE = 0 if _OPENMP is None else _address_of(_OPENMP.omp_get_num_threads)
_USLEEP = _address_of(ctypes.CDLL(None).usleep)


def has_team() -> bool:
    """Whether more than one thread can be used."""
    return _OPENMP is not None


@njit(inline="always")
def _wait_for(counter, wanted, usleep):  # type: ignore[no-untyped-def]
    looks = 0
    while load_shared(counter) < wanted:
        looks += 1
        if looks < _SPIN_ROUNDS:
            pause()
        else:
            call_sleep(usleep, _SLEEP_US)


@cfunc("void(int64)", cache=True, error_model="numpy")
def _run_tape(header):  # type: ignore[no-untyped-def]
    """Header: thread numbers given out, arrivals at barriers, operations, their address, omp_get_num_threads (0: one
    thread), usleep.
    """
    h = carray(pointer(header), 6, np.int64)
    thread = fetch_add(header, 1)
    team = call_int(h[4]) if h[4] != 0 else 1
    count, operations, usleep = h[2], h[3], h[5]
    for i in range(count):
        block = operations + 8 * _WIDTH * i
        call_body(load_shared(block + 8), block, thread)
        if team > 1:
            fetch_add(header + 8, 1)
            _wait_for(header + 8, team * (i + 1), usleep)


class Tape:
    """Operations in order. Not for use by two threads at once."""

    def __init__(self, threads: int) -> None:
        self.threads = threads if has_team() else 1
        self._operations = np.zeros((0, _WIDTH), np.int64)
        self._holes: dict[Hole, list[int]] = {}
        self._filled: dict[Hole, Any] = {}
        self._header = np.zeros(6, np.int64)
        self._run = _run_tape.ctypes
        self._address = _run_tape.address

    def __len__(self) -> int:
        return len(self._operations)

    def add(self, body: Any, args: Sequence[int | Hole]) -> None:
        """Append an operation. The caller keeps alive what the addresses among `args` point to."""
        row = np.zeros(_WIDTH, np.int64)
        row[1] = body.address
        for i, value in enumerate(args, _FIRST_ARG):
            if isinstance(value, Hole):
                self._holes.setdefault(value, []).append(len(self) * _WIDTH + i)
            else:
                row[i] = value
        self._operations = np.vstack((self._operations, row))
        self._filled = {hole: np.asarray(places) for hole, places in self._holes.items()}

    def run(self, values: dict[Hole, int], count: int | None = None, threads: int | None = None) -> None:
        """Run the first `count` operations (all, if None) on at most `threads` threads (all, if None).

        Raises KeyError for a hole without a value.
        """
        team = self.threads if threads is None else min(threads, self.threads)
        flat = self._operations.reshape(-1)
        for hole, places in self._filled.items():
            flat[places] = values[hole]
        self._operations[:, 0] = 0
        header = self._header
        header[:] = (0, 0, len(self) if count is None else count, flat.ctypes.data, 0, _USLEEP)
        if team > 1 and _OPENMP is not None:
            header[4] = _TEAM_SIZE
            _OPENMP.GOMP_parallel(self._address, header.ctypes.data, team, 0)
        else:
            self._run(header.ctypes.data)


def address(array: np.ndarray[Any, Any]) -> int:
    """Address of the first byte of a numpy array."""
    return int(array.ctypes.data)

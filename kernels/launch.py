"""Runs a compiled kernel body on the calling thread's OpenMP team: the one that torch uses, so that no second pool
spins beside it.

A body is a C function of one address: a block of int64 arguments. Slot 0 is a work counter, slot 1 a ticket counter:
each thread takes items from the first until none is left and, where it needs scratch, its own share by the second.
Which thread takes which item cannot change a result, because every item is computed alone.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

FIRST_ARG = 2
"""Index of a body's first own argument in its block."""


def _team() -> Any | None:
    """GOMP_parallel of the OpenMP runtime that torch brought, or None where there is none."""
    folders = [Path(torch.__file__).parent / "lib", Path(torch.__file__).parent.parent / "torch.libs"]
    for library in (path for folder in folders for path in sorted(folder.glob("lib*omp*.so*"))):
        try:
            function = ctypes.CDLL(os.fspath(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


_GOMP_PARALLEL = _team()


def has_team() -> bool:
    """Whether more than one thread can be used."""
    return _GOMP_PARALLEL is not None


class Call:
    """One kernel body with its argument block, ready to be run many times. Not for use by two threads at once."""

    def __init__(self, body: Any, num_args: int) -> None:
        self._body = body.ctypes
        self._address = body.address
        self._block = (ctypes.c_int64 * (FIRST_ARG + num_args))()
        self._pointer = ctypes.addressof(self._block)
        self._tail = slice(FIRST_ARG, FIRST_ARG + num_args)

    def __call__(self, args: list[int], threads: int) -> None:
        block = self._block
        block[0] = 0
        block[1] = 0
        block[self._tail] = args
        if threads > 1 and _GOMP_PARALLEL is not None:
            _GOMP_PARALLEL(self._address, self._pointer, threads, 0)
        else:
            self._body(self._pointer)


def address(array: np.ndarray[Any, Any]) -> int:
    """Address of the first byte of a numpy array."""
    return int(array.ctypes.data)

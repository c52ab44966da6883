"""Memory of a KV pool, checked against what is free first."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from headrace.control_groups import available_bytes
from headrace.errors import StartupError
from kvtransfer.transports.base import PoolBytes, runs
from kvtransfer.transports.base import allocate_pool as map_pool

_MARGIN_BYTES = 128 << 20
"""What must stay free beside the pool for everything else in the process to go on."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def allocate_pool(num_bytes: int, beside_bytes: int = 0) -> PoolBytes:
    """The KV pool's memory, as `kvtransfer.transports.base.allocate_pool` maps it; `beside_bytes` are taken later.

    Raises StartupError, with the bytes needed and available, when there is too little memory.
    """
    free = available_bytes()
    beside_bytes += _MARGIN_BYTES
    if num_bytes + beside_bytes > free:
        raise StartupError(
            f"too little memory for the KV pool: {num_bytes:,} bytes needed (and {beside_bytes:,} beside it), "
            f"{free:,} available"
        )
    try:
        return map_pool(num_bytes)
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        raise StartupError(
            f"too little memory for the KV pool: {num_bytes:,} bytes needed, {free:,} available ({error})"
        ) from error


def release_pages(pool: PoolBytes, blocks: Sequence[int], block_bytes: int) -> int:
    """Give the whole pages of neighbouring `blocks` back to the system: they hold zeros until they are written again.

    Nobody may use the blocks; what transports have registered stays valid where it is not pinned. Returns the bytes.
    Raises OSError when the system refuses.
    """
    start, released = pool.ctypes.data, 0
    for first, count in runs(sorted(blocks), len(blocks)):
        begin = start + first * block_bytes
        begin += -begin % mmap.PAGESIZE
        end = start + (first + count) * block_bytes
        end -= end % mmap.PAGESIZE
        if begin < end:
            if _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            released += end - begin
    return released


def touch_pages(pool: PoolBytes, blocks: Sequence[int], block_bytes: int) -> None:
    """Have memory for the blocks, whose content is nobody's: whoever writes to them later does not wait for it."""
    for block in blocks:
        pool[block * block_bytes : (block + 1) * block_bytes : mmap.PAGESIZE] = 0


def is_pinned() -> bool:
    """Memory of this process is locked, or pinned for a device: what the system took back the device would not see."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(("VmPin:", "VmLck:")) and int(line.split()[1]):
                return True
    return False

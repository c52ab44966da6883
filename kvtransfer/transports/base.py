"""What every transport is: registered pools, peers, and pulls of whole blocks from a peer's pool into one's own.

A transport belongs to one asyncio loop; all methods are called there. Nothing writes into a peer's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from headrace.errors import InvariantError

PoolBytes = npt.NDArray[np.uint8]
STALL_S = 0.1
"""A read that moves nothing for this long has stalled once (counted in `PullStats.stalls`)."""
MAX_DESCRIPTOR_BYTES = 1 << 20
HUGE_PAGE_BYTES = 2 << 20


def peer_name(worker_id: str, incarnation: str) -> str:
    """A process's name on every transport; a restarted worker has another."""
    return f"{worker_id}/{incarnation}"


class TransferFault(StrEnum):
    PEER_LOST = "peer_lost"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    FAILED = "failed"
    CORRUPT = "corrupt"
    """Other bytes than the holder's: whoever asked finds that out, no transport does."""


class TransferError(Exception):
    """A read or a connection that did not work out."""

    def __init__(self, kind: TransferFault, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class PullStats:
    bytes: int
    seconds: float
    stalls: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    """How a pool is reached; travels as msgpack. `peer_id` names one process: a restarted worker has another."""

    transport: str
    peer_id: str
    num_blocks: int
    block_bytes: int
    details: bytes

    def encode(self) -> bytes:
        return bytes(msgpack.packb([self.transport, self.peer_id, self.num_blocks, self.block_bytes, self.details]))

    @staticmethod
    def decode(data: bytes, transport: str, peer_id: str, block_bytes: int) -> Descriptor:
        """Raises TransferError(failed) when it is malformed, another process's, or does not fit the reader's pool."""
        try:
            if len(data) > MAX_DESCRIPTOR_BYTES:
                raise ValueError("too long")
            found = Descriptor(*msgpack.unpackb(data))
            if [type(part) for part in (found.peer_id, found.num_blocks, found.details)] != [str, int, bytes]:
                raise ValueError("wrong types")
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise TransferError(TransferFault.FAILED, "malformed descriptor") from error
        if (found.transport, found.block_bytes) != (transport, block_bytes):
            raise TransferError(
                TransferFault.FAILED,
                f"cannot pair {transport}/{block_bytes} with {found.transport}/{found.block_bytes} (lane/block bytes)",
            )
        if found.peer_id != peer_id:
            raise TransferError(TransferFault.FAILED, "stale: the descriptor is another incarnation's")
        return found


def allocate_pool(num_bytes: int) -> PoolBytes:
    """Zeroed pool memory: anonymous, from a huge page border on, in huge pages where the kernel grants them (NIXL reads
    3 times faster). The array keeps its mapping alive. Raises OSError, OverflowError or MemoryError when there is none.
    """
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(mapping, dtype=np.uint8)
    start = -flat.ctypes.data % HUGE_PAGE_BYTES
    return flat[start : start + num_bytes]


class Pool:
    """One's own registered memory, cut into blocks. The array must stay alive and in place as long as the transport."""

    def __init__(self, memory: PoolBytes, block_bytes: int) -> None:
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous or memory.nbytes < block_bytes:
            raise InvariantError("a KV pool is a flat, contiguous uint8 array of at least one block")
        self.memory = memory
        self.block_bytes = block_bytes
        self.num_blocks = memory.nbytes // block_bytes

    def view(self, first_block: int, num_blocks: int) -> memoryview:
        start = first_block * self.block_bytes
        return self.memory.data[start : start + num_blocks * self.block_bytes]

    def check_targets(self, remote_blocks: Sequence[int], local_blocks: Sequence[int], remote_total: int) -> None:
        """Own blocks are an invariant (InvariantError); the peer's are its claim (TransferError)."""
        if len(remote_blocks) != len(local_blocks) or len(set(local_blocks)) != len(local_blocks):
            raise InvariantError("a pull pairs each remote block with one own block")
        if local_blocks and not (min(local_blocks) >= 0 and max(local_blocks) < self.num_blocks):
            raise InvariantError("own block outside the pool")
        if remote_blocks and not (min(remote_blocks) >= 0 and max(remote_blocks) < remote_total):
            raise TransferError(TransferFault.FAILED, "unknown remote block")


def runs(blocks: Sequence[int], max_length: int) -> Iterator[tuple[int, int]]:
    """(first, length) of each maximal stretch of consecutive ids, at most `max_length` long."""
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1 or at - start == max_length:
            yield blocks[start], at - start
            start = at


class Pull:
    """A read under way.

    `done`: PullStats once all bytes are here, or TransferError. `terminal`: from then on nothing can write the target
    blocks; after a `done` that raised it may come much later or, with a stopped peer, never.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cancel: Callable[[], None]) -> None:
        self.done: asyncio.Future[PullStats] = loop.create_future()
        self.terminal: asyncio.Future[None] = loop.create_future()
        self.done.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._cancel = cancel

    def cancel(self) -> None:
        """Gives the read up: `done` raises TransferError(cancelled) unless it is over; `terminal` follows."""
        self.fail(TransferError(TransferFault.CANCELLED, "given up"))
        self._cancel()

    def finish(self, stats: PullStats) -> None:
        if not self.done.done():
            self.done.set_result(stats)
        self.end()

    def fail(self, error: TransferError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def end(self) -> None:
        if not self.terminal.done():
            self.terminal.set_result(None)

    def abort(self) -> None:
        """Nobody works on this read any more: given up unless it was over."""
        self.fail(TransferError(TransferFault.CANCELLED, "given up"))
        self.end()


def failed_pull(loop: asyncio.AbstractEventLoop, error: TransferError) -> Pull:
    """A read that never began."""
    pull = Pull(loop, lambda: None)
    pull.fail(error)
    pull.end()
    return pull


class Progress:
    """Bytes, time and stalls of one read; `now` in monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._start = self._last = now
        self._bytes = self._stalls = 0

    def moved(self, num_bytes: int, now: float) -> None:
        self._stalls += now - self._last > STALL_S
        self._bytes += num_bytes
        self._last = now

    def silence_s(self, now: float) -> float:
        return now - self._last

    def stats(self) -> PullStats:
        return PullStats(self._bytes, self._last - self._start, self._stalls)


class Peer(Protocol):
    """A peer's pool that can be read from."""

    peer_id: str
    num_blocks: int


class Transport(Protocol):
    name: str
    peer_id: str
    """Own name: worker and incarnation, unique in the deployment's life."""

    async def start(self, memory: PoolBytes, block_bytes: int) -> None:
        """Registers the pool and makes it readable. Raises TransferError or OSError where the lane does not work."""

    def descriptor(self) -> bytes:
        """How others reach the pool; valid until close()."""

    async def connect(self, peer_id: str, descriptor: bytes) -> Peer:
        """Again with the same arguments gives the same peer. Raises TransferError."""

    def pull(self, peer: Peer, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> Pull:
        """Starts reading. A read that moves nothing for the transport's `read_timeout_s` fails with timeout."""

    async def disconnect(self, peer: Peer) -> None:
        """Forgets a peer, once its last read is terminal. Again is a no-op."""

    async def close(self) -> None:
        """Gives up all reads and releases everything. A read that is not terminal keeps its memory registered."""

    def twin(self, peer_id: str) -> Transport:
        """A fresh, unstarted transport of the same kind and credentials."""

"""What every transport is: registered pools, peers, and pulls of blocks, or of a part of each, from a peer's pool into
one's own.

A transport belongs to one asyncio loop; all methods are called there. Nothing writes into a peer's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from headrace.errors import InvariantError
from kvtransfer.core.layout import Cut

log = logging.getLogger("headrace.kvtransfer.transports")

PoolBytes = npt.NDArray[np.uint8]
STALL_S = 0.1
"""A read that moves nothing for this long has stalled once (counted in `PullStats.stalls`)."""
MAX_DESCRIPTOR_BYTES = 1 << 20
MAX_BLOCKS = 1 << 31
"""Ids are 32 bits wide on every lane."""
MAX_POOL_BYTES = 1 << 47
"""What an address can be."""
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
    def decode(data: bytes, transport: str, peer_id: str) -> Descriptor:
        """Raises TransferError(failed) when it is malformed, of another lane or another process's."""
        try:
            if len(data) > MAX_DESCRIPTOR_BYTES:
                raise ValueError("too long")
            found = Descriptor(*msgpack.unpackb(data))
            parts = (found.peer_id, found.num_blocks, found.block_bytes, found.details)
            if [type(part) for part in parts] != [str, int, int, bytes] or min(found.num_blocks, found.block_bytes) < 1:
                raise ValueError("wrong types or sizes")
            if found.num_blocks >= MAX_BLOCKS or found.num_blocks * found.block_bytes >= MAX_POOL_BYTES:
                raise ValueError("no such pool")
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise TransferError(TransferFault.FAILED, "malformed descriptor") from error
        if found.transport != transport:
            raise TransferError(TransferFault.FAILED, f"cannot pair lane {transport} with {found.transport}")
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

    def views(self, blocks: Sequence[int], offset: int, num_bytes: int, max_bytes: int) -> Iterator[memoryview]:
        """The memory of these bytes of each block, in that order. Whole blocks that follow each other come as one view,
        of at most `max_bytes` unless one block is longer.
        """
        longest = max(1, max_bytes // num_bytes) if num_bytes == self.block_bytes else 1
        for first, length in runs(blocks, longest):
            start = first * self.block_bytes + offset
            yield self.memory.data[start : start + length * num_bytes]

    def refusal(self, blocks: Sequence[int], offset: int, num_bytes: int) -> str:
        """Why a peer may not read these bytes of these blocks, or ""."""
        if blocks and not (min(blocks) >= 0 and max(blocks) < self.num_blocks):
            return "unknown block"
        if num_bytes < 1 or offset < 0 or offset + num_bytes > self.block_bytes:
            return f"bytes {offset} to {offset + num_bytes} are outside a block of {self.block_bytes}"
        return ""

    def check_pull(self, peer: Peer, remote_blocks: Sequence[int], local_blocks: Sequence[int], cut: Cut | None) -> Cut:
        """What moves of each block. Own blocks are an invariant (InvariantError); the peer's are its claim
        (TransferError).
        """
        if len(remote_blocks) != len(local_blocks) or len(set(local_blocks)) != len(local_blocks):
            raise InvariantError("a pull pairs each remote block with one own block")
        if local_blocks and not (min(local_blocks) >= 0 and max(local_blocks) < self.num_blocks):
            raise InvariantError("own block outside the pool")
        if remote_blocks and not (min(remote_blocks) >= 0 and max(remote_blocks) < peer.num_blocks):
            raise TransferError(TransferFault.FAILED, "unknown remote block")
        if cut is None:
            if peer.block_bytes != self.block_bytes:
                raise TransferError(
                    TransferFault.FAILED,
                    f"whole blocks of {peer.block_bytes} bytes ({peer.peer_id}) do not fit own ones of "
                    f"{self.block_bytes}",
                )
            return Cut(0, 0, self.block_bytes)
        if cut.num_bytes < 1 or cut.local_offset < 0 or cut.local_offset + cut.num_bytes > self.block_bytes:
            raise InvariantError(f"{cut} is outside an own block of {self.block_bytes} bytes")
        if cut.remote_offset < 0 or cut.remote_offset + cut.num_bytes > peer.block_bytes:
            raise TransferError(
                TransferFault.FAILED, f"{cut} is outside a block of {peer.block_bytes} bytes ({peer.peer_id})"
            )
        return cut


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

    def follow(self, reading: asyncio.Task[None]) -> None:
        """The read ends with the task that works on it at the latest. What that did not foresee is a failure."""

        def over(_: asyncio.Task[None]) -> None:
            error = None if reading.cancelled() else reading.exception()
            if error is not None:
                log.error("read_broken", exc_info=error)
                self.fail(TransferError(TransferFault.FAILED, f"{type(error).__name__}: {error}"[:200]))
            self.abort()

        reading.add_done_callback(over)

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


def joined_pull(loop: asyncio.AbstractEventLoop, parts: Sequence[Pull]) -> Pull:
    """Several reads, from several peers, as one: done when all are, failed and given up with the first that fails,
    terminal when none can write.
    """
    whole = Pull(loop, lambda: None if whole.terminal.done() else _cancel_all(parts))
    began = loop.time()

    def part_done(future: asyncio.Future[PullStats]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, TransferError):
            whole.fail(error)
            _cancel_all(parts)

    def part_over(_: asyncio.Future[None]) -> None:
        if not all(part.terminal.done() for part in parts):
            return
        if all(part.done.done() and not part.done.exception() for part in parts):
            stats = [part.done.result() for part in parts]
            moved, stalls = sum(s.bytes for s in stats), sum(s.stalls for s in stats)
            whole.finish(PullStats(moved, loop.time() - began, stalls))
        whole.abort()

    for part in parts:
        part.done.add_done_callback(part_done)
        part.terminal.add_done_callback(part_over)
    return whole


def _cancel_all(parts: Sequence[Pull]) -> None:
    for part in parts:
        part.cancel()


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
    block_bytes: int
    """May differ from the own one: a worker of another parallel degree has other heads in a block."""


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

    def pull(
        self, peer: Peer, remote_blocks: Sequence[int], local_blocks: Sequence[int], cut: Cut | None = None
    ) -> Pull:
        """Starts reading `cut` of each block, or whole blocks: the read fails when those of the two sides differ in
        size. Whole blocks that follow each other on both sides move as one piece. A read that moves nothing for the
        transport's `read_timeout_s` fails with timeout.
        """

    async def disconnect(self, peer: Peer) -> None:
        """Forgets a peer, once its last read is terminal. Again is a no-op."""

    async def close(self) -> None:
        """Gives up all reads and releases everything. A read that is not terminal keeps its memory registered."""

    def twin(self, peer_id: str) -> Transport:
        """A fresh, unstarted transport of the same kind and credentials."""

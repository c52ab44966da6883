"""Transport within one process: pools find each other in a registry, a read is a copy on the event loop.

It behaves like a one-sided network read, late writes included: what a stalled peer owes still lands when it goes on,
even if the read was given up, and only then the read is terminal. `stall`, `resume`, `die` and `delay_s` make the
faults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import InvariantError
from kvtransfer.core.layout import Cut
from kvtransfer.transports.base import (
    Descriptor,
    Peer,
    Pool,
    PoolBytes,
    Progress,
    Pull,
    TransferError,
    TransferFault,
    failed_pull,
)

_REGISTRY: dict[str, MemoryTransport] = {}


@dataclass(slots=True)
class MemoryPeer:
    peer_id: str
    num_blocks: int
    block_bytes: int


class MemoryTransport:
    name = "memory"

    def __init__(self, peer_id: str, read_timeout_s: float = 30.0) -> None:
        self.peer_id = peer_id
        self.delay_s = 0.0
        """Seconds that a reader of this pool waits before each block."""
        self._read_timeout_s = read_timeout_s
        self._pool: Pool | None = None
        self._moving = asyncio.Event()
        self._moving.set()
        self._dead = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, memory: PoolBytes, block_bytes: int) -> None:
        self._pool = Pool(memory, block_bytes)
        if self.peer_id in _REGISTRY:
            raise InvariantError(f"two transports are named {self.peer_id}")
        _REGISTRY[self.peer_id] = self

    def descriptor(self) -> bytes:
        pool = self._own_pool()
        return Descriptor(self.name, self.peer_id, pool.num_blocks, pool.block_bytes, b"").encode()

    async def connect(self, peer_id: str, descriptor: bytes) -> MemoryPeer:
        found = Descriptor.decode(descriptor, self.name, peer_id)
        if peer_id not in _REGISTRY:
            raise TransferError(TransferFault.PEER_LOST, "no such pool")
        return MemoryPeer(peer_id, found.num_blocks, found.block_bytes)

    def pull(
        self, peer: Peer, remote_blocks: Sequence[int], local_blocks: Sequence[int], cut: Cut | None = None
    ) -> Pull:
        loop = asyncio.get_running_loop()
        try:
            cut = self._own_pool().check_pull(peer, remote_blocks, local_blocks, cut)
            holder = _REGISTRY.get(peer.peer_id)
            if holder is None:
                raise TransferError(TransferFault.PEER_LOST, "no such pool")
        except TransferError as error:
            return failed_pull(loop, error)
        pull = Pull(loop, lambda: None)
        task = loop.create_task(self._read(holder, list(remote_blocks), list(local_blocks), cut, pull))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return pull

    async def disconnect(self, peer: Peer) -> None:
        pass

    async def close(self) -> None:
        self.die()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def twin(self, peer_id: str) -> MemoryTransport:
        return MemoryTransport(peer_id, self._read_timeout_s)

    # --- faults of this pool, as its readers see them

    def stall(self) -> None:
        self._moving.clear()

    def resume(self) -> None:
        self._moving.set()

    def die(self) -> None:
        self._dead.set()
        self._moving.set()
        _REGISTRY.pop(self.peer_id, None)

    # --- reading

    async def _read(self, holder: MemoryTransport, remote: list[int], local: list[int], cut: Cut, pull: Pull) -> None:
        pool, source, loop = self._own_pool(), holder._own_pool(), asyncio.get_running_loop()
        progress = Progress(loop.time())
        timer = loop.call_later(0, lambda: None)
        try:
            for theirs, ours in zip(remote, local, strict=True):
                timer.cancel()
                late = TransferError(TransferFault.TIMEOUT, f"nothing moved for {self._read_timeout_s} s")
                timer = loop.call_later(self._read_timeout_s, pull.fail, late)
                await asyncio.sleep(holder.delay_s)
                await holder._moving.wait()
                if holder._dead.is_set():
                    pull.fail(TransferError(TransferFault.PEER_LOST, "the pool is gone"))
                    return
                if refusal := source.refusal([theirs], cut.remote_offset, cut.num_bytes):
                    pull.fail(TransferError(TransferFault.FAILED, f"refused: {refusal}"))
                    return
                (target,) = pool.views([ours], cut.local_offset, cut.num_bytes, cut.num_bytes)
                (target[:],) = source.views([theirs], cut.remote_offset, cut.num_bytes, cut.num_bytes)
                progress.moved(cut.num_bytes, loop.time())
                if pull.done.done():
                    return
            pull.finish(progress.stats())
        finally:
            timer.cancel()
            pull.abort()

    def _own_pool(self) -> Pool:
        if self._pool is None:
            raise InvariantError("the transport is not started")
        return self._pool

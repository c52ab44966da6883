"""Transport over UCX: one-sided reads through a NIXL agent. One puller thread owns the agent and runs all reads.

    asyncio loop                                puller thread
    pull() ------------ inbox ----------------> reads, in turns: at most POST_BYTES a post, POSTS_IN_FLIGHT posts a read
    done, terminal <--- call_soon_threadsafe -- polls posts; a peer that does not move delays nobody else's read

A copy over shared memory happens inside a post (with the interpreter lock released), hence the bounded posts. A read
that was given up posts nothing more, but its posts in progress may still write: `terminal` waits until NIXL reports
each of them done or failed. Nothing else is proof - releasing a handle, removing a peer, deregistering memory fence
nothing - so a post in progress is never released, and an agent that still has one at close() is kept until the
process ends.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgpack
import numpy as np

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
from kvtransfer.transports.ucx_agent import BlockIds, Handle, PostState, UcxAgent, UnfencedError

POST_BYTES = 16 << 20
POSTS_IN_FLIGHT = 4
MIN_PAUSE_S, MAX_PAUSE_S = 20e-6, 2e-3
CLOSE_S = 1.0
"""How long close() waits for posts in progress."""

T = TypeVar("T")
_UNFENCED: list[UcxAgent] = []
"""Agents that may still write; they and their memory stay until the process ends."""


@dataclass(slots=True, eq=False)
class UcxPeer:
    peer_id: str
    num_blocks: int
    block_bytes: int
    details: bytes
    lost: bool = False
    leaving: bool = False
    reads: int = 0


@dataclass(slots=True, eq=False)
class _Read:
    pull: Pull
    peer: UcxPeer
    remote: BlockIds
    local: BlockIds
    cut: Cut
    progress: Progress
    next: int = 0
    posts: list[tuple[Handle, int]] = field(default_factory=list)
    """Posts in progress and their bytes."""
    abandoned: bool = False
    unfenced: bool = False
    """A post ended without proof that it can write no more: this read is never terminal."""


class UcxTransport:
    name = "ucx"

    def __init__(self, peer_id: str, read_timeout_s: float = 30.0) -> None:
        self.peer_id = peer_id
        self._read_timeout_s = read_timeout_s
        self._pool: Pool | None = None
        self._puller: _Puller | None = None
        self._closed = False
        self._descriptor = b""

    async def start(self, memory: PoolBytes, block_bytes: int) -> None:
        pool = self._pool = Pool(memory, block_bytes)
        puller = self._puller = _Puller(asyncio.get_running_loop(), self.peer_id, pool, self._read_timeout_s)
        metadata = await puller.call(puller.open)
        details = msgpack.packb([memory.ctypes.data, metadata])
        self._descriptor = Descriptor(self.name, self.peer_id, pool.num_blocks, block_bytes, details).encode()

    def descriptor(self) -> bytes:
        return self._descriptor

    async def connect(self, peer_id: str, descriptor: bytes) -> UcxPeer:
        _, puller = self._started()
        self._check_open()
        found = Descriptor.decode(descriptor, self.name, peer_id)
        return await puller.call(lambda: puller.add(found))

    def pull(
        self, peer: Peer, remote_blocks: Sequence[int], local_blocks: Sequence[int], cut: Cut | None = None
    ) -> Pull:
        pool, puller = self._started()
        loop = asyncio.get_running_loop()
        if not isinstance(peer, UcxPeer):
            raise InvariantError("a peer of another transport")
        try:
            self._check_open()
            cut = pool.check_pull(peer, remote_blocks, local_blocks, cut)
        except TransferError as error:
            return failed_pull(loop, error)
        remote, local = np.asarray(remote_blocks, np.int32), np.asarray(local_blocks, np.int32)
        pull = Pull(loop, lambda: puller.post(lambda: puller.abandon(read)))
        read = _Read(pull, peer, remote, local, cut, Progress(time.monotonic()))
        puller.post(lambda: puller.begin(read))
        return pull

    async def disconnect(self, peer: Peer) -> None:
        _, puller = self._started()
        if isinstance(peer, UcxPeer) and not self._closed:
            await puller.call(lambda: puller.leave(peer))

    async def close(self) -> None:
        self._closed = True
        if self._puller is not None:
            self._puller.post(self._puller.stop)
            await asyncio.to_thread(self._puller.join)

    def twin(self, peer_id: str) -> UcxTransport:
        return UcxTransport(peer_id, self._read_timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(TransferFault.CANCELLED, "the transport was closed")

    def _started(self) -> tuple[Pool, _Puller]:
        if self._pool is None or self._puller is None:
            raise InvariantError("the transport is not started")
        return self._pool, self._puller


class _Puller(threading.Thread):
    """Runs what comes through the inbox, and all reads. Public methods below `run` are for its own thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, pool: Pool, read_timeout_s: float) -> None:
        super().__init__(name="kv-puller", daemon=True)
        self._loop = loop
        self._agent_name = name
        self._pool = pool
        self._read_timeout_s = read_timeout_s
        # Not a SimpleQueue: its get(timeout) can wait for ever (CPython 3.11 recomputes a short timeout to below zero).
        self._inbox: deque[Callable[[], None]] = deque()
        self._called = threading.Event()
        self._agent: UcxAgent | None = None
        self._peers: dict[str, UcxPeer] = {}
        self._reads: list[_Read] = []
        self._unfenced = False
        self._stop_at: float | None = None
        self.start()

    def post(self, command: Callable[[], None]) -> None:
        """From any thread."""
        self._inbox.append(command)
        self._called.set()

    async def call(self, function: Callable[[], T]) -> T:
        """Runs `function` on the puller thread and returns what it returns or raises."""
        future: asyncio.Future[T] = self._loop.create_future()

        def command() -> None:
            try:
                result = function()
            except ImportError as error:
                self._tell(_set_error, future, TransferError(TransferFault.FAILED, f"NIXL is not importable: {error}"))
            except Exception as error:  # raised where it is awaited
                self._tell(_set_error, future, error)
            else:
                self._tell(_set_result, future, result)

        self.post(command)
        return await future

    def run(self) -> None:
        pause = MIN_PAUSE_S
        while self._stop_at is None or (self._reads and time.monotonic() < self._stop_at):
            if self._called.wait(pause if self._reads else None):
                self._called.clear()
                pause = MIN_PAUSE_S
            while self._inbox:
                self._inbox.popleft()()
            moved = [self._advance(read) for read in list(self._reads)]
            pause = MIN_PAUSE_S if any(moved) else min(pause * 2, MAX_PAUSE_S)
        self._shut()

    # --- commands

    def open(self) -> bytes:
        self._agent = UcxAgent(self._agent_name, self._pool)
        return self._agent.metadata

    def add(self, found: Descriptor) -> UcxPeer:
        known = self._peers.get(found.peer_id)
        if known is not None and known.details == found.details and not (known.lost or known.leaving):
            return known
        if known is not None:
            self.leave(known)
            if known.reads:
                raise TransferError(TransferFault.PEER_LOST, "earlier reads from it are not over")
        try:
            base, metadata = msgpack.unpackb(found.details)
            if not (isinstance(base, int) and 0 < base < 1 << 63 and isinstance(metadata, bytes)):
                raise ValueError("wrong types")
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise TransferError(TransferFault.FAILED, "malformed descriptor") from error
        self._own_agent().add_peer(found.peer_id, metadata, base, found.block_bytes, found.num_blocks)
        peer = UcxPeer(found.peer_id, found.num_blocks, found.block_bytes, found.details)
        self._peers[found.peer_id] = peer
        return peer

    def begin(self, read: _Read) -> None:
        read.peer.reads += 1
        self._reads.append(read)
        if self._stop_at is not None:
            self.abandon(read)

    def abandon(self, read: _Read) -> None:
        read.abandoned = True

    def leave(self, peer: UcxPeer) -> None:
        peer.leaving = True
        if peer.reads == 0 and self._peers.get(peer.peer_id) is peer:
            del self._peers[peer.peer_id]
            self._own_agent().remove_peer(peer.peer_id)

    def stop(self) -> None:
        self._stop_at = time.monotonic() + CLOSE_S
        for read in self._reads:
            self._give_up(read, TransferError(TransferFault.CANCELLED, "the transport was closed"))

    # --- reads

    def _advance(self, read: _Read) -> bool:
        """Polls a read's posts and makes its next one. True when anything moved."""
        moved = False
        agent = self._own_agent()
        for post in list(read.posts):
            handle, num_bytes = post
            try:
                if agent.check(handle) is PostState.IN_PROGRESS:
                    continue
                read.progress.moved(num_bytes, time.monotonic())
            except TransferError as error:
                self._give_up(read, error)
            read.posts.remove(post)
            moved = True
        if not read.abandoned and read.next < len(read.local) and len(read.posts) < POSTS_IN_FLIGHT:
            self._post_next(read)
            moved = True
        if not read.posts and (read.abandoned or read.next == len(read.local)):
            self._end(read)
            return True
        if not read.abandoned and read.progress.silence_s(time.monotonic()) > self._read_timeout_s:
            self._give_up(read, TransferError(TransferFault.TIMEOUT, f"nothing moved for {self._read_timeout_s} s"))
        return moved

    def _post_next(self, read: _Read) -> None:
        part = slice(read.next, read.next + max(1, POST_BYTES // read.cut.num_bytes))
        num_bytes = len(read.local[part]) * read.cut.num_bytes
        try:
            if read.peer.lost or self._peers.get(read.peer.peer_id) is not read.peer:
                raise TransferError(TransferFault.PEER_LOST, "its connection is gone")
            handle, _ = self._own_agent().post(read.peer.peer_id, read.cut, read.remote[part], read.local[part])
        except TransferError as error:
            self._give_up(read, error)
            return
        read.next = min(part.stop, len(read.local))
        if handle is None:
            read.progress.moved(num_bytes, time.monotonic())
        else:
            read.posts.append((handle, num_bytes))

    def _give_up(self, read: _Read, error: TransferError) -> None:
        read.abandoned = True
        read.unfenced |= isinstance(error, UnfencedError)
        read.peer.lost |= error.kind is TransferFault.PEER_LOST
        self._tell(read.pull.fail, error)

    def _end(self, read: _Read) -> None:
        self._reads.remove(read)
        read.peer.reads -= 1
        if read.peer.leaving:
            self.leave(read.peer)
        if read.unfenced:
            self._unfenced = True
        elif read.abandoned:
            self._tell(read.pull.abort)
        else:
            self._tell(read.pull.finish, read.progress.stats())

    def _shut(self) -> None:
        if self._agent is None:
            return
        if self._reads or self._unfenced:
            _UNFENCED.append(self._agent)
        else:
            self._agent.close()

    def _own_agent(self) -> UcxAgent:
        if self._agent is None:
            raise InvariantError("the agent is not open")
        return self._agent

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)

"""Transports for tests: one of each lane, peers in processes of their own that hold known bytes, and a reader of them.

`ucx` uses the lanes UCX picks on this machine (shared memory); `ucx-tcp` forces the ones it uses between machines.
`nccl` runs on gloo, its twin for CPUs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import pytest

from headrace.ids import random_ids
from kvtransfer.core.layout import Cut
from kvtransfer.transports import ucx_agent
from kvtransfer.transports.base import (
    Descriptor,
    PoolBytes,
    Pull,
    TransferError,
    TransferFault,
    Transport,
    allocate_pool,
)
from kvtransfer.transports.memory import MemoryTransport
from kvtransfer.transports.nccl import NcclTransport
from kvtransfer.transports.tcp import TcpTransport
from kvtransfer.transports.ucx import UcxTransport

TOKEN = "the cluster's token"
MIB = 1 << 20

try:
    ucx_agent.load_bindings()
    NO_NIXL = ""
except ImportError as error:
    NO_NIXL = f"NIXL is not importable: {error}"

needs_nixl = pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL)
UCX_LANES = [pytest.param(lane, marks=needs_nixl) for lane in ("ucx", "ucx-tcp")]
LANES = ["memory", "tcp", "nccl", *UCX_LANES]

PROCESSES = multiprocessing.get_context("forkserver")
"""Peers are forked from a process that has imported what they need, so that each starts at once."""
PROCESSES.set_forkserver_preload(["tests.lanes"])


def make(lane: str, peer_id: str, read_timeout_s: float, token: str = TOKEN) -> Transport:
    if lane == "memory":
        return MemoryTransport(peer_id, read_timeout_s)
    if lane == "tcp":
        return TcpTransport(peer_id, token, "127.0.0.1", read_timeout_s)
    if lane == "nccl":
        return NcclTransport(peer_id, token, "127.0.0.1", read_timeout_s)
    os.environ["UCX_TLS"] = "tcp" if lane == "ucx-tcp" else "all"
    return UcxTransport(peer_id, read_timeout_s)


@cache
def content(block: int, block_bytes: int) -> PoolBytes:
    """What a holder's block holds; no byte is 0."""
    return (
        np.random.default_rng(block)
        .integers(1, 256, min(block_bytes, 256), dtype=np.uint8)
        .repeat(-(-block_bytes // 256))[:block_bytes]
    )


def filled_pool(num_blocks: int, block_bytes: int) -> PoolBytes:
    pool = allocate_pool(num_blocks * block_bytes)
    for block in range(num_blocks):
        pool[block * block_bytes : (block + 1) * block_bytes] = content(block, block_bytes)
    return pool


def changed(descriptor: Descriptor, **changes: Any) -> bytes:
    parts = {name: getattr(descriptor, name) for name in Descriptor.__slots__}
    return Descriptor(**(parts | changes)).encode()


# --- peers


class Remote(Protocol):
    peer_id: str
    descriptor: bytes

    def stop(self) -> None: ...
    def go_on(self) -> None: ...
    def kill(self) -> None: ...
    async def close(self) -> None: ...


class ProcessRemote:
    def __init__(self, lane: str, num_blocks: int, block_bytes: int, shared: bool) -> None:
        self.peer_id = random_ids("peer")
        self._shared = shared
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(
            target=hold, args=(theirs, lane, self.peer_id, num_blocks, block_bytes), daemon=True
        )
        self._process.start()
        theirs.close()
        self.descriptor: bytes = self._pipe.recv()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.join(10)
        assert self._process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._process.close()
        self._pipe.close()

    async def close(self) -> None:
        if not self._shared:
            self.end()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


class MemoryRemote:
    def __init__(self, transport: MemoryTransport) -> None:
        self.peer_id, self.descriptor = transport.peer_id, transport.descriptor()
        self.stop, self.go_on, self.kill, self.close = (
            transport.stall,
            transport.resume,
            transport.die,
            transport.close,
        )


_shared: dict[tuple[str, int, int], ProcessRemote] = {}
"""Peers that no test harms, by lane and pool."""


def end_shared_peers() -> None:
    while _shared:
        _shared.popitem()[1].end()


async def start_remote(lane: str, num_blocks: int, block_bytes: int, shared: bool = False) -> Remote:
    if lane != "memory":
        if not shared:
            return ProcessRemote(lane, num_blocks, block_bytes, False)
        key = (lane, num_blocks, block_bytes)
        return _shared.get(key) or _shared.setdefault(key, ProcessRemote(*key, True))
    transport = MemoryTransport(random_ids("peer"))
    await transport.start(filled_pool(num_blocks, block_bytes), block_bytes)
    return MemoryRemote(transport)


def hold(pipe: Connection, lane: str, peer_id: str, num_blocks: int, block_bytes: int) -> None:
    """The program of a peer: tells its descriptor and serves until the other end of the pipe is closed."""

    async def serve() -> None:
        transport = make(lane, peer_id, 20.0)
        await transport.start(filled_pool(num_blocks, block_bytes), block_bytes)
        pipe.send(transport.descriptor())
        await asyncio.to_thread(pipe.poll, None)
        await transport.close()

    asyncio.run(serve())


# --- readers


class Reader:
    def __init__(self, transport: Transport, num_blocks: int, block_bytes: int) -> None:
        self.transport, self.num_blocks, self.block_bytes = transport, num_blocks, block_bytes
        self.memory = allocate_pool(num_blocks * block_bytes)

    def block(self, block: int) -> PoolBytes:
        return self.memory[block * self.block_bytes : (block + 1) * self.block_bytes]

    def assert_holds(self, remote_blocks: list[int], local_blocks: list[int]) -> None:
        for remote, local in zip(remote_blocks, local_blocks, strict=True):
            assert np.array_equal(self.block(local), content(remote, self.block_bytes)), (remote, local)

    async def pull_from(
        self, remote: Remote, remote_blocks: list[int], local_blocks: list[int], cut: Cut | None = None
    ) -> Pull:
        peer = await self.transport.connect(remote.peer_id, remote.descriptor)
        return self.transport.pull(peer, remote_blocks, local_blocks, cut)


@asynccontextmanager
async def pair(
    lane: str,
    num_blocks: int = 64,
    block_bytes: int = MIB,
    *,
    read_timeout_s: float = 20.0,
    victims: int = 0,
    reader_blocks: int = 0,
    reader_block_bytes: int = 0,
) -> AsyncIterator[tuple[Any, ...]]:
    """A reader, a peer that must come to no harm, and peers for harming; all with pools of that size unless said."""
    transport = make(lane, random_ids("reader"), read_timeout_s)
    reader = Reader(transport, reader_blocks or num_blocks, reader_block_bytes or block_bytes)
    await transport.start(reader.memory, reader.block_bytes)
    others = [await start_remote(lane, num_blocks, block_bytes, i == 0) for i in range(1 + victims)]
    try:
        yield (reader, *others)
    finally:
        await transport.close()
        for other in others:
            await other.close()


async def fault_of(pull: Pull, limit_s: float = 15.0) -> TransferFault:
    with pytest.raises(TransferError) as caught:
        await asyncio.wait_for(asyncio.shield(pull.done), limit_s)
    return caught.value.kind


async def over(pull: Pull, limit_s: float = 15.0) -> None:
    await asyncio.wait_for(asyncio.shield(pull.terminal), limit_s)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))

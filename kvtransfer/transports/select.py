"""Starts a worker's lanes: every transport that it offers to its peers, best first, and says why one is missing.

Each is tried by reading the probe's blocks from oneself, so a lane that does not work here is found at start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.errors import StartupError
from kvtransfer.core.layout import Cut
from kvtransfer.probe import ProbeArea, fill_pattern, pattern_of
from kvtransfer.transports.base import Peer, PoolBytes, Pull, TransferError, TransferFault, Transport, allocate_pool
from kvtransfer.transports.tcp import TcpTransport
from kvtransfer.transports.ucx import UcxTransport

log = logging.getLogger("headrace.kvtransfer.lanes")

AUTO = ("ucx", "tcp")
"""What `auto` offers, best first. Two-sided NCCL is for those who ask for it."""
LANES = ("auto", *AUTO, "nccl")
ROUNDS = 3
"""Of reading a probe; the best one tells what a lane can do, the others what else the machine did."""


@dataclass(slots=True)
class Lanes:
    """Started transports over one pool with a probe behind it."""

    memory: PoolBytes
    block_bytes: int
    area: ProbeArea
    transports: dict[str, Transport] = field(default_factory=dict)
    """By name, best first; at least one."""
    gbps: dict[str, float] = field(default_factory=dict)
    """GB/s (10^9 bytes) of reading from oneself."""
    note: str = ""
    """Which lane is missing and why; or ""."""

    @property
    def first(self) -> Transport:
        return next(iter(self.transports.values()))

    @property
    def common(self) -> str:
        """The lane that all workers of this configuration have: the last resort."""
        return next(reversed(self.transports))

    def descriptors(self) -> dict[str, bytes]:
        return {name: transport.descriptor() for name, transport in self.transports.items()}

    async def close(self) -> None:
        for transport in self.transports.values():
            await transport.close()


async def start_lanes(
    name: str,
    memory: PoolBytes,
    block_bytes: int,
    area: ProbeArea,
    *,
    peer_id: str,
    token: str,
    host: str = "127.0.0.1",
    read_timeout_s: float = 30.0,
) -> Lanes:
    """The named transport, or with `auto` all of AUTO that work here, tcp in any case.

    `memory`: of `area.end` blocks. `peer_id` must be new for every process (worker and incarnation). Raises
    StartupError when no lane works, or not the one that was asked for.
    """
    if name not in LANES:
        raise StartupError(f"transport: {name!r} is none of {', '.join(LANES)}")
    if host in ("0.0.0.0", "::", ""):
        raise StartupError(f"host: {host!r} is no address that peers can reach; give this node's own")
    fill_pattern(memory, area, block_bytes, peer_id)
    lanes = Lanes(memory, block_bytes, area)
    for each in AUTO if name == "auto" else (name,):
        transport = _make(each, peer_id, token, host, read_timeout_s)
        try:
            await transport.start(memory, block_bytes)
            lanes.gbps[each] = await _read_from_oneself(transport, area, block_bytes)
        except (TransferError, OSError) as error:
            await transport.close()
            if each in (name, "tcp"):
                await lanes.close()
                where = f"on {host}" if each == "tcp" else "here"
                raise StartupError(f"transport {each} does not work {where}: {error}") from error
            lanes.note = f"{each} does not work here ({error}); KV moves over tcp"
            log.warning("lane_missing worker=%s lane=%s reason=%s", peer_id, each, error)
        else:
            lanes.transports[each] = transport
    return lanes


def _make(name: str, peer_id: str, token: str, host: str, read_timeout_s: float) -> Transport:
    if name == "ucx":
        return UcxTransport(peer_id, read_timeout_s)
    if name == "nccl":
        from kvtransfer.transports.nccl import NcclTransport  # torch: only for those who ask for it

        return NcclTransport(peer_id, token, host, read_timeout_s)
    return TcpTransport(peer_id, token, host, read_timeout_s)


async def _read_from_oneself(transport: Transport, area: ProbeArea, block_bytes: int) -> float:
    """GB/s of reading the probe through a second transport. Raises TransferError when it brings other bytes."""
    target = allocate_pool(area.num_blocks * block_bytes)
    target[:] = 0  # touch the pages: faults are not the lane's time
    twin = transport.twin(f"{transport.peer_id}/probe")
    try:
        await twin.start(target, block_bytes)
        peer = await twin.connect(transport.peer_id, transport.descriptor())
        return await read_probe(
            twin, peer, transport.peer_id, area.pattern, target, block_bytes, range(area.num_blocks)
        )
    finally:
        await twin.close()


async def read_probe(
    transport: Transport,
    peer: Peer,
    holder: str,
    pattern: Sequence[int],
    memory: PoolBytes,
    block_bytes: int,
    targets: Sequence[int],
    track: Callable[[Pull], None] = lambda _: None,
) -> float:
    """GB/s of reading the peer's `pattern` blocks into one's own `targets`, block bytes each; of blocks that are not
    equally large, as much as fits both. `holder`: its name.

    Raises TransferError when a read fails or brings bytes that are not the holder's. `track` is told of each read: it
    may write on until it is terminal.
    """
    size = min(block_bytes, peer.block_bytes)
    cut = None if peer.block_bytes == block_bytes else Cut(0, 0, size)

    async def read(blocks: Sequence[int], into: Sequence[int]) -> None:
        pull = transport.pull(peer, blocks, into, cut)
        track(pull)
        try:
            await asyncio.shield(pull.done)
        finally:
            pull.cancel()

    for target in targets:
        memory[target * block_bytes : (target + 1) * block_bytes] = 0
    await read(pattern[:1], targets[:1])  # connection set-up apart
    clock, seconds = asyncio.get_running_loop().time, float("inf")
    for _ in range(ROUNDS):
        start = clock()
        await read(pattern, targets)
        seconds = min(seconds, clock() - start)
    for number, target in enumerate(targets):
        got = memory[target * block_bytes : target * block_bytes + size]
        if not np.array_equal(got, pattern_of(holder, number, size)):
            raise TransferError(TransferFault.CORRUPT, f"block {number} of the probe came with other bytes")
    return len(targets) * size / seconds / 1e9

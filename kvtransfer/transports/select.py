"""Chooses and starts the transport, measures the lane by reading from oneself, and says why when it is not the best
one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from headrace.errors import StartupError
from kvtransfer.transports.base import PoolBytes, TransferError, TransferFault, Transport, allocate_pool
from kvtransfer.transports.tcp import TcpTransport
from kvtransfer.transports.ucx import UcxTransport

LANES = ("auto", "ucx", "tcp")
PROBE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Lane:
    """A started transport; `gbps` in GB/s (10^9 bytes) of a loopback read; `note` tells a fallback and its reason, or
    "".
    """

    transport: Transport
    gbps: float
    note: str = ""


async def make_transport(
    name: str,
    memory: PoolBytes,
    block_bytes: int,
    *,
    peer_id: str,
    token: str,
    host: str = "127.0.0.1",
    read_timeout_s: float = 30.0,
) -> Lane:
    """Starts the named transport on a pool that nothing else uses yet; `auto` is ucx where it works, else tcp.

    `peer_id` must be new for every process (worker and incarnation). Raises StartupError when the lane does not work.
    """
    if name not in LANES:
        raise StartupError(f"transport: {name!r} is none of {', '.join(LANES)}")
    if host in ("0.0.0.0", "::", ""):
        raise StartupError(f"host: {host!r} is no address that peers can reach; give this node's own")
    note = ""
    if name in ("auto", "ucx"):
        ucx = UcxTransport(peer_id, read_timeout_s)
        try:
            return await _start(ucx, memory, block_bytes)
        except TransferError as error:
            await ucx.close()
            if name == "ucx":
                raise StartupError(f"transport ucx does not work here: {error}") from error
            note = f"ucx does not work here ({error}); KV moves over tcp"
    tcp = TcpTransport(peer_id, token, host, read_timeout_s)
    try:
        lane = await _start(tcp, memory, block_bytes)
    except (TransferError, OSError) as error:
        await tcp.close()
        raise StartupError(f"transport tcp does not work on {host}: {error}") from error
    return Lane(lane.transport, lane.gbps, note)


async def _start(transport: Transport, memory: PoolBytes, block_bytes: int) -> Lane:
    await transport.start(memory, block_bytes)
    return Lane(transport, await measure_loopback_gbps(transport, memory, block_bytes))


async def measure_loopback_gbps(transport: Transport, memory: PoolBytes, block_bytes: int) -> float:
    """GB/s of reading up to PROBE_BYTES from a started transport's own pool through a second one.

    Uses the pool's first blocks and puts them back. Raises TransferError when the read fails or brings other bytes.
    """
    num_blocks = max(1, min(memory.nbytes, PROBE_BYTES) // block_bytes)
    used = memory[: num_blocks * block_bytes]
    saved, target = used.copy(), allocate_pool(num_blocks * block_bytes)
    target[:] = 0  # touch the pages: faults are not the lane's time
    pattern = np.random.default_rng(0).integers(0, 256, used.nbytes, dtype=np.uint8)
    probe = transport.twin(f"{transport.peer_id}/probe")
    blocks = list(range(num_blocks))
    try:
        used[:] = pattern
        await probe.start(target, block_bytes)
        peer = await probe.connect(transport.peer_id, transport.descriptor())
        await probe.pull(peer, blocks[:1], blocks[:1]).done  # connection set-up apart
        start = time.perf_counter()
        await probe.pull(peer, blocks, blocks).done
        seconds = time.perf_counter() - start
        if not np.array_equal(target, pattern):
            raise TransferError(TransferFault.FAILED, "a loopback read brought wrong bytes")
    finally:
        await probe.close()
        used[:] = saved
    return used.nbytes / seconds / 1e9

"""One end of a lane that `headrace doctor` measures, a process of its own: `python -m cluster.doctor.lane_end`.

JSON lines: a spec on stdin; the holder says where it is reached and stays until its stdin ends; the reader gets that
as a second line and answers with rates. UCX writes to the reader's stdout too: an answer is a line with the mark.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

import numpy as np

from headrace.errors import StartupError
from headrace.process import die_with_parent
from kvtransfer.probe import probe_area
from kvtransfer.transports.base import PoolBytes, TransferError, TransferFault, allocate_pool
from kvtransfer.transports.select import Lanes, start_lanes

MARK = "headrace-lane-end: "
POOL_BYTES = 64 << 20
ROUNDS = 3
READ_LIMIT_S = 3.0
HOLDER, READER = "doctor-holder/1", "doctor-reader/1"
_PIECE_BYTES = 1 << 20
_GO = b"g"


@dataclass(frozen=True, slots=True)
class EndSpec:
    lane: str
    host: str
    """Of the configuration's kv_transfer.host."""
    block_bytes: int
    token: str
    parent_pid: int
    is_holder: bool


@dataclass(frozen=True, slots=True)
class Holder:
    descriptor: str
    """In hex."""
    bare_port: int
    """Where it sends its pool through a bare socket."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Medians in GB/s."""

    gbps: float
    memcpy_gbps: float
    socket_gbps: float


def main() -> None:
    spec = EndSpec(**json.loads(sys.stdin.readline()))
    die_with_parent(spec.parent_pid)
    try:
        asyncio.run(_hold(spec) if spec.is_holder else _read(spec))
    except (StartupError, TransferError, OSError) as error:
        _answer({"error": str(error)})


def _answer(data: dict[str, object]) -> None:
    print(f"\n{MARK}{json.dumps(data)}", flush=True)


def _content(num_bytes: int) -> PoolBytes:
    """Other bytes in every place of a block, and in every block."""
    return np.arange(-(-num_bytes // 8), dtype=np.uint64).view(np.uint8)[:num_bytes]


async def _start(spec: EndSpec, name: str) -> tuple[Lanes, PoolBytes]:
    """The lane, and of its memory what this measures."""
    size = spec.block_bytes
    area = probe_area(POOL_BYTES // size, size)
    memory = allocate_pool(area.end * size)
    lanes = await start_lanes(
        spec.lane, memory, size, area, peer_id=name, token=spec.token, host=spec.host, read_timeout_s=READ_LIMIT_S
    )
    return lanes, memory[: area.first * size]


async def _hold(spec: EndSpec) -> None:
    lanes, pool = await _start(spec, HOLDER)
    pool[:] = _content(pool.nbytes)
    family = socket.getaddrinfo(spec.host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((spec.host, 0), family=family) as listener:
        threading.Thread(target=_send_bare, args=(listener, pool), daemon=True).start()
        _answer(asdict(Holder(lanes.first.descriptor().hex(), listener.getsockname()[1])))
        await asyncio.to_thread(sys.stdin.read)
    await lanes.close()


def _send_bare(listener: socket.socket, pool: PoolBytes) -> None:
    connection, _ = listener.accept()
    with connection:
        while connection.recv(len(_GO)):
            connection.sendall(pool.data)


async def _read(spec: EndSpec) -> None:
    lanes, pool = await _start(spec, READER)
    transport, num_blocks = lanes.first, pool.nbytes // spec.block_bytes
    rng = np.random.default_rng(1)
    theirs, ours = rng.permutation(num_blocks), rng.permutation(num_blocks)
    blocks = pool.reshape(num_blocks, spec.block_bytes)
    expected = np.empty_like(blocks)
    expected[ours] = _content(pool.nbytes).reshape(blocks.shape)[theirs]
    copies = allocate_pool(pool.nbytes).reshape(blocks.shape)
    holder = Holder(**json.loads(await asyncio.to_thread(sys.stdin.readline)))
    peer = await transport.connect(HOLDER, bytes.fromhex(holder.descriptor))

    async def pull() -> None:
        await transport.pull(peer, theirs.tolist(), ours.tolist()).done

    async def copy() -> None:
        for source, target in zip(theirs, ours, strict=True):
            copies[target] = blocks[source]

    with socket.create_connection((spec.host, holder.bare_port), timeout=READ_LIMIT_S) as bare:

        async def receive() -> None:
            bare.sendall(_GO)
            view = copies.reshape(-1).data
            while view:
                received = bare.recv_into(view[:_PIECE_BYTES])
                if not received:
                    raise ConnectionResetError("the bare socket ended")
                view = view[received:]

        seconds = await _time([pull, copy, receive])
    if not np.array_equal(blocks, expected):
        raise TransferError(TransferFault.FAILED, "the lane brought wrong bytes")
    _answer(asdict(Rates(*(pool.nbytes / each / 1e9 for each in seconds))))
    await lanes.close()


async def _time(works: list[Callable[[], Awaitable[None]]]) -> list[float]:
    """Median seconds of each, in turns, so that what else the machine does meets all; the first round does not count:
    connections and pages come then."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(1 + ROUNDS):
        for kept, work in zip(seconds, works, strict=True):
            start = time.perf_counter()
            await work()
            kept.append(time.perf_counter() - start)
    return [statistics.median(kept[1:]) for kept in seconds]


if __name__ == "__main__":
    main()

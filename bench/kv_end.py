"""The other process of `bench.kv`: a holder with a pool full of KV that any reader may have, and a bare socket that
sends the same bytes.

python -m bench.kv_end    one line of `EndSpec` as JSON in, one line of `EndReady` out, until standard input ends
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import numpy as np

from headrace.errors import Rejected
from headrace.ids import RequestKey
from headrace.process import die_with_parent
from headrace.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from kvtransfer.pairing import PairServer
from kvtransfer.probe import probe_area
from kvtransfer.service import HandOffRecord, LeaseGrant, LeaseHolder
from kvtransfer.transports.base import PoolBytes, allocate_pool, peer_name
from kvtransfer.transports.select import Lanes, start_lanes

TOKEN, INCARNATION, CARD = "bench", "1", {"kv": "bench"}
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EndSpec:
    lane: str
    num_blocks: int
    block_bytes: int
    checksums: bool
    parent: int


@dataclass(frozen=True, slots=True)
class EndReady:
    address: str
    socket_port: int


def scattered(num_blocks: int, count: int, seed: int) -> list[int]:
    """`count` blocks of a pool in random order."""
    return random.Random(seed).sample(range(num_blocks), count)


async def pool_with_lanes(spec: EndSpec, name: str) -> Lanes:
    area = probe_area(spec.num_blocks, spec.block_bytes)
    memory = allocate_pool(area.end * spec.block_bytes)
    memory[::4096] = 1
    return await start_lanes(
        spec.lane, memory, spec.block_bytes, area, peer_id=peer_name(name, INCARNATION), token=TOKEN
    )


class _Source:
    """Grants whatever is asked for: a request `COUNT/SEED/...` has that many scattered blocks."""

    def __init__(self, spec: EndSpec) -> None:
        self._spec = spec
        self._keys = 0

    def grant_lease(self, request_id: str, attempt: int, number: int) -> LeaseGrant | Rejected:
        count, seed = map(int, request_id.split("/")[:2])
        self._keys += 1
        record = HandOffRecord((1,), count * BLOCK_TOKENS)
        return LeaseGrant(RequestKey(self._keys), scattered(self._spec.num_blocks, count, seed), record)

    def grant_fetch(self, request_id: str, attempt: int, hashes: Sequence[bytes]) -> LeaseGrant | Rejected:
        return Rejected("no_cache")

    def lease_ended(self, key: RequestKey, completed: bool) -> None:
        pass


class _Servicer(WorkerServicer):  # type: ignore[misc]
    def __init__(self, holder: LeaseHolder) -> None:
        self._holder = holder

    async def Lease(self, request_iterator: Any, context: Any) -> None:
        await self._holder.serve(context)

    async def Pair(self, request_iterator: Any, context: Any) -> None:
        await self._holder.pairs.serve(context)


def _send_for_ever(listener: socket.socket, spec: EndSpec, memory: PoolBytes) -> None:
    """The bare loop: a count and blocks in, their bytes out, one after the other."""
    view = memory.data
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock:
            while len(count := sock.recv(4, socket.MSG_WAITALL)) == 4:
                asked = sock.recv(4 * int.from_bytes(count, "big"), socket.MSG_WAITALL)
                for block in np.frombuffer(asked, "<u4").tolist():
                    sock.sendall(view[block * spec.block_bytes : (block + 1) * spec.block_bytes])


async def _serve(spec: EndSpec) -> None:
    lanes = await pool_with_lanes(spec, "holder")
    pairs = PairServer(peer_name("holder", INCARNATION), INCARNATION, TOKEN, CARD, lanes, 8.0)
    server = grpc.aio.server()
    add_WorkerServicer_to_server(_Servicer(LeaseHolder(_Source(spec), pairs, checksums=spec.checksums)), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_send_for_ever, args=(listener, spec, lanes.memory), daemon=True).start()
    ready = EndReady(f"127.0.0.1:{port}", listener.getsockname()[1])
    print(json.dumps(asdict(ready)), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)
    await lanes.close()


def main() -> None:
    spec = EndSpec(**json.loads(sys.stdin.readline()))
    die_with_parent(spec.parent)
    asyncio.run(_serve(spec))


if __name__ == "__main__":
    main()

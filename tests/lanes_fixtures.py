"""Lanes and pairings of workers under test, without a worker around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.layout import KvLayout
from kvtransfer.pairing import PairClient, PairServer
from kvtransfer.probe import fill_pattern, probe_area
from kvtransfer.transports.base import allocate_pool, peer_name
from kvtransfer.transports.select import Lanes

CARD = {"protocol": "1", "block_size": "4", "weights": "abc"}


async def lanes_of(name: str, num_blocks: int, block_bytes: int, *make: Callable[[str], Any]) -> Lanes:
    """Started transports over a fresh pool of the worker `name` (see `peer_name`)."""
    area = probe_area(num_blocks, block_bytes)
    lanes = Lanes(allocate_pool(area.end * block_bytes), block_bytes, area)
    fill_pattern(lanes.memory, area, block_bytes, name)
    for one in make:
        transport = one(name)
        await transport.start(lanes.memory, block_bytes)
        lanes.transports[transport.name] = transport
        lanes.gbps[transport.name] = 1.0
    return lanes


def pair_server(
    lanes: Lanes, incarnation: str, token: str = "secret", patience_s: float = 5.0, **card: str
) -> PairServer:
    return PairServer(lanes.first.peer_id, incarnation, token, CARD | card, lanes, patience_s)


def pair_client(
    lanes: Lanes, me: pb.PeerAddress, token: str = "secret", patience_s: float = 5.0, **card: str
) -> PairClient:
    assert lanes.first.peer_id == peer_name(me.worker_id, me.incarnation)
    layout = KvLayout(1, 1, 1, 1, lanes.block_bytes // 2)  # one head, whatever is in it
    return PairClient(me, token, CARD | card, lanes, patience_s, layout)

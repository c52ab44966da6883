"""Whole hand-offs between groups of different parallel degrees: each rank of the reader pairs with the holder, leases,
and ends with the bytes of its own heads.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.errors import Rejected
from headrace.ids import RequestKey
from headrace.v1 import worker_pb2 as pb
from headrace.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from kvtransfer.core.layout import KvLayout
from kvtransfer.core.pull_plan import head_range
from kvtransfer.pairing import PairClient, PairServer
from kvtransfer.probe import rank_name
from kvtransfer.service import End, HandOffRecord, LeaseGrant, LeaseHolder, LeaseReader
from kvtransfer.transports.base import TransferError, TransferFault, failed_pull, joined_pull
from kvtransfer.transports.memory import MemoryTransport
from kvtransfer.transports.select import Lanes
from tests.lanes_fixtures import CARD, lanes_of
from tests.unit.test_kvtransfer_service import Sink

BLOCKS = [9, 2, 7, 12, 4]
"""The holder's, in logical order; the reader's own are others."""
OWN = [1, 5, 3, 14, 8]
NUM_BLOCKS = 16
HOLDER = pb.PeerAddress(worker_id="prefill-0", incarnation="a")


def model(num_heads: int) -> KvLayout:
    return KvLayout(num_layers=3, num_kv_heads=num_heads, head_dim=2, block_size=4, dtype_bytes=4)


def share(layout: KvLayout, degree: int) -> KvLayout:
    """What one rank of `degree` has."""
    begin, end = head_range(layout.num_kv_heads, degree, 0)
    return replace(layout, num_kv_heads=end - begin)


def kv(layout: KvLayout, block: int, heads: range) -> np.ndarray:
    """The whole model's bytes of these heads of one block, uint8; every head of every block has its own."""
    head_bytes = layout.block_bytes // layout.num_kv_heads
    return np.concatenate(
        [np.random.default_rng((block, head)).integers(0, 256, head_bytes, dtype=np.uint8) for head in heads]
    )


def heads_of(layout: KvLayout, degree: int, rank: int) -> range:
    return range(*head_range(layout.num_kv_heads, degree, rank))


class Source:
    def grant_lease(self, request_id: str, attempt: int, number: int) -> LeaseGrant | Rejected:
        return LeaseGrant(RequestKey(int(request_id)), list(BLOCKS), HandOffRecord((42,), len(BLOCKS) * 4))

    def lease_ended(self, key: RequestKey, completed: bool) -> None:
        assert completed


async def holder_group(layout: KvLayout, degree: int) -> list[Lanes]:
    name, block_bytes = "prefill-0/a", share(layout, degree).block_bytes
    group = [await lanes_of(rank_name(name, rank), NUM_BLOCKS, block_bytes, MemoryTransport) for rank in range(degree)]
    for rank, lanes in enumerate(group):
        for block in BLOCKS:
            view = lanes.memory[block * block_bytes : (block + 1) * block_bytes]
            view[:] = kv(layout, block, heads_of(layout, degree, rank))
    return group


@pytest.mark.parametrize("reader_degree", [1, 2, 4])
@pytest.mark.parametrize("holder_degree", [1, 2, 4])
@pytest.mark.parametrize("num_heads", [2, 8])
def test_each_rank_gets_its_heads_and_nothing_else_changes(
    num_heads: int, holder_degree: int, reader_degree: int
) -> None:
    async def test() -> None:
        layout = model(num_heads)
        group = await holder_group(layout, holder_degree)
        others = [lanes.descriptors() for lanes in group[1:]]
        holder = LeaseHolder(Source(), PairServer("prefill-0/a", "a", "secret", CARD, group[0], 5.0, others))

        class Servicer(WorkerServicer):  # type: ignore[misc]
            async def Lease(self, request_iterator: Any, context: Any) -> None:
                await holder.serve(context)

            async def Pair(self, request_iterator: Any, context: Any) -> None:
                await holder.pairs.serve(context)

        server = grpc.aio.server()
        add_WorkerServicer_to_server(Servicer(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        block_bytes = share(layout, reader_degree).block_bytes
        for rank in range(reader_degree):
            me = pb.PeerAddress(worker_id=f"decode-{rank}", incarnation="b")
            lanes = await lanes_of(f"decode-{rank}/b", NUM_BLOCKS, block_bytes, MemoryTransport)
            client = PairClient(me, "secret", CARD, lanes, 5.0, layout, rank, reader_degree)
            reader, sink = LeaseReader(client, block_size=4), Sink()
            where = pb.PeerAddress(worker_id="prefill-0", incarnation="a", address=address)
            reader.adopt(str(rank), 0, where, sink).reserved(OWN, 0)
            await asyncio.wait_for(sink.over.wait(), 10)
            assert sink.record is not None, sink.end
            pool = lanes.memory.reshape(-1, block_bytes)
            for theirs, own in zip(BLOCKS, OWN, strict=True):
                assert np.array_equal(pool[own], kv(layout, theirs, heads_of(layout, reader_degree, rank)))
            assert not pool[sorted(set(range(NUM_BLOCKS)) - set(OWN))].any()
            await reader.close()
            await lanes.close()
        await server.stop(0)
        for lanes in group:
            await lanes.close()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_degrees_that_do_not_divide_are_refused_with_the_numbers() -> None:
    async def test() -> None:
        layout = model(2)
        group = await holder_group(layout, 2)
        others = [group[1].descriptors()] * 2  # a group of three
        pairs = PairServer("prefill-0/a", "a", "secret", CARD, group[0], 5.0, others)

        class Servicer(WorkerServicer):  # type: ignore[misc]
            async def Pair(self, request_iterator: Any, context: Any) -> None:
                await pairs.serve(context)

        server = grpc.aio.server()
        add_WorkerServicer_to_server(Servicer(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        lanes = await lanes_of("decode-0/b", NUM_BLOCKS, layout.block_bytes, MemoryTransport)
        me = pb.PeerAddress(worker_id="decode-0", incarnation="b")
        reader = LeaseReader(PairClient(me, "secret", CARD, lanes, 5.0, layout), block_size=4)
        sink, where = Sink(), pb.PeerAddress(worker_id="prefill-0", incarnation="a", address=address)
        reader.adopt("0", 0, where, sink).reserved(OWN, 0)
        await asyncio.wait_for(sink.over.wait(), 10)
        assert sink.end == End(True, "lease_refused", "2 KV heads cannot be shared by 3 ranks", ())
        await reader.close()
        await server.stop(0)
        for each in (*group, lanes):
            await each.close()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_joined_read_fails_with_its_first_part_and_is_terminal_with_its_last() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10):
            holder, reader = MemoryTransport("h"), MemoryTransport("r")
            for transport in (holder, reader):
                await transport.start(np.zeros(4 * 64, np.uint8), 64)
            peer = await reader.connect("h", holder.descriptor())
            holder.stall()
            slow = reader.pull(peer, [0, 1], [0, 1])
            joined = joined_pull(loop, [slow, failed_pull(loop, TransferError(TransferFault.PEER_LOST, "gone"))])
            with pytest.raises(TransferError, match="gone"):
                await asyncio.shield(joined.done)
            await asyncio.sleep(0.01)
            assert slow.done.done() and not joined.terminal.done()
            holder.resume()
            await joined.terminal
            # all well: the sum of both
            joined = joined_pull(loop, [reader.pull(peer, [0], [0]), reader.pull(peer, [1], [1])])
            assert (await joined.done).bytes == 128
            await joined.terminal
            # given up
            joined = joined_pull(loop, [reader.pull(peer, [0], [0]), reader.pull(peer, [1], [1])])
            joined.cancel()
            await joined.terminal
            assert isinstance(joined.done.exception(), TransferError)
            for transport in (holder, reader):
                await transport.close()

    asyncio.run(test())

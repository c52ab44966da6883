"""Leases over real grpc.aio streams and the memory transport: two workers in one event loop.

Over 400 lines: both ends of the protocol share the world at the top.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest

import kvtransfer.adoption
import kvtransfer.holder
import kvtransfer.stream
from headrace.errors import Rejected
from headrace.ids import RequestKey, random_ids
from headrace.v1 import worker_pb2 as pb
from headrace.v1.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server
from kvtransfer.core.pairing import lease_proof
from kvtransfer.service import (
    Adoption,
    End,
    HandOffRecord,
    HandoffStats,
    LeaseGrant,
    LeaseHolder,
    LeaseReader,
)
from kvtransfer.transports.base import peer_name
from kvtransfer.transports.memory import MemoryTransport
from kvtransfer.transports.tcp import TcpTransport
from kvtransfer.transports.ucx import UcxTransport
from kvtransfer.transports.ucx_agent import load_bindings
from tests.faulty_streams import MessageFaults, faulty_pump
from tests.lanes_fixtures import CARD, lanes_of, pair_client, pair_server

BLOCK_SIZE, BLOCK_BYTES, NUM_BLOCKS = 4, 64, 32
LIVENESS_S = 0.4
KEY = RequestKey(7)


@dataclass
class Source:
    """A prefilling worker with one request, `req-1`, whose blocks are 8, 9, ..."""

    blocks: list[int] = field(default_factory=list)
    record: HandOffRecord | None = None
    ended: list[bool] = field(default_factory=list)

    def grant_lease(self, request_id: str, attempt: int, number: int) -> LeaseGrant | Rejected:
        if (request_id, attempt) != ("req-1", 0):
            return Rejected("unknown_request")
        return LeaseGrant(KEY, list(self.blocks), self.record)

    def lease_ended(self, key: RequestKey, completed: bool) -> None:
        assert key == KEY
        self.ended.append(completed)


@dataclass
class Sink:
    record: HandOffRecord | None = None
    stats: HandoffStats | None = None
    end: End | None = None
    quarantine_ended: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def activated(self, record: HandOffRecord, stats: HandoffStats) -> None:
        self.record, self.stats = record, stats
        self.over.set()

    def ended(self, end: End) -> None:
        self.end = end
        self.over.set()

    def quarantine_over(self) -> None:
        self.quarantine_ended = True


class World:
    """One holder, one reader. Block 8 + i of the holder is filled with the byte 100 + i."""

    def __init__(self, lanes: Sequence[Callable[[str], Any]], reader_lanes: Sequence[Callable[[str], Any]]) -> None:
        self.incarnation = random_ids("inc")
        self.lanes, self.own_lanes = lanes, reader_lanes
        self.source = Source()
        self.sink = Sink()

    async def start(self, weights: str, liveness_s: float, token: str, checksums: bool) -> None:
        me = pb.PeerAddress(worker_id="decode-0", incarnation=random_ids("inc"))
        holder_name, reader_name = (peer_name("prefill-0", self.incarnation), peer_name("decode-0", me.incarnation))
        self.holder_lanes = await lanes_of(holder_name, NUM_BLOCKS, BLOCK_BYTES, *self.lanes)
        self.reader_lanes = await lanes_of(reader_name, NUM_BLOCKS, BLOCK_BYTES, *self.own_lanes)
        self.holder_lane, self.reader_lane = self.holder_lanes.first, self.reader_lanes.first
        self.holder_memory, self.reader_memory = self.holder_lanes.memory, self.reader_lanes.memory
        pairs = pair_server(self.holder_lanes, self.incarnation, "secret", liveness_s)
        holder = self.holder = LeaseHolder(self.source, pairs, checksums=checksums, liveness_s=liveness_s)

        class Servicer(WorkerServicer):  # type: ignore[misc]
            async def Lease(self, request_iterator: Any, context: Any) -> None:
                await holder.serve(context)

            async def Pair(self, request_iterator: Any, context: Any) -> None:
                await pairs.serve(context)

        self.server = grpc.aio.server()
        add_WorkerServicer_to_server(Servicer(), self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        client = pair_client(self.reader_lanes, me, token, liveness_s, weights=weights)
        self.reader = LeaseReader(client, block_size=BLOCK_SIZE, liveness_s=liveness_s)

    def adopt(self, request_id: str = "req-1", **address: str) -> Adoption:
        return self.reader.adopt(request_id, 0, self.address(**address), self.sink)

    async def pair(self) -> None:
        told: list[pb.Paired] = []
        self.reader.meet(self.address(), told.append)
        await until(lambda: bool(told))
        assert told[0].lane == self.reader_lane.name and told[0].note == ""

    def address(self, **changes: str) -> pb.PeerAddress:
        where = {"worker_id": "prefill-0", "incarnation": self.incarnation, "address": f"127.0.0.1:{self.port}"}
        return pb.PeerAddress(**(where | changes))

    def compute(self, num_blocks: int) -> None:
        """The holder's step that completes `num_blocks` blocks in all."""
        for i in range(len(self.source.blocks), num_blocks):
            self.holder_memory[(8 + i) * BLOCK_BYTES : (9 + i) * BLOCK_BYTES] = 100 + i
            self.source.blocks.append(8 + i)
        self.holder.computed(KEY, list(self.source.blocks))

    def first_token(self, **overrides: Any) -> None:
        num_tokens = len(self.source.blocks) * BLOCK_SIZE - 1
        self.source.record = HandOffRecord(**({"output_ids": (42,), "num_tokens": num_tokens} | overrides))
        self.holder.handed_off(KEY, self.source.record)

    def row(self, block: int) -> list[int]:
        return sorted(set(self.reader_memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].tolist()))

    async def over(self) -> None:
        await asyncio.wait_for(self.sink.over.wait(), 10)

    async def assert_drained(self) -> None:
        for _ in range(200):
            if not (self.holder.leases or self.reader.handoffs or self.reader.reads_in_flight):
                break
            await asyncio.sleep(0.02)
        assert (self.holder.leases, self.reader.handoffs, self.reader.reads_in_flight) == (0, 0, 0)
        assert len(self.source.ended) <= 1


@asynccontextmanager
async def world(
    weights: str = CARD["weights"],
    lane: Callable[[str], Any] | Sequence[Callable[[str], Any]] = MemoryTransport,
    liveness_s: float = LIVENESS_S,
    token: str = "secret",
    checksums: bool = True,
    reader_lane: Sequence[Callable[[str], Any]] = (),
) -> AsyncIterator[World]:
    before = asyncio.all_tasks()
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    lanes = lane if isinstance(lane, Sequence) else (lane,)
    it = World(lanes, reader_lane or lanes)
    await it.start(weights, liveness_s, token, checksums)
    try:
        yield it
        await it.assert_drained()
    finally:
        await it.reader.close()
        await it.server.stop(0)
        await it.reader_lanes.close()
        await it.holder_lanes.close()
    await asyncio.sleep(0.01)
    mine = {task for task in asyncio.all_tasks() - before if "grpc" not in repr(task.get_coro())}
    assert mine == set()
    assert faults == []


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    return run


def no_nixl() -> bool:
    try:
        load_bindings()
    except ImportError:
        return True
    return False


@pytest.mark.parametrize(
    "lane",
    [
        MemoryTransport,
        partial(TcpTransport, token="secret"),
        pytest.param(UcxTransport, marks=pytest.mark.skipif(no_nixl(), reason="NIXL is not importable")),
    ],
    ids=["memory", "tcp", "ucx"],
)
def test_chunks_move_while_the_holder_computes_and_known_blocks_do_not(lane: Callable[[str], Any]) -> None:
    in_loop(lambda: chunks_move_while_the_holder_computes(lane))()


async def chunks_move_while_the_holder_computes(lane: Callable[[str], Any]) -> None:
    async with world(lane=lane, liveness_s=5.0) as w:
        # 1. the first chunk is there before the lease, the reader already has block 0
        w.compute(2)
        adoption = w.adopt()
        adoption.reserved([20, 3, 17, 5, 6], skip_blocks=1)
        await until(lambda: w.row(3) == [101] or w.sink.end is not None)
        assert w.sink.end is None
        assert w.holder.leases == 1 and w.reader.handoffs == 1
        # 2. the second chunk moves before the first token exists
        w.compute(4)
        await until(lambda: w.row(5) == [103])
        assert w.sink.record is None
        # 3. the hand-off
        w.first_token()
        await w.over()
        assert w.sink.record == HandOffRecord((42,), 15)
        assert [w.row(b) for b in (20, 3, 17, 5, 6)] == [[0], [101], [102], [103], [0]]
        assert w.sink.stats is not None and w.sink.stats.bytes_moved == 3 * BLOCK_BYTES
        assert 0 <= w.sink.stats.hand_off_s < 5
        await until(lambda: w.source.ended == [True])


@in_loop
async def test_everything_known_needs_no_read_but_still_verifies() -> None:
    async with world() as w:
        w.compute(2)
        w.first_token()
        w.adopt().reserved([1, 2, 3], skip_blocks=2)
        await w.over()
        assert w.sink.record is not None and w.sink.stats is not None and w.sink.stats.num_reads == 0
        await until(lambda: w.source.ended == [True])


@in_loop
async def test_revoked_before_held_ends_failed_and_frees_everything() -> None:
    async with world() as w:
        w.compute(2)
        w.adopt().reserved([1, 2, 3], skip_blocks=0)
        await until(lambda: w.row(2) == [101] and not w.holder.reads_in_flight)
        w.holder.revoke(KEY, "pressure")
        await w.over()
        assert w.sink.end == End(True, "lease_revoked", "pressure", ())
        assert w.source.ended == [False]


@in_loop
async def test_a_revoke_during_a_read_is_refused() -> None:
    async with world() as w:
        await w.pair()
        w.holder_lane.stall()
        w.compute(2)
        w.adopt().reserved([1, 2, 3], skip_blocks=0)
        await until(lambda: w.reader.reads_in_flight == 1)
        w.holder.revoke(KEY, "pressure")
        await asyncio.sleep(0.05)
        assert w.source.ended == [] and w.sink.end is None
        w.holder_lane.resume()
        w.first_token()
        await w.over()
        assert w.sink.record is not None


@in_loop
async def test_a_request_that_ends_at_the_holder_is_never_activated() -> None:
    async with world() as w:
        w.compute(1)
        w.adopt().reserved([1, 2], skip_blocks=0)
        await until(lambda: w.holder.leases == 1)
        w.holder.request_ended(KEY, "cancelled")
        await w.over()
        assert w.sink.end is not None and w.sink.end.reason == "lease_revoked"


@in_loop
async def test_finished_with_the_first_token_moves_nothing_more() -> None:
    async with world() as w:
        w.compute(1)
        w.adopt().reserved([1, 2], skip_blocks=0)
        await until(lambda: w.row(1) == [100] and not w.reader.reads_in_flight)
        w.first_token(finished=True)
        await w.over()
        assert w.sink.end == End(False, "finished", "", ())
        await until(lambda: w.source.ended == [False])


@in_loop
async def test_a_holder_that_dies_breaks_the_lease_and_its_read_is_lost() -> None:
    async with world() as w:
        w.compute(2)
        await w.pair()
        w.holder_lane.delay_s = 0.2
        w.adopt().reserved([1, 2, 3], skip_blocks=0)
        await until(lambda: w.reader.reads_in_flight == 1)
        w.holder_lane.die()
        await w.server.stop(0)
        await w.over()
        assert w.sink.end is not None and w.sink.end.reason in ("lease_broken", "transfer_failed")
        await until(lambda: w.reader.reads_in_flight == 0)
        assert w.sink.quarantine_ended == bool(w.sink.end.quarantined)
        assert w.source.ended == [False]


@in_loop
async def test_a_reader_that_cancels_in_mid_read_quarantines_until_the_read_is_terminal() -> None:
    async with world() as w:
        await w.pair()
        w.holder_lane.stall()
        w.compute(2)
        adoption = w.adopt()
        adoption.reserved([1, 2, 3], skip_blocks=0)
        await until(lambda: w.reader.reads_in_flight == 1)
        adoption.cancel()
        await w.over()
        # 1. the lease is gone, the read is not
        assert w.sink.end == End(False, "cancelled", "", (1, 2))
        await until(lambda: w.source.ended == [False])
        assert w.reader.reads_in_flight == 1 and not w.sink.quarantine_ended
        # 2. the late write lands in quarantined blocks only, then they are free
        w.holder_lane.resume()
        await until(lambda: w.sink.quarantine_ended)
        assert w.row(1) == [100] and w.row(2) == [0]


@in_loop
async def test_a_read_that_times_out_fails_the_hand_off_and_stays_quarantined() -> None:
    async with world(lane=partial(MemoryTransport, read_timeout_s=0.1)) as w:
        await w.pair()
        w.holder_lane.stall()
        w.compute(1)
        w.adopt().reserved([1, 2], skip_blocks=0)
        await w.over()
        assert w.sink.end == End(True, "transfer_failed", "timeout", (1,))
        w.holder_lane.resume()
        await until(lambda: w.sink.quarantine_ended)


@pytest.mark.parametrize(
    ("reason", "request_id", "address", "weights"),
    [
        ("stale_incarnation", "req-1", {"incarnation": "inc-of-yesterday"}, "abc"),
        ("weights: abc here, xyz there", "req-1", {}, "xyz"),
        ("unknown_request", "req-2", {}, "abc"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(
    reason: str, request_id: str, address: dict[str, str], weights: str
) -> None:
    @in_loop
    async def run() -> None:
        async with world(weights) as w:
            w.adopt(request_id, **address).reserved([1], skip_blocks=0)
            await w.over()
            assert w.sink.end == End(True, "lease_refused", reason, ())
            assert w.source.ended == []

    run()


@in_loop
async def test_a_second_reader_of_a_request_is_refused_and_the_first_goes_on() -> None:
    async with world() as w:
        w.compute(1)
        w.adopt().reserved([1], skip_blocks=0)
        await until(lambda: w.holder.leases == 1)
        first, w.sink = w.sink, Sink()
        w.adopt().reserved([2], skip_blocks=0)
        await w.over()
        assert w.sink.end == End(True, "lease_refused", "leased_already", ())
        w.first_token()
        w.sink = first
        await w.over()
        assert first.record is not None


@in_loop
async def test_without_the_cluster_token_nothing_is_opened() -> None:
    async with world(token="guess") as w:
        w.adopt().reserved([1], skip_blocks=0)
        await w.over()
        assert w.sink.end == End(True, "lease_refused", "the holder does not know the cluster token", ())
    # a reader that does not care whether the holder knows it
    async with world() as w, grpc.aio.insecure_channel(f"127.0.0.1:{w.port}") as channel:
        call = WorkerStub(channel).Pair()
        hello = pb.PairHello(reader=w.reader.me, holder_incarnation=w.incarnation, nonce=bytes(16))
        await call.write(pb.PairRequest(hello=hello))
        assert (await call.read()).HasField("challenge")
        await call.write(pb.PairRequest(proof=pb.PairProof(proof=bytes(32), card=CARD)))
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        call = WorkerStub(channel).Lease()
        await call.write(pb.LeaseRequest(open=open_message(w, proof=bytes(32))))
        assert (await call.code(), await call.details()) == (grpc.StatusCode.UNAUTHENTICATED, "unpaired")


@in_loop
async def test_nobody_at_the_address_breaks_the_lease_at_once() -> None:
    async with world() as w:
        w.adopt(address="127.0.0.1:1").reserved([1], skip_blocks=0)
        await w.over()
        assert w.sink.end == End(True, "lease_broken", "UNAVAILABLE", ())


@in_loop
async def test_a_silent_reader_loses_its_lease_and_a_quiet_one_keeps_it() -> None:
    async with world() as w:
        w.compute(1)
        # 1. a reader with heartbeats outlives several liveness times without any news
        w.adopt().reserved([1], skip_blocks=0)
        await asyncio.sleep(3 * LIVENESS_S)
        assert w.holder.leases == 1 and w.sink.end is None
        w.first_token()
        await w.over()
        await until(lambda: w.holder.leases == 0)
        # 2. one that says nothing after its open does not
        w.source.ended.clear()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{w.port}") as channel:
            call = WorkerStub(channel).Lease()
            await call.write(pb.LeaseRequest(open=open_message(w)))
            await until(lambda: w.holder.leases == 1)
            await until(lambda: w.source.ended == [False], limit_s=3 * LIVENESS_S)
            call.cancel()


@in_loop
async def test_a_silent_holder_breaks_the_lease() -> None:
    async with world() as w:

        class Silent(WorkerServicer):  # type: ignore[misc]
            async def Lease(self, request_iterator: Any, context: Any) -> None:
                await asyncio.sleep(60)

            async def Pair(self, request_iterator: Any, context: Any) -> None:
                await w.holder.pairs.serve(context)

        server = grpc.aio.server()
        add_WorkerServicer_to_server(Silent(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        w.adopt(address=f"127.0.0.1:{port}").reserved([1], skip_blocks=0)
        await asyncio.wait_for(w.sink.over.wait(), 3 * LIVENESS_S)
        assert w.sink.end == End(True, "lease_broken", "silence", ())
        await server.stop(0)


@pytest.mark.parametrize("verb", ["drop", "duplicate", "reorder"])
@pytest.mark.parametrize("kind", ["open", "opened", "announce", "pulled", "hand_off", "verify", "held", "close"])
def test_a_hand_off_ends_whatever_message_is_lost_repeated_or_overtaken(
    monkeypatch: pytest.MonkeyPatch, verb: str, kind: str
) -> None:
    """Without numbers a lost `hand_off`, `verify` or `held` left both ends waiting, alive by their heartbeats."""
    faults = MessageFaults(Counter())
    for module in (kvtransfer.adoption, kvtransfer.holder):
        monkeypatch.setattr(module, "pump", faulty_pump(faults, kvtransfer.stream.pump))

    @in_loop
    async def run() -> None:
        async with world(liveness_s=0.4) as w:
            faults.arm(verb, kind)
            w.adopt().reserved([1, 2, 3], skip_blocks=0)
            w.compute(2)
            if kind != "open":
                await until(lambda: w.holder.leases == 1 or w.sink.over.is_set())
            w.compute(3)
            w.first_token()
            await w.over()
            assert not faults.armed
            if w.sink.record is not None:
                assert [w.row(block) for block in (1, 2, 3)] == [[100], [101], [102]]
            else:
                assert w.sink.end is not None and w.sink.end.failed
            assert verb != "duplicate" or w.sink.record is not None, "a repeat costs nothing"

    run()


@in_loop
async def test_cancelled_in_the_queue_nothing_was_ever_opened() -> None:
    async with world() as w:
        adoption = w.adopt()
        adoption.cancel()
        await w.over()
        adoption.reserved([1], skip_blocks=0)
        await asyncio.sleep(0.02)
        assert w.sink.end == End(False, "cancelled", "", ())


@in_loop
async def test_a_hundred_hand_offs_leave_nothing_behind() -> None:
    async with world() as w:
        for i in range(100):
            w.source.blocks.clear()
            w.source.record = None
            w.source.ended.clear()
            w.sink = Sink()
            adoption = w.adopt()
            adoption.reserved([1, 2, 3], skip_blocks=i % 3)
            w.compute(2)
            if i % 4 == 3:
                adoption.cancel()
            else:
                w.first_token()
            await w.over()
            await until(lambda: w.holder.leases == 0)


def open_message(w: World, **changes: Any) -> pb.LeaseOpen:
    """What the paired reader would send."""
    key = w.holder.pairs._keys.get(peer_name(w.reader.me.worker_id, w.reader.me.incarnation), b"")
    fields = {"request_id": "req-1", "reader": w.reader.me, "holder_incarnation": w.incarnation}
    return pb.LeaseOpen(**(fields | {"proof": lease_proof(key, "req-1", 0, 0, b"")} | changes))


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)

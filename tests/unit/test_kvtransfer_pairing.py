"""Who may read from whom, and over which lane: both ends over real streams; `test_core_pairing` has the pure part."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from headrace.v1 import worker_pb2 as pb
from kvtransfer import adoption, holder
from kvtransfer.core.layout import Cut
from kvtransfer.core.pairing import lease_proof, proof
from kvtransfer.pairing import PairingError
from kvtransfer.reader import MAX_LINKS
from kvtransfer.service import End, HandOffRecord
from kvtransfer.transports.base import Pull, TransferError, TransferFault, failed_pull
from kvtransfer.transports.memory import MemoryTransport
from kvtransfer.transports.tcp import TcpTransport
from tests.lanes_fixtures import CARD
from tests.unit.test_kvtransfer_service import KEY, World, in_loop, until, world

Tcp = partial(TcpTransport, token="secret")


class Sick(MemoryTransport):
    """A lane whose reads go wrong as `sickness` says. Reads of the probe are well."""

    name = "sick"
    sickness = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.hanging: list[Pull] = []
        self.connections = 0

    async def connect(self, peer_id: str, descriptor: bytes) -> Any:
        self.connections += 1
        return await super().connect(peer_id, descriptor)

    def pull(self, peer: Any, remote_blocks: Any, local_blocks: Any, cut: Any = None) -> Pull:
        loop = asyncio.get_running_loop()
        if self.sickness == "fails":
            return failed_pull(loop, TransferError(TransferFault.PEER_LOST, "the wire was cut"))
        if self.sickness == "hangs":
            self.hanging.append(Pull(loop, lambda: None))
            return self.hanging[-1]
        pull = super().pull(peer, remote_blocks, local_blocks, cut)
        if self.sickness in ("flips once", "flips"):
            if self.sickness == "flips once":
                self.sickness = ""
            pool = self._own_pool()
            target = pool.memory[local_blocks[0] * pool.block_bytes :]
            pull.done.add_done_callback(lambda _: target.__setitem__(5, target[5] ^ 4))
        return pull


async def hand_over(w: World) -> None:
    """Two blocks from start to end, whatever that is."""
    w.adopt().reserved([20, 3], skip_blocks=0)
    w.compute(2)
    w.first_token()
    await w.over()


@in_loop
async def test_a_pairing_measures_its_lanes_and_is_made_once() -> None:
    async with world() as w:
        calls = []
        serve = w.holder.pairs.serve

        async def counted(context: Any) -> None:
            calls.append(1)
            await serve(context)

        w.holder.pairs.serve = counted  # type: ignore[method-assign]
        told: list[pb.Paired] = []
        for _ in range(10):
            w.reader.meet(w.address(), told.append)
        await until(lambda: len(told) == 10)
        assert len(calls) == 1
        assert all(paired.lane == "memory" and paired.lane_gbps["memory"] > 0 for paired in told)
        await hand_over(w)
        assert w.sink.record is not None and len(calls) == 1


@pytest.mark.parametrize("inline_bytes", [1 << 20, 0], ids=["on the loop", "in a thread"])
def test_a_flipped_bit_is_noticed_and_read_again(inline_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (adoption, holder):
        monkeypatch.setattr(module, "INLINE_BYTES", inline_bytes)
    in_loop(a_flipped_bit_is_noticed_and_read_again)()


async def a_flipped_bit_is_noticed_and_read_again() -> None:
    async with world(lane=Sick) as w:
        await w.pair()
        w.reader_lane.sickness = "flips once"
        await hand_over(w)
        assert w.sink.record == HandOffRecord((42,), 7) and w.sink.stats is not None
        assert (w.sink.stats.corrupt_blocks, w.sink.stats.retries) == (1, 1)
        assert [w.row(b) for b in (20, 3)] == [[100], [101]]
        await w.assert_drained()
        account = w.reader.accounts["prefill-0"]
        assert (account.corrupt_blocks, account.retries, account.failures) == (1, 1, 0)


@in_loop
async def test_bytes_that_stay_wrong_are_never_used() -> None:
    async with world(lane=Sick) as w:
        await w.pair()
        w.reader_lane.sickness = "flips"
        await hand_over(w)
        assert w.sink.record is None
        assert w.sink.end == End(True, "transfer_failed", "corrupt", ())


@in_loop
async def test_without_checksums_a_flipped_bit_is_not_seen() -> None:
    """Positive control of the two before: it is the digest that finds it."""
    async with world(lane=Sick, checksums=False) as w:
        await w.pair()
        w.reader_lane.sickness = "flips once"
        await hand_over(w)
        assert w.sink.record is not None and w.row(20) == [96, 100]


@in_loop
async def test_a_read_that_fails_is_made_again_over_the_next_lane() -> None:
    async with world(lane=(Sick, Tcp)) as w:
        await w.pair()
        w.reader_lane.sickness = "fails"
        await hand_over(w)
        assert w.sink.record is not None and w.sink.stats is not None
        assert (w.sink.stats.lane, w.sink.stats.retries) == ("tcp", 1)
        # the bad lane is the last resort from now on
        w.source.blocks.clear()
        w.source.record, w.sink = None, type(w.sink)()
        await until(lambda: w.holder.leases == 0)
        w.source.ended.clear()
        await hand_over(w)
        assert w.sink.stats is not None and (w.sink.stats.lane, w.sink.stats.retries) == ("tcp", 0)


@in_loop
async def test_a_lane_that_one_side_lacks_or_that_brings_other_bytes_is_not_used_and_the_note_says_why() -> None:
    async with world(lane=(Sick, Tcp)) as w:
        told: list[pb.Paired] = []
        w.reader_lane.sickness = "flips"
        w.reader.meet(w.address(), told.append)
        await until(lambda: bool(told))
        assert (told[0].lane, list(told[0].lane_gbps)) == ("tcp", ["tcp"])
        assert told[0].note.startswith("sick: corrupt") and "probe" in told[0].note
        await hand_over(w)
        assert w.sink.stats is not None and w.sink.stats.lane == "tcp"
    async with world(lane=(Tcp,), reader_lane=(MemoryTransport, Tcp)) as w:
        told = []
        w.reader.meet(w.address(), told.append)
        await until(lambda: bool(told))
        assert (told[0].lane, told[0].note) == ("tcp", "memory: the other side does not offer it")


@in_loop
async def test_without_a_common_lane_there_is_no_lease_and_the_next_request_tries_again() -> None:
    async with world(lane=(Sick,)) as w:
        w.reader_lane.sickness = "fails"
        await hand_over(w)
        assert w.sink.end is not None and (w.sink.end.reason, w.source.ended) == ("transfer_failed", [])
        w.reader_lane.sickness, w.sink = "", type(w.sink)()
        w.source.blocks.clear()
        await hand_over(w)
        assert w.sink.record is not None


@in_loop
async def test_a_reader_that_its_holder_has_forgotten_pairs_again() -> None:
    async with world() as w:
        await w.pair()
        w.holder.pairs._keys.clear()
        await hand_over(w)
        assert w.sink.end == End(True, "lease_refused", "unpaired", ())
        w.sink = type(w.sink)()
        w.source.blocks.clear()
        await hand_over(w)
        assert w.sink.record is not None


@in_loop
async def test_a_holder_of_another_model_is_not_asked_again() -> None:
    async with world(weights="xyz") as w:
        calls = []
        w.holder.pairs.signed = lambda request: calls.append(request) or False  # type: ignore[method-assign]
        for _ in range(3):
            w.sink = type(w.sink)()
            w.adopt().reserved([1], skip_blocks=0)
            await w.over()
            reason = f"weights: {CARD['weights']} here, xyz there"
            assert w.sink.end == End(True, "lease_refused", reason, ())
        assert calls == []


@in_loop
async def test_a_lease_signed_for_one_request_opens_no_other() -> None:
    async with world() as w:
        await w.pair()
        key = next(iter(w.holder.pairs._keys.values()))
        fields = {
            "reader": w.reader.me,
            "holder_incarnation": w.incarnation,
            "proof": lease_proof(key, "req-1", 0, 0, b""),
        }
        assert w.holder.pairs.signed(pb.LeaseOpen(request_id="req-1", **fields))
        for change in ({"request_id": "req-2"}, {"attempt": 1}, {"number": 1}, {"block_hashes": b"h" * 16}):
            assert not w.holder.pairs.signed(pb.LeaseOpen(**({"request_id": "req-1"} | fields | change)))
        assert KEY not in w.holder._served


@in_loop
async def test_a_lane_that_brings_wrong_bytes_is_left_for_the_next_one() -> None:
    async with world(lane=(Sick, Tcp)) as w:
        await w.pair()
        w.reader_lane.sickness = "flips"
        await hand_over(w)
        assert w.sink.record is not None and w.sink.stats is not None
        assert (w.sink.stats.lane, w.sink.stats.corrupt_blocks, w.sink.stats.retries) == ("tcp", 1, 1)
        account = w.reader.accounts["prefill-0"]
        assert (account.lane, account.failures, account.corrupt_blocks) == ("tcp", 0, 1)


@in_loop
async def test_a_connection_that_broke_is_made_anew_for_the_next_hand_off() -> None:
    async with world(lane=(Sick,)) as w:
        await w.pair()
        w.reader_lane.sickness = "fails"
        await hand_over(w)
        assert w.sink.end is not None and w.sink.end.detail == "peer_lost"
        assert w.reader.accounts["prefill-0"].failures == 1
        # 1. without a new connection the lane would stay what it is
        w.reader_lane.sickness, before = "", w.reader_lane.connections
        await until(lambda: w.holder.leases == 0)
        w.sink, w.source.ended = type(w.sink)(), []
        w.source.blocks.clear()
        await hand_over(w)
        assert w.sink.record is not None and w.reader_lane.connections == before + 1


@in_loop
async def test_a_probe_that_does_not_end_keeps_nobody_else_from_pairing() -> None:
    async with world(lane=(Sick, Tcp)) as w:
        told: list[pb.Paired] = []
        w.reader_lane.sickness = "hangs"
        w.reader.client.patience_s = 0.2
        w.reader.meet(w.address(), told.append)
        await until(lambda: bool(told))
        # 1. the other lane of the same holder works, and the read that hangs is accounted for
        assert told[0].lane == "tcp" and told[0].note.startswith("sick: no answer")
        assert w.reader.reads_in_flight == 1
        # 2. as long as it may write, its blocks are left alone; there are others
        link = await w.reader.enter(w.address())
        pairing = link.paired
        assert pairing is not None
        link.unpair(pairing)
        w.reader_lane.sickness = ""
        assert [lane.name for lane in (await link.pair()).lanes] == ["sick", "tcp"]
        await w.reader.leave(link)
        for pull in w.reader_lane.hanging:
            pull.end()
        await until(lambda: w.reader.reads_in_flight == 0)


@in_loop
async def test_a_hand_off_that_is_given_up_does_not_wait_for_a_pairing() -> None:
    async with world(lane=(Sick,), liveness_s=20.0) as w:
        w.reader_lane.sickness = "hangs"
        adoption = w.adopt()
        adoption.reserved([1], skip_blocks=0)
        await until(lambda: bool(w.reader_lane.hanging))
        adoption.cancel()
        await w.over()
        await until(lambda: w.reader.handoffs == 0, limit_s=1.0)
        async with asyncio.timeout(1.0):
            await w.reader.close()
        for pull in w.reader_lane.hanging:
            pull.end()


@in_loop
async def test_one_process_is_one_link_however_its_address_is_written() -> None:
    async with world() as w:
        first = await w.reader.enter(w.address())
        again = await w.reader.enter(w.address(address=f"localhost:{w.port}"))
        assert first is again and first.users == 2
        for _ in range(2):
            await w.reader.leave(first)


@in_loop
async def test_channels_to_holders_that_nobody_uses_are_bounded() -> None:
    async with world() as w:
        for number in range(MAX_LINKS + 20):
            link = await w.reader.enter(w.address(worker_id=f"gone-{number}"))
            await w.reader.leave(link)
        assert len(w.reader._sources) == MAX_LINKS


@in_loop
async def test_what_either_side_says_beside_its_proof_cannot_be_changed() -> None:
    async with world() as w:
        for changed in ({"proof": proof(b"k" * 32, b"accepted", {})}, {"ranks": []}):
            serve = w.holder.pairs._pair

            async def swapped(context: Any, serve: Any = serve, changed: Any = changed) -> Any:
                write = context.write

                class Swapped:
                    read = context.read

                    async def write(self, message: pb.PairResponse) -> None:
                        if message.HasField("accepted"):
                            said = {"ranks": message.accepted.ranks, "proof": message.accepted.proof} | changed
                            message = pb.PairResponse(accepted=pb.PairAccepted(**said))
                        await write(message)

                return await serve(Swapped())

            w.holder.pairs._pair = swapped  # type: ignore[method-assign]
            link = await w.reader.enter(w.address())
            with pytest.raises(PairingError, match="changed on its way"):
                await link.pair()
            await w.reader.leave(link)
            w.holder.pairs._pair = serve  # type: ignore[method-assign]


@in_loop
async def test_more_pairings_than_sets_to_read_into_take_their_turns() -> None:
    async with world() as w:
        prober, accepted = (
            w.reader.client.prober,
            pb.PairAccepted(
                ranks=[pb.RankPool(lanes=w.holder_lanes.descriptors())],
                probe_block=w.holder_lanes.area.pattern.start,
                probe_blocks=4,
            ),
        )
        ranks = [(0, Cut(0, 0, w.reader_lanes.block_bytes))]
        name = w.holder_lanes.first.peer_id
        lanes = await asyncio.gather(*(prober.measure(w.reader_lane, name, accepted, ranks) for _ in range(10)))
        assert all(lane.gbps > 0 for lane in lanes)

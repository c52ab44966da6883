"""A worker reads a prefix from a peer's cache instead of computing it: the same tokens whatever becomes of the read, no
error, and nothing held afterwards.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from kvtransfer.transports.memory import MemoryTransport
from kvtransfer.transports.tcp import TcpTransport
from kvtransfer.transports.ucx import UcxTransport
from tests.direct import BLOCK_SIZE, MakeLane, Workers, expected, until, workers
from tests.unit.test_kvtransfer_service import no_nixl
from workers.core import fetches

LANES = [
    pytest.param(MemoryTransport, id="memory"),
    pytest.param(partial(TcpTransport, token="secret"), id="tcp"),
    pytest.param(UcxTransport, id="ucx", marks=pytest.mark.skipif(no_nixl(), reason="NIXL is not importable")),
]
PROMPT = [random.Random(1).randrange(3, 260) for _ in range(10 * BLOCK_SIZE + 5)]
"""Ten full blocks and a bit."""


def run(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def bounded() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    return bounded


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads are not given up for their length."""
    monkeypatch.setattr(fetches, "LEAST_PATIENCE_S", 60.0)


async def warm(w: Workers, name: str, prompt: list[int]) -> None:
    """The worker has the prompt's blocks in its cache."""
    answer = await w[name].ask(prompt, 1)
    assert answer.tokens == expected(prompt, 1)
    await w.assert_drained()


async def stalled_fetch(w: Workers, holder: str, reader: str, **options: object) -> int:
    """A read that does not move, of all blocks of PROMPT; returns the request's handle."""
    await warm(w, holder, PROMPT)
    w.lane(holder).stall()
    handle = await w[reader].submit(PROMPT, source=w.address(holder), **options)
    await until(lambda: w.all[reader].hub.reader.reads_in_flight == 1)
    return handle


@pytest.mark.parametrize("make_lane", LANES)
@pytest.mark.parametrize(("holder", "reader"), [("prefill-0", "prefill-1"), ("decode-0", "prefill-0")])
def test_a_fetched_prefix_is_not_computed_and_changes_no_token(make_lane: MakeLane, holder: str, reader: str) -> None:
    @run
    async def main() -> None:
        async with workers(holder, reader, make_lane=make_lane) as w:
            await warm(w, holder, PROMPT)
            # 1. all ten blocks come from the peer
            answer = await w[reader].ask(PROMPT, source=w.address(holder))
            assert answer.tokens == expected(PROMPT, 8)
            assert answer.done is not None
            ledger, block_bytes = answer.done.ledger, w.all[reader].hub.reader.lanes.block_bytes
            assert (ledger.cached_tokens, ledger.computed_tokens) == (160, len(PROMPT) - 160 + 7)
            assert ledger.bytes_moved == 10 * block_bytes and ledger.transfer_s > 0
            assert ledger.lane == w.lane(reader).name
            counters = w.counters(reader)
            assert (counters["fetches"], counters["fetched_blocks"]) == (1, 10)
            assert counters["fetched_bytes"] == 10 * block_bytes and counters["fetch_s"] > 0
            await w.assert_drained()
            # 2. they are in the reader's own cache now: nothing is left to fetch
            answer = await w[reader].ask(PROMPT, source=w.address(holder))
            assert answer.done is not None and answer.done.ledger.cached_tokens >= 160
            assert w.counters(reader)["fetches"] == 1
            await w.assert_drained()

    main()


@run
async def test_only_what_the_reader_lacks_moves() -> None:
    async with workers("prefill-0", "prefill-1", make_lane=MemoryTransport) as w:
        await warm(w, "prefill-0", PROMPT)
        await warm(w, "prefill-1", PROMPT[:70])
        answer = await w["prefill-1"].ask(PROMPT, source=w.address("prefill-0"))
        assert answer.tokens == expected(PROMPT, 8)
        assert answer.done is not None and answer.done.ledger.cached_tokens == 160
        assert w.counters("prefill-1")["fetched_blocks"] == 6
        await w.assert_drained()


@run
async def test_a_holder_with_half_of_the_prefix_gives_half() -> None:
    async with workers("prefill-0", "prefill-1", make_lane=MemoryTransport) as w:
        await warm(w, "prefill-0", PROMPT[: 5 * BLOCK_SIZE + 1])
        answer = await w["prefill-1"].ask(PROMPT, source=w.address("prefill-0"))
        assert answer.tokens == expected(PROMPT, 8)
        assert answer.done is not None and answer.done.ledger.cached_tokens == 80
        counters = w.counters("prefill-1")
        assert (counters["fetched_blocks"], counters["fetch_missed_blocks"]) == (5, 5)
        await w.assert_drained()


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("lease_refused", {}),
        ("lease_refused", {"incarnation": "inc-of-yesterday"}),
        ("lease_broken", {"worker_id": "prefill-9", "address": "127.0.0.1:1"}),
    ],
    ids=["evicted", "stale", "nobody there"],
)
def test_a_fetch_that_is_refused_is_a_cache_miss(reason: str, change: dict[str, str]) -> None:
    @run
    async def main() -> None:
        async with workers("prefill-0", "prefill-1", make_lane=MemoryTransport) as w:
            if change:
                await warm(w, "prefill-0", PROMPT)
            answer = await w["prefill-1"].ask(PROMPT, source=w.address("prefill-0", **change))
            assert answer.tokens == expected(PROMPT, 8)
            assert answer.done is not None and answer.done.ledger.cached_tokens == 0
            assert w.counters("prefill-1")[f"fetch_failed_{reason}"] == 1
            await w.assert_drained()

    main()


@run
async def test_other_tenants_blocks_are_never_hit() -> None:
    async with workers("prefill-0", "prefill-1", make_lane=MemoryTransport) as w:
        await warm(w, "prefill-0", PROMPT)
        answer = await w["prefill-1"].ask(PROMPT, source=w.address("prefill-0"), namespace=b"m" * 16, tenant="u")
        assert answer.tokens == expected(PROMPT, 8)
        assert answer.done is not None and answer.done.ledger.cached_tokens == 0
        assert w.counters("prefill-1")["fetch_failed_lease_refused"] == 1
        await w.assert_drained()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("how", ["cancelled", "session closed", "deadline", "cleared"])
def test_a_read_that_loses_its_request_is_given_up_and_its_targets_stay_aside(how: str) -> None:
    @run
    async def main() -> None:
        async with workers("prefill-0", "prefill-1", make_lane=MemoryTransport) as w:
            # 1. the read is under way
            handle = await stalled_fetch(w, "prefill-0", "prefill-1", time_left_s=0.5 if how == "deadline" else 60)
            reader, pool = w.all["prefill-1"], w.all["prefill-1"].pool
            held = {h.holder: h.blocks for h in reader.service.status(audit=True).holders}
            assert held == {f"fetch req-{handle}/1": 10}
            held = {h.holder: h.blocks for h in w.all["prefill-0"].service.status(audit=True).holders}
            assert held == {f"lease fetch req-{handle}/1": 10}
            load = reader.scheduler.load(0, 0.0)
            assert (load.waiting_requests, load.waiting_tokens) == (1, len(PROMPT))
            # 2. it ends
            match how:
                case "cancelled":
                    await w["prefill-1"].finish(handle)
                case "session closed":
                    await w["prefill-1"].close()
                case "deadline":
                    answer = await w["prefill-1"].over(handle)
                    assert answer.done is not None and answer.done.reason == "deadline"
                case "cleared":
                    reader.hub.fetcher.clear("t")
            await until(lambda: pool.quarantined_blocks == 10)
            await until(lambda: w.all["prefill-0"].hub.holder.leases == 0)
            assert w.all["prefill-0"].pool.used_blocks == 0
            if how == "cleared":
                answer = await w["prefill-1"].over(handle)
                assert answer.tokens == expected(PROMPT, 8)
                assert answer.started is not None and answer.started.cached_tokens == 0
                # The clear came before the request computed its own.
                assert reader.service.status(audit=True).holders[0].holder.startswith("quarantine")
            # 3. what the read still owes lands in blocks that nobody has
            w.lane("prefill-0").resume()
            await w.assert_drained()
            assert how == "cleared" or len(reader.scheduler._cache) == 0

    main()


@pytest.mark.usefixtures("patient")
def test_a_holder_that_dies_in_mid_read_costs_only_time() -> None:
    @run
    async def main() -> None:
        async with workers("prefill-0", "prefill-1", make_lane=MemoryTransport) as w:
            handle = await stalled_fetch(w, "prefill-0", "prefill-1")
            await w.kill("prefill-0")
            answer = await w["prefill-1"].over(handle)
            assert answer.tokens == expected(PROMPT, 8)
            assert answer.done is not None and answer.done.ledger.cached_tokens == 0
            await w.assert_drained()

    main()


@run
async def test_a_read_that_takes_too_long_is_given_up_and_the_request_computed() -> None:
    async with workers("prefill-0", "prefill-1", make_lane=MemoryTransport) as w:
        handle = await stalled_fetch(w, "prefill-0", "prefill-1")
        answer = await w["prefill-1"].over(handle)
        assert answer.tokens == expected(PROMPT, 8)
        assert w.counters("prefill-1")["fetch_failed_overdue"] == 1
        assert w.all["prefill-1"].pool.quarantined_blocks == 10
        w.lane("prefill-0").resume()
        await w.assert_drained()


@pytest.mark.usefixtures("patient")
def test_pinned_blocks_outlive_any_pressure_at_the_holder() -> None:
    """Blocks that are being read are not evicted, nor is their lease revoked, however many requests come."""

    @run
    async def main() -> None:
        async with workers("prefill-0", "prefill-1", make_lane=MemoryTransport, num_blocks=32) as w:
            handle = await stalled_fetch(w, "prefill-0", "prefill-1")
            rng = random.Random(3)
            for _ in range(5):
                other = [rng.randrange(3, 260) for _ in range(300)]
                assert (await w["prefill-0"].ask(other, 4)).tokens == expected(other, 4)
            assert w.all["prefill-0"].pool.evictions > 0
            w.lane("prefill-0").resume()
            answer = await w["prefill-1"].over(handle)
            assert answer.tokens == expected(PROMPT, 8)
            assert answer.done is not None and answer.done.ledger.cached_tokens == 160
            await w.assert_drained()

    main()


@pytest.mark.usefixtures("patient")
def test_a_reader_without_room_computes_or_reads_what_fits() -> None:
    @run
    async def main() -> None:
        async with workers("prefill-0", "prefill-1", make_lane=MemoryTransport, num_blocks=22, step_s=0.005) as w:
            await warm(w, "prefill-0", PROMPT)
            long = await w["prefill-1"].submit(list(range(3, 203)), 150)
            await until(lambda: w["prefill-1"].answers[long].started is not None)
            answer = await w["prefill-1"].ask(PROMPT, source=w.address("prefill-0"))
            assert answer.tokens == expected(PROMPT, 8)
            assert w.counters("prefill-1").get("fetched_blocks", 0) < 10
            assert (await w["prefill-1"].over(long)).tokens == expected(list(range(3, 203)), 150)
            await w.assert_drained()

    main()


@run
async def test_many_readers_of_one_prefix_under_one_request_id() -> None:
    names = ["prefill-0", "prefill-1", "decode-0", "colocated-0"]
    async with workers(*names, make_lane=MemoryTransport) as w:
        await warm(w, "prefill-0", PROMPT)
        w.lane("prefill-0").delay_s = 0.005
        asked = [w[name].ask(PROMPT, source=w.address("prefill-0"), request_id="same") for name in names[1:] * 2]
        for answer in await asyncio.gather(*asked):
            assert answer.tokens == expected(PROMPT, 8)
        await w.assert_drained()


@run
async def test_a_request_may_fetch_its_prefix_and_be_handed_off() -> None:
    async with workers("prefill-0", "prefill-1", "decode-0", make_lane=MemoryTransport) as w:
        await warm(w, "decode-0", PROMPT[:100])
        await warm(w, "prefill-0", PROMPT)
        options = {"request_id": "both", "max_tokens": 8}
        source = w.address("prefill-0")
        prefill = await w["prefill-1"].submit(PROMPT, source=source, hand_off=True, **options)
        decode = await w["decode-0"].submit(PROMPT, adopt_from=w.address("prefill-1"), **options)
        answer = await w["decode-0"].over(decode)
        assert answer.tokens == expected(PROMPT, 8)
        prefilled = await w["prefill-1"].over(prefill)
        assert prefilled.done is not None and prefilled.done.reason == "handed_off"
        assert prefilled.done.ledger.cached_tokens == 160
        await w.assert_drained()


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_fetches_between_small_workers_gives_the_right_tokens(seed: int) -> None:
    """Little memory, slow lanes that stall now and then, cancels, deadlines, clears: exact tokens for whoever ends."""

    @run
    async def main() -> None:
        rng = random.Random(seed)
        names = ["prefill-0", "decode-0", "colocated-0"]
        bases = [[rng.randrange(3, 260) for _ in range(250)] for _ in range(4)]
        async with workers(*names, make_lane=MemoryTransport, num_blocks=rng.choice([24, 40, 80])) as w:
            for name in names:
                w.lane(name).delay_s = 0.001

            async def client() -> None:
                for _ in range(12):
                    name, peer = rng.choice(names), rng.choice(names)
                    prompt = [*rng.choice(bases)[: rng.randrange(1, 250)], *rng.choices(range(3, 260), k=7)]
                    limit = rng.choice([60.0, 60.0, 0.05])
                    handle = await w[name].submit(prompt, 6, source=w.address(peer), time_left_s=limit)
                    if rng.random() < 0.15:
                        await asyncio.sleep(rng.random() * 0.02)
                        await w[name].finish(handle)
                        continue
                    if rng.random() < 0.1:
                        w.all[name].hub.fetcher.clear(rng.choice(["t", None]))
                    answer = await w[name].over(handle)
                    assert answer.tokens == expected(prompt, 6)[: len(answer.tokens)]
                    how = answer.done.reason if answer.done is not None else answer.failed.reason
                    assert how == "length" or (how in ("deadline", "deadline_lost") and limit < 1), how

            async def stall() -> None:
                while True:
                    await asyncio.sleep(rng.random() * 0.2)
                    lane = w.lane(rng.choice(names))
                    lane.stall()
                    await asyncio.sleep(rng.choice([0.01, 0.01, 0.8]))
                    lane.resume()

            stalls = asyncio.create_task(stall())
            await asyncio.gather(*(client() for _ in range(8)))
            stalls.cancel()
            for name in names:
                w.lane(name).resume()
            await w.assert_drained()
            assert sum(w.counters(name).get("fetched_blocks", 0) for name in names) > 0

    main()

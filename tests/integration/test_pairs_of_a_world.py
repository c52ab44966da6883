"""Workers of a deployment meet before a request needs them to; who cannot read from whom is known and told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headrace.core.records import Role
from kvtransfer.pairing import PairClient, PairingError, PairingFault
from router import fleet
from router.core.placement import WorkerKey
from router.worker_metrics import WorkerMetrics
from tests.world import VOCAB, World, expected, spec, world
from workers.runner.fake import FakeRunner

P, D = Role.PREFILL, Role.DECODE
NAMES = {"prefill-0", "decode-0", "decode-1"}


def run(coroutine: Any, timeout_s: float = 30.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await coroutine

    asyncio.run(bounded())


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def met(w: World, name: str) -> set[str]:
    return {holder for holder, told in w.workers[name].hub.reader.accounts.items() if told.lane_gbps > 0}


async def ask_some(w: World, count: int = 12) -> None:
    rng = random.Random(1)
    requests = [spec(rng.choices(range(3, 260), k=rng.randrange(20, 90)), 8) for _ in range(count)]
    for request, answer in zip(requests, await asyncio.gather(*map(w.ask, requests)), strict=True):
        assert answer.tokens == expected(request)
    await w.assert_drained()


def test_workers_meet_each_other_and_a_successor_before_any_request() -> None:
    async def main() -> None:
        async with world(P, D, D) as w:
            await until(lambda: all(met(w, name) == NAMES - {name} for name in NAMES))
            await w.restart("prefill-0", P)
            await until(lambda: met(w, "prefill-0") == NAMES - {"prefill-0"})
            await ask_some(w)
            moved = sum(told.bytes for name in NAMES for told in w.workers[name].hub.reader.accounts.values())
            assert moved > 0

    run(main())


def test_metrics_tell_what_each_worker_read_from_each_other() -> None:
    async def main() -> None:
        async with world(P, D) as w:
            await ask_some(w)
            registry = CollectorRegistry()
            await WorkerMetrics(w.gateway, registry).refresh()
            lines = [line for line in generate_latest(registry).decode().splitlines() if "kv_pair_" in line]
            labels = '{holder="prefill-0",lane="tcp",model_name="tiny",pool="decode",worker="decode-0"}'
            told = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if labels in line}
            account = w.workers["decode-0"].hub.reader.accounts["prefill-0"]
            assert told["headrace_kv_pair_read_bytes_total"] == account.bytes > 0
            assert told["headrace_kv_pair_reads_total"] == account.reads > 0
            assert told["headrace_kv_pair_exposed_seconds_total"] == account.exposed_s > 0
            assert told["headrace_kv_pair_lane_gbps"] == account.lane_gbps > 0
            assert told["headrace_kv_pair_failures_total"] == 0

    run(main())


def test_a_worker_of_another_model_is_refused_with_the_part_that_differs(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with world(P, D) as w:
            runner = w._runner
            w._runner = lambda _: FakeRunner(1024, vocab_size=300)
            await w.start_worker("decode-9", D)
            w._runner = runner
            w.push_members()
            await w.connected()
            refused = {view.worker_id: view.refused for view in await w.gateway.fleet.accounts(1.0, audit=False)}
            assert refused == {
                "prefill-0": "",
                "decode-0": "",
                "decode-9": f"weights: fake:{VOCAB} here, fake:300 there",
            }
            assert "worker_refused worker=decode-9" in caplog.text and "weights: fake" in caplog.text
            assert "decode-9" not in met(w, "prefill-0") and met(w, "decode-9") == set()
            await ask_some(w)

    run(main())


def separate(monkeypatch: pytest.MonkeyPatch, reader: str, holder: str) -> None:
    """No lane connects these two."""
    pair = PairClient.pair

    async def parted(self: PairClient, stub: Any, address: Any) -> Any:
        if (self.me.worker_id, address.worker_id) == (reader, holder):
            raise PairingError(PairingFault.NO_LANE, "tcp: peer_lost: nobody there")
        return await pair(self, stub, address)

    monkeypatch.setattr(PairClient, "pair", parted)


def test_a_worker_that_cannot_read_from_a_prefill_worker_adopts_nothing_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    separate(monkeypatch, "decode-0", "prefill-0")

    async def main() -> None:
        async with world(P, D, D) as w:
            await until(lambda: bool(w.gateway.router.table._apart))
            await ask_some(w)
            assert w.workers["decode-0"].service.status(audit=False).counters["handoffs"] == 0
            assert w.workers["decode-1"].service.status(audit=False).counters["handoffs"] == 12
            assert w.gateway.counters.retries == 0

    run(main())


def test_when_no_pair_can_exchange_kv_requests_are_served_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    separate(monkeypatch, "decode-0", "prefill-0")

    async def main() -> None:
        async with world(P, D) as w:
            await until(lambda: bool(w.gateway.router.table._apart))
            await ask_some(w)
            # what is known of a process goes with it
            await w.restart("decode-0", D)
            await w.connected()
            now = {key for key in w.gateway.router.table.roster if key is not None}
            assert {key for pair in w.gateway.router.table._apart for key in pair} <= now

    run(main())


def test_a_pair_that_failed_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MEET_AGAIN_S", 0.1)
    pair, failed = PairClient.pair, []

    async def busy_at_first(self: PairClient, stub: Any, address: Any) -> Any:
        if self.me.worker_id == "decode-0" and not failed:
            failed.append(address.worker_id)
            raise PairingError(PairingFault.BROKEN, "no answer")
        return await pair(self, stub, address)

    monkeypatch.setattr(PairClient, "pair", busy_at_first)

    async def main() -> None:
        async with world(P, D) as w:
            await until(lambda: met(w, "decode-0") == {"prefill-0"})
            await until(lambda: not w.gateway.router.table._apart)
            assert failed == ["prefill-0"]
            await ask_some(w)
            assert w.workers["decode-0"].service.status(audit=False).counters["handoffs"] == 12

    run(main())


def test_workers_hear_of_each_other_however_often_they_come_back() -> None:
    async def main() -> None:
        async with world(P, D) as w:
            (reader,) = (s for s in w.gateway.fleet.sessions if s.key.worker_id == "decode-0")
            for number in range(fleet.MAX_MET + 5):
                reader.met.add(WorkerKey("prefill-9", f"inc-{number}"))
            await w.restart("prefill-0", P)
            await w.connected()
            await until(lambda: met(w, "decode-0") == {"prefill-0"})
            now = WorkerKey("prefill-0", w.ready["prefill-0"].incarnation)
            await until(lambda: reader.met == {now})

    run(main())

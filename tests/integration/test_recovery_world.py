"""Hand-offs that fail in a whole deployment: the request goes on by one of its ways, with the tokens of a run in which
nothing failed, and nothing is held afterwards.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager

import pytest

import kvtransfer.adoption
import kvtransfer.stream
from headrace.core.records import Role
from headrace.errors import Code, HeadraceError
from kvtransfer.core.layout import Cut
from kvtransfer.transports.base import Peer, Pull, TransferError, TransferFault, failed_pull
from router.core.recovery import OnFailure, Recovery
from tests.both_doors import doors
from tests.faulty_streams import MessageFaults, faulty_pump
from tests.integration.test_routing_world import until
from tests.integration.test_world import run
from tests.world import World, expected, spec, world

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
rng = random.Random(31)
PROMPT = [rng.randrange(3, 260) for _ in range(150)]


def calm_world(
    *roles: Role, gateway: dict[str, object] | None = None, **options: object
) -> AbstractAsyncContextManager[World]:
    """Where a busy machine breaks no session and a read is not made again within its lease: these tests are about the
    failures that they plant."""
    options = {"liveness_s": 8.0, "read_retries": 0} | options
    return world(*roles, gateway={"liveness_s": 8.0} | (gateway or {}), **options)  # type: ignore[arg-type]


class Reads:
    """Stands between a worker and its lane: the next `to_fail` reads fail, those that are held move nothing."""

    def __init__(self, w: World, name: str, to_fail: int = 0, hold: bool = False) -> None:
        self.to_fail, self.hold = to_fail, hold
        self.failed = 0
        self.held: list[Pull] = []
        self._reader = w.workers[name].hub.reader
        self._num_blocks = self._reader.lanes.area.first
        lane = self._reader.lanes.first
        self._pull = lane.pull
        lane.pull = self.pull  # type: ignore[method-assign]

    def pull(self, peer: Peer, remote_blocks: list[int], local_blocks: list[int], cut: Cut | None) -> Pull:
        if local_blocks[0] >= self._num_blocks:
            return self._pull(peer, remote_blocks, local_blocks, cut)  # of a probe
        if self.to_fail:
            self.to_fail -= 1
            self.failed += 1
            return failed_pull(self._reader.loop, TransferError(TransferFault.FAILED, "planted"))
        if self.hold:
            held = Pull(self._reader.loop, lambda: held.end())
            self.held.append(held)
            return held
        return self._pull(peer, remote_blocks, local_blocks, cut)


def prefilled(w: World) -> float:
    """Tokens that were computed as input, at all workers."""
    return sum(worker.service.status(audit=False).counters["prefill_tokens"] for worker in w.workers.values())


def recoveries(w: World, label: str) -> list[Recovery]:
    (routed,) = w.gateway.placing._explanations.find("t", label)
    return [made for _, made in routed.decisions if isinstance(made, Recovery)]


def counter(w: World, name: str, what: str) -> float:
    return w.workers[name].service.status(audit=False).counters.get(what, 0.0)


@pytest.mark.parametrize("roles", [(P, D), (P, D, D)], ids=str)
def test_a_retry_reads_what_was_computed_and_computes_nothing_again(roles: tuple[Role, ...]) -> None:
    async def main() -> None:
        async with calm_world(*roles, gateway={"max_attempts": 5}) as w:
            reads = [Reads(w, name, to_fail=1) for name in w.workers if name.startswith("decode")]
            request = spec(PROMPT, label="it", ignore_eos=True)
            assert (await w.ask(request)).tokens == expected(request)
            assert [each.failed for each in reads] == [1] * len(reads)
            assert {made.chosen.way for made in recoveries(w, "it")} == {OnFailure.RETRY}
            assert prefilled(w) == len(PROMPT)
            assert w.gateway.counters.retries == len(reads)
            await w.assert_drained()

    run(main())


def test_a_close_that_is_lost_keeps_no_blocks_while_the_request_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = MessageFaults(Counter())
    monkeypatch.setattr(kvtransfer.adoption, "pump", faulty_pump(faults, kvtransfer.stream.pump))

    async def main() -> None:
        async with calm_world(P, D, step_s=0.02) as w:
            faults.arm("drop", "close")
            request = spec(PROMPT, 60, label="it", ignore_eos=True)
            client = asyncio.create_task(w.ask(request))
            await until(lambda: faults.happened["drop close"] == 1)
            holder = w.workers["prefill-0"].service
            await until(lambda: holder.status(audit=False).used_blocks == 0 or client.done())
            assert not client.done(), "the blocks were held to the end"
            assert (await client).tokens == expected(request) and w.gateway.counters.retries == 0
            await w.assert_drained()

    run(main())


def test_a_decode_worker_that_cannot_read_leaves_the_request_to_another() -> None:
    async def main() -> None:
        async with calm_world(P, D, D) as w:
            reads = Reads(w, "decode-0", to_fail=1000)
            requests = [spec([*PROMPT, 5 + i], label=f"r{i}", ignore_eos=True) for i in range(8)]
            for request in requests:
                assert (await w.ask(request)).tokens == expected(request)
            assert reads.failed >= 1
            assert counter(w, "decode-1", "handoffs") == len(requests), "all went there in the end"
            await w.assert_drained()

    run(main())


def test_two_failures_of_one_pair_and_another_prefill_worker_computes_it() -> None:
    async def main() -> None:
        async with calm_world(P, P, D, gateway={"max_attempts": 5}) as w:
            reads = Reads(w, "decode-0", to_fail=2)
            request = spec(PROMPT, label="it", ignore_eos=True)
            assert (await w.ask(request)).tokens == expected(request)
            assert reads.failed == 2
            ways = [made.chosen.way for made in recoveries(w, "it")]
            assert ways == [OnFailure.RETRY, OnFailure.OTHER_PREFILL]
            assert {counter(w, name, "prefill_tokens") > 0 for name in ("prefill-0", "prefill-1")} == {True}
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize("roles", [(P, P, D), (P, D)], ids=str)
def test_a_prefill_worker_that_dies_during_the_hand_off_costs_a_prefill_and_no_token(roles: tuple[Role, ...]) -> None:
    async def main() -> None:
        async with calm_world(*roles, gateway={"max_attempts": 5}) as w:
            reads = Reads(w, "decode-0", hold=True)
            request = spec(PROMPT, 24, label="it", ignore_eos=True)
            client = asyncio.create_task(w.ask(request))
            await until(lambda: bool(reads.held))
            reads.hold = False
            [victim] = [name for name, worker in w.workers.items() if worker.hub.holder.leases]
            await w.kill(victim)
            assert (await client).tokens == expected(request)
            way = OnFailure.OTHER_PREFILL if len(roles) == 3 else OnFailure.LOCAL_RECOMPUTE
            # The reader may have noticed first: then it is asked once more, in vain.
            *before, last = [made.chosen.way for made in recoveries(w, "it")]
            assert last is way and before in ([], [OnFailure.RETRY])
            await w.assert_drained()

    run(main())


def test_a_decode_worker_that_dies_during_the_hand_off_leaves_the_kv_where_it_is() -> None:
    async def main() -> None:
        async with calm_world(P, D, D) as w:
            reads = {name: Reads(w, name, hold=True) for name in ("decode-0", "decode-1")}
            request = spec(PROMPT, 24, label="it", ignore_eos=True)
            client = asyncio.create_task(w.ask(request))
            await until(lambda: any(each.held for each in reads.values()))
            [victim] = [name for name, each in reads.items() if each.held]
            for each in reads.values():
                each.hold = False
            await w.kill(victim)
            assert (await client).tokens == expected(request)
            [made] = recoveries(w, "it")
            assert (made.cause, made.chosen.way) == ("decode_lost", OnFailure.RETRY)
            assert prefilled(w) == len(PROMPT)
            await w.assert_drained()

    run(main())


def test_a_reader_that_does_not_know_that_it_was_given_up_makes_way_for_the_next_one() -> None:
    """Its lease is open still: without an order of the adoptions the holder would refuse the new reader."""

    async def main() -> None:
        async with calm_world(P, D, D) as w:
            reads = {name: Reads(w, name, hold=True) for name in ("decode-0", "decode-1")}
            request = spec(PROMPT, 24, label="it", ignore_eos=True)
            client = asyncio.create_task(w.ask(request))
            await until(lambda: any(each.held for each in reads.values()))
            [old] = [name for name, each in reads.items() if each.held]
            for each in reads.values():
                each.hold = False
            hub = w.workers[old].hub
            hears = hub.close_session
            hub.close_session = lambda session: None  # type: ignore[method-assign]
            sessions = list(hub.sessions)
            next(s for s in w.gateway.fleet.sessions if s.key.worker_id == old).reset()
            assert (await client).tokens == expected(request)
            assert [made.chosen.way for made in recoveries(w, "it")] == [OnFailure.RETRY]
            assert prefilled(w) == len(PROMPT)
            assert counter(w, old, "lease_revoked") == 1
            for session in sessions:
                hears(session)
            await w.assert_drained()

    run(main())


def test_a_revoked_lease_is_recomputed_where_nothing_has_to_move() -> None:
    async def main() -> None:
        async with calm_world(P, D) as w:
            decode, prefill = w.workers["decode-0"].hub, w.workers["prefill-0"].hub
            reserve = decode._scheduler.reserve_adoptions
            decode._scheduler.reserve_adoptions = lambda now: []  # type: ignore[method-assign]
            request = spec(PROMPT, label="it", ignore_eos=True)
            client = asyncio.create_task(w.ask(request))
            await until(lambda: any(e.request.state.value == "transferring" for e in prefill._entries.values()))
            [entry] = prefill._entries.values()
            prefill.revoke(entry)
            decode._scheduler.reserve_adoptions = reserve  # type: ignore[method-assign]
            assert (await client).tokens == expected(request)
            [made] = recoveries(w, "it")
            assert (made.cause, made.chosen.way) == ("lease_revoked", OnFailure.LOCAL_RECOMPUTE)
            assert made.chosen.plan.worker.worker_id == "decode-0"
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize("way", ["of the deployment", "of the request"])
def test_whoever_wants_no_recovery_hears_of_the_failure_at_once(way: str) -> None:
    async def main() -> None:
        options: dict[str, object] = {"on_transfer_failure": "fail"}
        gateway, own = (options, {}) if way == "of the deployment" else ({}, options)
        async with calm_world(P, D, gateway=gateway) as w:
            Reads(w, "decode-0", to_fail=1)
            began = time.monotonic()
            with pytest.raises(HeadraceError, match="transfer_failed") as error:
                await w.ask(spec(PROMPT, ignore_eos=True, **own))
            assert error.value.code is Code.ABORTED and time.monotonic() - began < 5.0
            await w.assert_drained()

    run(main())


def test_a_policy_comes_through_both_doors() -> None:
    async def main() -> None:
        async with calm_world(P, D) as w, doors(w) as d:
            reads = Reads(w, "decode-0", to_fail=2)
            with pytest.raises(HeadraceError) as error:
                await d.generate(on_transfer_failure="fail")
            assert error.value.code is Code.ABORTED
            answer = await d.complete(headers={"X-Headrace-On-Transfer-Failure": "fail"})
            assert answer.status_code == 503 and reads.failed == 2
            # What is no policy is named, with what would be.
            with pytest.raises(HeadraceError, match="local_recompute") as error:
                await d.generate(on_transfer_failure="hope")
            assert (error.value.code, error.value.field) == (Code.INVALID_ARGUMENT, "on_transfer_failure")
            assert (await d.complete(headers={"X-Headrace-On-Transfer-Failure": "hope"})).status_code == 400
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize("policy", ["retry", "other_prefill", "local_recompute"])
def test_each_policy_gives_the_same_tokens(policy: str) -> None:
    async def main() -> None:
        async with calm_world(P, P, D, D) as w:
            for name in ("decode-0", "decode-1"):
                Reads(w, name, to_fail=1)
            requests = [spec([*PROMPT[: 40 + i]], label=f"r{i}", on_transfer_failure=policy) for i in range(6)]
            answers = await asyncio.gather(*(w.ask(request) for request in requests))
            for request, answer in zip(requests, answers, strict=True):
                assert answer.tokens == expected(request)
            made = [each for i in range(6) for each in recoveries(w, f"r{i}")]
            assert made and {each.chosen.way.value for each in made} == {policy}
            await w.assert_drained()

    run(main())


def test_explain_shows_the_ways_back_with_their_times() -> None:
    async def main() -> None:
        async with calm_world(P, P, D) as w:
            Reads(w, "decode-0", to_fail=1)
            await w.ask(spec(PROMPT, label="it"))
            shown = w.gateway.explain("t", "it")
            assert shown is not None
            assert [each.stage for each in shown] == ["plan", "decode", "recovery", "decode"]
            recovery = shown[2]
            assert (recovery.policy, recovery.reason) == ("auto", "transfer_failed")
            assert [row.kind for row in recovery.candidates] == ["retry", "other_prefill", "local_recompute"]
            assert [row.chosen for row in recovery.candidates] == [True, False, False]
            for row in recovery.candidates:
                assert sum(term.ms for term in row.terms) == pytest.approx(row.cost_ms)

    run(main())

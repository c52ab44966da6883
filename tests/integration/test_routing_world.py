"""Prefix-aware routing through real sessions: who is chosen, what is fetched, who may share, and how the gateway's view
of the caches comes right again whatever is lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from headrace.core.records import CacheChange, Role, cache_key
from headrace.core.step_shape import NUM_FEATURES
from headrace.ids import counting_ids
from kvtransfer.core.identity import block_hashes, namespace_id, request_root
from router.core.cost import USUAL_CHUNK_TOKENS
from router.core.decision import Decision, Fetch, PlanKind, RouteAsk
from router.core.placement import WorkerKey
from router.gateway import Gateway
from tests.doors_fixtures import gateway_spec, text_model
from tests.world import TOKEN, Answer, World, expected, spec
from tests.world import world as any_world

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
PROMPT = random.Random(9).choices(range(3, 260), k=170)
"""Ten full blocks and a part of one."""


def world(
    *roles: Role, gateway: dict[str, object] | None = None, **options: object
) -> AbstractAsyncContextManager[World]:
    """Routed by cost, as deployments are."""
    return any_world(*roles, gateway={"routing_policy": "cost"} | (gateway or {}), **options)  # type: ignore[arg-type]


def run(coroutine: object, timeout_s: float = 60.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await coroutine  # type: ignore[misc]

    asyncio.run(bounded())


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def keys_of(w: World, tokens: list[int], tenant: str = "t") -> list[int]:
    root = request_root(bytes.fromhex(w.gateway.fingerprint()), namespace_id(tenant, "", ""))
    return [cache_key(block_hash) for block_hash in block_hashes(root, tokens, 16)]


def depth(gateway: Gateway, w: World, name: str, tokens: list[int]) -> int:
    """Leading blocks that the gateway knows the worker to have."""
    slot = gateway.router.table.slot(WorkerKey(name, w.ready[name].incarnation))
    assert slot is not None
    return int(gateway.router.index.lookup(keys_of(w, tokens), gateway.router.table.num_slots)[slot])


async def ask(w: World, tokens: list[int], gateway: Gateway | None = None, **options: object) -> tuple[Answer, int]:
    """(the answer, which is the right one; cached prompt tokens)"""
    request = spec(tokens, 4, ignore_eos=True, **options)
    if gateway is None:
        answer = await w.ask(request)
    else:
        answer = Answer()
        async for delta in gateway.generate(request):
            answer.tokens += delta.token_ids
            answer.usage = delta.usage or answer.usage
    assert answer.tokens == expected(request) and answer.usage is not None
    return answer, answer.usage.cached_tokens


def chosen(gateway: Gateway, label: str) -> Decision:
    (routed,) = gateway.placing._explanations.find("t", label)
    return routed.decisions[0][1]


def test_a_prefix_is_prefilled_once_and_its_requests_go_where_it_is() -> None:
    """By the policy that always wants that: at the speed of these workers any plan may be the cheapest."""

    async def main() -> None:
        async with world(P, P, D, gateway={"routing_policy": "prefix_only"}) as w:
            # 1. Somebody computes it; the gateway hears of ten blocks there.
            _, cached = await ask(w, PROMPT, label="first")
            assert cached == 0
            holder = chosen(w.gateway, "first").worker.worker_id
            await until(lambda: depth(w.gateway, w, holder, PROMPT) == 10)
            # 2. Whatever begins so goes there and computes the rest alone.
            for i in range(4):
                _, cached = await ask(w, [*PROMPT, *range(3, 20 + i)], label=f"next-{i}")
                assert cached >= 160
                decision = chosen(w.gateway, f"next-{i}")
                assert decision.worker.worker_id == holder
                assert decision.diverged_at_block >= 10
            # 3. Who opted out computes all of it.
            _, cached = await ask(w, PROMPT, no_cache=True)
            assert cached == 0
            await w.assert_drained()

    run(main())


def test_a_chosen_fetch_is_carried_out_and_changes_no_token() -> None:
    async def main() -> None:
        async with world(P, P, D) as w:
            await ask(w, PROMPT, label="first")
            holder = chosen(w.gateway, "first").worker
            await until(lambda: depth(w.gateway, w, holder.worker_id, PROMPT) == 10)
            other = next(n for n in ("prefill-0", "prefill-1") if n != holder.worker_id)
            choose = w.gateway.router.choose

            def fetching(route: RouteAsk, now: float) -> Decision | None:
                plan = choose(route, now)
                assert plan is not None
                target = WorkerKey(other, w.ready[other].incarnation)
                return replace(plan, kind=PlanKind.FETCH_PAIR, worker=target, whole=False, fetch=Fetch(holder, 10))

            w.gateway.router.choose = fetching  # type: ignore[method-assign]
            _, cached = await ask(w, PROMPT)
            assert cached == 160
            assert w.workers[other].hub.counters["fetched_blocks"] == 10
            await until(lambda: depth(w.gateway, w, other, PROMPT) == 10)
            await w.assert_drained()

    run(main())


def test_a_worker_that_restarts_empty_is_not_taken_for_a_holder() -> None:
    async def main() -> None:
        async with world(C) as w:
            await ask(w, PROMPT)
            await until(lambda: depth(w.gateway, w, "colocated-0", PROMPT) == 10)
            await w.restart("colocated-0", C)
            await w.connected()
            assert depth(w.gateway, w, "colocated-0", PROMPT) == 0
            _, cached = await ask(w, PROMPT)
            assert cached == 0
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize("fault", ["drop", "twice", "swap"])
def test_the_index_comes_right_whatever_happens_to_cache_events(fault: str) -> None:
    """Events are lost, told twice or out of order between the session and the router; load reports and snapshots mend
    it."""

    async def main() -> None:
        rng = random.Random(3)
        async with world(C, num_blocks=64) as w:
            router, late = w.gateway.router, []
            apply = router.cache_changed

            def faulty(key: WorkerKey, change: CacheChange) -> bool:
                if rng.random() < 0.5:
                    return apply(key, change)
                if fault == "drop":
                    return True
                if fault == "twice":
                    return apply(key, change) and apply(key, change)
                late.append((key, change))
                if len(late) < 2:
                    return True
                results = [apply(*event) for event in reversed(late)]
                late.clear()
                return all(results)

            router.cache_changed = faulty  # type: ignore[method-assign]
            for _ in range(12):
                await ask(w, [rng.randrange(3, 260) for _ in range(rng.randrange(20, 300))])
            router.cache_changed = apply  # type: ignore[method-assign]
            await ask(w, PROMPT)
            log = w.workers["colocated-0"].scheduler._cache.log
            await until(lambda: router.index.entries == len(log) and depth(w.gateway, w, "colocated-0", PROMPT) == 10)
            await w.assert_drained()

    run(main())


def test_tenants_share_nothing_and_a_clear_forgets_one_of_them() -> None:
    async def main() -> None:
        async with world(C) as w:
            # 1. The same prompt of another tenant, or with a salt, is as good as new.
            assert (await ask(w, PROMPT))[1] == 0
            await until(lambda: depth(w.gateway, w, "colocated-0", PROMPT) == 10)
            salted = spec(PROMPT, 4, ignore_eos=True, cache_salt="s")
            for request in (replace(spec(PROMPT, 4, ignore_eos=True), tenant="u"), salted):
                answer = await w.ask(request)
                assert answer.usage is not None and answer.usage.cached_tokens == 0
            assert (await ask(w, PROMPT))[1] == 169
            # 2. Clearing one tenant leaves the others theirs.
            assert w.gateway.clear_cache("t") == (["colocated-0"], [])
            await until(lambda: depth(w.gateway, w, "colocated-0", PROMPT) == 0)
            assert (await ask(w, PROMPT))[1] == 0
            answer = await w.ask(replace(spec(PROMPT, 4, ignore_eos=True), tenant="u"))
            assert answer.usage is not None and answer.usage.cached_tokens == 169
            # 3. Clearing all empties worker and index.
            w.gateway.clear_cache(None)
            await until(lambda: w.gateway.router.index.entries == 0)
            assert not len(w.workers["colocated-0"].scheduler._cache)
            await w.assert_drained()

    run(main())


def test_a_worker_that_was_away_forgets_when_it_is_back() -> None:
    async def main() -> None:
        async with world(C) as w:
            await ask(w, PROMPT)
            session = w.gateway.fleet.sessions[0]
            session.connected = False
            assert w.gateway.clear_cache("t") == ([], ["colocated-0"])
            session.connected = True
            session.reset()
            cache = w.workers["colocated-0"].scheduler._cache
            await until(lambda: not len(cache) and session.connected)
            await w.assert_drained()

    run(main())


def test_a_second_gateway_knows_what_the_first_ones_requests_have_cached() -> None:
    async def main() -> None:
        async with world(P, P, D) as w:
            text = text_model()
            settings = {"max_model_len": 1024, "liveness_s": 2.0, "cluster_token": TOKEN, "gateway_id": "gateway-1"}
            settings["routing_policy"] = "prefix_only"
            second = Gateway(gateway_spec(**settings), text, ids=counting_ids())
            first, w.gateway = w.gateway, second
            try:
                w.push_members()
                await w.connected()
                await ask(w, PROMPT, gateway=first, label="first")
                holder = chosen(first, "first").worker.worker_id
                await until(lambda: depth(second, w, holder, PROMPT) == 10)
                _, cached = await ask(w, PROMPT, gateway=second)
                assert cached >= 160
            finally:
                w.gateway = first
                await second.close()
                text.close()
            await w.assert_drained()

    run(main())


def test_a_request_is_explained_while_it_runs_and_after_it_to_its_own_tenant() -> None:
    async def main() -> None:
        async with world(P, D, C) as w:
            request = spec(PROMPT, 8, ignore_eos=True, label="mine", answer_id="gen-1")
            running = asyncio.create_task(w.ask(request))
            await until(lambda: bool(w.gateway._legs))
            assert w.gateway.explain("t", "mine")
            await running
            decisions = w.gateway.explain("t", "gen-1")
            assert decisions is not None and decisions == w.gateway.explain("t", "mine")
            plan = decisions[0]
            assert plan.stage == "plan" and plan.policy == "cost" and plan.prompt_tokens == len(PROMPT)
            assert plan.realised_ms > 0.0
            assert sum(row.chosen for row in plan.candidates) == 1
            for row in plan.candidates:
                assert sum(term.ms for term in row.terms) == pytest.approx(row.cost_ms, rel=1e-3, abs=1e-3)
            assert w.gateway.explain("u", "mine") is None and w.gateway.explain("t", "nobody") is None
            await w.assert_drained()

    run(main())


def test_a_burst_of_siblings_computes_its_prefix_at_most_once_a_worker_and_all_are_answered() -> None:
    """Steps here cost the same whatever is in them, so that a prefix is cheap; where it is dear, see bench.simulate."""

    async def main() -> None:
        rng = random.Random(4)
        async with world(C, C, C, C, step_s=0.005, num_blocks=512) as w:
            # Step costs are known.
            for _ in range(12):
                await ask(w, rng.choices(range(3, 260), k=40))
            burst = await asyncio.gather(
                *(ask(w, [*PROMPT[:160], *rng.choices(range(3, 260), k=9)]) for _ in range(64))
            )
            assert sum(cached < 160 for _, cached in burst) <= 4, [c for _, c in burst]
            await w.assert_drained()

    run(main())


def test_who_waits_for_a_prefix_that_never_comes_computes_it() -> None:
    async def main() -> None:
        async with world(C, C, step_s=0.02, num_blocks=512) as w:
            for _ in range(3):
                await ask(w, PROMPT[::-1])
            long = [*PROMPT, *PROMPT[:100]]
            first = asyncio.create_task(w.ask(spec(long, 4, ignore_eos=True, label="first")))
            await until(lambda: bool(w.gateway._legs))
            others = [asyncio.create_task(ask(w, [*long, i])) for i in range(3, 9)]
            await asyncio.sleep(0.01)
            first.cancel()
            await asyncio.gather(*others)
            await w.assert_drained()

    run(main())


def test_workers_tell_what_their_steps_cost() -> None:
    """Without it the router would reckon with a machine that is nobody's. By a policy that has both of them learn."""

    async def main() -> None:
        async with world(P, D, step_s=0.002, gateway={"routing_policy": "least_loaded"}) as w:
            for _ in range(14):
                await ask(w, PROMPT, no_cache=True)
            await until(lambda: all(len(load.step_costs) == NUM_FEATURES for _, _, load in w.gateway.fleet.loads()))

    run(main())


def test_workers_tell_their_prefill_chunk() -> None:
    """The most of a prompt that a step takes: bounded for each request, and by the step's tokens."""

    async def main() -> None:
        async with world(P, D, by_role={D: {"long_prefill_token_threshold": 1024}}, max_num_batched_tokens=64) as w:
            table, fleet = w.gateway.router.table, w.gateway.fleet

            def told() -> dict[str, int]:
                slots = {session.key.worker_id: table.slot(session.key) for session in fleet.sessions}
                return {name: int(table.chunk_tokens[slot]) for name, slot in slots.items() if slot is not None}

            # 1. One is bound by the prompt's share, the other by the step.
            assert told() == {"prefill-0": 32, "decode-0": 64}
            # 2. Of a worker that does not tell, something usual is assumed.
            for session in fleet.sessions:
                assert session.hello is not None
                session.hello.ClearField("chunk_tokens")
            fleet.pair()
            assert told() == dict.fromkeys(w.workers, USUAL_CHUNK_TOKENS)

    run(main())

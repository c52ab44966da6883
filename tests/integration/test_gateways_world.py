"""Several gateways over the same workers: each has the whole view, and who loses one loses its requests alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path

from headrace.core.records import Role
from router.gateway import Gateway
from tests.world import Answer, World, expected, spec, world

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
TURNS = 4
TO_PREFIXES: dict[str, object] = {"routing_policy": "prefix_only"}
"""At the speed of these workers any plan may be the cheapest; this policy always wants what is cached."""


def run(coroutine: Coroutine[object, object, object], timeout_s: float = 60.0) -> None:
    asyncio.run(asyncio.wait_for(coroutine, timeout_s))


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def view(gateway: Gateway) -> int:
    """Pairs of a block and a worker that the gateway knows of."""
    return gateway.router.index.entries


async def cached_in_conversations(num_gateways: int) -> list[int]:
    """Cached prompt tokens of each turn of three conversations, whose turns go to the gateways in turn."""
    rng = random.Random(4)
    histories = [rng.choices(range(3, 260), k=90) for _ in range(3)]
    found = []
    async with world(C, C, C, num_gateways=num_gateways, gateway=TO_PREFIXES) as w:
        for turn in range(TURNS):
            for number, history in enumerate(histories):
                gateway = w.gateways[(turn + number) % num_gateways]
                request = spec(history, 12, ignore_eos=True)
                answer = await w.ask(request, gateway)
                assert answer.tokens == expected(request) and answer.usage is not None
                found.append(answer.usage.cached_tokens)
                history += [*answer.tokens, *rng.choices(range(3, 260), k=40)]
                known = sum(len(worker.scheduler._cache) for worker in w.workers.values())
                await until(lambda known=known: all(view(each) == known for each in w.gateways))
        await w.assert_drained()
    return found


def test_a_conversation_that_alternates_between_gateways_hits_what_it_hits_at_one() -> None:
    async def main() -> None:
        at_one, at_two = [await cached_in_conversations(count) for count in (1, 2)]
        assert at_two == at_one
        assert at_one[:3] == [0, 0, 0] and min(at_one[3:]) >= 90

    run(main())


def test_what_one_gateway_clears_has_no_name_at_any(tmp_path: Path) -> None:
    prompt = random.Random(5).choices(range(3, 260), k=100)

    async def cached(w: World, gateway: Gateway) -> int:
        answer = await w.ask(spec(prompt, 4, ignore_eos=True), gateway)
        assert answer.usage is not None
        return answer.usage.cached_tokens

    async def main() -> None:
        async with world(C, num_gateways=2, gateway=TO_PREFIXES | {"run_dir": str(tmp_path)}) as w:
            first, second = w.gateways
            # 1. What one has had computed the other finds.
            assert await cached(w, first) == 0
            assert await cached(w, second) > 0
            # 2. One clears while the worker does not hear it: old names are nobody's all the same.
            first.fleet.clear_cache = lambda tenant: ([], [])  # type: ignore[method-assign]
            first.clear_cache("t")
            assert await cached(w, second) == 0
            # 3. The new names are everybody's again.
            assert await cached(w, first) > 0
            await w.assert_drained()

    run(main())


def test_a_lost_gateway_takes_its_own_requests_along_and_nobody_elses() -> None:
    prompts = [random.Random(6 + i).choices(range(3, 260), k=60) for i in range(6)]

    async def main() -> None:
        async with world(P, D, D, num_gateways=2, step_s=0.002) as w:
            lost = w.siblings[0]
            # 1. Both have requests in all states at the workers.
            mine = [spec(prompt, 60, ignore_eos=True) for prompt in prompts]
            kept = [asyncio.create_task(w.ask(request)) for request in mine]
            gone = [asyncio.create_task(w.ask(spec(prompt, 400, ignore_eos=True), lost)) for prompt in prompts]
            await until(lambda: sum(leg.kind.value == "decode" for _, leg in lost._legs.values()) >= 3)
            # 2. One is gone without a word to the workers.
            await w.lose(lost)
            await asyncio.wait(gone)
            # 3. The other's streams are what they would be alone, at the first attempt.
            answers: list[Answer] = await asyncio.gather(*kept)
            assert [answer.tokens for answer in answers] == [expected(request) for request in mine]
            assert w.gateway.counters.retries == 0
            await w.assert_drained()

    run(main())

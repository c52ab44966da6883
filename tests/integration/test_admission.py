"""Admission from both doors to the workers: a refusal for each reason, deadlines, fields that arrive."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headrace.core.admission_records import Forecast
from headrace.core.records import Role
from headrace.errors import Code, HeadraceError
from router.api import GenerationSpec
from router.core.decision import RouteAsk
from router.fleet_metrics import FleetMetrics
from tests.both_doors import PROMPT, doors, hold, run, seen, until
from tests.world import World, expected, spec, world

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


@pytest.mark.parametrize("roles", [(C,), (P, D)], ids=str)
def test_sixty_four_clients_at_a_full_pool_are_all_served_when_they_wait_as_told(roles: tuple[Role, ...]) -> None:
    """PD-13: every request either waits with all it needs booked, or is told to come again holding nothing."""

    async def main() -> None:
        # 16 blocks a pool; each request needs 6 of them in the end, so that four fit by the account of tokens.
        async with world(*roles, num_blocks=16, gateway={"max_reserved_kv_tokens": 256}) as w:
            refusals = 0

            async def client(number: int) -> None:
                nonlocal refusals
                request = spec([3 + number] * 40, 24, ignore_eos=True)
                while True:
                    try:
                        answer = await w.ask(request)
                    except HeadraceError as error:
                        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "reserved_kv")
                        refusals += 1
                        assert error.retry_after_s is not None
                        await asyncio.sleep(error.retry_after_s)
                    else:
                        assert answer.tokens == expected(request)
                        return

            await asyncio.gather(*(client(number) for number in range(64)))
            assert refusals > 0
            await w.assert_drained()

    run(main())


def tenant(**limits: object) -> dict[str, object]:
    return {"tenants": {"default": limits}, "kv_bytes_per_token": 10}


REFUSALS = [
    ("tenant_concurrency", 1, tenant(max_concurrent_requests=1), {}),
    ("tenant_kv_bytes", 1, tenant(max_live_kv_bytes=2500), {}),
    ("tenant_rate", 1, tenant(tokens_per_s=0.1, burst_tokens=250), {}),
    ("concurrency", 1, {"max_live_requests": 1}, {}),
    ("queue_full", 2, {"max_waiting_requests": 1}, {}),
    ("waiting_tokens", 2, {"max_waiting_tokens": 45}, {}),
    ("reserved_kv", 2, {"max_reserved_kv_tokens": 485}, {}),
    ("queue_seconds", 2, {"max_queue_s": 1e-6}, {}),
    ("deadline_lost", 1, {"refuse_lost_deadlines": True}, {"max_tokens": 700}),
    ("too_large", 0, {}, {"max_tokens": 800}),
]


@pytest.mark.parametrize(("reason", "holders", "gateway", "options"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_each_limit_refuses_at_both_doors_with_its_reason(
    reason: str, holders: int, gateway: dict[str, object], options: dict[str, object]
) -> None:
    async def main() -> None:
        settings = {"num_blocks": 48, "step_s": 0.01, "max_num_seqs": 1}
        async with world(C, gateway=gateway, **settings) as w, doors(w) as d:  # type: ignore[arg-type]
            registry = CollectorRegistry()
            w.gateway.on_completed = FleetMetrics(w.gateway, registry).ended
            await w.ask(spec([3] * 20, 4, ignore_eos=True))
            tasks = await hold(w, holders)
            before = w.gateway.gate.admission.held
            response = await d.complete({"x-request-timeout-s": "3"}, **options)
            with pytest.raises(HeadraceError) as caught:
                await d.generate(timeout_s=3, **options)
            assert w.gateway.gate.admission.held == before
            error = response.json()["error"]
            assert (error["reason"], caught.value.reason) == (reason, reason)
            assert error["message"] == caught.value.message
            if reason == "too_large":
                assert (response.status_code, caught.value.code) == (400, Code.INVALID_ARGUMENT)
                assert "retry-after" not in response.headers and caught.value.retry_after_s is None
            else:
                assert (response.status_code, caught.value.code) == (429, Code.RESOURCE_EXHAUSTED)
            if reason not in ("too_large", "deadline_lost"):
                assert int(response.headers["retry-after-ms"]) > 0
                assert caught.value.retry_after_s is not None
            counted = f'action="reject",model_name="tiny",reason="{reason}"}} 2.0'
            assert counted in generate_latest(registry).decode()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await w.assert_drained()

    run(main())


def capped(**caps: int) -> dict[str, object]:
    return {"endpoints": {"default": {"max_context_tokens": 900}, "completions": caps, "generate": caps}}


def test_a_context_beyond_the_endpoints_cap_is_refused_with_field_limit_and_value_at_both_doors() -> None:
    async def main() -> None:
        async with world(C, gateway=capped(max_context_tokens=30)) as w, doors(w) as d:
            # 1. together too long: the output's field; a prompt alone too long: the prompt's
            for asked, field, http_field, value in (
                ({"max_tokens": 21}, "max_tokens", "max_tokens", "31"),
                ({"prompt": [5] * 31}, "token_ids", "prompt", "31"),
            ):
                response = await d.complete(**asked)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, http_field)
                assert "endpoint" in error["message"] and "30" in error["message"] and value in error["message"]
                with pytest.raises(HeadraceError) as caught:
                    await asyncio.to_thread(d.grpc.generate, asked.get("prompt", PROMPT), max_tokens=21)
                assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field)
            # 2. what fits is served, and who does not say gets the room that is left
            assert (await d.complete(max_tokens=20)).json()["usage"]["completion_tokens"] == 20
            assert (await d.complete(max_tokens=None)).json()["usage"]["completion_tokens"] == 20
            # 3. another endpoint has the default's cap
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, "ignore_eos": True}
            assert (await d.http.post("/v1/chat/completions", json=body)).status_code == 200
            response = await d.http.post("/v1/chat/completions", json=body | {"max_tokens": 900})
            assert "900" in response.json()["error"]["message"]
            await w.assert_drained()

    run(main())


def test_the_cap_on_uncached_tokens_counts_what_no_worker_has() -> None:
    async def main() -> None:
        async with world(P, D, gateway=capped(max_uncached_tokens=40)) as w, doors(w) as d:
            long = [9] * 96
            # 1. cold: refused, with field, limit and value, at both doors
            response = await d.complete(prompt=long)
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["reason"]) == (400, "prompt", "uncached_tokens")
            assert "96 of its 96" in error["message"] and "at most 40" in error["message"]
            with pytest.raises(HeadraceError) as caught:
                await asyncio.to_thread(d.grpc.generate, long, max_tokens=8)
            assert (caught.value.field, caught.value.reason) == ("token_ids", "uncached_tokens")
            # 2. piece by piece: each call adds no more than the cap to what is cached
            for end in (40, 72, 96):
                assert (await d.complete(prompt=long[:end])).status_code == 200
                await until(lambda end=end: w.gateway.router.index.num_blocks >= end // 16)
            # 3. a call that wants no cache, and a tenant's own salt, have nothing cached
            for opted_out in ({"no_cache": True}, {"cache_salt": "other"}):
                response = await d.complete(prompt=long, **opted_out)
                assert response.json()["error"]["reason"] == "uncached_tokens"
            assert w.gateway.gate.decisions["reject", "uncached_tokens"] == 4
            await w.assert_drained()

    run(main())


def test_a_doubtful_deadline_is_accepted_as_best_effort() -> None:
    async def main() -> None:
        async with world(C, gateway={"refuse_lost_deadlines": True}, step_s=0.01) as w:
            for length in (1, 40, 2, 40, 3, 40, 2):
                await w.ask(spec([3] * length, length, ignore_eos=True))
            [other] = await hold(w, 1)
            await until(lambda: w.gateway.router.table.total == 0)
            # Half a second of decode: nobody is sure of it to the millisecond, whatever the forecast is. With no slack
            # at all, whether it ends in time is chance; that it is let in is not, in a lower class. A busy machine may
            # change the forecast between the look and the call, so there are several tries.
            for _ in range(20):
                request = spec([4] * 30, 50, ignore_eos=True)
                forecast = foreseen(w, request)
                assert forecast is not None and forecast.margin_s > 0
                request = replace(request, deadline_s=forecast.total_s, priority=4)
                doubtful = asyncio.create_task(w.ask(request))
                await until(lambda task=doubtful: task.done() or len(seen(w)()) == 2)
                priorities = sorted(each.priority for each in seen(w)())
                await asyncio.gather(doubtful, return_exceptions=True)
                if len(priorities) == 2:
                    break
            assert priorities == [0, 5]
            assert w.gateway.gate.decisions["accept", "deadline_doubtful"] >= 1
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            await w.assert_drained()

    run(main())


def foreseen(w: World, request: GenerationSpec) -> Forecast | None:
    """Of a request whose length is sure."""
    output, router = request.sampling[0].max_tokens, w.gateway.router
    ask = RouteAsk("", len(request.prompt_ids), (), output, output, may_wait=True)
    return w.gateway.gate.foresight.forecast(router.outlook(ask, asyncio.get_running_loop().time()), output, output)


def test_a_deadline_is_not_lost_because_an_output_might_be_long_or_to_a_request_that_is_alone() -> None:
    async def main() -> None:
        async with world(C, gateway={"refuse_lost_deadlines": True}, step_s=0.01) as w:
            await w.ask(spec([3] * 20, 4, ignore_eos=True))
            # 1. nothing is known of such outputs: max_tokens would take 7 s, a short answer takes none
            [other] = await hold(w, 1)
            request = spec([4] * 10, 700, deadline_s=1.0)
            await asyncio.gather(w.ask(request), return_exceptions=True)
            assert w.gateway.gate.decisions["accept", "deadline_doubtful"] == 1
            # 2. beside another one a request that surely takes 7 s is lost, alone it may try
            sure = spec([4] * 10, 700, ignore_eos=True, deadline_s=0.5)
            with pytest.raises(HeadraceError) as caught:
                await w.ask(sure)
            assert caught.value.reason == "deadline_lost"
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            with pytest.raises(HeadraceError) as alone:
                await w.ask(sure)
            assert alone.value.code is Code.DEADLINE_EXCEEDED
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize("door", ["completions", "chat", "generate"])
def test_every_field_of_a_call_arrives_at_the_worker(door: str) -> None:
    async def main() -> None:
        async with world(C, step_s=0.01) as w, doors(w) as d:
            headers = {"x-headrace-task": "sum/long", "x-headrace-steps-left": "3"}
            body = {"max_tokens": 50, "ignore_eos": True, "priority": -7}
            if door == "generate":
                call = asyncio.create_task(d.generate(max_tokens=50, priority=-7, task="sum/long", steps_left=3))
            elif door == "completions":
                call = asyncio.create_task(d.complete(headers, **body))
            else:
                body["messages"] = [{"role": "user", "content": "hello"}]
                call = asyncio.create_task(d.http.post("/v1/chat/completions", json=body, headers=headers))
            requests = seen(w)
            await until(requests)
            [request] = requests()
            assert (request.tenant, request.priority, request.endpoint) == ("default", -7, door)
            assert (request.task, request.steps_left) == ("sum/long", 3)
            assert request.predicted_output_tokens == 50, "nothing is known yet"
            await call
            await w.assert_drained()

    run(main())


def test_the_prediction_learns_from_what_ended_and_travels() -> None:
    async def main() -> None:
        async with world(C, step_s=0.001) as w:
            short, length = short_answer()
            for _ in range(16):
                await w.ask(short)
            # A stop string that never comes: the output may end early, as far as the gateway knows.
            task = asyncio.create_task(
                w.ask(replace(short, stop=("never",), sampling=spec([3], 900, ignore_eos=True).sampling))
            )
            requests = seen(w)
            await until(requests)
            [request] = requests()
            assert request.predicted_output_tokens == length
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await w.assert_drained()

    run(main())


def short_answer() -> tuple[GenerationSpec, int]:
    """A request that ends by itself after a few tokens, and how many."""
    for first in range(3, 260):
        request = replace(spec([first] * 3, 400), endpoint="chat", task="sum")
        if 2 <= (length := len(expected(request))) < 100:
            return request, length
    raise AssertionError("no prompt has a short answer")

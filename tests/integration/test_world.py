"""A whole deployment in one process: the same tokens in every mode, whatever breaks, and nothing held afterwards."""

from __future__ import annotations

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headrace.core.records import Role
from headrace.errors import Code, HeadraceError
from headrace.v1 import worker_pb2
from router.fleet_metrics import FleetMetrics
from router.session import WorkerSession
from router.worker_metrics import WorkerMetrics
from tests.world import Answer, World, expected, spec, world

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


def run(coroutine: object, timeout_s: float = 60.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await coroutine  # type: ignore[misc]

    asyncio.run(bounded())


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 260) for _ in range(length)]


@pytest.mark.parametrize("policy", ["least_loaded", "cost"])
@pytest.mark.parametrize("roles", [(C,), (P, D), (P, P, D, D), (P, D, C)], ids=str)
def test_every_mode_gives_the_same_tokens(roles: tuple[Role, ...], policy: str) -> None:
    async def main() -> None:
        rng = random.Random(1)
        async with world(*roles, gateway={"routing_policy": policy}) as w:
            for length in (1, 15, 16, 17, 31, 32, 33, 64, 65, 300):
                for options in ({}, {"temperature": 0.8, "seed": 7}, {"min_tokens": 10, "max_tokens": 12}):
                    request = spec(prompt(rng, length), **options)
                    answer = await w.ask(request)
                    assert answer.tokens == expected(request)
                    assert len(answer.finish_reasons) == 1
                    assert answer.usage.completion_tokens == len(answer.tokens)
            await w.assert_drained()

    run(main())


def test_many_at_once_with_shared_prefixes_and_little_memory() -> None:
    async def main() -> None:
        rng = random.Random(2)
        base = prompt(rng, 200)
        async with world(P, D, num_blocks=48) as w:
            requests = [spec(base[: rng.randrange(1, 200)] + prompt(rng, rng.randrange(1, 60)), 24) for _ in range(64)]
            answers = await asyncio.gather(*(w.ask(r) for r in requests))
            for request, answer in zip(requests, answers, strict=True):
                assert answer.tokens == expected(request)
            await w.assert_drained()

    run(main())


def test_one_token_is_one_token_and_needs_no_reader() -> None:
    async def main() -> None:
        async with world(P, D) as w:
            request = spec([5, 6, 7], 1)
            answer = await w.ask(request)
            assert answer.tokens == expected(request) and answer.finish_reasons == ["length"]
            await w.assert_drained()
            assert w.workers["decode-0"].service.status(audit=False).counters.get("handoffs", 0) == 0

    run(main())


@pytest.mark.parametrize("roles", [(C,), (P, D)], ids=str)
def test_clients_that_leave_at_random_moments_leave_nothing_behind(roles: tuple[Role, ...]) -> None:
    async def main() -> None:
        rng = random.Random(3)
        async with world(*roles, step_s=0.002) as w:

            async def client(delay_s: float) -> None:
                request = spec(prompt(rng, rng.randrange(1, 200)), 40)
                try:
                    async with asyncio.timeout(delay_s):
                        await w.ask(request)
                except TimeoutError:
                    pass

            for _ in range(3):
                await asyncio.gather(*(client(rng.uniform(0, 0.4)) for _ in range(50)))
            await w.assert_drained()
            request = spec([9, 8, 7])
            assert (await w.ask(request)).tokens == expected(request)

    run(main())


def test_cut_sessions_resume_without_gap_or_repeat() -> None:
    async def main() -> None:
        rng = random.Random(4)
        async with world(P, D, D, step_s=0.003, gateway={"max_attempts": 50}) as w:
            requests = [spec(prompt(rng, rng.randrange(1, 150)), 40) for _ in range(24)]
            clients = [asyncio.create_task(w.ask(r)) for r in requests]
            cuts = 0
            while not all(c.done() for c in clients) and cuts < 12:
                await asyncio.sleep(rng.uniform(0.02, 0.15))
                rng.choice(w.gateway.fleet.sessions).reset()
                cuts += 1
            for request, client in zip(requests, clients, strict=True):
                assert (await client).tokens == expected(request)
            assert w.gateway.counters.retries > 0, "the cuts must have hit something"
            await w.assert_drained()

    run(main())


def test_sessions_that_workers_end_lose_no_frame() -> None:
    """The gateway comes back on a new stream, and the first frame it sends there must arrive."""

    async def main() -> None:
        rng = random.Random(8)
        async with world(P, D, D, step_s=0.003, gateway={"max_attempts": 50, "default_deadline_s": 30.0}) as w:
            requests = [spec(prompt(rng, rng.randrange(1, 150)), 60) for _ in range(16)]
            clients = [asyncio.create_task(w.ask(r)) for r in requests]
            for _ in range(6):
                await asyncio.sleep(0.1)
                for session in list(w.workers[rng.choice(sorted(w.workers))].hub.sessions):
                    session.overflowed.set()
            for request, client in zip(requests, clients, strict=True):
                assert (await client).tokens == expected(request)
            assert w.gateway.counters.retries > 0
            await w.assert_drained()

    run(main())


def test_a_gateway_that_does_not_read_is_reset_not_waited_for() -> None:
    async def main() -> None:
        async with world(C) as w:
            worker = w.workers["colocated-0"]
            [session] = worker.hub.sessions
            for handle in range(10_000):
                session.put(worker_pb2.SessionResponse(started=worker_pb2.Started(handle=handle)))
            await asyncio.sleep(0.2)
            assert session not in worker.hub.sessions
            request = spec([3, 4, 5])
            await w.connected()
            assert (await w.ask(request)).tokens == expected(request)
            await w.assert_drained()

    run(main())


def test_a_step_longer_than_the_liveness_limit_is_no_death() -> None:
    async def main() -> None:
        async with world(P, D, step_s=3.0, liveness_s=1.0, gateway={"liveness_s": 1.0}) as w:
            request = spec([3, 4, 5], 2)
            answer = await w.ask(request)
            assert answer.tokens == expected(request)
            assert w.gateway.counters.retries == 0
            await w.assert_drained()

    run(main())


def test_a_revoked_lease_makes_a_new_plan_on_one_worker() -> None:
    async def main() -> None:
        async with world(P, D, step_s=0.02) as w:
            request = spec(prompt(random.Random(9), 300), 20, ignore_eos=True, explain=True)
            holder = w.workers["prefill-0"].hub
            client = asyncio.create_task(w.ask(request))
            while not any(e.request.hand_off for e in holder._entries.values()):
                await asyncio.sleep(0.001)
            [entry] = holder._entries.values()
            while not holder.counters["lease_revocations"] and not client.done():
                holder.revoke(entry)
                await asyncio.sleep(0.005)
            assert (await client).tokens == expected(request)
            assert holder.counters["lease_revocations"] == 1 and w.gateway.counters.retries == 1
            await w.assert_drained()

    run(main())


def test_prefill_and_decode_workers_count_a_tenants_service_together() -> None:
    async def main() -> None:
        async with world(P, D) as w:
            first = spec(prompt(random.Random(3), 40), 60, ignore_eos=True)
            await w.ask(first)
            seen = w.gateway.gate.service.service()["t"]
            assert seen == 40 + 2 * 60
            await w.ask(spec(prompt(random.Random(4), 10), 1, ignore_eos=True))
            at_prefill = w.workers["prefill-0"].scheduler.service.service()["t"]
            assert at_prefill >= seen, "the outputs were computed elsewhere"
            await w.assert_drained()

    run(main())


def test_a_stop_string_ends_tokens_text_and_bill_at_one_place() -> None:
    async def main() -> None:
        async with world(C) as w:
            plain = await w.ask(spec([9, 10, 11], 60, ignore_eos=True))
            stop = plain.text[5]
            slow = spec([9, 10, 11], 60, ignore_eos=True, stop=(stop,))
            seen = []
            for pause_s in (0.0, 0.01):
                answer = Answer()
                async for delta in w.gateway.generate(slow):
                    await asyncio.sleep(pause_s)
                    answer.tokens += delta.token_ids
                    answer.text += delta.text
                    answer.usage = delta.usage or answer.usage
                assert answer.text == plain.text[: plain.text.index(stop)]
                assert answer.usage.completion_tokens == len(answer.tokens)
                seen.append(answer.tokens)
            assert seen[0] == seen[1], "a slow reader gets the same"
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_killed_workers_are_survived_by_restart_alone(victim: str) -> None:
    async def main() -> None:
        rng = random.Random(5)
        async with world(P, D, step_s=0.003, gateway={"max_attempts": 50, "max_worker_crashes": 50}) as w:
            requests = [spec(prompt(rng, rng.randrange(1, 150)), 40) for _ in range(16)]
            clients = [asyncio.create_task(w.ask(r)) for r in requests]
            await asyncio.sleep(0.1)
            await w.restart(victim, P if victim.startswith("p") else D)
            for request, client in zip(requests, clients, strict=True):
                assert (await client).tokens == expected(request)
            await w.assert_drained()

    run(main())


def test_a_request_that_crashes_two_workers_ends_with_an_error_not_a_third() -> None:
    async def main() -> None:
        async with world(C, C, C, step_s=0.01) as w:
            client = asyncio.create_task(w.ask(spec([3, 4, 5], 500, ignore_eos=True)))
            killed = []
            while not client.done():
                await asyncio.sleep(0.1)
                for name, worker in list(w.workers.items()):
                    if worker.hub.live_requests:
                        await w.kill(name)
                        killed.append(name)
            with pytest.raises(HeadraceError, match="2 worker crashes") as error:
                await client
            assert error.value.code is Code.ABORTED and len(killed) == 2
            await w.assert_drained()

    run(main())


def test_without_any_worker_the_deadline_decides() -> None:
    async def main() -> None:
        async with world(C, step_s=0.005) as w:
            client = asyncio.create_task(w.ask(spec([3, 4, 5], 300, ignore_eos=True, deadline_s=1.0)))
            await asyncio.sleep(0.2)
            await w.kill("colocated-0")
            w.push_members()
            with pytest.raises(HeadraceError) as error:
                await client
            assert error.value.code is Code.DEADLINE_EXCEEDED

    run(main())


def test_circular_waits_between_two_workers_end_by_revocation() -> None:
    """Each prefills for the other, and both pools are full of blocks that wait for a reader without room."""

    async def main() -> None:
        async with world(C, C, num_blocks=16, step_s=0.001, gateway={"mode": "disaggregated", "max_attempts": 20}) as w:
            rng = random.Random(6)
            requests = [spec(prompt(rng, 150), 60, ignore_eos=True) for _ in range(12)]
            answers = await asyncio.gather(*(w.ask(r) for r in requests))
            for request, answer in zip(requests, answers, strict=True):
                assert answer.tokens == expected(request)
            await w.assert_drained()
            assert sum(worker.hub.counters["lease_revocations"] for worker in w.workers.values()) > 0

    run(main())


def test_ledgers_add_up_for_two_hundred_requests_in_both_modes() -> None:
    async def main(*roles: Role) -> None:
        rng = random.Random(7)
        async with world(*roles, step_s=0.001) as w:

            async def one() -> None:
                request = spec(prompt(rng, rng.randrange(1, 120)), rng.randrange(2, 12), explain=True)
                async for delta in w.gateway.generate(request):
                    if (e := delta.explanation) is not None:
                        assert sum(ms for _, ms in e.to_first_token) == pytest.approx(e.ttft_ms, abs=1.0)
                        both = sum(ms for _, ms in [*e.to_first_token, *e.to_end])
                        assert both == pytest.approx(e.total_ms, abs=1.0)
                        for name, ms in [*e.to_first_token, *e.to_end]:
                            assert ms > -1.0, (name, ms)

            for _ in range(10):
                await asyncio.gather(*(one() for _ in range(20)))
            await w.assert_drained()

    run(main(P, D))
    run(main(C))


def test_metrics_sum_the_ledgers_and_show_each_worker() -> None:
    async def main() -> None:
        async with world(P, D) as w:
            registry = CollectorRegistry()
            w.gateway.on_completed = FleetMetrics(w.gateway, registry).ended
            WorkerMetrics(w.gateway, registry)
            total_ms = 0.0
            for i in range(5):
                async for delta in w.gateway.generate(spec([3 + i] * 40, 6, explain=True)):
                    total_ms += delta.explanation.total_ms if delta.explanation else 0.0
            text = generate_latest(registry).decode()
            stages = [float(x.rsplit(" ", 1)[1]) for x in text.splitlines() if x.startswith("headrace_stage_seconds_t")]
            assert sum(stages) * 1e3 == pytest.approx(total_ms, abs=1.0) and len(stages) == 14
            # The gauge is the worker's last report, which follows the end of its last request.
            idle = 'headrace_num_requests_running{model_name="tiny",pool="decode",worker="decode-0"} 0.0'
            async with asyncio.timeout(2.0):
                while idle not in generate_latest(registry).decode():
                    await asyncio.sleep(0.01)
            assert 'outcome="completed"} 5.0' in text
            await w.assert_drained()

    run(main())


def test_a_planted_leak_is_found_and_named() -> None:
    async def main() -> None:
        async with world(P, D) as w:
            worker = w.workers["prefill-0"]
            leak = worker.pool.alloc(3)
            status = worker.service.status(audit=True)
            assert status.used_blocks == 3 and "differ" in status.integrity_error
            worker.pool.decref(leak)
            await w.assert_drained()

    run(main())


def test_a_refused_request_leaves_the_next_one_alone() -> None:
    async def main(w: World) -> None:
        with pytest.raises(HeadraceError, match="max_tokens") as error:
            await w.ask(spec([3] * 500, 600))
        assert error.value.code is Code.INVALID_ARGUMENT
        request = spec([3, 4])
        assert (await w.ask(request)).tokens == expected(request)
        await w.assert_drained()

    async def both() -> None:
        async with world(P, D, num_blocks=32) as w:
            await main(w)

    run(both())


def test_nobody_is_sent_to_a_worker_whose_session_broke_while_it_is_asked_whether_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The question may take seconds. Each placement there failed at once and cost an attempt, until none was left."""

    async def main() -> None:
        answered = asyncio.Event()

        async def takes_its_time(*_: object) -> bool:
            await answered.wait()
            return True

        monkeypatch.setattr(WorkerSession, "_alive", takes_its_time)
        async with world(C, C, gateway={"max_attempts": 1}) as w:
            broken = w.gateway.fleet.sessions[0]
            broken.reset()
            while broken.connected:
                await asyncio.sleep(0.001)
            requests = [spec(prompt(random.Random(i), 20), 4) for i in range(6)]
            answers = await asyncio.gather(*(w.ask(request) for request in requests))
            assert [answer.tokens for answer in answers] == [expected(request) for request in requests]
            answered.set()
            await w.connected()
            await w.assert_drained()

    run(main())

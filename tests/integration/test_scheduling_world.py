"""A whole deployment in one process: each pool's own scheduler, bounds of a worker's queue, and what metrics say."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.fairness import ServiceWeights
from headrace.core.records import Role
from headrace.errors import Code, HeadraceError
from router.fleet_metrics import FleetMetrics
from router.worker_metrics import WorkerMetrics
from tests.world import World, expected, spec, world
from workers.core.settings import SchedulingOptions

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


def run(coroutine: object, timeout_s: float = 60.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await coroutine  # type: ignore[misc]

    asyncio.run(bounded())


class Scraped:
    """Samples by name and worker, or by name, worker and one more label."""

    def __init__(self, text: str) -> None:
        self._samples: dict[tuple[str, ...], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = [v for k, v in sample.labels.items() if k not in ("model_name", "pool")]
                self._samples[sample.name, *sorted(labels)] = sample.value

    def __getitem__(self, key: tuple[str, ...]) -> float:
        return self._samples[(f"headrace_{key[0]}", *sorted(key[1:]))]


async def scrape(w: World) -> Scraped:
    registry = CollectorRegistry()
    FleetMetrics(w.gateway, registry)
    metrics = WorkerMetrics(w.gateway, registry)
    await metrics.refresh()
    return Scraped(generate_latest(registry).decode())


def test_each_pool_schedules_by_its_own_settings() -> None:
    async def main() -> None:
        by_role: dict[Role, dict[str, object]] = {
            P: {
                "scheduling": SchedulingOptions(policy="deadline", chunk_mode="fixed"),
                "long_prefill_token_threshold": 8,
            },
            D: {"scheduling": SchedulingOptions(policy="fcfs"), "swap_bytes": 128 * 16 * 8},
        }
        async with world(P, D, by_role=by_role) as w:
            request = spec([5] * 40, 6, ignore_eos=True)
            assert (await w.ask(request)).tokens == expected(request)
            await w.assert_drained()
            at = {name: worker.service.status(audit=False) for name, worker in w.workers.items()}
            assert [at[name].policy for name in ("prefill-0", "decode-0")] == ["deadline", "fcfs"]
            assert [at[name].host_blocks for name in ("prefill-0", "decode-0")] == [0, 128]
            metrics = await scrape(w)
            # 40 tokens of prompt in chunks of 8; the decode worker computes the five tokens after the first.
            assert metrics["prefill_chunk_tokens_bucket", "prefill-0", "8.0"] == 5
            assert metrics["partial_prefills_total", "prefill-0"] == 4
            assert metrics["scheduled_prefill_tokens_total", "prefill-0"] == 40
            assert metrics["scheduled_decode_tokens_total", "decode-0"] == 5
            assert metrics["scheduled_prefill_tokens_total", "decode-0"] == 0

    run(main())


def test_metrics_tell_what_a_scheduler_did() -> None:
    async def main() -> None:
        service = ServiceWeights(tenants={"t": 2.0})
        options = {"num_blocks": 12, "step_s": 0.003, "swap_bytes": 128 * 64, "service": service}
        async with world(C, gateway={"service": service}, **options) as w:  # type: ignore[arg-type]
            for _ in range(64):
                w.gateway.gate.lengths.observe("", "t", "", 2, capped=False)
            # Three that are let in for short outputs, and grow to 5 blocks of 16 each: they cannot all stay.
            alike = (spec([7 + i] * 20, 50) for i in range(100))
            requests = [r for r in alike if len(expected(r)) == 50][:3]
            answers = await asyncio.gather(*(w.ask(r) for r in requests))
            assert [a.tokens for a in answers] == [expected(r) for r in requests]
            await w.assert_drained()
            metrics = await scrape(w)
            counters = w.workers["colocated-0"].scheduler.counters
            assert counters["preemptions"] > 0 and counters["swapped_out"] > 0
            for name, key in (
                ("preemptions", "preemptions"),
                ("swapped_out_requests", "swapped_out"),
                ("swapped_in_requests", "swapped_in"),
                ("recomputed_tokens", "recomputed_tokens"),
                ("deadline_lost_requests", "deadline_lost"),
            ):
                assert metrics[f"{name}_total", "colocated-0"] == counters[key], name
            engine = w.workers["colocated-0"].engine
            for name in ("step_seconds", "schedule_seconds", "apply_seconds"):
                assert metrics[f"{name}_count", "colocated-0"] == engine.steps
                assert metrics[f"{name}_bucket", "+Inf", "colocated-0"] == engine.steps
            assert metrics["step_seconds_sum", "colocated-0"] >= metrics["schedule_seconds_sum", "colocated-0"] > 0
            predicted = metrics["step_predicted_seconds_count", "colocated-0"]
            assert 0 < predicted < engine.steps and predicted == metrics["step_time_ratio_count", "colocated-0"]
            samples = metrics["predictor_samples", "colocated-0"]
            assert 32 <= samples <= engine.steps
            # What is weighed is 20 tokens of prompt and 50 of output that count double, by a share of 2.
            assert metrics["tenant_service", "t"] == 3 * (20 + 2 * 50) / 2
            # The worker counts a token at the end of a prefill with that prefill.
            assert metrics["worker_tenant_service", "colocated-0", "t"] == pytest.approx(180, rel=0.05)
            assert metrics["host_kv_blocks", "colocated-0"] == metrics["host_kv_free_blocks", "colocated-0"] == 64
            assert metrics["reserved_kv_tokens", "colocated-0"] == 0
            assert metrics["queue_predicted_seconds", "colocated-0"] == 0

    run(main())


@pytest.mark.parametrize("roles", [(C, C), (C,)], ids=str)
def test_requests_given_up_for_others_end_like_all_others(roles: tuple[Role, ...]) -> None:
    """Also where the worker's spec promises another one that is not there (any more)."""

    async def main() -> None:
        scheduling = SchedulingOptions(route_when_preempted=True, policy="decode_first")
        options = {"num_blocks": 16, "step_s": 0.002, "scheduling": scheduling, "long_prefill_token_threshold": 2}
        async with world(*roles, **options) as w:  # type: ignore[arg-type]
            for worker in w.workers.values():
                worker.scheduler._pause_s = 1.0  # who was preempted here before has waited long
            for _ in range(64):
                w.gateway.gate.lengths.observe("", "t", "", 2, capped=False)
            grow = [spec([7 + i] * 10, 100) for i in range(3 * len(roles))]
            long = [spec([40 + i] * 120, 4) for i in range(2 * len(roles))]
            answers = await asyncio.gather(*(w.ask(r) for r in [*grow, *long]))
            assert [a.tokens for a in answers] == [expected(r) for r in [*grow, *long]]
            assert sum(worker.scheduler.counters["routed"] for worker in w.workers.values()) > 0
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"max_waiting_requests": 1}, "queue_full"), ({"max_reserved_kv_tokens": 300}, "reserved_kv")],
    ids=["queue_full", "reserved_kv"],
)
def test_a_full_worker_refuses_with_reason_and_time_and_metrics_count_it(
    options: dict[str, object], reason: str
) -> None:
    async def main() -> None:
        async with world(C, max_num_seqs=1, step_s=0.005, **options) as w:  # type: ignore[arg-type]
            # Two run or wait: beyond that the worker refuses, and there is no other.
            tasks = [asyncio.create_task(w.ask(spec([5 + i] * 20, 200, ignore_eos=True))) for i in range(6)]
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [e for e in ended if isinstance(e, HeadraceError)]
            assert refused and len(refused) < len(tasks)
            for error in refused:
                assert error.code is Code.RESOURCE_EXHAUSTED
                assert error.retry_after_s is not None and error.retry_after_s > 0
            metrics = await scrape(w)
            assert metrics["worker_refusals_total", "colocated-0", reason] == len(refused)
            await w.assert_drained()

    run(main())


def test_a_dead_worker_has_no_samples_and_many_scrapes_ask_once() -> None:
    async def main() -> None:
        async with world(C, C) as w:
            now = 100.0
            registry = CollectorRegistry()
            metrics = WorkerMetrics(w.gateway, registry, clock=lambda: now)
            asked = 0
            accounts = w.gateway.fleet.accounts

            async def counted(timeout_s: float, audit: bool) -> object:
                nonlocal asked
                asked += 1
                return await accounts(timeout_s, audit)

            w.gateway.fleet.accounts = counted  # type: ignore[method-assign, assignment]
            await asyncio.gather(*(metrics.refresh() for _ in range(20)))
            assert asked == 1
            assert 'worker="colocated-1"' in generate_latest(registry).decode()
            await w.kill("colocated-1")
            w.push_members()
            now += 1.0
            await metrics.refresh()
            text = generate_latest(registry).decode()
            assert asked == 2
            assert 'worker="colocated-0"' in text and 'worker="colocated-1"' not in text

    run(main())


def test_tenants_in_an_account_are_bounded() -> None:
    async def main() -> None:
        async with world(C) as w:
            worker = w.workers["colocated-0"]
            for number in range(100):
                worker.scheduler.service.charge_input(worker.scheduler.service.enter(f"t{number}"), number)
            told = worker.service.status(audit=False).tenant_service
            assert len(told) == 32 and told["t99"] == 99.0 and "t0" not in told

    run(main())

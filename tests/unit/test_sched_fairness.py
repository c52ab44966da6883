"""Fairness between tenants (SPEC B11): VTC's bound on the gap in service, in virtual time.

Two tenants have work all the time; one's prompts are 100 times as long. The pool is small beside all the service, so
that the bound says something: 2 * max(w_p * L, w_q * M) with prompts of at most L = 1,000 tokens and M = 4,096 tokens
of KV is 16,384.
"""

from __future__ import annotations

from functools import cache

import pytest

from bench.simulate.report import service, service_gap
from bench.simulate.scenarios import INPUT_WEIGHT, OUTPUT_WEIGHT
from bench.simulate.worker import Run, VirtualWorker, default_cost, settings_of
from bench.simulate.workload import Job
from headrace.core.fairness import ServiceCounters, ServiceWeights

LONG, SHORT, ANSWER = 1_000, 10, 64
NUM_BLOCKS, BLOCK_TOKENS = 256, 16
BOUND = 2 * max(INPUT_WEIGHT * LONG, OUTPUT_WEIGHT * NUM_BLOCKS * BLOCK_TOKENS)
HORIZON_S = 200.0


def run(policy: str, jobs: list[Job], *, until_s: float = HORIZON_S, **tenants: float) -> Run:
    """`tenants`: weights of those that have another one than 1."""
    weights = ServiceWeights(INPUT_WEIGHT, OUTPUT_WEIGHT, tenants=tenants)
    settings = settings_of(
        max_num_batched_tokens=256,
        max_num_seqs=16,
        long_prefill_token_threshold=256,
        max_model_len=4_096,
        policy=policy,
    )
    worker = VirtualWorker(settings, NUM_BLOCKS, default_cost, service=ServiceCounters(weights))
    return worker.run(jobs, until_s=until_s)


def work(tenant: str, prompt: int, count: int, at_s: float = 0.0) -> list[Job]:
    return [Job(at_s, prompt, ANSWER, tenant=tenant)] * count


def curves(run_: Run, since_s: float = 0.0) -> tuple[list[float], list[float]]:
    """Service of the long and of the short tenant after each step from `since_s` on; both have work to the end."""
    for tenant in ("long", "short"):
        asked = [outcome for outcome in run_.outcomes if outcome.job.tenant == tenant]
        assert any(outcome.scheduled_at is None for outcome in asked)
    steps = [step for step in run_.steps if step.begin_s >= since_s]
    return (
        service(steps, "long", INPUT_WEIGHT, OUTPUT_WEIGHT),
        service(steps, "short", INPUT_WEIGHT, OUTPUT_WEIGHT),
    )


@cache
def backlogged(policy: str, long_weight: float = 1.0) -> tuple[list[float], list[float]]:
    alternating = [job for _ in range(150) for job in (*work("long", LONG, 1), *work("short", SHORT, 1))]
    return curves(run(policy, alternating + work("short", SHORT, 800), long=long_weight))


@pytest.mark.parametrize("policy", ["fair", "slo_fair"])
def test_the_gap_between_two_backlogged_tenants_is_bounded(policy: str) -> None:
    long, short = backlogged(policy)
    gap = service_gap(long, short)
    assert gap <= BOUND
    # Each has had four times the bound by then, so that it did not hold by itself.
    assert min(long[-1], short[-1]) > 2 * BOUND


def test_without_fairness_the_gap_grows_with_time() -> None:
    long, short = backlogged("fcfs")
    assert service_gap(long, short) > 2 * BOUND
    assert long[-1] > 5 * short[-1]


def test_a_tenant_of_twice_the_weight_gets_twice_the_service() -> None:
    long, short = backlogged("fair", 2.0)
    assert service_gap([served / 2 for served in long], short) <= BOUND
    assert long[-1] / short[-1] == pytest.approx(2.0, rel=0.1)


def test_a_tenant_that_comes_back_cannot_claim_what_it_did_not_use() -> None:
    # The short tenant has one request at the start and is then idle for 100 s, while the other is served alone.
    jobs = [*work("short", SHORT, 1), *work("long", LONG, 150), *work("short", SHORT, 800, at_s=100.0)]
    run_ = run("fair", jobs)
    before, _ = curves(run_, 0.0)
    long, short = curves(run_, 100.0)
    alone = before[-1] - long[-1]
    assert alone > 2 * BOUND
    assert service_gap(long, short) <= BOUND
    assert long[-1] > 0.8 * short[-1]


def test_a_newcomer_does_not_wait_until_old_debts_are_even() -> None:
    # Nor does somebody who had a lot long ago pay for it once the others have come and gone.
    jobs = [*work("long", LONG, 40), *work("short", SHORT, 800, at_s=120.0), *work("long", LONG, 150, at_s=120.0)]
    long, short = curves(run("fair", jobs), 120.0)
    assert service_gap(long, short) <= BOUND

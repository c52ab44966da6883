"""Nobody starves (SPEC B5): each guard is a number, and each test fails without it. In virtual time.

The machine takes the same time for each token of a step; streams of short requests have no end but the run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from bench.simulate.worker import Outcome, Run, VirtualWorker, settings_of
from bench.simulate.workload import Job
from headrace.core.slo import itl_s, percentile, ttft_s
from tests.core_world import linear_cost, linear_predictor

STREAM_S = 20.0


def run(jobs: Sequence[Job], token_s: float, **changes: object) -> Run:
    values: dict[str, object] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 32,
        "long_prefill_token_threshold": 64,
        "max_model_len": 4_096,
        "ttft_target_s": 0.0,
    }
    predictor = linear_predictor(token_s) if "itl_target_s" in changes else None
    worker = VirtualWorker(settings_of(**(values | changes)), 4_096, linear_cost(token_s), predictor=predictor)
    return worker.run(jobs)


def first_token_s(outcome: Outcome) -> float:
    ttft = ttft_s(outcome.timeline)
    assert ttft is not None
    return ttft


def stream(prompt: int, every_s: float, first_s: float = 0.0, until_s: float = STREAM_S) -> list[Job]:
    """Requests for one token each."""
    return [Job(first_s + n * every_s, prompt, 1) for n in range(int((until_s - first_s) / every_s))]


# ---- shares of a step


def long_prompt_beside_decodes(decodes: int, prompt: int, **changes: object) -> tuple[float, Run]:
    """Seconds until the first token of a prompt that comes while `decodes` requests make 400 tokens each, 4 ms a
    token."""
    run_ = run([*(Job(0.0, 1, 400) for _ in range(decodes)), Job(3.0, prompt, 1)], 0.004, **changes)
    assert all(timeline.completed for timeline in run_.timelines)
    return first_token_s(run_.outcomes[-1]), run_


def test_a_share_of_each_step_s_tokens_is_for_prefills() -> None:
    tokens: dict[str, object] = {"max_num_batched_tokens": 32}
    alone, _ = long_prompt_beside_decodes(31, 200, min_prefill_share=0.0, **tokens)
    shared, _ = long_prompt_beside_decodes(31, 200, min_prefill_share=0.25, **tokens)
    # One token a step is left, or eight.
    assert alone > 200 * 32 * 0.004
    assert shared < 0.2 * alone


def test_a_share_of_each_step_s_time_is_for_prefills_when_decodes_alone_take_more_than_all_of_it() -> None:
    starved, run_ = long_prompt_beside_decodes(30, 200, min_prefill_share=0.0, itl_target_s=0.1)
    assert starved > 0.9 * run_.end_s - 3.0
    served, _ = long_prompt_beside_decodes(30, 200, min_prefill_share=0.5, itl_target_s=0.1)
    assert served < 5.0


def test_a_cap_on_decode_rows_leaves_time_for_prefills() -> None:
    guards: dict[str, object] = {"min_prefill_share": 0.0, "itl_target_s": 0.1}
    starved, run_ = long_prompt_beside_decodes(30, 200, max_decode_rows=0, **guards)
    assert starved > 0.9 * run_.end_s - 3.0
    served, run_ = long_prompt_beside_decodes(30, 200, max_decode_rows=15, **guards)
    assert served < 5.0
    assert max(step.shape.decode_rows for step in run_.steps) == 15


def test_a_decode_that_others_pass_over_has_a_deadline_for_its_next_token() -> None:
    def longest_pause(next_token_deadline_s: float) -> float:
        jobs = [*(Job(0.0, 1, 400, priority=-1) for _ in range(2)), Job(0.0, 1, 20)]
        done = run(jobs, 0.01, max_decode_rows=2, next_token_deadline_s=next_token_deadline_s)
        return max(itl_s(done.timelines[2].token_times))

    assert longest_pause(0.0) > 7.0
    assert longest_pause(0.5) < 0.6


# ---- order


def test_age_outweighs_a_long_prompt_in_the_end() -> None:
    jobs = [Job(5.0, 1_000, 1), *stream(16, 0.014)]
    ttft = {
        boost: first_token_s(run(jobs, 0.001, policy="aging", max_num_seqs=8, age_boost_ms_per_s=boost).outcomes[0])
        for boost in (0.0, 100.0)
    }
    assert 5.0 + ttft[0.0] > STREAM_S
    assert ttft[100.0] < 14.0


@pytest.mark.parametrize("off", [{"ttft_target_s": 0.0}, {"urgency_horizon_s": 0.0}])
def test_a_first_token_that_is_due_soon_goes_first(off: dict[str, object]) -> None:
    jobs = [Job(0.001, 500, 1), *stream(20, 0.018)]
    guards: dict[str, object] = {"policy": "slo_fair", "max_num_seqs": 4, "age_boost_ms_per_s": 10.0}
    on: dict[str, object] = {"ttft_target_s": 4.0, "urgency_horizon_s": 1.0}
    assert first_token_s(run(jobs, 0.001, **guards, **on).outcomes[0]) <= 4.0
    assert first_token_s(run(jobs, 0.001, **guards, **(on | off)).outcomes[0]) > 4.0


def test_a_nearly_complete_prefill_is_completed_before_shorter_ones_start() -> None:
    jobs = [Job(0.0, 128, 1), *stream(32, 0.03, first_s=0.01, until_s=5.0)]
    ttft = {
        boost: first_token_s(
            run(jobs, 0.001, policy="slo_fair", age_boost_ms_per_s=0.0, nearly_complete_boost_ms=boost).outcomes[0]
        )
        for boost in (0.0, 500.0)
    }
    assert ttft[0.0] > 4.0
    assert ttft[500.0] < 0.2


# ---- what a rescue may not do


def test_a_rescued_prefill_does_not_push_decodes_over_their_target() -> None:
    # Decodes alone take 100 of 102 ms: there is no token for the prompt in a step that holds the target.
    ttft, run_ = long_prompt_beside_decodes(25, 60, min_prefill_share=0.5, itl_target_s=0.102)
    assert ttft < run_.end_s - 3.0
    gaps = [gap for timeline in run_.timelines[:-1] for gap in itl_s(timeline.token_times)]
    held = percentile(gaps, 0.95)
    assert held is not None and held <= 0.102
    # It is no lucky mean over a long run: nor do they while the prompt is under way.
    during = [step.end_s - step.begin_s for step in run_.steps if 3.0 <= step.begin_s <= 3.0 + ttft]
    assert sum(step > 0.102 for step in during) <= 0.05 * len(during)


@pytest.mark.parametrize("seed", range(3))
def test_a_rescue_of_first_tokens_costs_nobody_a_first_token_in_time(seed: int) -> None:
    rng = Random(seed)
    at, jobs = 0.0, []
    for _ in range(400):
        prompt = rng.choice((20, 20, 20, 20, 600))
        at += rng.expovariate(1.0) * 136 * 0.001 / 0.85
        jobs.append(Job(at, prompt, 1))
    guards: dict[str, object] = {"policy": "slo_fair", "max_num_seqs": 8, "age_boost_ms_per_s": 10.0}
    before = run(jobs, 0.001, ttft_target_s=2.0, urgency_horizon_s=0.0, **guards)
    after = run(jobs, 0.001, ttft_target_s=2.0, urgency_horizon_s=1.0, **guards)
    late_before = {i for i, outcome in enumerate(before.outcomes) if first_token_s(outcome) > 2.0}
    late_after = {i for i, outcome in enumerate(after.outcomes) if first_token_s(outcome) > 2.0}
    assert len(late_after) < len(late_before)
    assert not late_after - late_before

"""The virtual worker: its clock, its accounts and its workloads. The scheduler in it is the production one."""

import gzip
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from bench.simulate import workload
from bench.simulate.worker import EOS, Run, VirtualWorker, default_cost, gpu_cost
from bench.simulate.workload import Job
from headrace.core.predictor import StepShape
from headrace.core.records import FinishReason
from headrace.core.slo import ttft_s
from tests.core_world import make_settings
from workers.core.scheduler import SchedulerSettings


def a_second_a_token(shape: StepShape) -> float:
    return float(shape.decode_rows + shape.prefill_tokens)


def simulated(jobs: Sequence[Job], num_blocks: int = 200, sigma: float = 0.0, seed: int = 0, **settings: object) -> Run:
    worker = VirtualWorker(make_settings(**settings), num_blocks, a_second_a_token, sigma=sigma, seed=seed)
    run = worker.run(jobs)
    assert worker.pool.used_blocks == 0
    load = worker.scheduler.load(0, run.end_s)
    assert (load.waiting_requests, load.waiting_tokens, load.running_requests) == (0, 0, 0)
    return run


def many(seed: int = 1, count: int = 60, **options: object) -> list[Job]:
    rng = Random(seed)
    lengths = workload.mixed(short=(6, 9), long=(60, 12), long_share=0.2)
    return workload.make(rng, workload.poisson(rng, 0.05, count), lengths, **options)  # type: ignore[arg-type]


def test_two_requests_by_hand() -> None:
    # 1. At 2 the prompt of A (4 tokens) runs alone until 6; B comes at 3 and has to wait for that.
    # 2. From 6 until 12: A's second token and B's five prompt tokens.
    # 3. From 12 until 14: A's third and last token, B's second.
    run = simulated([Job(2.0, 4, 3, tenant="a"), Job(3.0, 5, 2, tenant="b")])
    a, b = run.timelines
    assert (a.token_times, a.ended_at, a.reason) == ([6.0, 12.0, 14.0], 14.0, FinishReason.LENGTH)
    assert (b.token_times, b.ended_at, b.reason) == ([12.0, 14.0], 14.0, FinishReason.LENGTH)
    assert (ttft_s(a), ttft_s(b)) == (4.0, 9.0)
    assert [outcome.scheduled_at for outcome in run.outcomes] == [2.0, 6.0]
    assert [(step.begin_s, step.end_s) for step in run.steps] == [(2.0, 6.0), (6.0, 12.0), (12.0, 14.0)]
    assert [step.shape for step in run.steps] == [
        StepShape(0, 0, 1, 4, 8, 1),
        StepShape(1, 5, 1, 5, 12, 2),
        StepShape(2, 12, 0, 0, 0, 2),
    ]
    assert [step.input_tokens for step in run.steps] == [{"a": 4}, {"b": 5}, {}]
    assert [step.output_tokens for step in run.steps] == [{"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1}]


def test_a_hidden_length_ends_with_eos_at_the_same_instants() -> None:
    told = simulated(many())
    hidden = simulated(many(declared_max_tokens=40))
    assert [t.token_times for t in hidden.timelines] == [t.token_times for t in told.timelines]
    assert {t.reason for t in told.timelines} == {FinishReason.LENGTH}
    assert {t.reason for t in hidden.timelines} == {FinishReason.EOS}


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_every_request_ends_once_and_all_tokens_add_up(num_blocks: int) -> None:
    jobs = many()
    run = simulated(jobs, num_blocks)
    assert [outcome.job for outcome in run.outcomes] == jobs
    for job, timeline in zip(jobs, run.timelines, strict=True):
        assert timeline.completed
        assert len(timeline.token_times) == job.output_tokens
        assert timeline.prefilled_tokens + timeline.cached_tokens == job.prompt_tokens
    # What steps say they computed is what requests got: each output token but the first costs one more token.
    computed = sum(step.shape.decode_rows + step.shape.prefill_tokens for step in run.steps)
    prefilled = sum(timeline.prefilled_tokens for timeline in run.timelines)
    decoded = sum(job.output_tokens - 1 for job in jobs)
    recomputed = sum(timeline.recomputed_tokens for timeline in run.timelines)
    assert computed == prefilled + decoded + recomputed
    assert sum(sum(step.input_tokens.values()) for step in run.steps) == prefilled
    assert sum(sum(step.output_tokens.values()) for step in run.steps) == sum(job.output_tokens for job in jobs)
    assert (run.stats["preemptions"] > 0) == (recomputed > 0) == (num_blocks == 24)


def test_one_seed_gives_one_run_and_another_seed_another() -> None:
    first, again, other = (simulated(many(), sigma=0.3, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first.end_s != other.end_s


def test_virtual_time_never_goes_back_and_steps_do_not_overlap() -> None:
    run = simulated(many(), sigma=0.5, seed=3)
    assert all(step.begin_s < step.end_s for step in run.steps)
    assert all(before.end_s <= after.begin_s for before, after in zip(run.steps, run.steps[1:], strict=False))
    for outcome in run.outcomes:
        assert outcome.scheduled_at is not None
        assert outcome.job.at_s <= outcome.scheduled_at
        times = list(outcome.timeline.token_times)
        assert times == sorted(times)
    assert run.end_s == run.steps[-1].end_s


def test_a_refused_request_says_why_and_costs_nothing() -> None:
    run = simulated([Job(0.0, 4, 2), Job(0.0, 2_000, 2)])
    assert [outcome.refused for outcome in run.outcomes] == ["", "too_long"]
    assert (run.timelines[1].reason, run.timelines[1].prefilled_tokens) == (None, 0)


def test_a_passed_deadline_ends_a_request_at_the_end_of_its_step() -> None:
    run = simulated([Job(1.0, 4, 50, deadline_s=6.5)])
    (timeline,) = run.timelines
    assert (timeline.reason, timeline.deadline, timeline.ended_at) == (FinishReason.DEADLINE, 7.5, 8.0)


def test_a_run_may_stop_before_its_requests_end() -> None:
    worker = VirtualWorker(make_settings(), 100, a_second_a_token)
    run = worker.run([Job(0.0, 4, 50), Job(1e6, 4, 50)], until_s=10.0)
    assert run.end_s == 10.0
    assert [timeline.reason for timeline in run.timelines] == [None, None]
    assert len(run.timelines[0].token_times) == 7


def test_shared_pieces_of_a_prompt_are_found_in_the_cache() -> None:
    jobs = [Job(0.0, 600, 1, pieces=(7, 8)), Job(1_000.0, 700, 1, pieces=(7, 9))]
    run = simulated(jobs, 400)
    assert [timeline.cached_tokens for timeline in run.timelines] == [0, 512]
    assert [timeline.prefilled_tokens for timeline in run.timelines] == [600, 188]


def test_a_scheduler_that_never_runs_anything_is_an_error_not_a_hang() -> None:
    worker = VirtualWorker(make_settings(), 100, a_second_a_token)
    worker.scheduler.schedule = lambda now: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="1 requests wait and nothing runs"):
        worker.run([Job(0.0, 4, 4)])


@pytest.mark.parametrize("cost", [default_cost, gpu_cost])
def test_a_step_with_more_work_is_never_cheaper(cost) -> None:  # type: ignore[no-untyped-def]
    rows = [cost(StepShape(n, 100 * n, 0, 0, 0)) for n in range(1, 1_000)]
    chunks = [cost(StepShape(8, 800, 1, n, n * n // 2)) for n in range(1, 5_000, 7)]
    assert rows == sorted(rows)
    assert chunks == sorted(chunks)


def test_the_cpu_costs_what_was_measured() -> None:
    stack = [default_cost(StepShape(rows, 0, 0, 0, 0)) for rows in (1, 4, 8, 32, 512)]
    assert stack == pytest.approx([0.028, 0.074, 0.081, 0.120, 0.685])


# ---- workloads


def test_arrivals_keep_their_rate_and_their_shape() -> None:
    steady = workload.poisson(Random(1), 4.0, 4_000)
    assert steady == sorted(steady)
    assert 4_000 / steady[-1] == pytest.approx(4.0, rel=0.1)
    rising = workload.ramp(Random(1), 1.0, 9.0, 100.0, 500)
    assert sum(at < 50.0 for at in rising) == pytest.approx(150, rel=0.25)
    assert sum(50.0 <= at < 100.0 for at in rising) == pytest.approx(350, rel=0.25)
    bursts = workload.burst(Random(1), 1.0, 100, every_s=10.0, size=20)
    assert len(bursts) == 100
    assert bursts.count(10.0) == bursts.count(20.0) == 20


def test_lengths_are_drawn_together() -> None:
    draw = workload.lognormal(200, 50, 1.0, most=4_000, correlation=1.0)
    rng = Random(2)
    pairs = sorted(draw(rng) for _ in range(2_000))
    assert [output for _, output in pairs] == sorted(output for _, output in pairs)
    assert pairs[1_000][0] == pytest.approx(200, rel=0.1)
    assert all(1 <= prompt <= 4_000 for prompt, _ in pairs)


def test_tenants_and_priorities_come_by_weight() -> None:
    tenants = workload.skewed(3, 1.0)
    assert tenants == pytest.approx({"t0": 1.0, "t1": 1 / 2, "t2": 1 / 3})
    rng = Random(3)
    lengths = workload.mixed((5, 5), (50, 5), 0.1)
    jobs = workload.make(rng, [0.0] * 3_000, lengths, tenants=tenants, priorities={0: 3, 5: 1}, deadline_s=2.0)
    assert sum(job.tenant == "t0" for job in jobs) == pytest.approx(3_000 * 6 / 11, rel=0.1)
    assert sum(job.priority == 5 for job in jobs) == pytest.approx(750, rel=0.1)
    assert {job.deadline_s for job in jobs} == {2.0}


def test_recorded_traces_of_both_formats_keep_their_instants_and_lengths(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "a.csv.gz", tmp_path / "m.jsonl.gz"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [f"2023-11-16 18:15:4{n}.5000000,{100 + n},{n}" for n in range(4)]
    azure.write_bytes(gzip.compress("\n".join(rows).encode()))
    line = '{"timestamp": %d, "input_length": 700, "output_length": 9, "hash_ids": [0, %d]}\n'
    mooncake.write_bytes(gzip.compress("".join(line % (1_500 * n, n) for n in range(3)).encode()))
    assert workload.trace(azure, 2, first=1, speed=2.0) == [Job(0.0, 101, 1), Job(0.5, 102, 2)]
    assert workload.trace(mooncake, 9)[2] == Job(3.0, 700, 9, pieces=(0, 2))


def test_ids_that_the_worker_gives_out_mean_what_they_should() -> None:
    settings: SchedulerSettings = make_settings()
    assert settings.eos_token_ids == (EOS,)

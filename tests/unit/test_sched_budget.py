"""Batching (SPEC B1), chunks (B2), and the budgets of a step and of memory (B3, B8), in virtual time.

The time budget is judged on a machine that `headrace profile` has measured: `tests/fixtures/step_profile.json`, with
its date and machine, whose quantiles are how much a step of the same shape varied.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

import pytest

from bench.simulate import workload
from bench.simulate.report import Row
from bench.simulate.scenarios import CPU, Load, batching, budget, chunks, measured
from bench.simulate.worker import VirtualWorker, settings_of
from headrace.core.predictor import Profile
from tests.core_world import World, linear_cost, make_settings
from workers.core.request import Request, State
from workers.core.settings import Batching

PROFILE = Path(__file__).parents[1] / "fixtures" / "step_profile.json"
TARGET_MS = 250.0


# ---- B1


def test_continuous_beats_window_beats_static() -> None:
    static, window, continuous = batching(Load(CPU, requests=150)).rows
    assert float(continuous["out tok/s"]) > float(window["out tok/s"]) > float(static["out tok/s"])
    assert float(continuous["ttft p99"]) < 0.5 * float(window["ttft p99"])
    assert float(window["ttft p99"]) < 0.8 * float(static["ttft p99"])
    # With everybody there from the start there is nothing to wait for, but rows stay empty until the longest has ended.
    assert float(continuous["offline out tok/s"]) > 1.05 * float(window["offline out tok/s"])


def starts(batching_: Batching, arrivals: list[float]) -> list[float]:
    """When each of the requests starts, on a worker of four rows whose window is a second; a request takes 5 s."""
    settings = make_settings(batching=batching_, batch_window_s=1.0, max_num_seqs=4)
    worker = VirtualWorker(settings, 200, lambda _: 1.0)
    run = worker.run([workload.Job(at, 3, 5) for at in arrivals])
    return [round(outcome.scheduled_at or 0.0, 1) for outcome in run.outcomes]


def test_when_a_batch_begins() -> None:
    # 1. Two come, two more while they would run, then nobody.
    arrivals = [0.0, 0.5, 3.0, 4.0, 20.0]
    assert starts(Batching.CONTINUOUS, arrivals) == [0.0, 1.0, 3.0, 4.0, 20.0]
    assert starts(Batching.WINDOW, arrivals) == [1.0, 1.0, 6.0, 6.0, 21.0]
    # 2. A full batch starts at once, a part of one after ten windows without an arrival.
    assert starts(Batching.STATIC, arrivals) == [4.0, 4.0, 4.0, 4.0, 30.0]


# ---- B2


def test_the_chunk_curve_has_two_ends() -> None:
    rows = {row["chunk"]: row for row in chunks(Load(CPU, requests=80)).rows}
    small, middle, unlimited = rows["16"], rows["32"], rows["unlimited"]
    assert float(small["ttft p99"]) > 2 * float(unlimited["ttft p99"])
    assert float(unlimited["itl p99"]) > 2 * float(small["itl p99"])
    assert float(middle["goodput/s"]) > max(float(small["goodput/s"]), float(unlimited["goodput/s"]))


# ---- B3


@cache
def budgets() -> dict[tuple[str, str], Row]:
    machine = measured(Profile.from_json(PROFILE.read_bytes()))
    table = budget(Load(machine, requests=100))
    return {(str(row["load"]), str(row["budget"])): row for row in table.rows}


@pytest.mark.parametrize("load", ["mix", "burst"])
def test_a_time_budget_holds_its_target_at_the_quantile_that_it_is_made_for(load: str) -> None:
    assert float(budgets()[load, "250 ms at p95"]["itl p95"]) <= TARGET_MS
    surest = budgets()[load, "250 ms at p99"]
    assert float(surest["itl p95"]) <= TARGET_MS
    assert float(surest["itl p99"]) <= TARGET_MS
    assert float(surest["late %"]) <= 2.0


@pytest.mark.parametrize("load", ["mix", "burst"])
def test_a_median_guards_no_percentile(load: str) -> None:
    assert float(budgets()[load, "250 ms at p50"]["itl p95"]) > TARGET_MS


@pytest.mark.parametrize("load", ["mix", "burst"])
@pytest.mark.parametrize("tokens", [128, 256, 512, 1_024, 2_048])
def test_fixed_token_budgets_miss_the_target(load: str, tokens: int) -> None:
    fixed, surest = budgets()[load, f"{tokens} tokens"], budgets()[load, "250 ms at p99"]
    assert float(fixed["itl p99"]) > 2 * TARGET_MS
    assert float(fixed["late %"]) > 30.0
    assert float(surest["goodput/s"]) > float(fixed["goodput/s"])


# ---- B8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chunk_mode", ["fixed", "bucketed", "adaptive"])
def test_no_step_exceeds_its_tokens_its_rows_or_the_memory(seed: int, chunk_mode: str) -> None:
    rng = Random(seed)
    lengths = workload.mixed((20, 30), (200, 60), 0.3)
    jobs = workload.make(
        rng, workload.burst(rng, 2.0, 60, every_s=5.0, size=12), lengths, priorities={0: 3, -1: 1},
        declared_max_tokens=100,
    )  # fmt: skip
    settings = settings_of(
        max_num_batched_tokens=48, max_num_seqs=8, long_prefill_token_threshold=40, max_model_len=512,
        chunk_mode=chunk_mode, ttft_target_s=2.0,
    )  # fmt: skip
    worker = VirtualWorker(settings, 40, linear_cost(0.005), seed=seed)
    run = worker.run(jobs)
    assert all(timeline.completed for timeline in run.timelines)
    for step in run.steps:
        assert step.shape.decode_rows + step.shape.prefill_tokens <= 48
        assert step.shape.decode_rows + step.shape.prefill_rows <= 8
        # What decodes read is resident; blocks of 16 may have room left, never too little.
        assert step.shape.decode_context <= 40 * 16
    assert run.stats["preemptions"] > 0
    assert worker.pool.used_blocks == 0


def beside_a_running_one(prompt: int, **changes: object) -> tuple[World, Request, Request]:
    """A request that holds six blocks of ten and decodes, and one that has just come."""
    world = World(make_settings(**changes), num_blocks=10)
    running = world.submit(20, max_tokens=4)
    world.step()
    assert len(running.block_ids) == 6
    return world, running, world.submit(prompt, max_tokens=1)


def test_tokens_to_spare_start_nobody_without_memory() -> None:
    world, _, waiting = beside_a_running_one(16, max_num_batched_tokens=64)
    world.step()
    assert waiting.state is State.WAITING
    world.run()
    assert waiting.state is State.FINISHED
    world.assert_drained()


def test_memory_to_spare_starts_nobody_without_tokens() -> None:
    world = World(make_settings(max_num_batched_tokens=8, long_prefill_token_threshold=8), num_blocks=100)
    first, second = world.submit(16, max_tokens=1), world.submit(4, max_tokens=1)
    world.step()
    assert (first.state, second.state) == (State.PREFILLING, State.WAITING)
    world.run()
    world.assert_drained()


def test_growth_that_is_expected_of_running_requests_is_memory_that_is_taken() -> None:
    for predicted, state in ((0, State.FINISHED), (40, State.WAITING)):
        world = World(make_settings(), num_blocks=12)
        world.submit(4, max_tokens=40, predicted_output_tokens=predicted)
        world.step()
        waiting = world.submit(16, max_tokens=1)
        world.step()
        assert waiting.state is state
        world.run()
        world.assert_drained()

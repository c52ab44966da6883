"""A queue of steps over a runner that only runs: order, fed tokens, lists that grow meanwhile, errors."""

from __future__ import annotations

import threading

import pytest

from headrace.ids import RequestKey
from headrace.sampling import SamplingParams
from workers.core.plan import StepPlan, StepResult
from workers.runner.threaded import Inline, Threaded, step_queue

PENALIZED = SamplingParams(max_tokens=9, repetition_penalty=1.5)


class Seen:
    """Waits for `go` in each step and keeps what it was given; samples 100 + row."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        assert self.go.acquire(timeout=10)
        if plan.step_id < 0:
            raise ValueError("planted")
        self.plans.append(plan)
        return StepResult([100 + row for row in range(len(plan.keys))])


class Queue(Seen):
    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult:
        return StepResult([])


def step(step_id: int, token_ids: list[int], tables: list[list[int]], histories: list[list[int] | None]) -> StepPlan:
    rows = len(token_ids)
    return StepPlan(
        step_id,
        [RequestKey(row) for row in range(rows)],
        [1] * rows,
        [4] * rows,
        token_ids,
        list(tables),
        [True] * rows,
        [PENALIZED] * rows,
        [()] * rows,
        list(histories),
        [2] * rows,
        num_decode_rows=rows,
    )


@pytest.mark.parametrize("is_taken_in", [False, True])
def test_a_row_gets_the_token_of_the_step_before_and_its_history_ends_with_it(is_taken_in: bool) -> None:
    """Whether or not the step before is applied by then, and whatever else grows."""
    runner = Seen()
    queue = Threaded(runner)  # type: ignore[arg-type]
    tables, history = [[1], [2], [3]], [1, 2, 3, 4]
    queue.submit(step(1, [4, 5, 6], tables, [None, [9] * 5, None]))
    behind = step(2, [-3, 8, -1], tables, [history, [9] * 5, None])
    queue.submit(behind)
    runner.go.release()
    assert queue.collect().token_ids == [100, 101, 102]
    if is_taken_in:
        history.append(102)
    tables[0].append(7)
    runner.go.release()
    queue.collect()
    ran = runner.plans[1]
    assert ran.token_ids == [102, 8, 100]
    assert ran.histories == [[1, 2, 3, 4, 102], [9] * 5, None]
    assert ran.block_tables == [[1], [2], [3]]
    assert behind.token_ids == [-3, 8, -1], "the scheduler's plan is not changed"


def test_an_error_of_a_step_comes_when_it_is_collected() -> None:
    runner = Seen()
    queue = Threaded(runner)  # type: ignore[arg-type]
    queue.submit(step(-1, [4], [[1]], [None]))
    runner.go.release()
    with pytest.raises(ValueError, match="planted"):
        queue.collect()


def test_auto_overlaps_where_the_runner_is_a_queue_itself() -> None:
    plain, device = Seen(), Queue()
    kinds = {name: step_queue(plain, name) for name in ("auto", "on", "off")}  # type: ignore[arg-type]
    assert [type(kinds[name]) for name in ("auto", "on", "off")] == [Inline, Threaded, Inline]
    assert step_queue(device, "auto") is step_queue(device, "on") is device  # type: ignore[arg-type]
    assert type(step_queue(device, "off")) is Inline  # type: ignore[arg-type]

"""The engine thread: what it tells and when, and that no wake-up is lost between planning and waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.ids import RequestKey
from workers.core.plan import StepEvents, StepPlan, StepResult
from workers.engine import Engine


class _Scheduler:
    """Gives out as many plans as it was given work."""

    def __init__(self, work: int) -> None:
        self.work = work
        self.calls: list[str] = []
        self.started: list[RequestKey] = []
        self.predicted_s = 0.5
        self.look_s: float | None = None
        self.refused: list[tuple[RequestKey, str]] = []
        self.paused: list[tuple[RequestKey, str]] = []

    def schedule(self, now: float) -> StepPlan | None:
        self.calls.append("schedule")
        if not self.work:
            return None
        self.work -= 1
        return StepPlan(0)

    def next_look(self, now: float) -> float | None:
        return None if self.look_s is None else now + self.look_s

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> StepEvents:
        self.calls.append("apply")
        return StepEvents()


class _Runner:
    def run(self, plan: StepPlan) -> StepResult:
        return StepResult([])


class _Sink:
    def __init__(self, scheduler: _Scheduler) -> None:
        self.scheduler = scheduler
        self.told = 0
        self.on_told: Callable[[], None] = lambda: None

    def step_began(self, keys: Sequence[RequestKey]) -> None: ...

    def step_ended(self, events: StepEvents) -> None:
        self.told += 1
        self.scheduler.calls.append("tell")
        self.on_told()


def _engine(work: int, **options: Any) -> tuple[Engine, _Scheduler, _Sink]:
    scheduler: Any = _Scheduler(work)
    sink = _Sink(scheduler)
    runner: Any = _Runner()
    return Engine(scheduler, runner, sink, **options), scheduler, sink


def test_a_step_is_told_when_the_next_one_is_planned() -> None:
    engine, scheduler, sink = _engine(2)
    while engine.step():
        pass
    assert scheduler.calls == ["schedule", "apply", "schedule", "tell", "apply", "schedule", "tell"]
    assert sink.told == 2


def test_stopping_tells_the_last_step() -> None:
    engine, _, sink = _engine(1_000_000)
    engine.start()
    while sink.told < 3:
        time.sleep(0.001)
    engine.stop()
    assert sink.told == engine.steps


def test_a_wake_while_the_last_events_are_told_is_not_lost() -> None:
    """It comes after the scheduler had nothing to do and before the thread waits: it must not wait then."""
    engine, scheduler, sink = _engine(1)
    rounds, ended = 50, threading.Event()

    def new_work() -> None:
        if sink.told == rounds:
            ended.set()
            return
        with engine.lock:
            scheduler.work = 1
            engine.wake()

    sink.on_told = new_work
    engine.start()
    # Each lost wake-up would cost the waiting time of 0.2 s.
    assert ended.wait(timeout=rounds * 0.1)
    engine.stop()


def test_a_worker_that_waits_looks_again_when_a_batch_is_to_begin() -> None:
    """Nobody wakes it then: the window of a batch ends by itself."""
    engine, scheduler, _ = _engine(0)
    waits = []
    for scheduler.look_s in (None, 0.05, 5.0, -1.0):
        waits.append(round(engine._patience_s(), 3))
    assert waits == [0.2, 0.05, 0.2, 0.001]


def test_with_overlap_the_next_step_is_planned_before_the_last_one_is_applied() -> None:
    engine, scheduler, _ = _engine(3, overlap="on")
    while engine.step():
        pass
    # 1. two plans  2. each further one behind the older of two  3. what is left is applied
    plan, apply = "schedule", ["apply", "schedule", "tell"]
    assert scheduler.calls == [plan, plan, *apply, *apply, *apply]


def test_a_step_lasts_from_the_end_of_the_one_before_it() -> None:
    now = [0.0]

    class Device(_Runner):
        def submit(self, plan: StepPlan) -> None: ...

        def collect(self) -> StepResult:
            now[0] += 5.0
            return StepResult([])

    class Planner(_Scheduler):
        def schedule(self, now_s: float) -> StepPlan | None:
            now[0] += 1.0
            return super().schedule(now_s)

    scheduler: Any = Planner(3)
    device: Any = Device()
    engine = Engine(scheduler, device, _Sink(scheduler), clock=lambda: now[0], overlap="auto")
    engine.step()
    ages, lasted = [], []
    while engine.step():
        ages.append(engine.step_age_s)
        lasted.append(engine.last_step_s)
    assert lasted == [6.0, 6.0, 6.0]
    assert ages == [0.0, 0.0, 0.0] and not engine.hung and engine._step_began is None
    assert engine.stats.histograms["step_seconds"].total == 19.0, "the first one's planning, and all that came behind"


def test_stopping_applies_what_is_under_way() -> None:
    engine, scheduler, sink = _engine(1_000_000, overlap="on")
    engine.start()
    while sink.told < 3:
        time.sleep(0.001)
    engine.stop()
    assert sink.told == engine.steps == scheduler.calls.count("apply") == 1_000_000 - scheduler.work

"""The engine thread: plan, run, apply. It owns the runner; the scheduler is shared under a lock never held while
running. With overlap a step is planned while the one before it runs, and applied while the one behind it does.

What a step meant is told to the event loop only when the next one is planned: telling wakes the loop's thread, which
then works while the kernels run without the interpreter's lock, instead of keeping that lock from the planning.

Whoever changes the scheduler's state from outside takes `lock` and calls `wake()`. A broken invariant ends the process
(DESIGN law 8): a worker that may be wrong must not go on.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.clock import Clock, monotonic
from headrace.ids import RequestKey
from headrace.process import EXIT_BROKEN
from workers.core.plan import StepEvents, StepPlan, StepResult
from workers.core.request import Keep
from workers.core.scheduler import Scheduler
from workers.runner.base import Runner
from workers.runner.threaded import Inline, step_queue
from workers.step_stats import StepStats

log = logging.getLogger("headrace.workers.engine")

IDLE_S = 0.2
MIN_WAIT_S = 0.001
"""A batch that is due and does not begin (blocks are short) must not keep a core busy."""
WATCHDOG_FLOOR_S = 60.0
WATCHDOG_STEPS = 50
"""A step may last this many times the longest one so far before the engine counts as hung."""


class StepSink(Protocol):
    """Called on the engine thread."""

    def step_began(self, keys: Sequence[RequestKey]) -> None:
        """Requests that are computed for the first time in the step that begins now."""

    def step_ended(self, events: StepEvents) -> None: ...

    def refused(self, refusals: Sequence[tuple[RequestKey, str]]) -> None:
        """Requests that the scheduler has ended without a step, and why."""

    def paused(self, paused: Sequence[tuple[RequestKey, Keep]]) -> None:
        """Requests that wait for a tool now; all their tokens have been told."""


@dataclass(slots=True)
class _UnderWay:
    """A step that is begun, or behind one that is."""

    plan: StepPlan
    since: float
    """When it was planned; when the step before it was over."""
    predicted_s: float
    schedule_s: float


class Engine:
    """Runs steps while there is work. `overlap`: on | off | auto, see `workers.runner.threaded.step_queue`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sink: StepSink,
        clock: Clock = monotonic,
        overlap: str = "off",
    ) -> None:
        self.lock = threading.RLock()
        self.steps = 0
        self.last_step_s = 0.0
        self.last_schedule_s = 0.0
        """The host's part before a step, and after it."""
        self.last_apply_s = 0.0
        self.stats = StepStats()
        self._scheduler = scheduler
        self._runner = runner
        self._queue = step_queue(runner, overlap)
        self.overlaps = not isinstance(self._queue, Inline)
        self._sink = sink
        self._clock = clock
        self._wake = threading.Condition(self.lock)
        self._under_way: deque[_UnderWay] = deque()
        """Oldest first."""
        self._started: Sequence[RequestKey] = ()
        """First computed in the step that has begun last; not told yet."""
        self._step_began: float | None = None
        self._longest_step_s = 0.0
        self._stopping = False
        self._woken = False
        self._untold: StepEvents | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There may be work. The caller holds `lock`."""
        self._woken = True
        self._wake.notify()

    def stop(self) -> None:
        """Ends the thread after the steps under way."""
        with self.lock:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def step(self) -> bool:
        """One iteration; False when there was nothing to run. Tells what the last step that is over meant."""
        plan = self.begin()
        if plan is not None:
            self._queue.submit(plan)
            if self.overlaps and len(self._under_way) == 1:
                return True  # what comes behind it is planned before anybody waits for it
        if self._under_way:
            self.end(self._under_way[0].plan, self._queue.collect())
            return True
        return False

    def begin(self) -> StepPlan | None:
        """What to run now, with the lock given back; `end` must follow, in the order of the plans. None: nothing."""
        with self.lock:
            self._woken = False
            planned = self._clock()
            plan = self._scheduler.schedule(planned)
            self.last_schedule_s = self._clock() - planned
            if plan is not None:
                if not self._under_way:
                    self._started = self._scheduler.started
                predicted_s = self._scheduler.predicted_s
                self._under_way.append(_UnderWay(plan, planned, predicted_s, self.last_schedule_s))
            refused, self._scheduler.refused = self._scheduler.refused, []
            paused, self._scheduler.paused = self._scheduler.paused, []
        self._tell()
        if refused:
            self._sink.refused(refused)
        if paused:
            self._sink.paused(paused)
        started, self._started = self._started, ()
        if started:
            self._sink.step_began(started)
        if self._step_began is None and plan is not None:
            self._step_began = self._clock()
        return plan

    def end(self, plan: StepPlan, result: StepResult) -> None:
        """The oldest step has run."""
        step = self._under_way.popleft()
        with self.lock:
            ended = self._clock()
            events = self._scheduler.apply(plan, result, ended)
            self.last_apply_s = self._clock() - ended
            self.stats.add(
                plan,
                predicted_s=step.predicted_s,
                step_s=ended - step.since,
                schedule_s=step.schedule_s,
                apply_s=self.last_apply_s,
            )
            if self._under_way:
                self._under_way[0].since = ended
                self._started = self._scheduler.started
        self.last_step_s = self.step_age_s
        self._step_began = ended if self._under_way else None
        self._longest_step_s = max(self._longest_step_s, self.last_step_s)
        self.steps += 1
        self._untold = events

    def _tell(self) -> None:
        events, self._untold = self._untold, None
        if events is not None:
            self._sink.step_ended(events)

    def now(self) -> float:
        return self._clock()

    @property
    def step_age_s(self) -> float:
        """Seconds since the running step began; 0 when idle."""
        began = self._step_began
        return 0.0 if began is None else max(self._clock() - began, 0.0)

    @property
    def hung(self) -> bool:
        """The watchdog's verdict: far beyond any step seen, and never before a minute (DESIGN law 9)."""
        return self.step_age_s > max(WATCHDOG_FLOOR_S, WATCHDOG_STEPS * self._longest_step_s)

    def _patience_s(self) -> float:
        """How long to wait for a wake-up: not beyond the instant at which a batch begins by itself."""
        now = self._clock()
        look = self._scheduler.next_look(now)
        return IDLE_S if look is None else min(IDLE_S, max(look - now, MIN_WAIT_S))

    def _main(self) -> None:
        try:
            while not self._stopping:
                if not self.step():
                    with self.lock:
                        # Somebody may have woken it since it planned: telling lets the event loop run.
                        if not (self._stopping or self._woken):
                            self._wake.wait(timeout=self._patience_s())
            while self._under_way:
                self._tell()
                self.end(self._under_way[0].plan, self._queue.collect())
            self._tell()
        except Exception:
            log.exception("engine_broken steps=%d", self.steps)
            os._exit(EXIT_BROKEN)

"""What one iteration costs the host: the production scheduler at steady state, with a runner that answers at once.

Real time, unlike the rest of this folder. All rows decode; each that ends is replaced by a waiting request and that one
by a new arrival, so that rows and queue stay as they are while requests start, grow by blocks and finish. `catch up` is
what a worker's other thread does while the next step runs. Python's garbage collector is off while steps are timed: a
collection walks all waiting requests and would be counted against whichever call it falls into.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import count
from random import Random
from time import perf_counter_ns

from bench.simulate.report import Row, Table, render
from bench.simulate.worker import BLOCK_SIZE, FILLER, Unsupported, request_of, settings_of
from bench.simulate.workload import Job
from headrace.core.slo import percentile
from workers.core.blocks import BlockPool
from workers.core.plan import StepResult
from workers.core.prefix_cache import PrefixCache
from workers.core.scheduler import Scheduler, SchedulerSettings

PROMPT_TOKENS = 16
OUTPUT_TOKENS = ((64, 192), (512, 1_536))
"""Shortest and longest answer of a table: what a step costs depends on how many requests start and end in it."""
WARM_STEPS, STEPS = 250, 400
STEP_S = 0.02
"""Of the clock that the scheduler is told."""


class Host:
    """A worker with `num_waiting` requests behind `max_num_seqs` full rows."""

    def __init__(
        self, settings: SchedulerSettings, num_waiting: int, seed: int, answers: tuple[int, int] = OUTPUT_TOKENS[0]
    ) -> None:
        self._answers = answers
        blocks = settings.max_num_seqs * -(-(PROMPT_TOKENS + answers[1]) // BLOCK_SIZE)
        pool = BlockPool(2 * blocks, BLOCK_SIZE)
        self._scheduler = Scheduler(settings, pool, PrefixCache(pool))
        self._random = Random(seed)
        self._numbers = count(1)
        self._now = 0.0
        self.nanoseconds: dict[str, list[int]] = {"submit": [], "schedule": [], "apply": [], "catch up": []}
        self.rows = 0
        """Of all steps together."""
        for _ in range(settings.max_num_seqs + num_waiting):
            self._arrive()

    def steps(self, number: int) -> int:
        """Run and time them. Returns how many requests ended."""
        scheduler, spent, ended = self._scheduler, self.nanoseconds, 0
        for _ in range(number):
            began = perf_counter_ns()
            plan = scheduler.schedule(self._now)
            spent["schedule"].append(perf_counter_ns() - began)
            if plan is None:
                raise RuntimeError("nothing runs")
            self.rows += plan.num_rows
            result = StepResult([FILLER] * sum(plan.samples))
            self._now += STEP_S
            began = perf_counter_ns()
            events = scheduler.apply(plan, result, self._now)
            spent["apply"].append(perf_counter_ns() - began)
            began = perf_counter_ns()
            scheduler.catch_up()
            spent["catch up"].append(perf_counter_ns() - began)
            for _ in events.finished:
                self._arrive()
            ended += len(events.finished)
        return ended

    def _arrive(self) -> None:
        job = Job(self._now, PROMPT_TOKENS, self._random.randint(*self._answers))
        request = request_of(job, next(self._numbers))
        began = perf_counter_ns()
        rejected = self._scheduler.submit(request, self._now)
        self.nanoseconds["submit"].append(perf_counter_ns() - began)
        if rejected is not None:
            raise RuntimeError(f"a request was refused: {rejected.reason}")


def measure(
    max_num_seqs: int, num_waiting: int, seed: int, answers: tuple[int, int] = OUTPUT_TOKENS[0], **changes: object
) -> Row:
    """`changes`: further fields of SchedulerSettings. Raises Unsupported for an unknown one."""
    values: dict[str, object] = {
        "max_num_batched_tokens": 2 * max_num_seqs * PROMPT_TOKENS,
        "max_num_seqs": max_num_seqs,
        "long_prefill_token_threshold": 2_048,
        "max_model_len": 4_096,
    }
    host = Host(settings_of(**(values | changes)), num_waiting, seed, answers)
    gc.collect()
    gc.disable()
    try:
        host.steps(WARM_STEPS)
        host.rows = 0
        for spent in host.nanoseconds.values():
            spent.clear()
        ended = host.steps(STEPS)
    finally:
        gc.enable()
    row: Row = {"rows": host.rows / STEPS, "waiting": num_waiting, "ended/step": ended / STEPS}
    for name, spent in host.nanoseconds.items():
        for share in (0.5, 0.99):
            row[f"{name} p{share * 100:g} us"] = (percentile(spent, share) or 0) / 1e3
    return row


def run(rows: Sequence[int], waiting: Sequence[int], seed: int, policy: str | None = None) -> None:
    """Print every number of rows with the shortest queue, and every queue with the most rows."""
    most, shortest = max(rows), min(waiting)
    pairs = [(few, shortest) for few in sorted(rows) if few < most] + [(most, queue) for queue in sorted(waiting)]
    changes = {} if policy is None else {"policy": policy}
    for answers in OUTPUT_TOKENS:
        note = (
            f"real microseconds a step over {STEPS} steps after {WARM_STEPS} to warm up, garbage collector off; "
            f"prompts of {PROMPT_TOKENS}, answers of {answers[0]}-{answers[1]} tokens, blocks of {BLOCK_SIZE}"
        )
        try:
            measured = [measure(few, queue, seed, answers, **changes) for few, queue in pairs]
        except Unsupported as error:
            raise SystemExit(f"not possible here: {error}") from error
        print(f"\n{render(Table('host', note, measured))}")

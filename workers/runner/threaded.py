"""A queue of steps over a runner that only has `run`: in a thread of its own, or without overlap in the caller's."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from workers.core.plan import StepPlan, StepResult
from workers.runner.base import Runner, StepQueue


class Inline:
    """Without overlap: the step runs when it is collected."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See `StepQueue.submit`."""
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """See `StepQueue.collect`."""
        return self._runner.run(self._plans.popleft())


class Threaded:
    """With overlap: one thread runs the steps, and puts in what the step before has sampled. The runner is that
    thread's from the first step on."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runner")
        self._results: deque[Future[StepResult]] = deque()
        self._sampled: list[int] = []
        """By the step before; that thread's."""

    def submit(self, plan: StepPlan) -> None:
        """See `StepQueue.submit`."""
        self._results.append(self._thread.submit(self._run, held(plan)))

    def collect(self) -> StepResult:
        """See `StepQueue.collect`."""
        return self._results.popleft().result()

    def _run(self, plan: StepPlan) -> StepResult:
        result = self._runner.run(fed(plan, self._sampled))
        self._sampled = result.token_ids
        return result


def step_queue(runner: Runner, overlap: str) -> StepQueue:
    """`overlap`: on | off | auto, which is on where the runner itself is a queue."""
    if overlap == "off" or (overlap == "auto" and not isinstance(runner, StepQueue)):
        return Inline(runner)
    return runner if isinstance(runner, StepQueue) else Threaded(runner)


def held(plan: StepPlan) -> StepPlan:
    """The plan with lists that do not grow."""
    histories = [
        None if history is None else history[: start + count]
        for history, start, count in zip(plan.histories, plan.start_pos, plan.num_tokens, strict=False)
    ]
    return replace(plan, block_tables=[list(table) for table in plan.block_tables], histories=histories)


def fed(plan: StepPlan, sampled: list[int]) -> StepPlan:
    """The plan with the tokens of the step before; decode rows, whose places are those of their tokens, have them."""
    token_ids, histories = list(plan.token_ids), list(plan.histories)
    for row in range(plan.num_decode_rows):
        if (place := token_ids[row]) < 0:
            token_ids[row] = sampled[-1 - place]
            if (history := histories[row]) is not None:
                histories[row] = [*history[: plan.start_pos[row]], token_ids[row]]
    return replace(plan, token_ids=token_ids, histories=histories)

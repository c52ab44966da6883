"""One worker on a virtual clock: the production scheduler, block pool and prefix cache; only steps are not computed.

A step lasts what an injected cost function says of its shape; requests arrive while it runs, and what it yields counts
at its end. Nothing sleeps, and one seed gives one run. Costs that chance disturbs are the caller's wish (`sigma`).

Does not: charge for copies of blocks, or for the scheduler's own time (`bench.simulate.host` measures that).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from math import exp, inf
from random import Random

from bench.simulate.workload import PIECE_TOKENS, Job
from headrace.core.fairness import ServiceCounters
from headrace.core.predictor import StepPredictor, StepShape
from headrace.core.records import FinishReason
from headrace.core.slo import Timeline
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from workers.core.blocks import BlockPool
from workers.core.plan import StepPlan, StepResult
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request
from workers.core.scheduler import Scheduler, SchedulerSettings

Cost = Callable[[StepShape], float]
"""Seconds that a step of this shape lasts."""

FILLER, EOS = 1, 0
BLOCK_SIZE = 16
POLL_S = 1e-3
"""How often a scheduler that lets requests wait on purpose is asked again."""
MOST_POLLS = 100_000

_CPU_ROWS = (1, 4, 8, 32, 512)
_CPU_SECONDS = (0.028, 0.074, 0.081, 0.120, 0.685)
_CPU_SLOPES = [
    (after - before) / (more - fewer)
    for before, after, fewer, more in zip(_CPU_SECONDS, _CPU_SECONDS[1:], _CPU_ROWS, _CPU_ROWS[1:], strict=False)
]


def default_cost(shape: StepShape) -> float:
    """A small CPU, in the order of the project's 2-core machine.

    The stack's 28 / 74 / 81 / 120 / 685 ms at 1 / 4 / 8 / 32 / 512 rows (DESIGN, "Predictor"), linear in between and
    beyond; attention 4 us a token of a decode's context (450 ms for 64 rows up to 3,000) and 1 us a pair in prefill,
    whose tiles share what they read.
    """
    rows = shape.decode_rows + shape.prefill_tokens
    below = min(max(bisect_right(_CPU_ROWS, rows) - 1, 0), len(_CPU_SLOPES) - 1)
    stack = _CPU_SECONDS[below] + _CPU_SLOPES[below] * (rows - _CPU_ROWS[below])
    return stack + 4e-6 * shape.decode_context + 1e-6 * shape.prefill_context


def gpu_cost(shape: StepShape) -> float:
    """A large GPU with an 8B model: reading 16 GB of weights costs 6 ms and hides up to 256 tokens, then computing
    takes over at 0.02 ms a token; a decode reads 128 KiB of KV a token of context at 3 TB/s (44 ns), prefill attention
    takes 1.3 ns a pair. A model of the shape of the curve, not of one device.
    """
    tokens = shape.decode_rows + shape.prefill_tokens
    stack = 6e-3 + 2e-5 * max(0, tokens - 256)
    return stack + 44e-9 * shape.decode_context + 1.3e-9 * shape.prefill_context


def shape_of(plan: StepPlan) -> StepShape:
    """A token attends to itself: a decode at position p has a context of p + 1."""
    decodes = plan.num_decode_rows
    chunks = list(zip(plan.start_pos[decodes:], plan.num_tokens[decodes:], strict=True))
    return StepShape(
        decode_rows=decodes,
        decode_context=sum(plan.start_pos[:decodes]) + decodes,
        prefill_rows=len(chunks),
        prefill_tokens=sum(num for _, num in chunks),
        prefill_context=sum(num * start + num * num // 2 for start, num in chunks),
        sampled_rows=sum(plan.samples),
    )


class Unsupported(Exception):
    """The scheduler in this tree lacks what was asked for."""


def settings_of(**values: object) -> SchedulerSettings:
    """Settings without bounds on queues or memory reserves but for `values`. Raises Unsupported for an unknown one."""
    unknown = values.keys() - {known.name for known in fields(SchedulerSettings)}
    if unknown:
        raise Unsupported(f"SchedulerSettings has no {', '.join(sorted(unknown))}")
    unbounded: dict[str, object] = {
        "block_size": BLOCK_SIZE,
        "max_waiting_requests": 10**9,
        "max_waiting_tokens": 10**12,
        "watermark_blocks": 0,
        "eos_token_ids": (EOS,),
    }
    return SchedulerSettings(**(unbounded | values))  # type: ignore[arg-type]


@dataclass(slots=True)
class Step:
    begin_s: float
    end_s: float
    shape: StepShape
    input_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens computed for the first time, by tenant."""
    output_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """What became of one job. `timeline` is the server's variant, in virtual seconds."""

    job: Job
    timeline: Timeline
    scheduled_at: float | None = None
    """Its first row in a step began."""
    refused: str = ""
    """The scheduler's reason code."""


@dataclass(frozen=True, slots=True)
class Run:
    outcomes: list[Outcome]
    """In the order in which the jobs were given."""
    steps: list[Step]
    end_s: float
    stats: dict[str, int]
    """The scheduler's counters."""

    @property
    def timelines(self) -> list[Timeline]:
        return [outcome.timeline for outcome in self.outcomes]


@dataclass(slots=True)
class _Live:
    """A request that is on the worker."""

    outcome: Outcome
    request: Request
    token_times: list[float] = field(default_factory=list)
    seen: int = 0
    """Leading tokens that were computed, or found in the cache, at least once."""
    prefilled: int = 0
    recomputed: int = 0


class Stepper:
    """A scheduler whose steps last what `cost` says. It has no clock: `begin`, and `scheduler.apply` at `Step.end_s`.

    `predictor` and `service` go to the scheduler as they are.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        num_blocks: int,
        cost: Cost = default_cost,
        *,
        sigma: float = 0.0,
        ratios: Sequence[float] = (),
        seed: int = 0,
        predictor: StepPredictor | None = None,
        service: ServiceCounters | None = None,
    ) -> None:
        """`sigma`: spread of the logarithm of a factor that each step's cost is multiplied with.
        `ratios`: further such factors, one drawn for each step; a profile's quantiles are a measured machine's noise.
        """
        self.pool = BlockPool(num_blocks, settings.block_size)
        self.cache = PrefixCache(self.pool)
        self.scheduler = Scheduler(settings, self.pool, self.cache, predictor, service)
        self._cost = cost
        self._sigma = sigma
        self._ratios = ratios
        self._random = Random(seed)

    def begin(self, now: float) -> tuple[StepPlan, Step] | None:
        """The next step; None when there is nothing to compute now."""
        plan = self.scheduler.schedule(now)
        if plan is None:
            return None
        shape = shape_of(plan)
        return plan, Step(now, now + (self._seconds(shape) if plan.keys else 0.0), shape)

    def _seconds(self, shape: StepShape) -> float:
        factor = exp(self._random.gauss(0.0, self._sigma)) if self._sigma else 1.0
        if self._ratios:
            factor *= self._random.choice(self._ratios)
        return self._cost(shape) * factor


class VirtualWorker(Stepper):
    """Serves a list of jobs alone. Runs once."""

    def __init__(
        self,
        settings: SchedulerSettings,
        num_blocks: int,
        cost: Cost = default_cost,
        *,
        sigma: float = 0.0,
        ratios: Sequence[float] = (),
        seed: int = 0,
        predictor: StepPredictor | None = None,
        service: ServiceCounters | None = None,
    ) -> None:
        """As for Stepper."""
        super().__init__(
            settings, num_blocks, cost, sigma=sigma, ratios=ratios, seed=seed, predictor=predictor, service=service
        )
        self._live: dict[RequestKey, _Live] = {}
        self._steps: list[Step] = []
        self._polls = 0

    def run(self, jobs: Sequence[Job], until_s: float = inf) -> Run:
        """Everything until the last job has ended, or until the first step that ends at or after `until_s`.

        Raises RuntimeError when requests wait and nothing ever runs.
        """
        outcomes = [Outcome(job, Timeline(job.at_s)) for job in jobs]
        coming = deque(sorted(enumerate(outcomes, 1), key=lambda item: item[1].job.at_s))
        now = 0.0
        while (coming or self._live) and now < until_s:
            self._take_in(coming, now)
            self.scheduler.expire(now)
            begun = self.begin(now)
            self._notice_ends(now)
            if begun is None:
                now = self._idle_until(coming, now)
                continue
            plan, step = begun
            self._take_in(coming, step.end_s)
            self._end(step, plan)
            now = step.end_s
        for live in list(self._live.values()):
            self._close(live, None, now)
        return Run(outcomes, self._steps, now, self.scheduler.stats())

    def _take_in(self, coming: deque[tuple[int, Outcome]], until: float) -> None:
        while coming and coming[0][1].job.at_s <= until:
            number, outcome = coming.popleft()
            request = request_of(outcome.job, number)
            rejected = self.scheduler.submit(request, outcome.job.at_s)
            if rejected is None:
                self._live[request.key] = _Live(outcome, request)
            else:
                outcome.refused = rejected.reason

    def _notice_ends(self, now: float) -> None:
        """Of requests that the scheduler has given up: they are in no step's events."""
        if len(self.scheduler.requests) < len(self._live):
            for live in list(self._live.values()):
                if live.request.finish_reason is not None:
                    self._close(live, live.request.finish_reason, now)

    def _idle_until(self, coming: deque[tuple[int, Outcome]], now: float) -> float:
        """The next arrival; sooner when requests wait, since only the scheduler knows what for."""
        arrival = coming[0][1].job.at_s if coming else inf
        if not self._live:
            return arrival if coming else now
        self._polls += 1
        if self._polls > MOST_POLLS:
            raise RuntimeError(f"{len(self._live)} requests wait and nothing runs, at {now:.3f} s")
        return min(arrival, now + POLL_S)

    def _end(self, step: Step, plan: StepPlan) -> None:
        for key, start, num in zip(plan.keys, plan.start_pos, plan.num_tokens, strict=True):
            self._count_computed(self._live[key], start, num, step)
        token_ids = [self._token(key) for key, samples in zip(plan.keys, plan.samples, strict=True) if samples]
        events = self.scheduler.apply(plan, StepResult(token_ids), step.end_s)
        for key in events.token_keys:
            live = self._live[key]
            live.token_times.append(step.end_s)
            tenant = live.outcome.job.tenant
            step.output_tokens[tenant] = step.output_tokens.get(tenant, 0) + 1
        for key, reason in events.finished:
            self._close(self._live[key], reason, step.end_s)
        if plan.keys:
            self._polls = 0
            self._steps.append(step)

    def _count_computed(self, live: _Live, start: int, num: int, step: Step) -> None:
        if live.outcome.scheduled_at is None:
            live.outcome.scheduled_at = step.begin_s
            live.seen = start
        end = start + num
        fresh = max(0, min(end, live.outcome.job.prompt_tokens) - max(start, live.seen))
        live.prefilled += fresh
        live.recomputed += max(0, min(end, live.seen) - start)
        live.seen = max(live.seen, end)
        if fresh:
            tenant = live.outcome.job.tenant
            step.input_tokens[tenant] = step.input_tokens.get(tenant, 0) + fresh

    def _token(self, key: RequestKey) -> int:
        live = self._live[key]
        return EOS if len(live.token_times) + 1 == live.outcome.job.output_tokens else FILLER

    def _close(self, live: _Live, reason: FinishReason | None, now: float) -> None:
        del self._live[live.request.key]
        live.outcome.timeline = Timeline(
            received_at=live.outcome.job.at_s,
            token_times=live.token_times,
            ended_at=None if reason is None else now,
            reason=reason,
            prefilled_tokens=live.prefilled,
            cached_tokens=live.request.ledger.cached_tokens,
            recomputed_tokens=live.recomputed,
            deadline=live.request.deadline,
        )


def request_of(job: Job, number: int) -> Request:
    """The request that a worker would get. Its key is `number`; prompts share blocks only where `job.pieces` do."""
    if job.pieces:
        # Pieces are named from 0; ids 0 and 1 are taken.
        prompt = [2 + piece for piece in job.pieces for _ in range(PIECE_TOKENS)][: job.prompt_tokens]
    else:
        prompt = [-1 - number & 0xFFFFFFFF] + [FILLER] * (job.prompt_tokens - 1)
    declared = job.declared_max_tokens
    return Request(
        key=RequestKey(number),
        request_id=RequestId(f"sim-{number}"),
        attempt=0,
        prompt_ids=prompt,
        sampling=SamplingParams(job.output_tokens if declared is None else declared, ignore_eos=declared is None),
        root=b"simulated",
        deadline=None if job.deadline_s is None else job.at_s + job.deadline_s,
        tenant=job.tenant,
        priority=job.priority,
    )

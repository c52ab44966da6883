"""What latency, throughput and goodput mean here (SPEC, "Definitions"): whoever has whole timelines computes them with
this. The gateway's histograms (`router.metrics`) observe the same differences token by token.

    TTFT = first token - received          ITL_i = token_i - token_(i-1)          E2E = ended - received
    TPOT = (last token - first token) / (n - 1), undefined for n = 1; an average, never mixed with ITL
    goodput = requests/s that completed normally and met every SLO that the contract requires

A timeline's instants are of one clock. Taken where tokens leave the server they give the server's variant of each
figure, taken where a client sees them the client's; one timeline holds one variant. A figure of a cohort is that of the
cohort's timelines: the caller groups.

Percentiles are nearest-rank: the least value that at least `share` of all values do not exceed. It is always a value
that occurred, and needs no assumption about what lies between two.

Does not: read clocks, keep state, or print.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from headrace.core.records import FinishReason

COMPLETED = frozenset({FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH})
"""Normal ends. A hand-off ends one worker's part only."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request over all its attempts: instants in seconds of one clock, and what was computed for it."""

    received_at: float
    token_times: Sequence[float] = ()
    """One instant for each output token, in order. Tokens that come out together share theirs; text that was held back
    counts when it is released."""
    ended_at: float | None = None
    reason: FinishReason | None = None
    """None: refused, or not ended yet."""
    prefilled_tokens: int = 0
    """Prompt tokens computed, each once."""
    cached_tokens: int = 0
    """Prompt tokens whose KV a cache had."""
    recomputed_tokens: int = 0
    """Tokens computed again after their KV was given up."""
    deadline: float | None = None
    tool_call_at: float | None = None
    """When the first valid tool call was complete."""

    @property
    def completed(self) -> bool:
        return self.ended_at is not None and self.reason in COMPLETED


@dataclass(frozen=True, slots=True)
class Slo:
    """The contract: what a request must meet to count as good; None requires nothing.

    Raises ValueError for a share that is none.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    """Bound on the request's own ITL at `itl_share`."""
    itl_share: float = 0.99
    tpot_s: float | None = None
    deadline: bool = False
    """Requests that have a deadline must complete before it."""
    tool_call_s: float | None = None
    """From received to the first valid tool call; a request without one misses it."""
    completion_rate: float = 0.0
    """Least share of a cohort that completes normally; a cohort below it has no goodput at all."""

    def __post_init__(self) -> None:
        if not 0.0 < self.itl_share <= 1.0 or not 0.0 <= self.completion_rate <= 1.0:
            raise ValueError("itl_share must be in (0, 1] and completion_rate in [0, 1]")


@dataclass(frozen=True, slots=True)
class Spread:
    """How a latency is reported, in seconds; `longest` is the longest pause where the values are ITLs."""

    p50_s: float
    p95_s: float
    p99_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates a second of all that was done, also for requests that were cut off: work, not success (that is goodput)."""

    completed_requests: float
    prefilled_tokens: float
    """Input actually computed; hits and recomputation are apart and in no sum."""
    cached_tokens: float
    recomputed_tokens: float
    output_tokens: float

    @property
    def total_tokens(self) -> float:
        """Input computed and output. Depends on the mix of the two: no capacity figure."""
        return self.prefilled_tokens + self.output_tokens


# ---- one request


def ttft_s(timeline: Timeline) -> float | None:
    """None without a token."""
    return timeline.token_times[0] - timeline.received_at if timeline.token_times else None


def itl_s(token_times: Sequence[float]) -> list[float]:
    """The n - 1 gaps between n tokens: k tokens that come out together are one gap and k - 1 zeros."""
    return [after - before for before, after in pairwise(token_times)]


def tpot_s(token_times: Sequence[float]) -> float | None:
    """None for fewer than two tokens."""
    return (token_times[-1] - token_times[0]) / (len(token_times) - 1) if len(token_times) > 1 else None


def e2e_s(timeline: Timeline) -> float | None:
    """None unless the request completed normally."""
    if timeline.ended_at is None or not timeline.completed:
        return None
    return timeline.ended_at - timeline.received_at


def misses(timeline: Timeline, slo: Slo) -> tuple[str, ...]:
    """What the request owes the contract: completion | ttft | itl | tpot | deadline | tool_call. () is a good request.

    An undefined ITL or TPOT (one token) breaks no bound. An end at the deadline is in time.
    """
    missed = [] if timeline.completed else ["completion"]
    if slo.ttft_s is not None and _over(ttft_s(timeline), slo.ttft_s, undefined=True):
        missed.append("ttft")
    if slo.itl_s is not None and _over(percentile(itl_s(timeline.token_times), slo.itl_share), slo.itl_s):
        missed.append("itl")
    if slo.tpot_s is not None and _over(tpot_s(timeline.token_times), slo.tpot_s):
        missed.append("tpot")
    if slo.deadline and timeline.deadline is not None and _over(timeline.ended_at, timeline.deadline, undefined=True):
        missed.append("deadline")
    if slo.tool_call_s is not None:
        called = timeline.tool_call_at
        spent = None if called is None else called - timeline.received_at
        if _over(spent, slo.tool_call_s, undefined=True):
            missed.append("tool_call")
    return tuple(missed)


# ---- cohorts


def percentile(values: Iterable[float], share: float) -> float | None:
    """Nearest rank, see above; share in (0, 1]. None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    # Without the margin 0.07 * 100 would ask for the eighth value.
    return ordered[max(1, ceil(share * len(ordered) - 1e-9)) - 1]


def spread(values: Iterable[float]) -> Spread | None:
    """None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p95, p99 = (percentile(ordered, share) or 0.0 for share in (0.5, 0.95, 0.99))
    return Spread(p50, p95, p99, ordered[-1])


def ttft_spread(cohort: Iterable[Timeline]) -> Spread | None:
    """Over the requests that had a token."""
    return spread(ttft for timeline in cohort if (ttft := ttft_s(timeline)) is not None)


def itl_spread(cohort: Iterable[Timeline]) -> Spread | None:
    """Over all gaps of all requests together, so that long answers weigh more."""
    return spread(gap for timeline in cohort for gap in itl_s(timeline.token_times))


def throughput(cohort: Iterable[Timeline], duration_s: float) -> Throughput:
    """Raises ValueError unless duration_s is positive."""
    _positive(duration_s)
    timelines = list(cohort)
    return Throughput(
        completed_requests=sum(timeline.completed for timeline in timelines) / duration_s,
        prefilled_tokens=sum(timeline.prefilled_tokens for timeline in timelines) / duration_s,
        cached_tokens=sum(timeline.cached_tokens for timeline in timelines) / duration_s,
        recomputed_tokens=sum(timeline.recomputed_tokens for timeline in timelines) / duration_s,
        output_tokens=sum(len(timeline.token_times) for timeline in timelines) / duration_s,
    )


def attainment(cohort: Iterable[Timeline], slo: Slo) -> float | None:
    """Share of good requests among all, refused ones included. None without requests."""
    timelines = list(cohort)
    return _good(timelines, slo) / len(timelines) if timelines else None


def goodput(cohort: Iterable[Timeline], slo: Slo, duration_s: float) -> float:
    """Good requests a second. Raises ValueError unless duration_s is positive."""
    _positive(duration_s)
    return _good(list(cohort), slo) / duration_s


def _good(timelines: Sequence[Timeline], slo: Slo) -> int:
    if sum(timeline.completed for timeline in timelines) < slo.completion_rate * len(timelines) - 1e-9:
        return 0
    return sum(not misses(timeline, slo) for timeline in timelines)


def _over(value: float | None, bound: float, undefined: bool = False) -> bool:
    return undefined if value is None else value > bound


def _positive(duration_s: float) -> None:
    if duration_s <= 0.0:
        raise ValueError(f"a rate over {duration_s} s")

"""What a virtual cluster is made of beside its workers: requests on their way, their legs, gateways, results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING

from bench.simulate.fleet import ClusterWorker, WorkerSpec
from bench.simulate.worker import Outcome
from bench.simulate.workload import Job
from headrace.core.records import FinishReason, cache_key
from headrace.core.slo import Timeline
from router.core.decision import Decision
from router.core.foresight import Outlook
from router.core.placement import Mode, WorkerKey
from router.core.settings import RoutingSettings
from workers.core.request import Request

if TYPE_CHECKING:
    from bench.simulate.gateways import Gateway
    from bench.simulate.handoff import HandOff

ROOT = b"simulated"
MAX_TOKENS = 2_048
"""The caller's, for every job with a shorter answer: nobody is told how long an answer is."""
FIRST_GUESS_TOKENS = 128
"""Expected of an answer before any has ended."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    workers: tuple[WorkerSpec, ...]
    policy: str = "cost"
    mode: Mode = Mode.AUTO
    gateways: int = 1
    block_transfer_s: float = 0.0005
    """To send one block over a worker's lane; a lane sends one after the other."""
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    refuse_lost_deadlines: bool = False
    """At the gateways, by their forecasts, as `gateway.limits.refuse_lost_deadlines`."""
    best_effort_classes: int = 1
    """As `gateway.degradation.best_effort_classes`."""
    seed: int = 0


@dataclass(slots=True, eq=False)
class Leg:
    """One request at one worker."""

    call: Call
    worker: ClusterWorker
    request: Request
    kind: str
    """whole | prefill | decode"""
    tokens_left: int
    """Of the answer, to be sampled here."""
    undo: Callable[[], None] = lambda: None
    """Takes the booking back."""
    live: bool = True
    source: Leg | None = None
    """decode: where the blocks come from."""
    hand_off: HandOff | None = None
    """Of the source and the decode that has room for it."""


@dataclass(slots=True, eq=False)
class Call:
    """One job at its gateway."""

    number: int
    job: Job
    gateway: Gateway
    prompt: Prompt
    max_tokens: int
    outcome: Outcome
    token_times: list[float] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    excluded: set[WorkerKey] = field(default_factory=set)
    attempt: int = 0
    looks: int = 0
    """Times that nobody could take it."""
    decision: Decision | None = None
    """The last plan."""
    outlook: Outlook | None = None
    """What was foreseen when it came."""
    best_effort: bool = False
    """Its deadline was doubtful then."""
    whole_next: bool = False
    ended: bool = False
    seen: int = 0
    """Leading tokens that were computed, or found in a cache, at least once."""
    prefilled: int = 0
    cached: int = 0
    recomputed: int = 0

    def leg(self, kind: str) -> Leg | None:
        return next((leg for leg in self.legs if leg.live and leg.kind == kind), None)

    def count_computed(self, start: int, num: int, began_at: float) -> None:
        """A chunk of the prompt, or of what has to be computed again."""
        if self.outcome.scheduled_at is None:
            self.outcome.scheduled_at = began_at
            self.cached = self.seen = start
        end = start + num
        fresh = max(0, min(end, self.job.prompt_tokens) - max(start, self.seen))
        self.prefilled += fresh
        self.recomputed += num - fresh
        self.seen = max(self.seen, end)

    def close(self, reason: FinishReason | None, refused: str, now: float) -> None:
        self.ended = True
        self.outcome.refused = refused
        self.outcome.timeline = Timeline(
            received_at=self.job.at_s,
            token_times=self.token_times,
            ended_at=None if reason is None else now,
            reason=reason,
            prefilled_tokens=self.prefilled,
            cached_tokens=self.cached,
            recomputed_tokens=self.recomputed,
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    hashes: tuple[bytes, ...]
    """Of its full blocks."""
    keys: tuple[int, ...]
    """The same as the index has them."""


class Prompts:
    """Makes prompts whose blocks are equal where names of leading pieces are."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._chains: dict[tuple[bytes, int], bytes] = {}
        self._names = count(1 << 31)
        """For jobs that name no pieces."""

    def of(self, job: Job) -> Prompt:
        size = self._block_size
        num_full = job.prompt_tokens // size
        names = list(job.pieces) or [next(self._names) for _ in range(num_full + 1)]
        hashes: list[bytes] = []
        parent = ROOT
        for name in names[:num_full]:
            parent = self._chains.get((parent, name)) or self._link(parent, name)
            hashes.append(parent)
        token_ids: list[int] = []
        for name in names:
            # Ids 0 and 1 are taken.
            token_ids += [2 + name] * size
        return Prompt(token_ids[: job.prompt_tokens], tuple(hashes), tuple(map(cache_key, hashes)))

    def _link(self, parent: bytes, name: int) -> bytes:
        """As good as the hash of the piece's tokens, and a hundred times as fast."""
        block_hash = blake2b(parent + name.to_bytes(8, "little"), digest_size=16).digest()
        self._chains[parent, name] = block_hash
        return block_hash


@dataclass(frozen=True, slots=True)
class ClusterRun:
    outcomes: list[Outcome]
    """In the order in which the jobs were given."""
    plans: dict[str, int]
    """Plans made, by kind."""
    prefilled: list[int]
    """Prompt tokens computed, recomputed ones too, by worker."""
    busy_s: list[float]
    end_s: float

    @property
    def timelines(self) -> list[Timeline]:
        return [outcome.timeline for outcome in self.outcomes]

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that requests found in a cache when they first ran."""
        return sum(outcome.timeline.cached_tokens for outcome in self.outcomes)

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens, those of refused requests too."""
        return self.hit_tokens / sum(outcome.job.prompt_tokens for outcome in self.outcomes)

    @property
    def busiest(self) -> float:
        """Prompt tokens that the busiest worker computed, over the mean."""
        return max(self.prefilled) * len(self.prefilled) / max(1, sum(self.prefilled))

"""Who goes first: one score in milliseconds, made of named terms; a policy is the set of terms that it counts.

    effective priority = class + deadline urgency + age + nearly complete - remaining cost - fairness debt - level

(SPEC Definitions; scheduler article, sections 15 to 18.) The highest score goes first, equal ones by arrival. All terms
but urgency and debt are linear in time with one slope, so their order does not change while requests wait: a queue
sorts by `static_ms` once and compares only its heads (`workers.core.waiting`).

    fcfs                age alone, decodes have no precedence
    decode_first        age alone, decodes first
    aging               class + age - remaining cost
    deadline            urgency alone, without a horizon: least slack first
    shortest_remaining  age - remaining cost
    mlfq                skip-join feedback queue: level by prompt length, down by service, first come within a level
                        (Wu et al., "Fast Distributed Inference Serving for Large Language Models", 2023)
    fair                the tenant that has received least (VTC), then age
    slo_fair            all terms but level

Does not: hold requests, read clocks, or decide how much a request gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.core.fairness import ServiceCounters
from workers.core.request import Request, State
from workers.core.settings import SchedulerSettings

_LEVEL_MS = 1e9
_MAX_LEVEL = 16
_LONG_S = 1e6
"""Slack of a request that nothing is due for."""
LATE_MS = 1e300
"""What a request that is lost, and served all the same, has less than all others."""
_ATTAINABLE_AT, _LOST_BELOW = 1.3, 0.7
"""Time left over time needed: predictions err by so much, either way."""


class Outlook(StrEnum):
    """What can still become of a request's deadline (SPEC B7)."""

    ATTAINABLE = "attainable"
    DOUBTFUL = "doubtful"
    LOST = "lost"


@dataclass(slots=True)
class Pace:
    """How fast work goes here, for scores and outlooks; `known`: from measurement, not assumed."""

    prefill_token_s: float = 0.001
    prefill_pair_s: float = 0.0
    """Beyond that, for each token of a prompt and each token before it."""
    decode_token_s: float = 0.0
    known: bool = False

    def block_ms(self, block_size: int, index: int) -> float:
        """Prefill time of the block at this place of a prompt."""
        return 1000.0 * block_size * (self.prefill_token_s + self.prefill_pair_s * block_size * index)


@dataclass(frozen=True, slots=True)
class Terms:
    """Which parts of the score a policy counts."""

    decodes_first: bool = True
    by_class: bool = False
    urgency: bool = False
    horizon: bool = True
    age: bool = True
    cost: bool = False
    nearly: bool = False
    debt: bool = False
    level: bool = False


POLICIES: dict[str, Terms] = {
    "fcfs": Terms(decodes_first=False),
    "decode_first": Terms(),
    "aging": Terms(by_class=True, cost=True),
    "deadline": Terms(urgency=True, horizon=False, age=False),
    "shortest_remaining": Terms(cost=True),
    "mlfq": Terms(level=True),
    "fair": Terms(debt=True),
    "slo_fair": Terms(by_class=True, urgency=True, cost=True, nearly=True, debt=True),
}

REASONS = ("class", "deadline_urgency", "aging_boost", "short_remaining", "nearly_complete", "fair_share", "level")
"""Names of the terms, in the order of `Policy.score`."""


class Policy:
    """Scores requests by the terms of one policy."""

    def __init__(self, settings: SchedulerSettings, pace: Pace, service: ServiceCounters) -> None:
        terms = POLICIES.get(settings.policy)
        if terms is None:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}")
        self.terms = terms
        self.reorders = settings.policy not in ("fcfs", "decode_first")
        self.horizon_s = settings.urgency_horizon_s if terms.horizon else float("inf")
        """Slack beyond which nothing is urgent."""
        self._settings = settings
        self._pace = pace
        self._service = service
        # Without a cost to weigh against, any slope gives the order of arrival; 0 would give no order.
        pure_age = terms.age and not (terms.by_class or terms.cost)
        self._age_ms_per_s = (1000.0 if pure_age else settings.age_boost_ms_per_s) if terms.age else 0.0

    def score(self, request: Request, now: float) -> tuple[float, ...]:
        """Terms in milliseconds, in the order of REASONS; their sum is the priority."""
        terms, settings = self.terms, self._settings
        return (
            -request.rank * settings.class_weight_ms if terms.by_class else 0.0,
            self._urgency_ms(request, now, self.prefill_s(request)) if terms.urgency else 0.0,
            self.age_ms(request, now),
            -1000.0 * self.prefill_s(request) if terms.cost else 0.0,
            settings.nearly_complete_boost_ms if terms.nearly and self._nearly_complete(request) else 0.0,
            -self._debt_ms(request) if terms.debt else 0.0,
            -_LEVEL_MS * request.level if terms.level else 0.0,
        )

    def total(self, request: Request, now: float) -> float:
        """The priority: the sum of `score`'s terms, without making them."""
        terms, settings = self.terms, self._settings
        total = self.age_ms(request, now)
        prefill_s = self.prefill_s(request)
        if terms.by_class and (rank := request.rank):
            total -= rank * settings.class_weight_ms
        if terms.urgency:
            total += self._urgency_ms(request, now, prefill_s)
        if terms.cost:
            total -= 1000.0 * prefill_s
        if terms.nearly and self._nearly_complete(request):
            total += settings.nearly_complete_boost_ms
        if terms.debt:
            total -= self._debt_ms(request)
        if terms.level:
            total -= _LEVEL_MS * request.level
        return total

    def static_ms(self, request: Request) -> float:
        """The part of the score that stands still relative to others while they wait. For the queue's order."""
        terms, settings = self.terms, self._settings
        static = -self._age_ms_per_s * request.accepted_at
        if terms.by_class:
            static -= request.rank * settings.class_weight_ms
        if terms.cost:
            static -= 1000.0 * self.prefill_s(request)
        if terms.level:
            static -= _LEVEL_MS * request.level
        return static

    def prefill_s(self, request: Request) -> float:
        """Predicted time of what is missing before the next token."""
        return request.uncomputed_tokens * self._pace.prefill_token_s

    def due_at(self, request: Request) -> float:
        """Instant at which the request must start to be in time for its first token and for its deadline.

        After it a deadline is doubtful at best.
        """
        return self._due_at(request, self.prefill_s(request))

    def _due_at(self, request: Request, prefill: float) -> float:
        due = request.accepted_at + _LONG_S
        if self._settings.ttft_target_s and request.first_token_at is None and not request.resumed:
            due = min(due, request.accepted_at + self._settings.ttft_target_s - prefill)
        if request.deadline is not None:
            margin = _ATTAINABLE_AT if self._pace.known else 1.0
            work = prefill + self._calls(request) * self._decode_s(request)
            due = min(due, request.deadline - margin * work)
        return due

    def outlook(self, request: Request, now: float, cached_tokens: int = 0) -> Outlook:
        """By the deadline alone: a late first token is late, but not lost. Certain only when the pace is known.

        cached_tokens: tokens of the prefill that need not be computed.
        """
        if request.deadline is None:
            return Outlook.ATTAINABLE
        left = request.deadline - now
        least = need = 0.0
        if self._pace.known:
            prefill_s = max(0, request.uncomputed_tokens - cached_tokens) * self._pace.prefill_token_s
            calls = self._calls(request)
            least = prefill_s + calls * request.certain_output_tokens * self._pace.decode_token_s
            need = prefill_s + calls * self._decode_s(request)
        if left < _LOST_BELOW * least:
            return Outlook.LOST
        return Outlook.DOUBTFUL if left < _ATTAINABLE_AT * need else Outlook.ATTAINABLE

    def reason(self, request: Request, first: Request, now: float) -> str:
        """Why `request` goes before `first`, who came earliest: the term that speaks most for it.

        The earliest itself goes first by its age, if that outweighs something that speaks against it.
        """
        if request is first:
            age = self.age_ms(request, now)
            against = age - min(self.total(request, now), age)
            return "aging_boost" if 0 < against <= age else "arrival"
        gains = [a - b for a, b in zip(self.score(request, now), self.score(first, now), strict=True)]
        best = max(range(len(gains)), key=gains.__getitem__)
        return REASONS[best] if gains[best] > 0 else "arrival"

    def join_level(self, num_tokens: int) -> int:
        """Skip-join: a prompt starts at the level whose quantum holds it."""
        level, quantum = 0, self._settings.mlfq_quantum_tokens
        while num_tokens > quantum and level < _MAX_LEVEL:
            level, quantum = level + 1, quantum * 2
        return level

    def level_end(self, level: int) -> int:
        """Service in tokens after which a request leaves `level` downwards."""
        return self._settings.mlfq_quantum_tokens * ((1 << (level + 1)) - 1)

    def age_ms(self, request: Request, now: float) -> float:
        """Priority from waiting: since it came, or, for one that had its turn and was preempted, all its waits."""
        if request.state is not State.PREEMPTED:
            return self._age_ms_per_s * (now - request.accepted_at)
        return self.waited_ms(request) + self._age_ms_per_s * (now - request.clock.since)

    def waited_ms(self, request: Request) -> float:
        """Priority from the waits that are over."""
        ledger = request.ledger
        return self._age_ms_per_s * (ledger.queue_s + ledger.preempted_s)

    def debt_ms(self, request: Request) -> float:
        return self._debt_ms(request)

    def _urgency_ms(self, request: Request, now: float, prefill_s: float) -> float:
        """Grows as the slack falls below the horizon, and ends with it: what is late would only make others late."""
        if request.late:
            return -LATE_MS
        slack = self._due_at(request, prefill_s) - now
        if not self.terms.horizon:
            return -1000.0 * (slack if slack >= 0 else _LONG_S)
        horizon = self._settings.urgency_horizon_s
        return 1000.0 * (horizon - slack) if 0 <= slack < horizon else 0.0

    def _nearly_complete(self, request: Request) -> bool:
        if request.state is not State.PREFILLING or not request.computed_tokens:
            return False
        return request.uncomputed_tokens <= self._settings.long_prefill_token_threshold

    def _debt_ms(self, request: Request) -> float:
        """How far the tenant is ahead of the one furthest behind."""
        ahead = self._service.counter(request.tenant_index) - self._service.lowest()
        weight = 1e6 if not (self.terms.by_class or self.terms.cost) else self._settings.fairness_weight_ms
        return weight * max(0.0, ahead)

    @staticmethod
    def _calls(request: Request) -> int:
        """Model calls that must end before the deadline: this one and those that its agent has left. The prefix cache
        has the prompt of each later one, but for what is new."""
        return 1 + (request.steps_left or 0)

    def _decode_s(self, request: Request) -> float:
        return request.expected_output_tokens * self._pace.decode_token_s

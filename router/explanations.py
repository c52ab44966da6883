"""Why the latest requests went where they went: the router's decisions, kept for whoever asks (SPEC E1).

The store is bounded by the candidates that it remembers, since one decision over a large fleet has thousands of them.
A request's decisions stay columns until somebody asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.v1 import inference_pb2 as pb
from router.core.decision import Decision, PlanKind
from router.core.explained import candidate_rows
from router.core.flight import Flight
from router.core.recovery import Recovery
from router.core.router import Router

MAX_CANDIDATES = 200_000
"""Over all requests: 16 numbers each."""
MAX_SHOWN = 16
"""Candidates of one decision that an answer has, the cheapest."""

Name = tuple[str, str]
"""Tenant, and an id: the client's label or the one that the answer bore."""


@dataclass(frozen=True, slots=True)
class Routed:
    """What is remembered of a choice: no tokens."""

    prompt_tokens: int
    decisions: tuple[tuple[int, Decision | Recovery], ...]
    """With the attempt of each."""
    realised_ms: Mapping[int, float]
    """By attempt."""

    @classmethod
    def of(cls, flight: Flight) -> Routed:
        return cls(len(flight.prompt_ids), tuple(flight.decisions), flight.realised_ms)


class Explanations:
    """The latest calls that have ended, by their names; each is remembered until others need its room."""

    def __init__(self) -> None:
        self._calls: OrderedDict[int, tuple[tuple[Name, ...], list[Routed], int]] = OrderedDict()
        self._by_name: dict[Name, int] = {}
        self._next = 0
        self._num_candidates = 0

    def keep(self, tenant: str, labels: tuple[str, ...], choices: list[Routed]) -> None:
        """A call has ended. A later one under the same label hides it."""
        size = 1 + sum(_size(decision) for choice in choices for _, decision in choice.decisions)
        names = tuple((tenant, label) for label in labels if label)
        self._next += 1
        self._calls[self._next] = (names, choices, size)
        self._by_name.update(dict.fromkeys(names, self._next))
        self._num_candidates += size
        while self._num_candidates > MAX_CANDIDATES and len(self._calls) > 1:
            number, (old_names, _, old_size) = self._calls.popitem(last=False)
            self._num_candidates -= old_size
            for name in old_names:
                if self._by_name.get(name) == number:
                    del self._by_name[name]

    def find(self, tenant: str, label: str) -> list[Routed]:
        """The choices of the latest ended call of that name; [] when there is none."""
        number = self._by_name.get((tenant, label))
        return [] if number is None else self._calls[number][1]


def explained(choices: list[Routed], router: Router, block_size: int) -> Iterator[pb.RoutingDecision]:
    """All decisions of a call's choices."""
    for index, choice in enumerate(choices):
        for attempt, decision in choice.decisions:
            if isinstance(decision, Recovery):
                yield _recovery(index, attempt, decision, choice)
            else:
                yield _message(index, attempt, decision, choice, router, block_size)


def _size(decision: Decision | Recovery) -> int:
    if isinstance(decision, Recovery):
        return sum(len(option.plan.candidates) for option in decision.options)
    return len(decision.candidates)


def _recovery(index: int, attempt: int, recovery: Recovery, choice: Routed) -> pb.RoutingDecision:
    return pb.RoutingDecision(
        choice=index,
        attempt=attempt,
        stage="recovery",
        policy=recovery.policy.value,
        reason=recovery.cause,
        prompt_tokens=choice.prompt_tokens,
        predicted_ms=recovery.chosen.predicted_ms,
        num_candidates=len(recovery.options),
        candidates=[
            pb.PlanCandidate(
                kind=option.way.value,
                worker=option.plan.worker.worker_id,
                cost_ms=option.predicted_ms,
                terms=[
                    pb.CostTerm(name="next_token", ms=option.first_ms),
                    pb.CostTerm(name="transfer", ms=option.transfer_ms),
                    pb.CostTerm(name="decode", ms=option.rest_ms),
                ],
                chosen=option is recovery.chosen,
            )
            for option in recovery.options
        ],
    )


def _message(
    index: int, attempt: int, decision: Decision, choice: Routed, router: Router, block_size: int
) -> pb.RoutingDecision:
    is_plan = decision.kind is not PlanKind.DECODE
    rows = candidate_rows(decision)
    shown = rows[:MAX_SHOWN]
    shown += [row for row in rows[MAX_SHOWN:] if row.is_chosen]
    return pb.RoutingDecision(
        choice=index,
        attempt=attempt,
        stage="plan" if is_plan else "decode",
        policy=router.policy.value,
        reason=decision.reason,
        prompt_tokens=choice.prompt_tokens,
        matched_tokens=decision.diverged_at_block * block_size,
        predicted_ms=decision.predicted_ttft_ms,
        realised_ms=choice.realised_ms.get(attempt, 0.0) if is_plan else 0.0,
        num_candidates=len(rows),
        candidates=[
            pb.PlanCandidate(
                kind=row.kind.value,
                worker=row.worker.worker_id,
                fetch_from=decision.fetch.source.worker_id if row.is_chosen and decision.fetch else "",
                fetch_blocks=row.fetched_blocks,
                cached_tokens=row.cached_blocks * block_size,
                cost_ms=row.cost_ms,
                terms=[pb.CostTerm(name=name, ms=ms) for name, ms in row.terms.items() if ms],
                chosen=row.is_chosen,
            )
            for row in shown
        ],
    )

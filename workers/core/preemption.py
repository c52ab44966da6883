"""Whom to take blocks from when there are too few, and how the victim comes back: both by cost in milliseconds.

    victim score = freed blocks, priced - restore - deadline penalty - fairness debt - nearly finished bonus - class
    restore      = the cheapest of  recompute: what no other request shares is prefilled again
                                    swap:      every block is copied to the host and back
                                    route:     another worker begins anew (only a request that has received little)

(SPEC Definitions and B9; scheduler article, sections 21 and 22.) A request is preempted for one of its own class or a
higher one, never for a lower. Progress: after a preemption a request is no victim before it has computed
`min_progress_tokens` more. A request that waits for a row or blocks then gets nobody's; one that computes and lacks a
block gets the latest arrival's. The earliest of several always goes on, and since a request returns with room for all
its tokens and one more, every return can bring at least one token.

Does not: free anything (the scheduler does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import nlargest

from headrace.errors import InvariantError
from workers.core.blocks import BlockPool
from workers.core.policies import Pace, Policy
from workers.core.queues import Queues
from workers.core.request import Request, State
from workers.core.settings import SchedulerSettings

_COMPARED = 16
"""Of more candidates the latest arrivals are compared: to score one is to walk over its blocks."""
_ROUTE_MS = 5.0
"""A refusal, and a submission elsewhere."""
_ROUTE_AFTER_TOKENS = 1
"""Output tokens from which a request stays: its client has a stream to lose."""


class Way(StrEnum):
    RECOMPUTE = "recompute"
    SWAP = "swap"
    ROUTE = "route"


@dataclass(frozen=True, slots=True)
class Restore:
    way: Way
    cost_ms: float


@dataclass(frozen=True, slots=True)
class Score:
    """Terms in milliseconds; the highest total is preempted."""

    freed_ms: float
    restore_ms: float
    deadline_ms: float
    debt_ms: float
    nearly_ms: float
    class_ms: float

    @property
    def total(self) -> float:
        return self.freed_ms - self.restore_ms - self.deadline_ms - self.debt_ms - self.nearly_ms - self.class_ms


class Preemption:
    def __init__(self, settings: SchedulerSettings, pool: BlockPool, pace: Pace, policy: Policy) -> None:
        self._settings = settings
        self._pool = pool
        self._pace = pace
        self._policy = policy

    def restore(self, request: Request, free_host_blocks: int, pause_s: float) -> Restore:
        """The cheapest way back. `pause_s`: how long a preempted request waits here before blocks are free again."""
        settings = self._settings
        table = request.block_ids[: self._pool.blocks_for(request.computed_tokens)]
        shared = sum(1 for block in table if self._pool.refs(block) > 1)
        lost_tokens = max(0, request.computed_tokens - shared * settings.block_size)
        pause_ms = 1000.0 * pause_s
        ways = [Restore(Way.RECOMPUTE, 1000.0 * lost_tokens * self._pace.prefill_token_s + pause_ms)]
        if 0 < len(table) <= free_host_blocks:
            ways.append(Restore(Way.SWAP, 2000.0 * len(table) * settings.host_copy_block_s + pause_ms))
        if settings.route_when_preempted and self._may_leave(request):
            again_ms = 1000.0 * request.computed_tokens * self._pace.prefill_token_s
            ways.append(Restore(Way.ROUTE, again_ms + _ROUTE_MS))
        return min(ways, key=lambda restore: restore.cost_ms)

    def score(self, request: Request, restore: Restore, now: float) -> Score:
        settings = self._settings
        freed = sum(1 for block in request.block_ids if self._pool.refs(block) == 1)
        block_ms = 1000.0 * settings.block_size * self._pace.prefill_token_s
        slack_ms = 1000.0 * (self._policy.due_at(request) - now)
        misses = 0.0 <= slack_ms < restore.cost_ms
        whole = request.num_output + request.expected_output_tokens
        done = request.num_output / whole if whole else 0.0
        return Score(
            freed_ms=freed * block_ms,
            restore_ms=restore.cost_ms,
            deadline_ms=settings.deadline_penalty_ms if misses else 0.0,
            debt_ms=-self._policy.debt_ms(request),
            nearly_ms=settings.nearly_finished_bonus_ms * done,
            class_ms=-settings.class_weight_ms * request.rank,
        )

    def choose_victim(
        self, candidates: Sequence[Request], wanted_by: Request, free_host_blocks: int, pause_s: float, now: float
    ) -> Request | None:
        """Among `candidates` (which hold blocks), for a request that needs some. None: nobody may be preempted for it.

        A lower class goes before an equal one. `wanted_by` may be its own victim, when it computes.
        """
        allowed = [r for r in candidates if not r.pinned and r.priority >= wanted_by.priority]
        if not allowed:
            return None
        lowest = max(r.priority for r in allowed)
        allowed = [r for r in allowed if r.priority == lowest]
        ready = [r for r in allowed if r.computed_tokens >= r.protected_tokens]
        if wanted_by.state is State.DECODING:
            # It computes: somebody must go, but never the eldest of several, whatever the scores say.
            eldest = min(allowed, key=lambda r: r.arrival)
            ready = [r for r in ready if r is not eldest]
            if not ready:
                return max(allowed, key=lambda r: r.arrival)
        elif not ready:
            return None
        if len(ready) > _COMPARED:
            ready = nlargest(_COMPARED, ready, key=lambda r: r.arrival)

        def total(request: Request) -> float:
            return self.score(request, self.restore(request, free_host_blocks, pause_s), now).total

        return max(ready, key=lambda r: (total(r), r.arrival))

    @staticmethod
    def _may_leave(request: Request) -> bool:
        fresh = request.attempt <= 1 and not request.adopted and not request.resumed
        return fresh and request.num_output < _ROUTE_AFTER_TOKENS


def choose_for_class(
    queues: Queues, wants: Request, lacking_blocks: int, settings: SchedulerSettings, pace: Pace
) -> Request | None:
    """A handed-off request whose blocks a waiting prefill of a higher class should have, where that pays and all such
    together have what it lacks; or None."""

    def pays(request: Request) -> bool:
        again_ms = 1000.0 * request.computed_tokens * pace.prefill_token_s
        return (request.priority - wants.priority) * settings.class_weight_ms > again_ms

    lower = [request for request in queues.held.values() if request.priority > wants.priority and pays(request)]
    if not 0 < lacking_blocks <= sum(len(request.block_ids) for request in lower):
        return None
    return min(lower, key=lambda r: (r.pinned, r.computed_tokens, -r.arrival), default=None)


def choose_revocable(queues: Queues) -> Request | None:
    """A handed-off request whose reader should be told to do without, or None.

    Only a circular wait needs it: this worker holds blocks for readers on a peer that waits for blocks itself, which it
    holds for readers here. Then nothing computes or is being read here, and a request waits whose start would set
    others free: an adoption, a preempted request, or a prefill that stays. A queue of hand_off prefills alone waits
    for its readers: they are busy, not stuck, and a revoked request would only come back to the end of that queue.
    The choice is the cheapest to compute again, one without an open lease before one with.
    """
    waiting = queues.line.first()
    if not queues.held:
        return None
    if queues.num_computing or queues.reserved or queues.fetching:
        return None
    if not queues.preempted and not queues.adopting and (waiting is None or waiting.hand_off):
        return None
    return min(queues.held.values(), key=lambda r: (r.pinned, r.computed_tokens, -r.arrival))


def require(victim: Request | None) -> Request:
    """Whoever asks for a block decodes, and a decoding request has no reader: it can always be its own victim."""
    if victim is None:
        raise InvariantError("a block is short although nobody computes")
    return victim

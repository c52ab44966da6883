"""A request that decodes leaves its worker for another one, without a token lost, doubled or computed twice.

    move --HoldAt--> the old worker drops what nobody has seen, keeps the KV in its cache, says that it waits
         --SubmitTo--> the target reads the full blocks from there, computes the rest, says that it has started
         --FinishAt--> the old worker lets the blocks go

Until the target has started nothing is given up: when it refuses, fails or is lost, the old worker goes on. What the
old worker had sent when it was held is kept aside: it counts when the request turns out to have ended there. A move is
no failed attempt.

Does not: change the flight (`router.core.flight` does), send, or book.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.core.records import TokenLogprobs
from router.core.cost import MEMORY_WAIT
from router.core.decision import KINDS, Decision, Fetch, PlanKind, RouteAsk
from router.core.fleet_table import COLOCATED, DECODE
from router.core.legs import Leg
from router.core.placement import Mode, WorkerKey
from router.core.recovery import MOVED
from router.core.router import Router


@dataclass(slots=True)
class Move:
    """One move under way."""

    source: Leg
    to: WorkerKey | None
    """Where it is to go; None: wherever it is cheapest."""
    target: Leg | None = None
    """Once the source waits."""
    since: float = 0.0
    """When the target was asked."""
    held: list[tuple[int, int, TokenLogprobs | None]] = field(default_factory=list)
    """(offset, token, its log-probabilities) that came from the source since it was asked to wait."""


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker was left with nothing to take along, or a reader that has nothing yet: the next plan is the move."""

    to: WorkerKey | None
    """As `Move.to`."""


def can_leave(
    ask: RouteAsk, source: WorkerKey, to: WorkerKey | None, router: Router, now: float, holder: WorkerKey | None = None
) -> bool:
    """Whether anybody else, or `to`, could take the request as it asks, with a `holder` adopt it from there. Books
    nothing."""
    if holder is not None:
        return router.choose_decode(_away(ask, source, to, router), holder, now) is not None
    ask = replace(ask, may_wait=False, excluded={*ask.excluded, source})
    return (router.choose(ask, now) if to is None else plan_at(ask, to, router, now)) is not None


def plan_at(ask: RouteAsk, to: WorkerKey, router: Router, now: float) -> Decision | None:
    """To begin at `to`, and there alone where no worker can adopt from it. Books nothing. None: it cannot take it."""
    table = router.table
    for readers in (DECODE, COLOCATED):
        at = np.flatnonzero(table.by_role[readers])
        kept = {key for slot in at if (key := table.roster[slot]) is not None}
        plan = router.choose(only(ask, {to, *kept}, router), now)
        if plan is not None and plan.worker == to:
            return plan
    return router.choose(only(ask, {to}, router), now)


def only(ask: RouteAsk, workers: Collection[WorkerKey], router: Router) -> RouteAsk:
    """The same for these workers alone, at once."""
    others = {key for key in router.table.roster if key is not None and key not in workers}
    return replace(ask, may_wait=False, excluded={*ask.excluded, *others})


def plan_away(ask: RouteAsk, source: WorkerKey, to: WorkerKey | None, router: Router, now: float) -> Decision | None:
    """To go on elsewhere with the KV that `source` has: at a decode worker where there is one, as if it adopted the
    request, else at whoever serves whole ones. None: nobody can take it."""
    ask = _away(ask, source, to, router)
    found = router.choose_decode(ask, source, now) or router.choose(replace(ask, mode=Mode.COLOCATED), now)
    if found is None:
        return None
    table = router.table
    at, slot = table.slot(source), table.slot(found.worker)
    assert slot is not None
    size = max(1, int(table.block_size[slot]))
    # The last token is computed in any case: something has to yield the next one.
    there = (ask.num_tokens - 1) // size
    is_near = at is not None and table.lane[at] == table.lane[slot] and not ask.no_cache
    fetch = Fetch(source, there) if is_near and there > found.held_blocks else None
    cached = there if fetch else found.held_blocks
    start = min(cached * size, ask.num_tokens - 1)
    compute_ms = table.steps.share_ms(slot, ask.num_tokens - start, start)
    kind = PlanKind.FETCH_WHOLE if fetch else PlanKind.WHOLE
    columns = found.candidates
    return replace(
        found,
        kind=kind,
        whole=True,
        fetch=fetch,
        reason=MOVED,
        cached_blocks=cached,
        booked_ms=compute_ms,
        predicted_ttft_ms=float(table.queue_ms[slot] + found.terms[MEMORY_WAIT] + compute_ms),
        candidates=replace(columns, kinds=np.full(len(columns), KINDS.index(kind), np.int8)),
    )


def _away(ask: RouteAsk, source: WorkerKey, to: WorkerKey | None, router: Router) -> RouteAsk:
    ask = replace(ask, may_wait=False, excluded={*ask.excluded, source})
    return ask if to is None else only(ask, {to}, router)

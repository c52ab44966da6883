"""Which worker serves a request: a pure choice over load views. It books nothing and sends nothing.

Scores are in tokens of work ahead of the request; the lowest wins and equal scores take turns. Blocks, not requests,
bound a decode worker: one without room for the whole request is passed over while another has it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.records import Role, WorkerLoad

DECODE_ROW_TOKENS = 16
"""A running decode weighs as much as this many waiting prompt tokens."""


class Mode(StrEnum):
    AUTO = "auto"
    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """A worker's process: a restart under the same name is another key."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A connected worker as one gateway sees it: its last report plus this gateway's later bookings."""

    key: WorkerKey
    role: Role
    address: str
    capacity_tokens: int
    """Tokens of the whole KV pool."""
    load: WorkerLoad = field(default_factory=WorkerLoad)
    booked_requests: int = 0
    booked_tokens: int = 0
    block_size: int = 16
    lane: str = ""
    """Transport that it reads and is read with; only equal ones pair."""

    @property
    def queued_tokens(self) -> int:
        """Work ahead of a new request."""
        rows = self.load.running_requests + self.load.adopting_requests + self.booked_requests
        return self.load.waiting_tokens + self.booked_tokens + DECODE_ROW_TOKENS * rows

    @property
    def free_tokens(self) -> int:
        return (self.load.free_blocks + self.load.evictable_blocks) * self.block_size - self.booked_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """`whole`: the worker serves all of it. Otherwise it prefills; the decode worker is chosen when it has started."""

    worker: WorkerView
    whole: bool
    reason: str


def choose_plan(
    mode: Mode, fleet: Sequence[WorkerView], excluded: Collection[WorkerKey], num_tokens: int, turn: int
) -> Plan | None:
    """The plan for a request that needs `num_tokens` of KV at most; None when no worker can take it now.

    Any role may serve whole requests when a pool is empty (SPEC E2). `turn` rotates among equals.
    """
    ready = [w for w in fleet if w.key not in excluded and w.capacity_tokens >= num_tokens]
    decode = [w for w in ready if w.role is Role.DECODE]
    lanes = {w.lane for w in decode}
    prefill = [w for w in ready if w.role is Role.PREFILL and (not decode or w.lane in lanes)]
    colocated = [w for w in ready if w.role is Role.COLOCATED]
    if mode is Mode.DISAGGREGATED:
        source = prefill or colocated
        if not source or not any(w.key != source[0].key or len(source) > 1 for w in decode or colocated):
            return None
        return Plan(_least(source, turn), whole=False, reason="mode")
    if mode is Mode.COLOCATED:
        pool = colocated or decode or prefill
        return Plan(_least(pool, turn), whole=True, reason="mode") if pool else None
    if prefill and decode:
        best = _least(prefill, turn)
        if colocated and (other := _least(colocated, turn)).queued_tokens < best.queued_tokens:
            return Plan(other, whole=True, reason="less_queued")
        return Plan(best, whole=False, reason="pools")
    pool = colocated or decode or prefill
    return Plan(_least(pool, turn), whole=True, reason="pool_down" if not colocated else "colocated") if pool else None


def choose_decode(
    fleet: Sequence[WorkerView], source: WorkerKey, excluded: Collection[WorkerKey], num_tokens: int, turn: int
) -> WorkerView | None:
    """The decode worker for a prefill that has started at `source`; never the source itself."""
    lane = next((w.lane for w in fleet if w.key == source), "")
    ready = [
        w
        for w in fleet
        if w.key not in excluded and w.key != source and w.capacity_tokens >= num_tokens and w.lane == lane
    ]
    pool = [w for w in ready if w.role is Role.DECODE] or [w for w in ready if w.role is Role.COLOCATED]
    if not pool:
        return None
    roomy = [w for w in pool if w.free_tokens >= num_tokens]
    return _least(roomy or pool, turn)


def _least(pool: Sequence[WorkerView], turn: int) -> WorkerView:
    """Lowest queue; equals take turns."""
    low = min(w.queued_tokens for w in pool)
    ties = [w for w in pool if w.queued_tokens == low]
    return ties[turn % len(ties)]

"""The workers as columns: one row (slot) each, for choices that look at all of them at once.

A row is the worker's last load report plus what this gateway has sent there since: a report names the last
Submit/Adopt that it includes, later ones are added, so that a burst does not pile onto the worker whose report is
oldest. A booking is undone when delivery fails, and forgotten with the worker's process. Does not: judge, send, or
know time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace.core.records import Role, WorkerLoad
from headrace.core.step_shape import FEATURES, GENERIC_S, KNOTS, NUM_FEATURES
from router.core.placement import WorkerKey

PREFILL, DECODE, COLOCATED = range(3)
ROLE_CODES = {Role.PREFILL: PREFILL, Role.DECODE: DECODE, Role.COLOCATED: COLOCATED}
_NUM_KNOTS = len(KNOTS)
_WIDTHS = np.array([*(b - a for a, b in pairwise(KNOTS)), KNOTS[-1]], np.float64)
_KNOTS = np.array(KNOTS, np.int64)
DECODE_ROW, DECODE_TOKEN, PREFILL_ROW, PAIR, SAMPLED_ROW = range(5)
"""Columns of `FleetTable.adders_ms`."""
assert len(FEATURES) == 1 + _NUM_KNOTS + 5

_INT = {
    "role": np.int8, "capacity_tokens": np.int64, "block_size": np.int64, "lane": np.int32, "node": np.int32,
    "generation": np.int64, "waiting_tokens": np.int64, "rows": np.int64, "decode_rows": np.int64,
    "decode_context": np.int64, "output_left": np.int64, "free_blocks": np.int64, "evictable_blocks": np.int64,
    "booked_us": np.int64, "booked_tokens": np.int64, "booked_rows": np.int64, "booked_requests": np.int64,
    "booked_context": np.int64, "booked_blocks": np.int64,
}  # fmt: skip
_FLOAT = ("queue_ms", "eviction_ms", "restore_ms")
_BOOL = ("live", "closed", "has_costs")


@dataclass(frozen=True, slots=True)
class Booking:
    """What one request adds to a worker until a report includes it."""

    us: int = 0
    """Microseconds of prefill work; whole ones, so that an undo is exact."""
    tokens: int = 0
    """Prompt tokens to compute."""
    rows: int = 0
    """Decode rows to come."""
    context: int = 0
    """Tokens that those attend to."""
    blocks: int = 0
    """Blocks to be taken from the free and evictable ones."""


@dataclass(slots=True)
class _Worker:
    key: WorkerKey
    slot: int
    address: str
    seq: int = 0
    pending: dict[int, Booking] = field(default_factory=dict)
    load: WorkerLoad = field(default_factory=WorkerLoad)


class FleetTable:
    """See the module's docstring. Columns are arrays over slots; only the first `num_slots` rows were ever used.

    at_knot_ms, slope_ms: [slots, knots] a step's cost by rows of the matrix products; adders_ms: [slots, 5].
    """

    role: NDArray[np.int8]
    capacity_tokens: NDArray[np.int64]
    block_size: NDArray[np.int64]
    lane: NDArray[np.int32]
    node: NDArray[np.int32]
    generation: NDArray[np.int64]
    waiting_tokens: NDArray[np.int64]
    rows: NDArray[np.int64]
    decode_rows: NDArray[np.int64]
    decode_context: NDArray[np.int64]
    output_left: NDArray[np.int64]
    free_blocks: NDArray[np.int64]
    evictable_blocks: NDArray[np.int64]
    booked_us: NDArray[np.int64]
    booked_tokens: NDArray[np.int64]
    booked_rows: NDArray[np.int64]
    booked_requests: NDArray[np.int64]
    booked_context: NDArray[np.int64]
    booked_blocks: NDArray[np.int64]
    queue_ms: NDArray[np.float64]
    eviction_ms: NDArray[np.float64]
    restore_ms: NDArray[np.float64]
    live: NDArray[np.bool_]
    closed: NDArray[np.bool_]
    has_costs: NDArray[np.bool_]

    def __init__(self) -> None:
        self.num_slots = 0
        self._workers: dict[WorkerKey, _Worker] = {}
        self._at: list[_Worker | None] = []
        self._free: list[int] = []
        self._roster: tuple[WorkerKey | None, ...] | None = None
        self._names: dict[str, int] = {}
        self._generic = np.array(GENERIC_S) * 1e3
        self._generic_scale = 1.0
        self._are_averages_old = False
        for name in self._columns():
            setattr(self, name, np.zeros(0, self._dtype(name)))
        self._costs = np.zeros((0, NUM_FEATURES))
        self.at_knot_ms = np.zeros((0, _NUM_KNOTS))
        self.slope_ms = np.zeros((0, _NUM_KNOTS))
        self.adders_ms = np.zeros((0, 5))

    # ---- who is there

    def up(
        self,
        key: WorkerKey,
        role: Role,
        capacity_tokens: int,
        block_size: int,
        lane: str = "",
        node: str = "",
        address: str = "",
    ) -> int:
        """A worker's slot from now on. The same worker again only changes what is told of it."""
        worker = self._workers.get(key)
        if worker is None:
            slot = self._free.pop() if self._free else self._new_slot()
            worker = self._workers[key] = _Worker(key, slot, address)
            self._at[slot] = worker
            self._roster = None
            self.generation[slot] += 1
        slot, worker.address = worker.slot, address
        self.live[slot] = True
        self.role[slot] = ROLE_CODES[role]
        self.capacity_tokens[slot], self.block_size[slot] = capacity_tokens, block_size
        self._fill(slot, worker.load)
        self.lane[slot], self.node[slot] = self._name(lane), self._name(node)
        return slot

    def down(self, key: WorkerKey) -> int | None:
        """Forgets the worker and its bookings; the slot that it had."""
        worker = self._workers.pop(key, None)
        if worker is None:
            return None
        slot = worker.slot
        self._at[slot] = None
        self._roster = None
        for name in self._columns():
            if name != "generation":
                getattr(self, name)[slot] = 0
        self._free.append(slot)
        self._are_averages_old = True
        return slot

    def slot(self, key: WorkerKey) -> int | None:
        worker = self._workers.get(key)
        return worker.slot if worker else None

    def key(self, slot: int) -> WorkerKey:
        """Of a live slot."""
        worker = self._at[slot]
        assert worker is not None
        return worker.key

    @property
    def roster(self) -> tuple[WorkerKey | None, ...]:
        """Who has each slot now."""
        if self._roster is None:
            self._roster = tuple(worker.key if worker else None for worker in self._at)
        return self._roster

    def address(self, key: WorkerKey) -> str:
        worker = self._workers.get(key)
        return worker.address if worker else ""

    def load(self, key: WorkerKey) -> WorkerLoad:
        """The last report."""
        worker = self._workers.get(key)
        return worker.load if worker else WorkerLoad()

    @property
    def keys(self) -> list[WorkerKey]:
        return list(self._workers)

    # ---- loads and bookings

    def report(self, key: WorkerKey, load: WorkerLoad) -> None:
        """Takes a report; an older one than the last, or one of a worker that is gone, is ignored."""
        worker = self._workers.get(key)
        if worker is None or load.submit_seq < worker.load.submit_seq:
            return
        worker.load = load
        for seq in [s for s in worker.pending if s <= load.submit_seq]:
            self._count(worker.slot, worker.pending.pop(seq), -1)
        self._fill(worker.slot, load)

    def book(self, key: WorkerKey, booking: Booking) -> int:
        """Adds a request to a worker that is there; returns the submit_seq to send with it (from 1)."""
        worker = self._workers[key]
        worker.seq += 1
        worker.pending[worker.seq] = booking
        self._count(worker.slot, booking, 1)
        return worker.seq

    def undo(self, key: WorkerKey, seq: int) -> None:
        """Idempotent; what a report has included by now is not undone."""
        worker = self._workers.get(key)
        booking = worker.pending.pop(seq, None) if worker else None
        if worker is not None and booking is not None:
            self._count(worker.slot, booking, -1)

    @property
    def total(self) -> int:
        """Bookings outstanding on all workers; 0 at quiescence."""
        return sum(len(worker.pending) for worker in self._workers.values())

    # ---- step costs

    def scale_generic(self, ratio: float) -> None:
        """Workers that tell no costs take `ratio` times as long as was reckoned, by a completed request."""
        self._generic_scale = min(max(self._generic_scale * ratio, 1e-4), 1e4)
        self._are_averages_old = True

    def refresh(self) -> None:
        """Brings the rows without step costs of their own up to date: call it before a choice."""
        if self._are_averages_old:
            self._are_averages_old = False
            known = self.has_costs[: self.num_slots] & self.live[: self.num_slots]
            if known.any():
                costs = self._costs[: self.num_slots][known].mean(axis=0)
            else:
                costs = self._generic * self._generic_scale
            self._lay_out(np.flatnonzero(~self.has_costs[: self.num_slots]), costs)

    def rows_ms(self, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """[n] a step's time at each slot for that many rows of the matrix products (at least 1), adders apart."""
        at = np.searchsorted(_KNOTS, rows, side="right") - 1
        return self.at_knot_ms[slots, at] + self.slope_ms[slots, at] * (rows - _KNOTS[at])

    # ---- inside

    def _columns(self) -> list[str]:
        return [*_INT, *_FLOAT, *_BOOL]

    @staticmethod
    def _dtype(name: str) -> type:
        return _INT.get(name, np.float64 if name in _FLOAT else np.bool_)

    def _new_slot(self) -> int:
        slot = self.num_slots
        if slot == len(self.role):
            size = max(64, 2 * slot)
            for name in [*self._columns(), "_costs", "at_knot_ms", "slope_ms", "adders_ms"]:
                old = getattr(self, name)
                new = np.zeros((size, *old.shape[1:]), old.dtype)
                new[:slot] = old
                setattr(self, name, new)
        self.num_slots += 1
        self._at.append(None)
        return slot

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def _count(self, slot: int, booking: Booking, sign: int) -> None:
        self.booked_requests[slot] += sign
        self.booked_us[slot] += sign * booking.us
        self.booked_tokens[slot] += sign * booking.tokens
        self.booked_rows[slot] += sign * booking.rows
        self.booked_context[slot] += sign * booking.context
        self.booked_blocks[slot] += sign * booking.blocks

    def _fill(self, slot: int, load: WorkerLoad) -> None:
        self.queue_ms[slot] = load.queue_s * 1e3
        self.waiting_tokens[slot] = load.waiting_tokens
        self.rows[slot] = load.running_requests + load.adopting_requests
        self.decode_rows[slot] = load.decode_rows
        self.decode_context[slot] = load.decode_context
        self.output_left[slot] = load.expected_output_tokens
        # Before the first report nothing is held there.
        self.free_blocks[slot] = (
            load.free_blocks
            if load.total_blocks or load.free_blocks
            else self.capacity_tokens[slot] // self.block_size[slot]
        )
        self.evictable_blocks[slot] = load.evictable_blocks
        self.eviction_ms[slot] = load.eviction_ms_per_block
        self.restore_ms[slot] = load.restore_block_s * 1e3
        self.closed[slot] = bool(load.closed)
        has_costs = len(load.step_costs) == NUM_FEATURES
        if has_costs:
            costs = np.array(load.step_costs) * 1e3
            if not self.has_costs[slot] or not np.array_equal(costs, self._costs[slot]):
                self._costs[slot] = costs
                self._lay_out(np.array([slot]), costs)
                self._are_averages_old = True
        elif self.has_costs[slot] or not self.at_knot_ms[slot].any():
            self._are_averages_old = True
        self.has_costs[slot] = has_costs

    def _lay_out(self, slots: NDArray[np.int64], costs_ms: NDArray[np.float64]) -> None:
        pieces = costs_ms[1 : _NUM_KNOTS + 1]
        self.at_knot_ms[slots] = costs_ms[0] + np.concatenate([[0.0], np.cumsum(pieces[:-1])])
        self.slope_ms[slots] = pieces / _WIDTHS
        self.adders_ms[slots] = costs_ms[_NUM_KNOTS + 1 :]

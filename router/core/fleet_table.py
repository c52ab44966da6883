"""The workers as columns: one row (slot) each, for choices that look at all of them at once.

A row is the worker's last load report plus what this gateway has sent there since: a report names the last
Submit/Adopt that it includes, later ones are added, so that a burst does not pile onto the worker whose report is
oldest. A booking is undone when delivery fails, and forgotten with the worker's process. Does not: judge, send, or
know time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.core.records import Role, WorkerLoad
from headrace.core.step_shape import NUM_FEATURES
from router.core.cost import USUAL_CHUNK_TOKENS, Columns
from router.core.placement import WorkerKey
from router.core.step_columns import StepColumns

PREFILL, DECODE, COLOCATED = range(3)
ROLE_CODES = {Role.PREFILL: PREFILL, Role.DECODE: DECODE, Role.COLOCATED: COLOCATED}
_INT = (
    *("role", "lane", "node", "place", "generation", "capacity_tokens", "block_size", "chunk_tokens"),
    *("waiting_tokens", "requests", "output_left", "rows", "context"),
    *("evictable_blocks", "unused_blocks", "available_blocks", "growth_blocks"),
)
_FLOAT = ("queue_ms", "eviction_ms", "restore_ms")
_BOOL = ("live", "closed")


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
class _Booked:
    requests: int = 0
    us: int = 0
    tokens: int = 0
    rows: int = 0
    context: int = 0
    blocks: int = 0


@dataclass(slots=True)
class _Worker:
    key: WorkerKey
    slot: int
    address: str
    seq: int = 0
    pending: dict[int, Booking] = field(default_factory=dict)
    booked: _Booked = field(default_factory=_Booked)
    load: WorkerLoad = field(default_factory=WorkerLoad)


class FleetTable:
    """See the module's docstring. Columns are [slots] arrays, of which `num_slots` rows were ever used; those of the
    load include this gateway's bookings. A slot is used again with a new generation.
    """

    role: NDArray[np.int64]
    lane: NDArray[np.int64]
    node: NDArray[np.int64]
    place: NDArray[np.int64]
    """Number of the pair (lane, node)."""
    generation: NDArray[np.int64]
    capacity_tokens: NDArray[np.int64]
    block_size: NDArray[np.int64]
    chunk_tokens: NDArray[np.int64]
    """Most prompt tokens of one request in a step."""
    waiting_tokens: NDArray[np.int64]
    requests: NDArray[np.int64]
    output_left: NDArray[np.int64]
    evictable_blocks: NDArray[np.int64]
    unused_blocks: NDArray[np.int64]
    """Free ones that nothing is booked for."""
    available_blocks: NDArray[np.int64]
    """Free and evictable ones, less those booked; below zero when more is booked than there is."""
    growth_blocks: NDArray[np.int64]
    """That the decodes there are expected to take still."""
    rows: NDArray[np.int64]
    """Decode rows."""
    context: NDArray[np.int64]
    """Tokens that those attend to."""
    queue_ms: NDArray[np.float64]
    """Prefill work ahead of a new request."""
    eviction_ms: NDArray[np.float64]
    restore_ms: NDArray[np.float64]
    live: NDArray[np.bool_]
    closed: NDArray[np.bool_]

    def __init__(self) -> None:
        self.num_slots = 0
        self.version = 0
        """Another one whenever who is there, willing or large enough has changed."""
        self.least_capacity_tokens = 0
        """Of live workers."""
        self.by_role: dict[int, NDArray[np.bool_]] = {}
        """[num_slots] live workers of each role."""
        self.steps = StepColumns()
        self._workers: dict[WorkerKey, _Worker] = {}
        self._at: list[_Worker | None] = []
        self._free: list[int] = []
        self._lanes: dict[str, int] = {}
        self._nodes: dict[str, int] = {}
        self._places: dict[tuple[int, int], int] = {}
        self._roster: tuple[WorkerKey | None, ...] | None = None
        self._apart: set[tuple[WorkerKey, WorkerKey]] = set()
        """(reader, holder) that no lane connects."""
        self._columns: Columns | None = None
        for name in (*_INT, *_FLOAT, *_BOOL):
            kind = np.int64 if name in _INT else np.float64 if name in _FLOAT else np.bool_
            setattr(self, name, np.zeros(0, kind))
        self._sort_out()

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
        chunk_tokens: int = 0,
    ) -> int:
        """A worker's slot from now on. The same worker again only changes what is told of it.

        chunk_tokens: 0: it does not tell.
        """
        worker = self._workers.get(key)
        if worker is None:
            slot = self._free.pop() if self._free else self._new_slot()
            worker = self._workers[key] = _Worker(key, slot, address)
            self._at[slot], self._roster = worker, None
            self.generation[slot] += 1
            self.live[slot] = True
        slot, worker.address = worker.slot, address
        self.role[slot] = ROLE_CODES[role]
        self.capacity_tokens[slot], self.block_size[slot] = capacity_tokens, block_size
        self.chunk_tokens[slot] = chunk_tokens or USUAL_CHUNK_TOKENS
        self.lane[slot] = self._lanes.setdefault(lane, len(self._lanes))
        self.node[slot] = self._nodes.setdefault(node, len(self._nodes))
        place = (int(self.lane[slot]), int(self.node[slot]))
        self.place[slot] = self._places.setdefault(place, len(self._places))
        self._tell(worker)
        self._sort_out()
        return slot

    def down(self, key: WorkerKey) -> int | None:
        """Forgets the worker and its bookings; the slot that it had."""
        worker = self._workers.pop(key, None)
        if worker is None:
            return None
        slot = worker.slot
        self._apart = {pair for pair in self._apart if key not in pair}
        self._at[slot], self._roster = None, None
        for name in (*_INT, *_FLOAT, *_BOOL):
            if name != "generation":
                getattr(self, name)[slot] = 0
        self.steps.forget(slot)
        self._free.append(slot)
        self._sort_out()
        return slot

    def paired(self, reader: WorkerKey, holder: WorkerKey, works: bool) -> None:
        """Whether one worker can read from another. Nobody has told: it can."""
        if works:
            self._apart.discard((reader, holder))
        elif reader in self._workers and holder in self._workers:
            self._apart.add((reader, holder))

    def apart_from(self, slot: int) -> list[int]:
        """Slots of workers that cannot read from that one."""
        holder = self._at[slot]
        return [
            self._workers[reader].slot for reader, other in self._apart if holder is not None and other == holder.key
        ]

    def slot(self, key: WorkerKey) -> int | None:
        worker = self._workers.get(key)
        return worker.slot if worker else None

    def key(self, slot: int) -> WorkerKey:
        """Of a live slot."""
        worker = self._at[slot]
        assert worker is not None
        return worker.key

    def address(self, key: WorkerKey) -> str:
        worker = self._workers.get(key)
        return worker.address if worker else ""

    def load(self, key: WorkerKey) -> WorkerLoad:
        """The last report."""
        worker = self._workers.get(key)
        return worker.load if worker else WorkerLoad()

    @property
    def roster(self) -> tuple[WorkerKey | None, ...]:
        """Who has each slot now."""
        if self._roster is None:
            self._roster = tuple(worker.key if worker else None for worker in self._at)
        return self._roster

    @property
    def columns(self) -> Columns:
        """Views of the rows that were ever used, with step costs as of the last `steps.refresh`. Take it anew for each
        choice."""
        if self._columns is None:
            own = {"live": self.live, "decodes_only": self.by_role[DECODE], "knots": self.steps.knots}
            count, columns = self.num_slots, []
            for name in Columns._fields:
                column = own.get(name)
                if column is None:
                    column = getattr(self, name) if hasattr(self, name) else getattr(self.steps, name)
                columns.append(column if name == "knots" else column[:count])
            self._columns = Columns._make(columns)
        return self._columns

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    # ---- loads and bookings

    def report(self, key: WorkerKey, load: WorkerLoad) -> None:
        """Takes a report; an older one than the last, or one of a worker that is gone, is ignored."""
        worker = self._workers.get(key)
        if worker is None or load.submit_seq < worker.load.submit_seq:
            return
        worker.load = load
        for seq in [s for s in worker.pending if s <= load.submit_seq]:
            _count(worker.booked, worker.pending.pop(seq), -1)
        self._tell(worker)

    def book(self, key: WorkerKey, booking: Booking) -> int:
        """Adds a request to a worker that is there; returns the submit_seq to send with it (from 1)."""
        worker = self._workers[key]
        worker.seq += 1
        worker.pending[worker.seq] = booking
        _count(worker.booked, booking, 1)
        self._tell(worker)
        return worker.seq

    def undo(self, key: WorkerKey, seq: int) -> None:
        """Idempotent; what a report has included by now is not undone."""
        worker = self._workers.get(key)
        booking = worker.pending.pop(seq, None) if worker else None
        if worker is not None and booking is not None:
            _count(worker.booked, booking, -1)
            self._tell(worker)

    @property
    def total(self) -> int:
        """Bookings outstanding on all workers; 0 at quiescence."""
        return sum(len(worker.pending) for worker in self._workers.values())

    # ---- inside

    def _sort_out(self) -> None:
        live, role = self.live[: self.num_slots], self.role[: self.num_slots]
        self.by_role = {code: live & (role == code) for code in (PREFILL, DECODE, COLOCATED)}
        self.least_capacity_tokens = int(self.capacity_tokens[: self.num_slots][live].min(initial=1 << 62))
        self._columns = None
        self.version += 1

    def _new_slot(self) -> int:
        slot = self.num_slots
        if slot == len(self.role):
            size = max(64, 2 * slot)
            for name in (*_INT, *_FLOAT, *_BOOL):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(size - slot, old.dtype)]))
            self.steps.grow(size)
        self.num_slots += 1
        self._at.append(None)
        return slot

    def _tell(self, worker: _Worker) -> None:
        """Writes a worker's row: its load and what is booked there."""
        slot, load, booked = worker.slot, worker.load, worker.booked
        self.queue_ms[slot] = load.queue_s * 1e3 + booked.us * 1e-3
        self.waiting_tokens[slot] = load.waiting_tokens + booked.tokens
        self.requests[slot] = load.running_requests + load.adopting_requests + booked.requests
        self.output_left[slot] = load.expected_output_tokens
        # Before the first report nothing is held there.
        told = load.total_blocks or load.free_blocks or load.evictable_blocks
        free = load.free_blocks if told else int(self.capacity_tokens[slot] // self.block_size[slot])
        self.unused_blocks[slot] = max(0, free - booked.blocks)
        self.evictable_blocks[slot] = load.evictable_blocks
        self.available_blocks[slot] = free + load.evictable_blocks - booked.blocks
        self.growth_blocks[slot] = load.expected_output_tokens // int(self.block_size[slot])
        rows, context = load.decode_rows + booked.rows, load.decode_context + booked.context
        if self.role[slot] != PREFILL:
            # Whoever is ahead here decodes by the time that a new request computes.
            rows += load.waiting_requests + max(0, load.running_requests - load.decode_rows) + load.adopting_requests
            context += load.waiting_tokens
        self.rows[slot], self.context[slot] = rows, context
        self.eviction_ms[slot] = load.eviction_ms_per_block
        self.restore_ms[slot] = load.restore_block_s * 1e3
        if self.closed[slot] != bool(load.closed):
            self.closed[slot] = bool(load.closed)
            self.version += 1
        costs_s = load.step_costs if len(load.step_costs) == NUM_FEATURES else ()
        self.steps.tell(slot, costs_s, rows, context, int(self.chunk_tokens[slot]))


def _count(booked: _Booked, booking: Booking, sign: int) -> None:
    booked.requests += sign
    booked.us += sign * booking.us
    booked.tokens += sign * booking.tokens
    booked.rows += sign * booking.rows
    booked.context += sign * booking.context
    booked.blocks += sign * booking.blocks

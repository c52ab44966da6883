"""What this gateway has sent to each worker since that worker's last load report.

A load report names the last Submit/Adopt that it includes; later ones are added here, so that a burst does not pile
onto the worker whose report is oldest. A booking is undone when delivery fails, and forgotten with the worker's
process.
"""

from __future__ import annotations

from headrace.core.records import WorkerLoad
from router.core.placement import WorkerKey


class Bookings:
    """Per worker process: the sequence of Submits, the last report, and the unreported rest."""

    def __init__(self) -> None:
        self._seq: dict[WorkerKey, int] = {}
        self._pending: dict[WorkerKey, dict[int, int]] = {}
        self._loads: dict[WorkerKey, WorkerLoad] = {}

    def add(self, worker: WorkerKey, tokens: int) -> int:
        """Books `tokens` of work and returns the submit_seq to send with it (from 1)."""
        seq = self._seq.get(worker, 0) + 1
        self._seq[worker] = seq
        self._pending.setdefault(worker, {})[seq] = tokens
        return seq

    def undo(self, worker: WorkerKey, seq: int) -> None:
        self._pending.get(worker, {}).pop(seq, None)

    def report(self, worker: WorkerKey, load: WorkerLoad) -> None:
        """Takes a report; an older one than the last is ignored."""
        known = self._loads.get(worker)
        if known is not None and load.submit_seq < known.submit_seq:
            return
        self._loads[worker] = load
        pending = self._pending.get(worker)
        if pending:
            for seq in [s for s in pending if s <= load.submit_seq]:
                del pending[seq]

    def forget(self, worker: WorkerKey) -> None:
        self._seq.pop(worker, None)
        self._pending.pop(worker, None)
        self._loads.pop(worker, None)

    def load(self, worker: WorkerKey) -> WorkerLoad:
        return self._loads.get(worker, WorkerLoad())

    def unreported(self, worker: WorkerKey) -> tuple[int, int]:
        """(requests, tokens) that the last report does not include."""
        pending = self._pending.get(worker, {})
        return len(pending), sum(pending.values())

    @property
    def total(self) -> int:
        """Bookings outstanding on all workers; 0 at quiescence."""
        return sum(len(p) for p in self._pending.values())

"""What became of a gateway's requests, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.records import FinishReason
from headrace.errors import HeadraceError
from router.core.legs import AdoptAt, SubmitTo


@dataclass(slots=True)
class Counters:
    """Requests (branches) since the start; accepted = completed + failed + cancelled + live (CASES law a)."""

    accepted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    retries: int = 0
    """Plans and adoptions beyond a first one that are no move."""
    moves: int = 0
    """Plans and adoptions by which a worker is left."""

    def sent(self, action: SubmitTo | AdoptAt, attempt: int) -> None:
        """`attempt`: of the flight, this plan included."""
        tries = action.number if isinstance(action, AdoptAt) else attempt
        self.moves += action.moved
        self.retries += tries > 1 and not action.moved

    def ended(self, reason: FinishReason, error: HeadraceError | None) -> None:
        if error is None:
            self.completed += 1
        elif reason is FinishReason.CANCELLED:
            self.cancelled += 1
        else:
            self.failed += 1

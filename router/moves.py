"""Requests that are told to leave a worker: which ones, and how many do. How one leaves is `router.core.moving`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.clock import Clock
from router.answer import Branch
from router.core.legs import Action
from router.fleet import Fleet
from router.placing import Placing


class Moved(NamedTuple):
    """Choices of requests that leave a worker, and that stay."""

    moved: int
    stay: int


class Moves:
    """`act` carries out what a branch's flight asks for, `place` plans one that is queued."""

    def __init__(
        self,
        fleet: Fleet,
        placing: Placing,
        clock: Clock,
        act: Callable[[Branch, list[Action]], None],
        place: Callable[[Branch, float], None],
    ) -> None:
        self._fleet, self._placing, self._clock = fleet, placing, clock
        self._act, self._place = act, place

    def move(
        self, branches: Iterable[Branch], worker_id: str, tenant: str | None, label: str, to_id: str = ""
    ) -> Moved:
        """Has requests leave a worker for `to_id`, or for wherever it is cheapest: those of the tenant (None: of all)
        and label ('': all) that are there; without a worker the ones of that name wherever they are.

        They go on where they are when nobody else can take them, or when their KV is being handed on just now. Raises
        HeadraceError for workers that are not there.
        """
        source, to = self._fleet.key("worker_id", worker_id), self._fleet.key("to", to_id)
        moved = stay = 0
        for branch in list(branches):
            if tenant not in (None, branch.spec.tenant) or label not in ("", branch.spec.label):
                continue
            now, flight = self._clock(), branch.flight
            at = source or flight.at
            if at is None or at == to or not any(leg.live and leg.worker == at for leg in flight.legs):
                continue
            self._placing.name_blocks(branch)
            actions = flight.move(at, self._placing.router, now, to)
            moved, stay = moved + (actions is not None), stay + (actions is None)
            self._act(branch, actions or [])
            self._place(branch, now)
        return Moved(moved, stay)

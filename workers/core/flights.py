"""The steps that the runner has: the one that runs and, with overlap, the one that was planned behind it.

The second is planned as if no row ended with the first but those that must, by length. Where another one does, its
row is void: what it samples is dropped, what it writes goes into blocks that are still the request's. For each way in
which a request could lose its blocks or its place while plans on their way name it:

| what happens | what is done |
| --- | --- |
| it ends: last token, cancel, deadline | FINISHED at once; its blocks go back with the last plan that names it |
| a tool's call, a move | no further plan names it; it pauses when the last one that does is over |
| others need its blocks or its row, memory is short | no step is planned behind: first the step on its way is over |
| a prefill samples its first token, hands off | known when its step is over; the step planned behind does not name it |
| its blocks are published, announced to a reader | when the step that filled them is over |

Blocks that nobody uses go to whoever comes, as ever: a step runs after the one before it. Only copies to the host make
others than steps wait for them (`copies_out`), and the pool's memory changes with nothing else on its way.

Does not: choose, or know what a step costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.core.predictor import StepShape
from headrace.errors import InvariantError
from headrace.ids import RequestKey
from workers.core.batch import DecodeBatch, Ints
from workers.core.host_tier import Copy
from workers.core.plan import StepPlan
from workers.core.request import HostCopy, Request, State

MOST = 2
"""Steps on their way at once."""


@dataclass(slots=True, eq=False)
class Flight:
    """One of them."""

    plan: StepPlan
    decodes: list[Request]
    """In the order of the plan's rows."""
    prefills: list[Request]
    """In the order of the plan's rows after those."""
    fresh: list[Request]
    """Decodes among them that no step had before."""
    shape: StepShape
    predicted_s: float
    """0: no prediction."""
    since: float = 0.0
    """When it began to run; until then it is planned behind another."""
    started: list[RequestKey] = field(default_factory=list)
    """Requests that it is the first one of."""
    host_copies: list[HostCopy] = field(default_factory=list)
    """Host blocks that it reads or writes for nobody's further use; they are free when the step is over."""
    landing: dict[RequestKey, int] = field(default_factory=dict)
    """Requests whose blocks from the host are there when the step is over, and the tokens that they have until then."""
    restored: list[Copy] = field(default_factory=list)
    """Blocks of the host tier that stay where they are until the step is over."""
    copied: list[int] = field(default_factory=list)
    """Blocks that have a reference for being copied from, until the step is over."""
    dropped: list[Request] = field(default_factory=list)
    """Ended since; this is the last plan that names their blocks."""

    def names(self, request: Request, batch: DecodeBatch) -> bool:
        """The plan has a row for it, and none has that was planned since."""
        if request.state is State.DECODING:
            return bool(batch.step_id[request.row] == self.plan.step_id)
        return request in self.prefills


class Flights:
    """Oldest first."""

    def __init__(self, batch: DecodeBatch) -> None:
        self._batch = batch
        self._flights: list[Flight] = []
        self._rows: list[tuple[int, slice | Ints]] = []
        """Of each, `DecodeBatch.moves` when it was planned, and its places in the batch."""

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    @property
    def running(self) -> Flight | None:
        return self._flights[0] if self._flights else None

    @property
    def newest(self) -> Flight | None:
        return self._flights[-1] if self._flights else None

    @property
    def copies_out(self) -> bool:
        """Blocks that are free by now are still to be copied from: only steps may get them."""
        return any(flight.plan.swap_out for flight in self._flights)

    def depart(self, flight: Flight, rows: slice | Ints) -> None:
        """The newest; `rows`: its decodes' places in the batch."""
        self._flights.append(flight)
        self._rows.append((self._batch.moves, rows))
        self._batch.depart(rows, flight.plan.step_id)
        for request, num_tokens in zip(flight.prefills, _chunks(flight.plan), strict=True):
            request.under_way += num_tokens

    def land(self) -> slice | Ints:
        """The oldest is over. Returns its decodes' places in the batch."""
        flight, (moves, rows) = self._flights.pop(0), self._rows.pop(0)
        if moves != self._batch.moves:
            rows = self._batch.rows_of(flight.decodes)
        self._batch.land(rows)
        for request, num_tokens in zip(flight.prefills, _chunks(flight.plan), strict=True):
            request.under_way -= num_tokens
        return rows

    def naming(self, request: Request) -> Flight | None:
        """The last plan that has a row for it."""
        return next((flight for flight in reversed(self._flights) if flight.names(request, self._batch)), None)

    def check_integrity(self) -> None:
        """Raises InvariantError unless batch and requests count the rows that the plans have."""
        named = [id(request) for flight in self._flights for request in flight.decodes]
        for request in self._batch.requests:
            if self._batch.ahead[request.row] != named.count(id(request)):
                raise InvariantError(f"request {request.key}: its rows on their way are not those of the plans")
        under_way = dict.fromkeys((request for flight in self._flights for request in flight.prefills), 0)
        for flight in self._flights:
            for request, num_tokens in zip(flight.prefills, _chunks(flight.plan), strict=True):
                under_way[request] += num_tokens
        if any(request.under_way != num_tokens for request, num_tokens in under_way.items()):
            raise InvariantError("prompt tokens on their way are not those of the plans")


def _chunks(plan: StepPlan) -> list[int]:
    return plan.num_tokens[plan.num_decode_rows :]

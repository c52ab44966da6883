"""Where every request stands: one container a state, each in arrival order, so that a replay chooses the same.

`move` is the only way from one to another and goes along the table of `workers.core.request`.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from headrace.errors import InvariantError
from headrace.ids import RequestKey
from workers.core.request import Request, State, advance


def _arrival(request: Request) -> int:
    return request.arrival


class Queues:
    def __init__(self) -> None:
        self.waiting: OrderedDict[RequestKey, Request] = OrderedDict()
        """Prefills that hold nothing yet."""
        self.adopting: OrderedDict[RequestKey, Request] = OrderedDict()
        """Adoptions that hold nothing yet."""
        self.preempted: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.reserved: dict[RequestKey, Request] = {}
        """Adoptions whose blocks are being pulled."""
        self.held: dict[RequestKey, Request] = {}
        """Handed-off requests whose blocks wait for their reader."""
        self.waiting_tokens = 0
        """Uncomputed tokens of `waiting` and `preempted`."""

    def add(self, request: Request) -> None:
        """Put a request where its state belongs."""
        home = self._home(request)
        if isinstance(home, list):
            insort(home, request, key=_arrival)
        elif home is not None:
            home[request.key] = request
        if home is self.waiting or home is self.preempted:
            self.waiting_tokens += request.num_tokens

    def move(self, request: Request, to: State, now: float) -> None:
        """Raises InvariantError on an illegal edge."""
        self._take(request)
        advance(request, to, now)
        self.add(request)

    @property
    def num_computing(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def next_prefill(self) -> Request | None:
        """Preempted requests come first, then arrival order; None also when an earlier adoption waits for blocks."""
        if self.preempted:
            return self.preempted[0]
        head = next(iter(self.waiting.values()), None)
        return None if head is None or self._later_than(head, self.adopting) else head

    def next_adoption(self) -> Request | None:
        """None also when a prefill that came earlier, or any preempted request, waits for blocks."""
        head = next(iter(self.adopting.values()), None)
        if head is None or self.preempted or self._later_than(head, self.waiting):
            return None
        return head

    def all(self) -> Iterator[Request]:
        for mapping in (self.waiting, self.adopting, self.reserved, self.held):
            yield from mapping.values()
        for row in (self.preempted, self.prefilling, self.decoding):
            yield from row

    def check_integrity(self) -> None:
        """Raises InvariantError unless each request stands where its state says, in order, and counters agree."""
        for request in self.all():
            home = self._home(request)
            if isinstance(home, list):
                if sum(1 for other in home if other is request) != 1:
                    raise InvariantError(f"request {request.key} is not where {request.state} belongs")
            elif home is None or home.get(request.key) is not request:
                raise InvariantError(f"request {request.key} is not where {request.state} belongs")
        for ordered in (list(self.waiting.values()), list(self.adopting.values())):
            if ordered != sorted(ordered, key=_arrival):
                raise InvariantError("a queue is out of arrival order")
        for ordered in (self.preempted, self.prefilling, self.decoding):
            if ordered != sorted(ordered, key=_arrival):
                raise InvariantError("a queue is out of arrival order")
        if self.waiting_tokens != sum(r.num_tokens for r in [*self.waiting.values(), *self.preempted]):
            raise InvariantError("the count of waiting tokens is wrong")

    @staticmethod
    def _later_than(request: Request, queue: OrderedDict[RequestKey, Request]) -> bool:
        other = next(iter(queue.values()), None)
        return other is not None and other.arrival < request.arrival

    def _home(self, request: Request) -> list[Request] | dict[RequestKey, Request] | None:
        match request.state:
            case State.WAITING:
                return self.adopting if request.adopted else self.waiting
            case State.TRANSFERRING:
                return self.reserved if request.adopted else self.held
            case State.PREFILLING:
                return self.prefilling
            case State.DECODING:
                return self.decoding
            case State.PREEMPTED:
                return self.preempted
            case _:
                return None

    def _take(self, request: Request) -> None:
        home = self._home(request)
        if isinstance(home, list):
            home.remove(request)
        elif home is not None:
            del home[request.key]
        if home is self.waiting or home is self.preempted:
            self.waiting_tokens -= request.num_tokens

"""Where every request stands: one container a state. `move` is the only way from one to another and goes along the
table of `workers.core.request`.

Does not: choose. Orders are those of arrival, but for the line of waiting prefills, which is in its policy's.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from headrace.errors import InvariantError
from headrace.ids import RequestKey
from workers.core.admission import QueueAdmission
from workers.core.batch import DecodeBatch
from workers.core.following import Following
from workers.core.request import Request, State, advance
from workers.core.waiting import WaitingLine


def _arrival(request: Request) -> int:
    return request.arrival


def _in_line(request: Request) -> bool:
    """Where a waiting request waits."""
    return not (request.adopted or request.fetching)


class Queues:
    def __init__(self, line: WaitingLine, batch: DecodeBatch, admission: QueueAdmission) -> None:
        self._admission = admission
        self.line = line
        """Prefills that hold nothing yet."""
        self.following = Following(line)
        self.batch = batch
        """Decodes."""
        self.adopting: OrderedDict[RequestKey, Request] = OrderedDict()
        """Adoptions that hold nothing yet."""
        self.fetching: OrderedDict[RequestKey, Request] = OrderedDict()
        """Waiting prefills that part of their prefix is being read for; they join the line when that is over."""
        self.preempted: list[Request] = []
        self.prefilling: list[Request] = []
        self.reserved: dict[RequestKey, Request] = {}
        """Adoptions whose blocks are being pulled."""
        self.held: dict[RequestKey, Request] = {}
        """Handed-off requests whose blocks wait for their reader."""
        self.paused: dict[RequestKey, Request] = {}
        """Requests whose client asks a tool; they may hold blocks, and compute nothing."""
        self.lacking_blocks: Request | None = None
        """The prefill that was to start in the last step planned, and found too few blocks."""
        self.cached_tokens = 0
        """Of waiting prefills: what the cache had for them when they came."""
        self.waiting_tokens = 0
        """Uncomputed tokens of the line and of preempted requests."""

    def add(self, request: Request, now: float) -> None:
        """Put a request where its state belongs."""
        match request.state:
            case State.WAITING if _in_line(request):
                self.line.add(request)
            case State.DECODING:
                self.batch.add(request, now)
            case State.PREFILLING | State.PREEMPTED:
                insort(self._list(request), request, key=_arrival)
            case State.FINISHED:
                return
            case _:
                self._dict(request)[request.key] = request
        if self._counts(request):
            self.waiting_tokens += request.num_tokens
            self.cached_tokens += request.known_cached if request.state is State.WAITING else 0

    def move(self, request: Request, to: State, now: float) -> None:
        """Raises InvariantError on an illegal edge."""
        self._take(request)
        if request.state is State.PREFILLING:
            self.following.left(request)
        if request.state is State.WAITING:
            self._admission.started(request.key, now)
        advance(request, to, now)
        if to is State.FINISHED:
            self._admission.left(request.key, now)
        self.add(request, now)

    def join_line(self, request: Request, now: float) -> None:
        """The read for a fetching request is over: it waits on, at the place of its arrival."""
        self._take(request)
        request.fetching = False
        self.add(request, now)

    @property
    def num_computing(self) -> int:
        return len(self.prefilling) + self.batch.num_alive

    def next_adoption(self) -> Request | None:
        """None also when a prefill that came earlier, or any preempted request, lacks blocks."""
        head = next(iter(self.adopting.values()), None)
        lacking = self.lacking_blocks
        if head is None or self.preempted:
            return None
        if lacking is not None and lacking.state is State.WAITING and lacking.arrival < head.arrival:
            return None
        return head

    def adoption_before(self, request: Request) -> bool:
        """An adoption that came earlier waits for blocks."""
        head = next(iter(self.adopting.values()), None)
        return head is not None and head.arrival < request.arrival

    def all(self) -> Iterator[Request]:
        for mapping in (self.line.requests, self.adopting, self.fetching, self.reserved, self.held, self.paused):
            yield from mapping.values()
        yield from self.preempted
        yield from self.prefilling
        yield from (request for request in self.batch.requests if request.state is State.DECODING)

    def check_integrity(self) -> None:
        """Raises InvariantError unless each request stands where its state says, in order, and counters agree."""
        seen = list(self.all())
        if len({request.key for request in seen}) != len(seen):
            raise InvariantError("a request stands in two places")
        for request in seen:
            match request.state:
                case State.DECODING:
                    home = self.batch.requests[request.row] is request
                case State.PREFILLING | State.PREEMPTED:
                    home = request in self._list(request)
                case State.WAITING if _in_line(request):
                    home = self.line.requests.get(request.key) is request
                case _:
                    home = self._dict(request).get(request.key) is request
            if not home:
                raise InvariantError(f"request {request.key} is not where {request.state} belongs")
        for ordered in (
            list(self.line.requests.values()),
            list(self.adopting.values()),
            list(self.fetching.values()),
            self.preempted,
            self.prefilling,
        ):
            if ordered != sorted(ordered, key=_arrival):
                raise InvariantError("a queue is out of arrival order")
        if self.waiting_tokens != sum(r.num_tokens for r in [*self.line.requests.values(), *self.preempted]):
            raise InvariantError("the count of waiting tokens is wrong")
        if self.cached_tokens != sum(r.known_cached for r in self.line.requests.values()):
            raise InvariantError("the count of waiting tokens that are cached is wrong")
        self._admission.check_integrity(len(self.line) + len(self.fetching), len(self.adopting), len(seen))
        self.batch.check_integrity()
        self.following.check_integrity()

    @staticmethod
    def _counts(request: Request) -> bool:
        return request.state is State.PREEMPTED or (request.state is State.WAITING and _in_line(request))

    def _list(self, request: Request) -> list[Request]:
        return self.prefilling if request.state is State.PREFILLING else self.preempted

    def _dict(self, request: Request) -> dict[RequestKey, Request]:
        if request.state is State.TOOL_WAIT:
            return self.paused
        if request.state is State.WAITING:
            return self.fetching if request.fetching else self.adopting
        return self.reserved if request.adopted else self.held

    def _take(self, request: Request) -> None:
        if self._counts(request):
            self.waiting_tokens -= request.num_tokens
            self.cached_tokens -= request.known_cached if request.state is State.WAITING else 0
        match request.state:
            case State.WAITING if _in_line(request):
                self.line.discard(request)
                if request.follows:
                    self.following.drop(request)
            case State.DECODING:
                self.batch.remove(request)
            case State.PREFILLING | State.PREEMPTED:
                self._list(request).remove(request)
            case State.FINISHED:
                return
            case _:
                del self._dict(request)[request.key]

"""The line of prefills that hold nothing yet, in the order of a policy, without a scan.

While requests wait, the linear part of their scores keeps its order, so each tenant has a heap by `Policy.static_ms`
(one heap for all where the policy does not weigh tenants). What is not linear is looked at where it matters: heads of
the tenants that have received least, and of a heap by the instant at which a request must start to be in time. The
choice costs O(log n), whoever else waits.

Requests leave by changing state; what stays of them in a heap is dropped when it comes to the top. One that is parked
keeps its place in the order of arrival, and its deadline, but is not chosen.
Does not: know blocks or budgets, or decide how many may start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count, takewhile

from headrace.core.fairness import ServiceCounters
from headrace.ids import RequestKey
from workers.core.policies import Outlook, Policy
from workers.core.request import Request, State

_TENANTS = 8
"""Tenants whose heads are compared, those with the least service first."""
_Entry = tuple[float, int, int, Request]
"""(instant, arrival, number of the entry, request)."""
_LineEntry = tuple[bool, float, int, int, Request]
"""Late ones last."""


def _waits(request: Request) -> bool:
    return request.state is State.WAITING


def _may_start(request: Request) -> bool:
    return request.state is State.WAITING and not request.follows


class WaitingLine:
    def __init__(self, policy: Policy, service: ServiceCounters) -> None:
        self.requests: OrderedDict[RequestKey, Request] = OrderedDict()
        """In order of arrival."""
        self._policy = policy
        self._service = service
        self._lines: dict[int, list[_LineEntry]] = {}
        self._tenants: list[tuple[float, int]] = []
        """(counter when pushed, tenant), one entry for each line; counters only grow, so a stale one is too small."""
        self._due: list[_Entry] = []
        self._looks: list[_Entry] = []
        """Requests with a doubtful deadline, by when to look at them again."""
        self._numbers = count()
        self._num_parked = 0
        self._entries = 0
        """In all lines, those of requests that have left too."""

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """At the place that the policy gives it. Whoever came later than it stays behind it, by arrival too."""
        later = list(takewhile(lambda other: other.arrival > request.arrival, reversed(self.requests.values())))
        self.requests[request.key] = request
        for other in reversed(later):
            self.requests.move_to_end(other.key)
        self._enter(request)

    def park(self, request: Request) -> None:
        """Not to be chosen until `unpark`, or until it leaves."""
        request.follows = True
        self._num_parked += 1

    def unpark(self, request: Request) -> None:
        """Back at its place; `follows` is False."""
        self._num_parked -= 1
        self._enter(request)

    def _enter(self, request: Request) -> None:
        tenant = request.tenant_index if self._policy.terms.debt else 0
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = []
            heappush(self._tenants, (self._service.counter(tenant) if self._policy.terms.debt else 0.0, tenant))
        number = next(self._numbers)
        heappush(line, (False, -self._policy.static_ms(request), request.arrival, number, request))
        self._entries += 1
        heappush(self._due, (self._policy.due_at(request), request.arrival, number, request))
        self._compact()

    def discard(self, request: Request) -> None:
        self._num_parked -= request.follows
        del self.requests[request.key]

    def first(self) -> Request | None:
        """Who came earliest."""
        return next(iter(self.requests.values()), None)

    def best(self, now: float) -> Request | None:
        """Who starts next by the policy; None when nobody waits."""
        first = self.first()
        if first is None or self._num_parked == len(self.requests):
            return None
        if not self._policy.reorders:
            return next(request for request in self.requests.values() if not request.follows)
        candidates = [head for tenant in self._least_served() if (head := self._head(tenant)) is not None]
        if self._policy.terms.urgency and (urgent := self._most_urgent(now)) is not None:
            candidates.append(urgent)
        if not candidates:
            return None
        if all(candidate is candidates[0] for candidate in candidates):
            return candidates[0]
        return max(candidates, key=lambda r: (self._policy.total(r, now), -r.arrival))

    def lost(self, now: float, cached_tokens: Callable[[Request], int]) -> list[Request]:
        """Requests that cannot meet their deadlines any more; each is named once. They still wait here.

        cached_tokens: what of a request need not be computed; asked for those that seem lost without.
        """
        lost: list[Request] = []
        for heap in (self._due, self._looks):
            while heap and heap[0][0] < now:
                _, arrival, _, request = heappop(heap)
                if not _waits(request) or request.deadline is None:
                    continue
                outlook = self._policy.outlook(request, now)
                if outlook is Outlook.LOST:
                    outlook = self._policy.outlook(request, now, cached_tokens(request))
                if outlook is Outlook.LOST:
                    lost.append(request)
                elif request.deadline > now:
                    # Looked at again when half of what is left has gone: at most a logarithm of times.
                    look_at = now + max(0.01, (request.deadline - now) / 2)
                    heappush(self._looks, (look_at, arrival, next(self._numbers), request))
        return lost

    def _least_served(self) -> list[int]:
        if not self._policy.terms.debt:
            return [0]
        taken: list[tuple[float, int]] = []
        while self._tenants and len(taken) < _TENANTS:
            counted, tenant = heappop(self._tenants)
            if self._head(tenant) is None:
                del self._lines[tenant]
                continue
            counter = self._service.counter(tenant)
            if counter > counted:
                heappush(self._tenants, (counter, tenant))
            else:
                taken.append((counted, tenant))
        for entry in taken:
            heappush(self._tenants, entry)
        return [tenant for _, tenant in taken]

    def _head(self, tenant: int) -> Request | None:
        line = self._lines.get(tenant, [])
        while line:
            is_late, key, arrival, number, request = line[0]
            if not _may_start(request):
                heappop(line)
                self._entries -= 1
            elif request.late and not is_late:
                heapreplace(line, (True, key, arrival, number, request))
            else:
                return request
        return None

    def _most_urgent(self, now: float) -> Request | None:
        while self._due and not _may_start(self._due[0][3]):
            entry = heappop(self._due)
            if _waits(entry[3]):
                heappush(self._looks, entry)  # parked: only its deadline counts now
        if not self._due or not now <= self._due[0][0] < now + self._policy.horizon_s:
            return None
        return self._due[0][3]

    def _compact(self) -> None:
        """Most of what is in the heaps may have left long ago."""
        limit = 2 * len(self.requests) + 64
        for heap in (self._due, self._looks):
            if len(heap) > limit:
                heap[:] = [entry for entry in heap if _waits(entry[3])]
                heapify(heap)
        if self._entries > limit:
            for line in self._lines.values():
                line[:] = [entry for entry in line if _may_start(entry[4])]
                heapify(line)
            self._entries = sum(map(len, self._lines.values()))

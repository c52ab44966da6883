"""The line of prefills that hold nothing yet, in the order of a policy, without a scan.

While requests wait, the linear part of their scores keeps its order, so each tenant has a heap by `Policy.static_ms`
(one heap for all where the policy does not weigh tenants). What is not linear is looked at where it matters: heads of
the tenants that have received least, and of a heap by the instant at which a request must start to be in time. The
choice costs O(log n), whoever else waits.

An entry of a heap counts while it has its request's number; one of a request that has left, or is parked, is dropped
when it comes to the top, or when such entries are most of the heap. A parked request keeps its place in the order of
arrival, and its deadline, but is not chosen.
Does not: know blocks or budgets, or decide how many may start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count, takewhile

from headrace.core.fairness import ServiceCounters
from headrace.ids import RequestKey
from workers.core.policies import Outlook, Policy
from workers.core.request import Request

_TENANTS = 8
"""Tenants whose heads are compared, those with the least service first."""
_Entry = tuple[float, int, int, Request]
"""(instant, arrival, number of the entry, request)."""
_LineEntry = tuple[bool, float, int, int, Request]
"""Late ones last."""


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
        self._stays: dict[RequestKey, int] = {}
        """Of each request here: the number of its entry in `_looks`."""
        self._places: dict[RequestKey, int] = {}
        """Of each that may be chosen: the number of its entries in its line and in `_due`."""
        self._entries = 0
        """In all lines, those that do not count too."""

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """At the place that the policy gives it. Whoever came later than it stays behind it, by arrival too."""
        later = list(takewhile(lambda other: other.arrival > request.arrival, reversed(self.requests.values())))
        self.requests[request.key] = request
        for other in reversed(later):
            self.requests.move_to_end(other.key)
        self._enter(request)
        number = self._stays[request.key] = self._places[request.key]
        if request.deadline is not None:
            heappush(self._looks, (self._policy.due_at(request), request.arrival, number, request))
            self._compact(self._looks, self._stays)

    def park(self, request: Request) -> None:
        """Not to be chosen until `unpark`, or until it leaves."""
        request.follows = True
        del self._places[request.key]

    def unpark(self, request: Request) -> None:
        """Back at its place; `follows` is False."""
        self._enter(request)

    def _enter(self, request: Request) -> None:
        tenant = request.tenant_index if self._policy.terms.debt else 0
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = []
            heappush(self._tenants, (self._service.counter(tenant) if self._policy.terms.debt else 0.0, tenant))
        number = self._places[request.key] = next(self._numbers)
        # Where the policy does not reorder, that of arrival is all.
        key = -self._policy.static_ms(request) if self._policy.reorders else 0.0
        heappush(line, (False, key, request.arrival, number, request))
        self._entries += 1
        if self._policy.terms.urgency:
            heappush(self._due, (self._policy.due_at(request), request.arrival, number, request))
            self._compact(self._due, self._places)
        if self._entries > self._most_entries():
            for line in self._lines.values():
                line[:] = [entry for entry in line if self._places.get(entry[4].key) == entry[3]]
                heapify(line)
            self._entries = sum(map(len, self._lines.values()))

    def discard(self, request: Request) -> None:
        del self.requests[request.key]
        del self._stays[request.key]
        self._places.pop(request.key, None)

    def first(self) -> Request | None:
        """Who came earliest."""
        return next(iter(self.requests.values()), None)

    def best(self, now: float) -> Request | None:
        """Who starts next by the policy; None when nobody waits, or only parked ones do."""
        if not self._places:
            return None
        if not self._policy.reorders:
            return self._head(0)
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
        while self._looks and self._looks[0][0] < now:
            _, arrival, number, request = heappop(self._looks)
            if self._stays.get(request.key) != number or request.deadline is None:
                continue
            outlook = self._policy.outlook(request, now)
            if outlook is Outlook.LOST:
                outlook = self._policy.outlook(request, now, cached_tokens(request))
            if outlook is Outlook.LOST:
                lost.append(request)
            elif request.deadline > now:
                # Looked at again when half of what is left has gone: at most a logarithm of times.
                look_at = now + max(0.01, (request.deadline - now) / 2)
                heappush(self._looks, (look_at, arrival, number, request))
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
            if self._places.get(request.key) != number:
                heappop(line)
                self._entries -= 1
            elif request.late and not is_late and self._policy.reorders:
                heapreplace(line, (True, key, arrival, number, request))
            else:
                return request
        return None

    def _most_urgent(self, now: float) -> Request | None:
        """Who must start soonest of those that can still be in time."""
        while self._due and (self._places.get(self._due[0][3].key) != self._due[0][2] or self._due[0][0] < now):
            heappop(self._due)
        if not self._due or self._due[0][0] >= now + self._policy.horizon_s:
            return None
        return self._due[0][3]

    def _most_entries(self) -> int:
        return 2 * len(self.requests) + 64

    def _compact(self, heap: list[_Entry], numbers: Mapping[RequestKey, int]) -> None:
        if len(heap) > self._most_entries():
            heap[:] = [entry for entry in heap if numbers.get(entry[3].key) == entry[2]]
            heapify(heap)

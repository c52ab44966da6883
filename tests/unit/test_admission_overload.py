"""Overload, by the clock of a simulation: admission keeps goodput where it is without load, and clients that wait as
long as they are told come in.
"""

from __future__ import annotations

import heapq
import random

from headrace.core.admission import Admission
from headrace.core.admission_records import Ask, Forecast, QueueLimits, Room, TenantLimits, Ticket

SERVICE_S = 1.0
DEADLINE_S = 5.0


def served_in_time(arrivals_per_s: float, judged: bool, duration_s: float = 200.0) -> float:
    """One server, first come first served; requests that ended before their deadlines, a second."""
    gate = Admission(QueueLimits())
    free_at, in_time = 0.0, 0
    running: list[tuple[float, float, int, Ticket]] = []
    for i in range(int(arrivals_per_s * duration_s)):
        now = i / arrivals_per_s
        while running and running[0][0] <= now:
            end, _, _, ticket = heapq.heappop(running)
            gate.leave(ticket, end)
        forecast = Forecast(queue_s=max(free_at - now, 0.0), decode_s=SERVICE_S)
        ask = Ask("t", 1, 1, 1, time_left_s=DEADLINE_S if judged else None, forecast=forecast)
        decision = gate.enter(ask, Room(), now)
        if decision.admitted:
            free_at = max(free_at, now) + SERVICE_S
            in_time += free_at <= now + DEADLINE_S
            heapq.heappush(running, (free_at, now, i, decision.tickets[0]))
    return in_time / duration_s


def test_goodput_holds_at_several_times_capacity() -> None:
    alone = served_in_time(0.9, judged=True)
    for overload in (1.5, 4.0, 10.0):
        assert served_in_time(overload, judged=True) >= alone
    assert served_in_time(4.0, judged=False) < 0.1 * alone, "without admission everything is late"


def test_clients_that_wait_as_told_are_all_served_and_keep_the_places_busy() -> None:
    """40 clients of two tenants, 4 places, a request takes about a second: 10 s of work that all arrives at once."""
    rng = random.Random(1)
    gate = Admission(QueueLimits(max_live_requests=4), TenantLimits(max_concurrent_requests=3))
    events: list[tuple[float, int, str, object]] = [(i * 1e-3, i, "ask", "ab"[i % 2]) for i in range(40)]
    heapq.heapify(events)
    order, refusals, served, now = 40, 0, 0, 0.0
    while events:
        now, _, kind, what = heapq.heappop(events)
        order += 1
        if kind == "end":
            assert isinstance(what, Ticket)
            gate.leave(what, now)
            served += 1
            continue
        decision = gate.enter(Ask(str(what), 1, 1, 1), Room(), now)
        if decision.admitted:
            heapq.heappush(events, (now + rng.uniform(0.8, 1.2), order, "end", decision.tickets[0]))
        else:
            refusals += 1
            assert decision.retry_after_s > 0
            heapq.heappush(events, (now + decision.retry_after_s, order, "ask", what))
    assert served == 40
    assert now < 1.5 * 40 / 4, "places do not stand empty for long"
    assert refusals < 40 * 39 / 2, "nobody comes back more often than a place becomes free"
    assert gate.held.live_requests == 0

"""Admission: every limit has a reason of its own and a retry time that holds, and the accounts add up to nothing."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.accounts import IDLE_TENANT_S, MAX_RETRY_S, MIN_RETRY_S, UNKNOWN_RETRY_S
from headrace.core.admission import Admission
from headrace.core.admission_records import (
    Action,
    Ask,
    Attainment,
    Decision,
    Forecast,
    QueueLimits,
    Reason,
    Room,
    TenantLimits,
    Ticket,
    attainment,
)

ROOM = Room(max_model_len=1000, capacity_tokens=800)


def ask(tenant: str = "a", **changes: object) -> Ask:
    """10 tokens of prompt and 10 of output: 20 tokens of KV, 1 s of engine time."""
    sizes = {"prompt_tokens": 10, "max_tokens": 10, "reserved_output_tokens": 10, "engine_s": 1.0}
    return Ask(tenant=tenant, **(sizes | changes))  # type: ignore[arg-type]


def admission(tenant: TenantLimits | None = None, **queue: object) -> Admission:
    return Admission(QueueLimits(**queue), tenant, kv_bytes_per_token=100)  # type: ignore[arg-type]


def assert_drained(gate: Admission) -> None:
    assert not any(astuple(gate.held))


# each unit and each cap: two asks fit, the third does not
LIMITS = [
    (Reason.TENANT_CONCURRENCY, {}, TenantLimits(max_concurrent_requests=2), "leave"),
    (Reason.TENANT_KV_BYTES, {}, TenantLimits(max_live_kv_bytes=4500), "leave"),
    (Reason.CONCURRENCY, {"max_live_requests": 2}, None, "leave"),
    (Reason.QUEUE_FULL, {"max_waiting_requests": 2}, None, "start"),
    (Reason.WAITING_TOKENS, {"max_waiting_tokens": 25}, None, "start"),
    (Reason.RESERVED_KV, {"max_reserved_kv_tokens": 45}, None, "leave"),
    (Reason.QUEUE_SECONDS, {"max_queue_s": 2.5}, None, "start"),
]


@pytest.mark.parametrize(("reason", "queue", "tenant", "freed_by"), LIMITS, ids=lambda v: str(v)[:24])
def test_each_limit_refuses_with_its_own_reason_and_admits_when_the_retry_time_has_passed(
    reason: Reason, queue: dict[str, object], tenant: TenantLimits | None, freed_by: str
) -> None:
    gate = admission(tenant, **queue)
    # 1. a steady flow: every 2 s one ask comes in, and the one before the last goes
    now, held = 0.0, list[Ticket]()
    for _ in range(40):
        decision = gate.enter(ask(), ROOM, now)
        assert (decision.action, decision.reason) == (Action.ACCEPT, Reason.OK)
        held += decision.tickets
        if freed_by == "leave":
            gate.started(held[-1], now)
        if len(held) == 2:
            now += 2.0
            free(gate, held.pop(0), freed_by, now)
    # 2. full: one more is refused, for this reason, and nothing is booked
    held += gate.enter(ask(), ROOM, now).tickets
    before = gate.held
    refused = gate.enter(ask(), ROOM, now)
    assert (refused.action, refused.reason, refused.tickets) == (Action.REJECT, reason, ())
    assert gate.held == before
    # 3. the flow goes on at its pace: the answer was neither early nor late
    assert refused.retry_after_s == pytest.approx(2.0, rel=0.1)
    assert not gate.enter(ask(), ROOM, now + 0.5 * refused.retry_after_s).admitted
    now += 2.0
    free(gate, held.pop(0), freed_by, now)
    again = gate.enter(ask(), ROOM, now + 0.1 * refused.retry_after_s)
    assert again.admitted
    # 4. everything goes
    for ticket in [*held, *again.tickets]:
        gate.leave(ticket, now + 1.0)
    if freed_by == "leave":
        assert_drained(gate)


def free(gate: Admission, ticket: Ticket, how: str, now: float) -> None:
    if how == "leave":
        gate.leave(ticket, now)
    else:
        gate.started(ticket, now)


@pytest.mark.parametrize("tokens_per_s", [0.3, 7.0, 1e5])
def test_the_retry_time_of_the_token_rate_is_exact(tokens_per_s: float) -> None:
    gate = admission(TenantLimits(tokens_per_s=tokens_per_s, burst_tokens=50))
    now = 12_345.678
    assert gate.enter(ask(), ROOM, now).admitted
    assert gate.enter(ask(), ROOM, now).admitted
    refused = gate.enter(ask(), ROOM, now)
    assert refused.reason is Reason.TENANT_RATE
    assert refused.retry_after_s == pytest.approx(10 / tokens_per_s)
    early = now + 0.99 * refused.retry_after_s
    assert gate.enter(ask(), ROOM, early).reason is Reason.TENANT_RATE
    assert gate.enter(ask(), ROOM, now + refused.retry_after_s).admitted


def test_the_token_rate_pays_for_what_was_used() -> None:
    gate = admission(TenantLimits(tokens_per_s=1.0, burst_tokens=40))
    # 1. unused output comes back: 20 taken, 15 used
    [ticket] = gate.enter(ask(), ROOM, 0.0).tickets
    gate.started(ticket, 0.0)
    gate.leave(ticket, 0.0, output_tokens=5)
    assert gate.enter(ask(), ROOM, 0.0).admitted
    assert gate.enter(ask(), ROOM, 0.0).retry_after_s == pytest.approx(15.0)
    # 2. a request that never started costs nothing
    other = gate.enter(ask("b"), ROOM, 0.0).tickets + gate.enter(ask("b"), ROOM, 0.0).tickets
    for ticket in other:
        gate.leave(ticket, 0.0)
    assert gate.enter(ask("b", num_requests=2), ROOM, 0.0).admitted
    # 3. one that overran its prediction leaves a debt
    [ticket] = gate.enter(ask("c"), ROOM, 0.0).tickets
    gate.started(ticket, 0.0)
    gate.leave(ticket, 0.0, output_tokens=60)
    assert gate.enter(ask("c"), ROOM, 0.0).retry_after_s == pytest.approx(50.0)


def test_an_ask_above_the_burst_waits_for_a_full_bucket_and_is_not_starved() -> None:
    gate = admission(TenantLimits(tokens_per_s=10.0, burst_tokens=15))
    assert gate.enter(ask(), ROOM, 0.0).admitted, "20 tokens, and the bucket is full"
    assert gate.enter(ask(), ROOM, 0.0).retry_after_s == pytest.approx(2.0), "5 of debt and 15 to fill"
    assert gate.enter(ask(), ROOM, 2.0).admitted


@pytest.mark.parametrize(
    ("asked", "room", "gate", "reason"),
    [
        (ask(max_tokens=991), Room(max_model_len=1000), admission(), Reason.TOO_LONG),
        (ask(max_tokens=791), ROOM, admission(), Reason.TOO_LARGE),
        (ask(num_requests=3), ROOM, admission(max_live_requests=2), Reason.TOO_LARGE),
        (ask(num_requests=3), ROOM, admission(max_waiting_requests=2), Reason.TOO_LARGE),
        (ask(), ROOM, admission(max_reserved_kv_tokens=19), Reason.TOO_LARGE),
        (ask(), ROOM, admission(TenantLimits(max_live_kv_bytes=1999)), Reason.TOO_LARGE),
        (ask(num_requests=2), ROOM, admission(TenantLimits(max_concurrent_requests=1)), Reason.TOO_LARGE),
        (ask(cached_tokens=2), replace(ROOM, max_uncached_tokens=7), admission(), Reason.UNCACHED_TOKENS),
    ],
    ids=["context", "pool", "requests", "queue", "kv", "tenant-kv", "tenant-requests", "uncached"],
)
def test_what_can_never_fit_is_refused_at_once_and_asking_again_is_not_advised(
    asked: Ask, room: Room, gate: Admission, reason: Reason
) -> None:
    assert gate.enter(asked, room, 0.0) == Decision(Action.REJECT, reason, 0.0)
    assert gate.enter(asked, replace(room, routed=tuple(Reason)), 0.0).action is Action.REJECT
    assert_drained(gate)
    assert gate.num_tenants == 0


def test_what_is_cached_counts_for_no_cap_on_uncached_tokens() -> None:
    gate = admission()
    decision = gate.enter(ask(cached_tokens=3), replace(ROOM, max_uncached_tokens=7), 0.0)
    assert decision.admitted
    gate.leave(decision.tickets[0], 1.0)
    assert_drained(gate)


def test_one_that_is_longer_than_the_queue_may_come_in_alone() -> None:
    """KV-09, KV-11: a heavy request is never refused for good, and waits until it blocks nobody."""
    gate = admission(max_waiting_tokens=25, max_queue_s=2.5)
    [light] = gate.enter(ask(), ROOM, 0.0).tickets
    heavy = ask(prompt_tokens=500, engine_s=50.0)
    assert gate.enter(heavy, ROOM, 0.0).reason is Reason.WAITING_TOKENS
    gate.started(light, 1.0)
    assert gate.enter(heavy, ROOM, 1.0).admitted


def test_all_choices_of_a_call_come_in_or_none() -> None:
    gate = admission(TenantLimits(max_concurrent_requests=4), max_live_requests=5)
    first = gate.enter(ask(num_requests=3), ROOM, 0.0)
    assert len(first.tickets) == 3
    refused = gate.enter(ask(num_requests=2), ROOM, 0.0)
    assert (refused.reason, gate.held.live_requests) == (Reason.TENANT_CONCURRENCY, 3)
    refused = gate.enter(ask("b", num_requests=3), ROOM, 0.0)
    assert (refused.reason, gate.held.live_requests) == (Reason.CONCURRENCY, 3)
    assert gate.enter(ask("b", num_requests=2), ROOM, 0.0).admitted


def test_a_refusal_names_the_tenants_own_cap_first_and_the_longest_wait_of_all() -> None:
    tenant = TenantLimits(max_concurrent_requests=1, tokens_per_s=1.0, burst_tokens=30)
    gate = admission(tenant, max_live_requests=1)
    gate.enter(ask(), ROOM, 0.0)
    refused = gate.enter(ask(), ROOM, 0.0)
    assert refused.reason is Reason.TENANT_CONCURRENCY
    assert refused.retry_after_s == pytest.approx(10.0), "the bucket's, though concurrency may be free in a second"


def test_before_anything_has_left_the_wait_is_a_guess_and_afterwards_bounded() -> None:
    gate = admission(max_live_requests=1)
    [ticket] = gate.enter(ask(), ROOM, 0.0).tickets
    assert gate.enter(ask(), ROOM, 5.0).retry_after_s == UNKNOWN_RETRY_S
    gate.leave(ticket, 3600.0)
    gate.enter(ask(), ROOM, 3600.0)
    assert gate.enter(ask(), ROOM, 3600.0).retry_after_s <= MAX_RETRY_S
    fast = admission(max_live_requests=1)
    for _ in range(100):
        [ticket] = fast.enter(ask(), ROOM, 0.0).tickets
        fast.leave(ticket, 0.0001)
    fast.enter(ask(), ROOM, 0.0001)
    assert fast.enter(ask(), ROOM, 0.0001).retry_after_s >= MIN_RETRY_S


def test_idle_time_is_no_slow_drain() -> None:
    def refused_after(pause_s: float) -> float:
        gate = admission(max_live_requests=1)
        now = 0.0
        for _ in range(60):
            [ticket] = gate.enter(ask(), ROOM, now).tickets
            now += 1.0
            gate.leave(ticket, now)
        gate.enter(ask(), ROOM, now + pause_s)
        return gate.enter(ask(), ROOM, now + pause_s).retry_after_s

    assert refused_after(1000.0) == pytest.approx(refused_after(0.0))


DEADLINES = [
    (10.0, Attainment.ATTAINABLE, Action.ACCEPT, Reason.OK),
    (8.0, Attainment.ATTAINABLE, Action.ACCEPT, Reason.OK),
    (7.9, Attainment.DOUBTFUL, Action.ACCEPT, Reason.DEADLINE_DOUBTFUL),
    (6.0, Attainment.DOUBTFUL, Action.ACCEPT, Reason.DEADLINE_DOUBTFUL),
    (5.9, Attainment.LOST, Action.REJECT, Reason.DEADLINE_LOST),
    (0.0, Attainment.LOST, Action.REJECT, Reason.DEADLINE_LOST),
]
FORECAST = Forecast(queue_s=2.0, prefill_s=1.0, transfer_s=0.5, decode_s=3.5, margin_s=1.0)


@pytest.mark.parametrize(("time_left_s", "chance", "action", "reason"), DEADLINES)
def test_a_deadline_is_attainable_doubtful_or_lost(
    time_left_s: float, chance: Attainment, action: Action, reason: Reason
) -> None:
    assert attainment(FORECAST, time_left_s) is chance
    asked = ask(forecast=FORECAST, time_left_s=time_left_s)
    decision = admission().enter(asked, ROOM, 0.0)
    assert (decision.action, decision.reason) == (action, reason)
    assert decision.best_effort is (chance is Attainment.DOUBTFUL)
    elsewhere = admission().enter(asked, replace(ROOM, routed=tuple(Reason)), 0.0)
    assert elsewhere.action is (Action.ROUTE if chance is Attainment.LOST else action)
    others = admission().enter(asked, replace(ROOM, routed=set(Reason) - {Reason.DEADLINE_LOST}), 0.0)
    assert others.action is action
    taken = admission().enter(asked, replace(ROOM, takes_lost=True), 0.0)
    assert (taken.action, taken.reason) == (Action.ACCEPT, reason)
    assert taken.best_effort is (chance is not Attainment.ATTAINABLE)


def test_a_lost_deadline_says_when_the_queue_will_be_short_enough_or_that_it_never_is() -> None:
    lost = admission().enter(ask(forecast=FORECAST, time_left_s=4.5), ROOM, 0.0)
    assert lost.retry_after_s == pytest.approx(1.5)
    later = replace(FORECAST, queue_s=FORECAST.queue_s - lost.retry_after_s)
    assert admission().enter(ask(forecast=later, time_left_s=4.5), ROOM, 0.0).admitted
    assert admission().enter(ask(forecast=FORECAST, time_left_s=3.9), ROOM, 0.0).retry_after_s == 0.0


def test_without_a_forecast_or_a_deadline_nothing_is_lost() -> None:
    assert attainment(None, 0.001) is Attainment.ATTAINABLE
    assert attainment(replace(FORECAST, queue_s=1e9), None) is Attainment.ATTAINABLE


def test_shared_limits_route_elsewhere_and_a_tenants_own_do_not() -> None:
    room = replace(ROOM, routed=tuple(Reason))
    gate = admission(max_live_requests=1)
    gate.enter(ask(), room, 0.0)
    routed = gate.enter(ask(), room, 0.0)
    assert (routed.action, routed.reason, routed.tickets) == (Action.ROUTE, Reason.CONCURRENCY, ())
    capped = admission(TenantLimits(max_concurrent_requests=1))
    capped.enter(ask(), room, 0.0)
    assert capped.enter(ask(), room, 0.0).action is Action.REJECT


def test_what_cannot_start_is_queued_and_booked() -> None:
    gate = admission()
    decision = gate.enter(ask(), replace(ROOM, can_start=False), 0.0)
    assert (decision.action, decision.reason) == (Action.QUEUE, Reason.NO_ROOM)
    assert gate.held.waiting_requests == 1
    gate.leave(*decision.tickets, now=1.0)
    assert_drained(gate)


def test_one_tenants_caps_are_not_anothers() -> None:
    gate = Admission(
        QueueLimits(), TenantLimits(max_concurrent_requests=1), {"big": TenantLimits(max_concurrent_requests=3)}
    )
    for tenant, cap in (("a", 1), ("b", 1), ("big", 3)):
        for _ in range(cap):
            assert gate.enter(ask(tenant), ROOM, 0.0).admitted
        assert gate.enter(ask(tenant), ROOM, 0.0).reason is Reason.TENANT_CONCURRENCY


def test_idle_tenants_are_forgotten_but_not_their_debt() -> None:
    gate = admission(TenantLimits(tokens_per_s=0.1, burst_tokens=40))
    # 1. a thousand tenants come and go without using anything
    for i in range(1000):
        [ticket] = gate.enter(ask(f"t{i}"), ROOM, 0.0).tickets
        gate.leave(ticket, 0.0)
    # 2. one uses all it has: its bucket is full again after 400 s
    [ticket] = gate.enter(ask("poor", num_requests=1), ROOM, 0.0).tickets
    gate.started(ticket, 0.0)
    gate.leave(ticket, 0.0, output_tokens=30)
    for i in range(600):
        gate.enter(ask("live"), ROOM, IDLE_TENANT_S + 1.0 + i * 1e-3)
    assert gate.num_tenants == 2
    assert gate.enter(ask("poor"), ROOM, 100.0).reason is Reason.TENANT_RATE
    # 3. and is forgotten then
    gate.enter(ask("live"), ROOM, 500.0)
    assert gate.num_tenants == 1


def test_started_and_leave_may_be_repeated() -> None:
    gate = admission()
    [ticket] = gate.enter(ask(), ROOM, 0.0).tickets
    for _ in range(2):
        gate.started(ticket, 1.0)
        assert (gate.held.waiting_requests, gate.held.live_requests) == (0, 1)
    for _ in range(2):
        gate.leave(ticket, 2.0)
        gate.started(ticket, 2.0)
        assert_drained(gate)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "start", "leave"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(1, 3),
        st.integers(1, 60),
        st.integers(1, 60),
        st.floats(0.0, 5.0),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_accounts_are_never_negative_never_above_a_cap_and_sum_to_zero(
    operations: list[tuple[str, str, int, int, int, float]],
) -> None:
    tenant = TenantLimits(max_concurrent_requests=4, max_live_kv_bytes=15_000, tokens_per_s=20.0, burst_tokens=200)
    queue = QueueLimits(
        max_live_requests=8,
        max_waiting_requests=5,
        max_waiting_tokens=120,
        max_reserved_kv_tokens=300,
        max_queue_s=4.0,
    )
    gate = Admission(queue, tenant, kv_bytes_per_token=100)
    now, live, taken = 0.0, list[Ticket](), {"a": 0, "b": 0, "c": 0}
    for kind, name, n, prompt, output, size in operations:
        now += size / 5
        if kind == "enter":
            asked = ask(
                name, num_requests=n, prompt_tokens=prompt, max_tokens=output, reserved_output_tokens=output,
                engine_s=size / 3,
            )  # fmt: skip
            before = gate.held
            decision = gate.enter(asked, ROOM, now)
            assert len(decision.tickets) == (n if decision.admitted else 0)
            assert gate.held.live_requests == before.live_requests + len(decision.tickets)
            live += decision.tickets
            taken[name] += len(decision.tickets) * (prompt + output)
        elif live:
            ticket = live[n * prompt % len(live)]
            if kind == "start":
                gate.started(ticket, now)
            else:
                live.remove(ticket)
                used = ticket.kv_tokens - ticket.prompt_tokens
                gate.started(ticket, now)
                gate.leave(ticket, now, used)
        held = gate.held
        assert min(astuple(held)) >= 0
        assert held.live_requests == len(live) <= 8
        assert held.waiting_requests <= 5
        assert held.reserved_kv_tokens == sum(t.kv_tokens for t in live) <= 300
        assert held.waiting_tokens <= 120 or held.waiting_requests <= 3, "alone, with its own choices"
        for owner in taken:
            own = [t for t in live if t.tenant == owner]
            assert len(own) <= 4
            assert sum(t.kv_tokens for t in own) * 100 <= 15_000
            # rate: what a full bucket and the time gave, and one ask that found the bucket full
            assert taken[owner] <= 200 + 20 * now + 3 * 120
    for ticket in live:
        gate.leave(ticket, now)
    assert_drained(gate)

"""Tool calls at the gateway, without sockets: every fact that can reach a paused flight, and where a call ends."""

from __future__ import annotations

import pytest

from headrace.core.admission import Admission
from headrace.core.admission_records import Ask, QueueLimits, Room, TenantLimits
from headrace.core.records import FinishReason, Role, WorkerLedger, WorkerLoad, token_hash
from headrace.core.step_shape import GENERIC_S
from headrace.errors import Code, HeadraceError
from headrace.sampling import SamplingParams
from router.branch_text import BranchText
from router.core.flight import Flight, FlightState
from router.core.latency import Timeline
from router.core.legs import Deliver, Ended, FinishAt, Leg, PauseAt, ResumeAt, SubmitTo
from router.tools import check_room
from tests.doors_fixtures import text_model
from tests.unit.test_router_core import C0, D0, P0, flight, fly, router, view

CALL = 99
"""The token that ends a call."""
C1 = view("c1", Role.COLOCATED)
WHOLE = "whole"


def calling(**options: object) -> Flight:
    return flight(ends_call=lambda token_id: token_id == CALL, max_tokens=20, **options)


def paused(kind: str = WHOLE, **options: object) -> tuple[Flight, Leg]:
    """Two tokens, the second ends a call; the worker does not know yet."""
    f = calling(**options)
    if kind == WHOLE:
        [submit] = f.place(router(C0), 1.0)
        assert isinstance(submit, SubmitTo)
        leg = submit.leg
    else:
        p, leg = fly(f, [P0, D0])
        f.token(leg, 0, 11, 1.9)
        f.done(p, FinishReason.HANDED_OFF, WorkerLedger(), 1.95)
    f.token(leg, 0, 11, 2.0)
    assert f.token(leg, 1, CALL, 3.0) == [Deliver((CALL,), paused=True), PauseAt(leg)]
    assert f.state is FlightState.PAUSED and f.answerable and f.holds_kv
    return f, leg


@pytest.mark.parametrize("kind", [WHOLE, "decode"])
def test_an_answer_goes_to_the_leg_once_the_worker_has_said_that_it_waits(kind: str) -> None:
    # 1. The answer comes first: tokens of before the pause are dropped until the worker has said so.
    f, leg = paused(kind)
    assert f.answer([7, 8], router(), 4.0) == []
    assert not f.answerable
    assert f.token(leg, 2, 50, 4.1) == []
    assert f.waits(leg, 4.2) == [ResumeAt(leg, (7, 8))]
    assert f.state is FlightState.RUNNING
    assert f.token(leg, 2, 51, 4.3) == [Deliver((51,))]
    assert (f.output_ids, f.num_tokens) == ([11, CALL, 51], 8)
    assert f.token_ids == [5, 6, 7, 11, CALL, 7, 8, 51]
    # 2. The worker speaks first.
    assert f.token(leg, 3, CALL, 5.0)[-1] == PauseAt(leg)
    assert f.waits(leg, 5.1) == []
    assert f.answer([], router(), 6.0) == [ResumeAt(leg, ())]
    assert f.answer([1], router(), 6.1) == [], "nobody waits"
    assert f.inserts == [(2, (7, 8))]


def test_a_repeated_token_that_differs_is_a_fault_while_paused_too() -> None:
    f, leg = paused()
    assert f.token(leg, 1, CALL, 3.1) == []
    [finish, ended] = f.token(leg, 1, 12, 3.2)
    assert isinstance(ended, Ended) and ended.error is not None and ended.error.code is Code.INTERNAL
    assert finish == FinishAt(leg, "cancelled")


def ends_the_leg(f: Flight, leg: Leg, how: str) -> list[object]:
    match how:
        case "done":
            return f.done(leg, FinishReason.EOS, WorkerLedger(), 3.5, token_hash([11, CALL, 50, 0]))
        case "cancelled":
            return f.done(leg, FinishReason.CANCELLED, WorkerLedger(), 3.5, token_hash([11, CALL]))
        case "failed":
            return f.failed(leg, HeadraceError(Code.INTERNAL, "gone"), "internal", 3.5)
        case "preempted":
            return f.failed(leg, HeadraceError(Code.UNAVAILABLE, "others"), "preempted", 3.5)
        case "not_resumed":
            return f.failed(leg, HeadraceError(Code.UNAVAILABLE, "too long"), "not_resumed", 3.5)
    return f.lost(leg.worker, how == "dead", 3.5)


LEG_ENDS = ["done", "failed", "preempted", "not_resumed", "dead", "lost"]


@pytest.mark.parametrize("how", LEG_ENDS)
@pytest.mark.parametrize("answered_first", [False, True])
def test_without_its_leg_a_paused_flight_waits_on_and_is_planned_anew_behind_the_answer(
    how: str, answered_first: bool
) -> None:
    f, leg = paused()
    if answered_first:
        assert f.answer([7], router(), 3.2) == []
    assert ends_the_leg(f, leg, how) == []
    if not answered_first:
        assert f.state is FlightState.PAUSED and not f.holds_kv
        assert f.place(router(C0), 3.6) == [], "nothing to do before the answer"
        assert f.answer([7], router(), 4.0) == []
    assert f.state is FlightState.QUEUED
    [submit] = f.place(router(C1), 4.1)
    assert isinstance(submit, SubmitTo) and f.attempt == 2
    assert f.token(leg, 2, 60, 4.2) == [], "late frames of the old leg are dropped"
    assert f.token(submit.leg, 2, 61, 4.3) == [Deliver((61,))]


def test_legs_that_are_lost_while_tools_run_are_no_attempts_and_no_crashes() -> None:
    f = calling(max_attempts=2, max_crashes=2)
    for round_number in range(6):
        [submit] = f.place(router(C0), float(round_number))
        f.token(submit.leg, round_number, CALL, round_number + 0.1)
        assert f.lost(C0.key, True, round_number + 0.2) == []
        f.answer([1], router(), round_number + 0.3)
    assert (f.state, f.crashed) == (FlightState.QUEUED, set())
    # A failure of a plan that runs counts as ever.
    [submit] = f.place(router(C0), 7.0)
    f.lost(C0.key, False, 7.1)
    assert f.state is FlightState.QUEUED
    f.place(router(C0), 7.2)
    ended = f.lost(C0.key, False, 7.3)[-1]
    assert isinstance(ended, Ended) and ended.error is not None and "2 attempts" in ended.error.message


@pytest.mark.parametrize("how", ["stop", "cancel", "deadline", "abort", "worker's deadline"])
def test_a_paused_flight_ends_as_any_other(how: str) -> None:
    for gone in (False, True):
        f, leg = paused()
        if gone:
            ends_the_leg(f, leg, "dead")
        match how:
            case "stop":
                actions = f.stop(5.0)
            case "cancel":
                actions = f.cancel(5.0)
            case "deadline":
                actions = f.deadline(5.0)
            case "abort":
                actions = f.abort(HeadraceError(Code.UNAVAILABLE, "shutting down"), 5.0)
            case _:
                actions = f.done(leg, FinishReason.DEADLINE, WorkerLedger(), 5.0)
                if gone:
                    assert actions == []
                    continue
        assert isinstance(actions[-1], Ended) and f.state is FlightState.ENDED
        assert not any(leg.live for leg in f.legs)
        assert f.answer([1], router(), 6.0) == [] and f.waits(leg, 6.0) == []
        assert f.timeline.ended_paused


def test_a_call_that_the_first_token_ends_gives_the_hand_off_up() -> None:
    f = calling()
    p, d = fly(f, [P0, D0])
    actions = f.token(p, 0, CALL, 2.0)
    assert actions == [Deliver((CALL,), paused=True), FinishAt(p, "cancelled"), FinishAt(d, "cancelled")]
    assert not f.holds_kv
    f.answer([1], router(), 3.0)
    assert f.state is FlightState.QUEUED


def test_a_prefill_worker_that_dies_behind_the_hand_off_takes_nothing_from_a_leg_that_waits() -> None:
    f = calling()
    p, d = fly(f, [P0, D0])
    f.token(p, 0, 11, 2.0)
    f.token(d, 0, 11, 2.1)
    f.token(d, 1, CALL, 2.2)
    assert f.lost(p.worker, True, 2.3) == []
    f.waits(d, 2.4)
    assert f.answer([1], router(), 2.5) == [ResumeAt(d, (1,))]


@pytest.mark.parametrize("limit", ["max_tokens", "max_model_len"])
def test_a_call_with_the_last_token_there_is_ends_the_request(limit: str) -> None:
    f = flight(ends_call=lambda _: True, **({"max_tokens": 1} if limit == "max_tokens" else {"max_model_len": 4}))
    [submit] = f.place(router(C0), 1.0)
    assert f.token(submit.leg, 0, CALL, 2.0) == [Deliver((CALL,))]
    assert f.done(submit.leg, FinishReason.LENGTH, WorkerLedger(), 2.1) == [Ended(FinishReason.LENGTH)]


def test_an_end_with_just_the_tokens_of_the_call_is_the_requests_end() -> None:
    f, leg = paused()
    [ended] = f.done(leg, FinishReason.LENGTH, WorkerLedger(), 3.5, token_hash(f.output_ids))
    assert ended == Ended(FinishReason.LENGTH)


def test_room_for_an_answer_is_what_the_context_and_the_largest_pool_leave() -> None:
    f, _ = paused(max_model_len=100)
    check_room(f, 94, None, "text")
    with pytest.raises(HeadraceError, match="has 95 tokens; there is room for 94") as caught:
        check_room(f, 95, 100, "text")
    assert (caught.value.code, caught.value.field, caught.value.reason) == (
        Code.INVALID_ARGUMENT,
        "text",
        "too_long",
    )
    check_room(f, 64 - 23, 64, "text")
    with pytest.raises(HeadraceError, match="room for 41"):
        check_room(f, 42, 64, "text")
    with pytest.raises(HeadraceError, match="room for 44"):
        check_room(f, 45, None, "text", max_context_tokens=50)
    check_room(f, 94, None, "text", max_context_tokens=5000)


# ---- ledgers


def sums(line: Timeline) -> tuple[float, float]:
    return sum(s for _, s in line.to_first_token()), sum(s for _, s in line.to_end())


def test_a_pause_on_one_worker_is_its_tool_wait_and_the_answers_prefill_no_part_of_the_first_token() -> None:
    line = Timeline(accepted=0.0)
    line.submitted(1.0)
    line.first_ledger(WorkerLedger(queue_s=0.5, prefill_s=0.4))
    line.token(2.0)
    line.paused(3.0)
    line.resumed(8.0)
    line.token(9.0)
    line.whole_ledger(WorkerLedger(queue_s=0.7, prefill_s=1.0, decode_s=1.2, tool_wait_s=5.0))
    line.ended(9.1)
    assert sums(line) == (pytest.approx(2.0), pytest.approx(7.1))
    stages = dict(line.to_end())
    assert (stages["tool_wait"], stages["decode_queue"]) == (5.0, pytest.approx(0.2))
    assert stages["decode"] == pytest.approx(1.2 + 0.6)
    assert dict(line.to_first_token())["prefill"] == 0.4


def test_a_pause_that_outlived_its_worker_is_the_gateways_tool_wait() -> None:
    line = Timeline(accepted=0.0)
    line.submitted(1.0)
    line.first_ledger(WorkerLedger(prefill_s=1.0))
    line.token(2.0)
    line.paused(3.0)
    line.resumed(8.0)
    line.replaced(8.0)
    line.submitted(8.5)
    line.first_ledger(WorkerLedger(queue_s=0.1, prefill_s=0.2))
    line.token(9.0)
    line.whole_ledger(WorkerLedger(queue_s=0.1, prefill_s=0.2, decode_s=1.0))
    line.ended(10.0)
    stages = dict(line.to_end())
    assert sums(line)[1] == pytest.approx(8.0)
    assert (stages["tool_wait"], stages["preempted"]) == (5.0, 0.5)
    assert (stages["decode_queue"], stages["decode"]) == (pytest.approx(0.1), pytest.approx(1.0 + 0.2 + 1.0))


def test_a_plan_that_fails_behind_an_answer_has_lost_all_but_the_tools_time() -> None:
    line = Timeline(accepted=0.0)
    line.submitted(1.0)
    line.token(2.0)
    line.paused(3.0)
    line.resumed(8.0)
    line.attempt_lost(9.0)
    line.submitted(9.5)
    line.whole_ledger(WorkerLedger(decode_s=0.5))
    line.ended(10.0)
    stages = dict(line.to_end())
    assert sums(line)[1] == pytest.approx(8.0)
    assert (stages["tool_wait"], stages["preempted"]) == (5.0, 2.5)


def test_a_request_that_ends_while_it_waits_has_waited_until_then() -> None:
    line = Timeline(accepted=0.0)
    line.submitted(1.0)
    line.token(2.0)
    line.token(3.0)
    line.paused(3.0)
    line.ended(7.0)
    stages = dict(line.to_end())
    assert (stages["tool_wait"], stages["decode"]) == (4.0, 1.0)
    assert sums(line)[1] == pytest.approx(5.0)


# ---- text


def read(calls: tuple[str, ...], pieces: list[str], stop: tuple[str, ...] = ()) -> list[tuple[str, bool, bool]]:
    """(text, stopped, call ended) after each token of each piece."""
    model = text_model()
    reader = BranchText(model, stop, False, SamplingParams(100), calls)
    found = []
    for piece in pieces:
        for token in model.encode(piece):
            text, stopped = reader.push([token])
            found.append((text, stopped, reader.call_ended))
    model.close()
    return found


def test_a_call_ends_with_the_token_that_completes_it_and_its_rest_is_cut() -> None:
    # "hello" is one token, and the call ends inside it.
    assert read(("x", "hel"), ["ab", "hello", "q"]) == [
        ("a", False, False),
        ("b", False, False),
        ("hel", False, True),
        ("q", False, False),
    ]


def test_a_call_that_is_cut_into_tokens_ends_with_the_last_of_them() -> None:
    found = read(("</c>",), ["a</c>", "</", "x</c>"])
    assert "".join(text for text, _, _ in found) == "a</c></x</c>"
    assert [i for i, (_, _, ended) in enumerate(found) if ended] == [4, len(found) - 1]


def test_what_was_held_back_for_a_stop_string_goes_out_with_the_call() -> None:
    found = read(("bc",), ["abc", "d"], stop=("bcd",))
    assert ("".join(text for text, _, _ in found), any(stopped for _, stopped, _ in found)) == ("abcd", False)
    assert found[2] == ("bc", False, True)


def test_a_stop_string_that_ends_before_a_call_or_with_it_wins() -> None:
    for stop in ("b", "abc"):
        found = read(("bc",), ["abcd"], stop=(stop,))
        assert not any(ended for _, _, ended in found)
        assert any(stopped for _, stopped, _ in found)


# ---- admission


def test_a_request_that_waits_for_a_tool_leaves_its_place_but_not_its_memory() -> None:
    gate = Admission(QueueLimits(max_live_requests=1, max_reserved_kv_tokens=100), TenantLimits(), None, 2)
    ask = Ask("t", 10, 20, 20)
    [first] = gate.enter(ask, Room(), 0.0).tickets
    gate.started(first, 0.0)
    assert not gate.enter(ask, Room(), 0.0).admitted
    # 1. Kept: no request in progress, its KV reserved.
    gate.pause(first, True, 1.0)
    gate.pause(first, True, 1.0)
    assert (gate.held.live_requests, gate.held.paused_requests, gate.held.reserved_kv_tokens) == (0, 1, 30)
    [second] = gate.enter(ask, Room(), 1.0).tickets
    gate.started(second, 1.0)
    # 2. Given up: nor that.
    gate.pause(first, False, 2.0)
    gate.pause(first, False, 2.0)
    assert gate.held.reserved_kv_tokens == 30
    # 3. Not more wait so than may be in progress: the second keeps its place.
    gate.pause(second, True, 2.0)
    assert (gate.held.live_requests, gate.held.paused_requests) == (1, 1)
    # 4. Back, whatever the bound says, with what the tool has added.
    gate.resume(first, 5, 3.0)
    assert (gate.held.live_requests, gate.held.paused_requests, gate.held.reserved_kv_tokens) == (2, 0, 65)
    # 5. Whatever state they leave in.
    gate.resume(second, 0, 3.0)
    gate.pause(first, False, 4.0)
    gate.leave(first, 5.0, 7)
    gate.leave(second, 5.0, 7)
    assert not any(vars_of(gate))


def vars_of(gate: Admission) -> tuple[float, ...]:
    held = gate.held
    return (
        held.live_requests,
        held.waiting_requests,
        held.waiting_tokens,
        held.reserved_kv_tokens,
        held.queue_s,
        held.paused_requests,
    )


def test_a_tenants_cap_holds_for_those_that_wait_as_for_those_that_run() -> None:
    gate = Admission(QueueLimits(), TenantLimits(max_concurrent_requests=2), None, 1)
    ask = Ask("t", 10, 20, 20)
    tickets = []
    while (decision := gate.enter(ask, Room(), 0.0)).admitted:
        tickets += decision.tickets
        gate.started(tickets[-1], 0.0)
        gate.pause(tickets[-1], True, 0.0)
    assert len(tickets) == 4
    for ticket in tickets:
        gate.leave(ticket, 1.0)
    assert not any(vars_of(gate))


@pytest.mark.parametrize("queue_s", [0.0, 30.0])
def test_a_paused_request_leaves_a_worker_only_for_one_that_is_clearly_cheaper(queue_s: float) -> None:
    f, leg = paused()
    f.waits(leg, 3.5)
    known = router(C0, C1)
    for worker, queue in ((C0, queue_s), (C1, 0.0)):
        load = WorkerLoad(free_blocks=600, total_blocks=600, queue_s=queue, step_costs=GENERIC_S)
        known.report(worker.key, load)
    actions = f.answer([7, 8], known, 4.0)
    if queue_s == 0.0:
        assert actions == [ResumeAt(leg, (7, 8))]
        return
    assert actions == [FinishAt(leg, "cancelled")] and f.state is FlightState.QUEUED
    [submit] = f.place(known, 4.1)
    assert isinstance(submit, SubmitTo) and submit.leg.worker == C1.key
    assert f.token_ids == [5, 6, 7, 11, CALL, 7, 8]
    assert f.token(submit.leg, 2, 51, 5.0) == [Deliver((51,))]

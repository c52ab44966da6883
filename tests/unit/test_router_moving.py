"""A request that leaves a worker: no token lost, none doubled, and nothing given up before somebody else has it."""

from __future__ import annotations

import pytest

from headrace.core.records import FinishReason, WorkerLedger, token_hash
from headrace.errors import Code, HeadraceError
from router.core.decision import Fetch, PlanKind
from router.core.flight import Flight, FlightState
from router.core.legs import Deliver, Ended, FinishAt, HoldAt, Leg, LegKind, PauseAt, ResumeAt, SubmitTo
from router.core.placement import Mode
from router.core.recovery import MOVED, OnFailure
from tests.unit.test_router_core import C0, D0, D1, P0, P1, Member, flight, fly, router, view

C1 = view("c1", C0.role)
FULL = HeadraceError(Code.RESOURCE_EXHAUSTED, "queue full", retry_after_s=2.0)
PROMPT = tuple(range(5, 45))


def decoding(fleet: list[Member], **options: object) -> tuple[Flight, Leg]:
    """At a worker that has sent two tokens, the second alone."""
    f = flight(**options)  # type: ignore[arg-type]
    f.prompt_ids = PROMPT
    if all(member.role is C0.role for member in fleet):
        [submit] = f.place(router(*fleet), 1.0)
        assert isinstance(submit, SubmitTo)
        leg = submit.leg
        f.token(leg, 0, 11, 2.0)
    else:
        p, leg = fly(f, fleet)
        f.token(p, 0, 11, 2.0)
        f.token(leg, 0, 11, 2.1)
        f.done(p, FinishReason.HANDED_OFF, WorkerLedger(), 2.2)
    assert f.token(leg, 1, 12, 2.3) == [Deliver((12,))]
    return f, leg


def leave(f: Flight, leg: Leg, fleet: list[Member], **options: object) -> SubmitTo:
    """Held, waiting, and asked for at another worker."""
    assert f.move(leg.worker, router(*fleet), 3.0, **options) == [HoldAt(leg)]  # type: ignore[arg-type]
    assert f.waits(leg, 3.1) == [] and f.state is FlightState.QUEUED
    [submit] = f.place(router(*fleet), 3.1)
    assert isinstance(submit, SubmitTo) and f.state is FlightState.RUNNING
    return submit


@pytest.mark.parametrize("fleet", [[C0, C1], [P0, D0, D1]], ids=["colocated", "disaggregated"])
def test_the_kv_is_read_from_the_worker_that_is_left(fleet: list[Member]) -> None:
    f, leg = decoding(fleet)
    submit = leave(f, leg, fleet)
    assert submit.leg.kind is LegKind.WHOLE and submit.leg.worker.worker_id[0] == leg.worker.worker_id[0]
    assert submit.leg.worker != leg.worker
    assert submit.fetch == Fetch(leg.worker, 2), "41 of 42 tokens have KV: two full blocks"
    assert (submit.decision.kind, submit.decision.reason, submit.moved) == (PlanKind.FETCH_WHOLE, MOVED, True)
    assert f.started(submit.leg, router(*fleet), 3.2) == [FinishAt(leg, "cancelled")]
    assert f.token(leg, 2, 50, 3.3) == [], "late frames of the old worker are dropped"
    assert f.token(submit.leg, 2, 13, 3.4) == [Deliver((13,))]
    assert f.failures == 0 and leg.worker in f.ask().avoided
    ending = f.done(submit.leg, FinishReason.LENGTH, WorkerLedger(), 3.5, token_hash([11, 12, 13]))
    assert ending == [Ended(FinishReason.LENGTH)]


def test_what_comes_before_the_worker_waits_is_not_taken_twice() -> None:
    fleet = [C0, C1]
    f, leg = decoding(fleet)
    f.move(leg.worker, router(*fleet), 3.0)
    assert f.token(leg, 2, 13, 3.05) == [], "the worker will cut it"
    f.waits(leg, 3.1)
    [submit] = f.place(router(*fleet), 3.1)
    f.started(submit.leg, router(*fleet), 3.2)
    assert f.token(submit.leg, 2, 13, 3.3) == [Deliver((13,))]
    assert f.output_ids == [11, 12, 13]


def test_an_end_that_comes_first_ends_the_request_with_all_its_tokens() -> None:
    fleet = [C0, C1]
    f, leg = decoding(fleet)
    f.move(leg.worker, router(*fleet), 3.0)
    f.token(leg, 2, 13, 3.05)
    actions = f.done(leg, FinishReason.EOS, WorkerLedger(), 3.1, token_hash([11, 12, 13]))
    assert actions == [Deliver((13,)), Ended(FinishReason.EOS)]


@pytest.mark.parametrize("fact", ["refused", "lost", "deadline of a fetch"])
def test_whoever_cannot_take_it_leaves_it_where_it_is(fact: str) -> None:
    fleet = [C0, C1]
    f, leg = decoding(fleet)
    submit = leave(f, leg, fleet)
    match fact:
        case "refused":
            actions = f.failed(submit.leg, FULL, "queue_full", 3.2)
        case "lost":
            actions = f.lost(submit.leg.worker, dead=True, now=3.2)
        case _:
            actions = f.done(submit.leg, FinishReason.CANCELLED, WorkerLedger(), 3.2)
    assert actions == [ResumeAt(leg, ())] and f.failures == 0
    assert f.token(leg, 2, 13, 3.3) == [Deliver((13,))]
    again = [*fleet, view("c2", C0.role)]
    assert f.move(leg.worker, router(*again), 3.4) == [HoldAt(leg)], "it may be tried again"


def test_a_worker_that_is_lost_while_it_is_left_is_not_needed_any_more() -> None:
    fleet = [C0, C1]
    f, leg = decoding(fleet)
    submit = leave(f, leg, fleet)
    assert f.lost(leg.worker, dead=True, now=3.2) == []
    assert f.started(submit.leg, router(*fleet), 3.3) == []
    assert f.token(submit.leg, 2, 13, 3.4) == [Deliver((13,))]


def test_both_workers_lost_is_a_failure_like_any_other() -> None:
    fleet = [C0, C1]
    f, leg = decoding(fleet, max_crashes=3)
    submit = leave(f, leg, fleet)
    f.lost(leg.worker, dead=True, now=3.2)
    assert f.lost(submit.leg.worker, dead=True, now=3.3) == []
    assert f.state is FlightState.QUEUED and f.failures == 1
    [again] = f.place(router(view("c2", C0.role)), 3.4)
    assert isinstance(again, SubmitTo) and again.decision.reason != MOVED and not again.moved


def test_a_worker_that_is_lost_before_it_waits_is_an_ordinary_loss() -> None:
    fleet = [C0, C1]
    f, leg = decoding(fleet)
    f.move(leg.worker, router(*fleet), 3.0)
    assert f.lost(leg.worker, dead=True, now=3.1) == []
    [submit] = f.place(router(C1), 3.2)
    assert isinstance(submit, SubmitTo) and submit.fetch is None and f.failures == 1


def test_nobody_else_means_no_move() -> None:
    f, leg = decoding([C0])
    assert f.move(leg.worker, router(C0), 3.0) is None
    assert f.move(C1.key, router(C0, C1), 3.0) is None, "it is not there"
    assert f.token(leg, 2, 13, 3.1) == [Deliver((13,))]
    f.move(leg.worker, router(C0, C1), 3.2)
    f.waits(leg, 3.3)
    assert f.place(router(C0), 3.4) == [ResumeAt(leg, ())], "whoever could have taken it is gone"


def test_a_move_goes_where_it_is_told() -> None:
    fleet = [P0, D0, D1, C0]
    for to in (C0.key, P0.key):
        f, leg = decoding([P0, D0])
        assert leave(f, leg, fleet, to=to).leg.worker == to
    f, leg = decoding([P0, D0])
    gone = view("gone", C0.role).key
    assert f.move(leg.worker, router(*fleet), 3.0, to=gone) is None


def test_what_does_not_decode_yet_is_planned_anew() -> None:
    f = flight()
    [submit] = f.place(router(P0, D0), 1.0)
    assert f.move(P0.key, router(P0, P1, D0), 1.5) == [FinishAt(submit.leg, "cancelled")]
    [submit] = f.place(router(P0, P1, D0), 1.5)
    assert isinstance(submit, SubmitTo) and submit.moved and submit.leg.worker == P1.key and f.failures == 0
    assert f.lost(P1.key, dead=False, now=1.6) == []
    [again] = f.place(router(P0, P1, D0), 1.7)
    assert isinstance(again, SubmitTo) and not again.moved, "what fails behind a move is a failure"


@pytest.mark.parametrize("to", ["c1", "c2", "c3"])
def test_what_does_not_decode_yet_begins_where_it_is_told(to: str) -> None:
    fleet = [C0, C1, view("c2", C0.role), view("c3", C0.role)]
    f = flight()
    [submit] = f.place(router(C0), 1.0)
    assert f.move(C0.key, router(*fleet), 1.5, view(to, C0.role).key) == [FinishAt(submit.leg, "cancelled")]
    [submit] = f.place(router(*fleet), 1.6)
    assert submit.leg.worker.worker_id == to


def test_a_prefill_that_is_told_where_to_begin_is_still_handed_on() -> None:
    others = [view(f"p{i}", P0.role) for i in range(2, 6)]
    for target in others:
        f = flight(Mode.DISAGGREGATED)
        f.place(router(P0, D0), 1.0)
        fleet = [P0, P1, *others, D0]
        assert f.move(P0.key, router(*fleet), 1.5, target.key) is not None
        [submit] = f.place(router(*fleet), 1.6)
        assert isinstance(submit, SubmitTo) and (submit.leg.kind, submit.leg.worker) == (LegKind.PREFILL, target.key)
        [adopt] = f.started(submit.leg, router(*fleet), 1.7)
        assert adopt.leg.worker == D0.key


@pytest.mark.parametrize("policy", list(OnFailure))
def test_an_adoption_goes_where_it_is_told(policy: OnFailure) -> None:
    others = [view(f"d{i}", D0.role) for i in range(2, 6)]
    for target in others:
        f = flight(on_failure=policy)
        _, d = fly(f, [P0, D0])
        fleet = [P0, D0, D1, *others]
        assert f.move(d.worker, router(*fleet), 1.5, target.key) == [FinishAt(d, "cancelled")]
        sent = f.place(router(*fleet), 1.6)
        assert sent[-1].leg.worker == target.key and sent[-1].moved


def test_where_to_go_holds_while_somebody_is_there_and_for_one_plan() -> None:
    c2, c3 = view("c2", C0.role), view("c3", C0.role)
    f = flight()
    f.place(router(C0), 1.0)
    f.move(C0.key, router(C0, C1, c2, c3), 1.5, c3.key)
    [submit] = f.place(router(C0, C1, c2), 1.6)
    assert submit.leg.worker in (C1.key, c2.key), "it is gone meanwhile: anybody else"
    f.lost(submit.leg.worker, dead=False, now=1.7)
    [again] = f.place(router(C1, c3), 1.8)
    assert again.leg.worker == C1.key, "as chance has it among equals, not as the move had it"


def test_a_hand_off_leaves_its_reader_and_keeps_its_prefill() -> None:
    fleet = [P0, D0, D1]
    f = flight(on_failure=OnFailure.FAIL)
    p, d = fly(f, fleet)
    f.token(p, 0, 11, 2.0)
    assert f.move(p.worker, router(*fleet), 2.05) is None, "its KV is on its way out anyway"
    assert f.move(d.worker, router(*fleet), 2.1) == [FinishAt(d, "cancelled")]
    [adopt] = f.place(router(*fleet), 2.1)
    assert (adopt.source, adopt.number, adopt.moved) == (p, 2, True) and adopt.leg.worker != d.worker
    assert f.failures == 0 and not f.failed_pairs
    assert f.move(adopt.leg.worker, router(P0, view("x", D0.role)._replace(key=adopt.leg.worker)), 2.2) is None


def test_who_waits_for_a_tool_is_planned_anew_when_it_has_answered() -> None:
    fleet = [C0, C1]
    f, leg = decoding(fleet, ends_call=lambda token_id: token_id == 99)
    assert f.token(leg, 2, 99, 2.5) == [Deliver((99,), paused=True), PauseAt(leg)]
    f.waits(leg, 2.6)
    assert f.move(leg.worker, router(*fleet), 3.0) == [FinishAt(leg, "cancelled")]
    assert f.state is FlightState.PAUSED and f.answerable
    assert f.answer([7, 8], router(*fleet), 4.0) == []
    [submit] = f.place(router(*fleet), 4.0)
    assert isinstance(submit, SubmitTo) and submit.moved and submit.leg.worker != leg.worker and f.failures == 0


def test_every_ending_ends_both_legs() -> None:
    for end in ("stop", "cancel", "deadline"):
        fleet = [C0, C1]
        f, leg = decoding(fleet)
        submit = leave(f, leg, fleet)
        finishes = getattr(f, end)(3.2)[:-1]
        assert [action.leg for action in finishes] == [leg, submit.leg]


def test_the_ledger_of_a_moved_request_adds_up() -> None:
    fleet = [C0, C1]
    f, leg = decoding(fleet)
    submit = leave(f, leg, fleet)
    f.started(submit.leg, router(*fleet), 3.3)
    f.prefilled(submit.leg, WorkerLedger(queue_s=0.2, prefill_s=0.1))
    f.token(submit.leg, 2, 13, 3.5)
    f.done(submit.leg, FinishReason.LENGTH, WorkerLedger(queue_s=0.2, prefill_s=0.1, decode_s=0.5), 4.0)
    stages = dict(f.timeline.to_end())
    assert sum(stages.values()) == pytest.approx(2.0)
    assert stages["preempted"] == 0.0 and stages["decode"] == pytest.approx(1.1 + 0.1 + 0.5)

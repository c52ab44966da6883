"""A hand-off that failed has one way back: which one, by policy, by what is left and by predicted time."""

from __future__ import annotations

import pytest

from headrace.core.records import FinishReason, WorkerLedger, token_hash
from headrace.errors import Code, HeadraceError
from router.core.explained import candidate_rows
from router.core.flight import Flight, FlightState
from router.core.legs import AdoptAt, Deliver, Ended, FinishAt, Leg, LegKind, SubmitTo
from router.core.recovery import OnFailure, Option, Recovery, choose
from tests.unit.test_router_core import D0, D1, P0, P1, Member, flight, fly, router

BROKEN = HeadraceError(Code.ABORTED, "the hand-off did not complete")
RETRY, OTHER, LOCAL = OnFailure.RETRY, OnFailure.OTHER_PREFILL, OnFailure.LOCAL_RECOMPUTE


def handing_over(fleet: list[Member], **options: object) -> tuple[Flight, Leg, Leg]:
    """The first token is with the client, the KV on its way."""
    f = flight(**options)  # type: ignore[arg-type]
    p, d = fly(f, fleet)
    assert f.token(p, 0, 11, 2.0) == [Deliver((11,))]
    return f, p, d


def recovered(f: Flight) -> Recovery:
    return [made for _, made in f.decisions if isinstance(made, Recovery)][-1]


def other(leg: Leg, a: Member, b: Member) -> Member:
    return b if leg.worker == a.key else a


@pytest.mark.parametrize("cause", ["lease_broken", "lease_refused", "transfer_failed"])
def test_a_retry_asks_another_reader_for_the_same_prefill(cause: str) -> None:
    fleet = [P0, D0, D1]
    f, p, d = handing_over(fleet)
    assert f.failed(d, BROKEN, cause, 2.1) == [] and p.live
    [adopt] = f.place(router(*fleet), 2.1)
    assert isinstance(adopt, AdoptAt) and (adopt.source, adopt.number) == (p, 2)
    assert adopt.leg.worker == other(d, D0, D1).key, "rather with one that has not failed"
    assert f.attempt == 1, "the plan is the same"
    assert f.token(adopt.leg, 0, 11, 2.2) == []
    f.done(p, FinishReason.HANDED_OFF, WorkerLedger(), 2.25)
    assert f.token(adopt.leg, 1, 12, 2.3) == [Deliver((12,))]
    ending = f.done(adopt.leg, FinishReason.LENGTH, WorkerLedger(), 2.5, token_hash([11, 12]))
    assert ending == [Ended(FinishReason.LENGTH)]


def test_a_prefill_that_still_computes_is_adopted_anew_and_its_tokens_count_meanwhile() -> None:
    f = flight()
    p, d = fly(f, [P0, D0])
    assert f.failed(d, BROKEN, "lease_broken", 1.5) == []
    assert f.state is FlightState.QUEUED
    assert f.token(p, 0, 11, 1.6) == [Deliver((11,))], "nobody can take it just now; the prefill goes on"
    [adopt] = f.place(router(P0, D0), 1.7)
    assert isinstance(adopt, AdoptAt) and adopt.source is p


def test_a_prefill_that_ends_the_request_needs_no_way_back() -> None:
    f = flight()
    p, d = fly(f, [P0, D0])
    f.failed(d, BROKEN, "lease_broken", 1.5)
    f.token(p, 0, 0, 1.6)
    assert f.done(p, FinishReason.EOS, WorkerLedger(), 1.7) == [Ended(FinishReason.EOS)]


def test_without_the_prefill_worker_another_one_computes_again() -> None:
    f, p, d = handing_over([P0, D0])
    assert f.lost(p.worker, dead=True, now=2.1) == []
    assert f.failed(d, BROKEN, "lease_broken", 2.2) == []
    [submit] = f.place(router(P0, P1, D0), 2.3)
    assert isinstance(submit, SubmitTo) and submit.leg.kind is LegKind.PREFILL and submit.leg.worker == P1.key
    assert [option.way for option in recovered(f).options] == [OTHER, LOCAL]


def test_a_prefill_worker_that_dies_before_the_retry_leaves_the_next_way() -> None:
    f, p, d = handing_over([P0, D0])
    f.failed(d, BROKEN, "lease_broken", 2.1)
    assert f.lost(p.worker, dead=True, now=2.2) == []
    [submit] = f.place(router(D0), 2.3)
    assert isinstance(submit, SubmitTo) and submit.leg.kind is LegKind.WHOLE
    assert f.failures == 1, "it is one failure"


def test_two_failures_of_one_pair_are_the_last_of_it() -> None:
    fleet = [P0, P1, D0]
    f, p, d = handing_over(fleet, max_attempts=9)
    f.failed(d, BROKEN, "transfer_failed", 2.1)
    [adopt] = f.place(router(*fleet), 2.1)
    assert isinstance(adopt, AdoptAt) and adopt.leg.worker == D0.key
    f.failed(adopt.leg, BROKEN, "transfer_failed", 2.2)
    finish, submit = f.place(router(*fleet), 2.2)
    assert finish == FinishAt(p, "cancelled") and isinstance(submit, SubmitTo)
    assert submit.leg.kind is LegKind.PREFILL and submit.leg.worker == other(p, P0, P1).key
    [adopt] = f.started(submit.leg, router(*fleet), 2.3)
    assert isinstance(adopt, AdoptAt) and (adopt.leg.worker, adopt.number) == (D0.key, 1), "this pair has not failed"


def test_a_failed_pair_does_not_meet_again_in_a_new_plan() -> None:
    fleet = [P0, D0, D1]
    f, p, d = handing_over(fleet, on_failure=OTHER)
    f.lost(p.worker, dead=False, now=2.0)
    f.failed(d, BROKEN, "transfer_failed", 2.1)
    f._failure = None  # as if its worker had been lost behind the hand-off: a plain new plan
    [submit] = f.place(router(*fleet), 2.2)
    assert isinstance(submit, SubmitTo) and submit.leg.worker == P0.key
    [adopt] = f.started(submit.leg, router(*fleet), 2.3)
    assert isinstance(adopt, AdoptAt) and adopt.leg.worker == other(d, D0, D1).key


def test_a_revoked_lease_is_not_asked_for_again() -> None:
    fleet = [P0, D0]
    for told_by_reader in (True, False):
        f, p, d = handing_over(fleet)
        given_up = f.failed(d if told_by_reader else p, BROKEN, "lease_revoked", 2.1)
        assert given_up == [FinishAt(p if told_by_reader else d, "cancelled")]
        [submit] = f.place(router(*fleet), 2.2)
        assert isinstance(submit, SubmitTo) and submit.leg.kind is LegKind.WHOLE
        assert submit.leg.worker == D0.key, "who took it back is short of memory"


def test_a_lost_decode_worker_leaves_the_kv_for_another_one() -> None:
    f, p, d = handing_over([P0, D0, D1])
    assert f.lost(d.worker, dead=True, now=2.1) == []
    left = other(d, D0, D1)
    [adopt] = f.place(router(P0, left), 2.2)
    assert isinstance(adopt, AdoptAt) and (adopt.source, adopt.leg.worker) == (p, left.key)
    assert recovered(f).cause == "decode_lost" and not f.failed_pairs


def test_the_last_attempt_needs_no_hand_off() -> None:
    fleet = [P0, P1, D0, D1]
    f, _, d = handing_over(fleet, max_attempts=2)
    f.failed(d, BROKEN, "lease_broken", 2.1)
    _, submit = f.place(router(*fleet), 2.2)
    assert isinstance(submit, SubmitTo) and submit.leg.kind is LegKind.WHOLE


def test_whoever_wants_no_recovery_gets_the_reason_at_once() -> None:
    f, p, d = handing_over([P0, D0], on_failure=OnFailure.FAIL)
    finish, ended = f.failed(d, BROKEN, "lease_broken", 2.1)
    assert finish == FinishAt(p, "cancelled")
    assert isinstance(ended, Ended) and ended.error is not None
    assert ended.error.code is Code.ABORTED and ended.error.reason == "lease_broken"


def test_a_worker_that_is_lost_behind_the_hand_off_is_no_failure_of_it() -> None:
    f, p, d = handing_over([P0, D0], on_failure=OnFailure.FAIL)
    f.token(d, 0, 11, 2.1)
    f.done(p, FinishReason.HANDED_OFF, WorkerLedger(), 2.2)
    assert f.lost(d.worker, dead=True, now=2.3) == [] and f.state is FlightState.QUEUED


@pytest.mark.parametrize("policy", [RETRY, OTHER, LOCAL])
def test_a_policy_names_what_is_tried_first(policy: OnFailure) -> None:
    fleet = [P0, P1, D0]
    f, p, d = handing_over(fleet, on_failure=policy)
    f.failed(d, BROKEN, "lease_broken", 2.1)
    actions = f.place(router(*fleet), 2.2, time_left_s=0.0)
    assert recovered(f).chosen.way is policy
    assert p.live is (policy is RETRY) and isinstance(actions[-1], AdoptAt if policy is RETRY else SubmitTo)


def test_a_decision_is_kept_with_what_each_way_was_predicted_to_take() -> None:
    fleet = [P0, P1, D0, D1]
    f, _, d = handing_over(fleet)
    f.failed(d, BROKEN, "lease_broken", 2.1)
    f.place(router(*fleet), 2.2, time_left_s=5.0)
    made = recovered(f)
    assert [option.way for option in made.options] == [RETRY, OTHER, LOCAL]
    assert (made.policy, made.cause, made.time_left_ms) == (OnFailure.AUTO, "lease_broken", 5000.0)
    assert made.chosen is made.options[0] and all(option.predicted_ms > 0 for option in made.options)


def options(**predicted_ms: float) -> tuple[Option, ...]:
    """All ways go to the same place; their times are what is looked at."""
    plan = flight().place(router(D0), 1.0)[0].decision  # type: ignore[union-attr]
    assert candidate_rows(plan)
    return tuple(Option(OnFailure(way), plan, ms, 0.0, 0.0) for way, ms in predicted_ms.items())


@pytest.mark.parametrize(
    ("time_left_ms", "way"), [(1000.0, RETRY), (300.0, OTHER), (100.0, LOCAL), (10.0, LOCAL)], ids=str
)
def test_the_first_way_that_keeps_the_deadline_else_the_quickest(time_left_ms: float, way: OnFailure) -> None:
    found = options(retry=500.0, other_prefill=200.0, local_recompute=50.0)
    assert choose(OnFailure.AUTO, found, time_left_ms, attempts_left=9).way is way


def test_nobody_who_can_take_it_is_waited_for() -> None:
    f, p, d = handing_over([P0, D0])
    f.failed(d, BROKEN, "lease_broken", 2.1)
    assert f.place(router(), 2.2) == [] and p.live
    [adopt] = f.place(router(P0, D0), 2.3)
    assert isinstance(adopt, AdoptAt)

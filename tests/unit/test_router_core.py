"""The gateway's pure cores: placement, bookings, the flight of one branch, its latency ledgers, the audit."""

from __future__ import annotations

import itertools
import random

import pytest

from headrace.core.records import FinishReason, Role, WorkerLedger, WorkerLoad, token_hash
from headrace.errors import Code, HeadraceError
from headrace.ids import RequestId
from headrace.sampling import SamplingParams
from router.core.audit import GatewayAccount, WorkerAccount, findings
from router.core.bookings import Bookings
from router.core.flight import AdoptAt, Deliver, Ended, FinishAt, Flight, FlightState, LegKind, SubmitTo
from router.core.placement import Mode, Plan, WorkerKey, WorkerView, choose_decode, choose_plan

EOS = 0


def view(name: str, role: Role, *, queued: int = 0, capacity: int = 10_000, free: int = 600) -> WorkerView:
    load = WorkerLoad(waiting_tokens=queued, free_blocks=free)
    return WorkerView(WorkerKey(name, f"{name}.1"), role, f"{name}:1", capacity, load)


P0, P1 = view("p0", Role.PREFILL), view("p1", Role.PREFILL)
D0, D1 = view("d0", Role.DECODE), view("d1", Role.DECODE)
C0 = view("c0", Role.COLOCATED)


def flight(mode: Mode = Mode.AUTO, max_tokens: int = 8, **kw: object) -> Flight:
    handles = itertools.count(1)
    params = SamplingParams(max_tokens=max_tokens)
    return Flight(RequestId("req-1"), (5, 6, 7), params, mode, lambda: next(handles), eos_token_ids=(EOS,), **kw)  # type: ignore[arg-type]


def fly(f: Flight, fleet: list[WorkerView]) -> tuple:
    """Place, start and adopt: (prefill leg, decode leg)."""
    [submit] = f.place(fleet, 1.0, 0)
    assert isinstance(submit, SubmitTo)
    [adopt] = f.started(submit.leg, fleet, 1.1, 0)
    assert isinstance(adopt, AdoptAt)
    return submit.leg, adopt.leg


def plan(mode: Mode, *fleet: WorkerView, excluded: tuple[WorkerKey, ...] = (), need: int = 100) -> Plan | None:
    return choose_plan(mode, fleet, excluded, need, 0)


def test_auto_splits_when_both_pools_live_and_serves_whole_when_one_is_down() -> None:
    assert not plan(Mode.AUTO, P0, D0).whole
    assert plan(Mode.AUTO, P0).whole
    assert plan(Mode.AUTO, D0).whole
    assert plan(Mode.AUTO, C0).whole
    assert plan(Mode.AUTO) is None


def test_forced_modes_force() -> None:
    assert plan(Mode.DISAGGREGATED, P0) is None
    assert plan(Mode.COLOCATED, P0, D0).whole
    assert not plan(Mode.DISAGGREGATED, P0, D0, C0).whole


def test_least_queued_wins_equals_take_turns_and_excluded_or_small_workers_are_passed_over() -> None:
    busy = view("p0", Role.PREFILL, queued=500)
    assert plan(Mode.AUTO, busy, P1, D0).worker.key == P1.key
    both = [choose_plan(Mode.AUTO, [P0, P1, D0], (), 100, turn).worker.key for turn in range(4)]
    assert both == [P0.key, P1.key, P0.key, P1.key]
    assert plan(Mode.AUTO, P0, P1, D0, excluded=(P0.key,)).worker.key == P1.key
    small = view("d0", Role.DECODE, capacity=50)
    assert plan(Mode.AUTO, small) is None
    full = view("d0", Role.DECODE, free=0)
    assert choose_decode([P0, full, D1], P0.key, (), 100, 0).key == D1.key
    assert choose_decode([P0, full], P0.key, (), 100, 0).key == full.key


def test_bookings_fill_the_time_between_reports() -> None:
    b = Bookings()
    assert b.add(P0.key, 100) == 1 and b.add(P0.key, 50) == 2
    assert b.unreported(P0.key) == (2, 150)
    b.report(P0.key, WorkerLoad(submit_seq=1))
    assert b.unreported(P0.key) == (1, 50)
    b.report(P0.key, WorkerLoad(submit_seq=0, waiting_tokens=9))
    assert b.load(P0.key).waiting_tokens == 0, "an older report is ignored"
    b.undo(P0.key, 2)
    assert b.total == 0


def test_disaggregated_flight_delivers_each_token_once() -> None:
    f = flight()
    p, d = fly(f, [P0, D0])
    assert f.token(p, 0, 11, 2.0) == [Deliver((11,))]
    assert f.token(d, 0, 11, 2.1) == [], "the reader repeats the first token"
    assert f.done(p, FinishReason.HANDED_OFF, WorkerLedger(), 2.2) == []
    assert f.token(d, 1, 12, 2.3) == [Deliver((12,))]
    assert f.done(d, FinishReason.LENGTH, WorkerLedger(), 2.4) == [Ended(FinishReason.LENGTH)]
    assert f.output_ids == [11, 12]


@pytest.mark.parametrize(("offset", "token"), [(0, 99), (2, 12)])
def test_a_different_repeat_or_a_gap_fails_the_request(offset: int, token: int) -> None:
    f = flight()
    p, d = fly(f, [P0, D0])
    f.token(p, 0, 11, 2.0)
    actions = f.token(d, offset, token, 2.1)
    assert isinstance(actions[-1], Ended) and actions[-1].error.code is Code.INTERNAL
    assert [a.leg for a in actions[:-1]] == [p, d]


def test_a_dropped_or_swapped_token_is_caught_by_the_hash_of_the_output() -> None:
    for made, fails in (([11, 12], False), ([11], True), ([11, 13], True), ([12, 11], True)):
        f = flight()
        [submit] = f.place([C0], 1.0, 0)
        f.token(submit.leg, 0, 11, 2.0)
        f.token(submit.leg, 1, 12, 2.1)
        [ended] = f.done(submit.leg, FinishReason.EOS, WorkerLedger(), 2.2, token_hash(made))
        assert isinstance(ended, Ended) and (ended.error is not None) is fails


def test_end_at_prefill_gives_the_reader_up() -> None:
    f = flight(max_tokens=1)
    p, d = fly(f, [P0, D0])
    f.token(p, 0, 11, 2.0)
    assert f.done(p, FinishReason.LENGTH, WorkerLedger(), 2.1) == [FinishAt(d, "cancelled"), Ended(FinishReason.LENGTH)]


def test_lost_decode_worker_resumes_with_the_tokens_so_far() -> None:
    f = flight()
    p, d = fly(f, [P0, D0, D1])
    f.token(p, 0, 11, 2.0)
    assert f.lost(d.worker, dead=True, now=3.0) == [FinishAt(p, "cancelled")]
    assert f.state is FlightState.QUEUED and f.crashed == {d.worker}
    p2, d2 = fly(f, [P0, D0, D1])
    assert d2.worker == D1.key, "the dead incarnation is not chosen again"
    assert f.token(d, 1, 50, 4.0) == [], "late frames of the old attempt are dropped"
    assert f.token(p2, 1, 12, 4.1) == [Deliver((12,))]


def test_lost_prefill_worker_after_adoption_is_decided_by_the_reader() -> None:
    f = flight()
    p, d = fly(f, [P0, D0])
    f.token(p, 0, 11, 2.0)
    assert f.lost(p.worker, dead=True, now=2.1) == []
    assert f.state is FlightState.RUNNING
    error = HeadraceError(Code.ABORTED, "lease broken")
    assert f.failed(d, error, "lease_broken", 2.2) == []
    assert f.state is FlightState.QUEUED
    [submit] = f.place([D0], 2.3, 0)
    assert submit.leg.kind is LegKind.WHOLE and submit.leg.worker == D0.key


def test_a_request_in_two_crashes_ends_with_an_error_not_a_third() -> None:
    f = flight()
    [submit] = f.place([C0], 1.0, 0)
    f.lost(submit.leg.worker, dead=True, now=1.1)
    again = view("c1", Role.COLOCATED)
    [submit] = f.place([C0, again], 1.2, 0)
    [ended] = f.lost(submit.leg.worker, dead=True, now=1.3)
    assert isinstance(ended, Ended) and ended.error.code is Code.ABORTED and "2 worker crashes" in ended.error.message


def test_attempts_are_bounded_even_when_nobody_crashes() -> None:
    f = flight()
    for _ in range(3):
        [submit] = f.place([C0], 1.0, 0)
        actions = f.lost(submit.leg.worker, dead=False, now=1.1)
    assert f.state is FlightState.ENDED and actions[-1].error.code is Code.ABORTED


def test_refusals_go_on_to_other_workers_then_reach_the_client() -> None:
    f = flight()
    [submit] = f.place([C0], 1.0, 0)
    full = HeadraceError(Code.RESOURCE_EXHAUSTED, "queue full", retry_after_s=2.0)
    assert f.failed(submit.leg, full, "queue_full", 1.1) == []
    [ended] = f.place([C0], 1.2, 0)
    assert ended.error is full


def test_a_request_that_was_given_up_for_others_goes_elsewhere_or_back_when_there_is_nobody_else() -> None:
    given_up = HeadraceError(Code.UNAVAILABLE, "the worker needed the room for others")
    c1 = view("c1", Role.COLOCATED)
    for fleet, taken_by in (([C0, c1], c1), ([C0], C0)):
        f = flight()
        [submit] = f.place([C0], 1.0, 0)
        assert f.failed(submit.leg, given_up, "preempted", 1.1) == []
        [again] = f.place(fleet, 1.2, 0)
        assert isinstance(again, SubmitTo) and again.leg.worker == taken_by.key


def test_output_that_is_whole_needs_no_other_attempt() -> None:
    for tokens, reason in (([11, EOS], FinishReason.EOS), ([11, 12], FinishReason.LENGTH)):
        f = flight(max_tokens=2)
        [submit] = f.place([C0], 1.0, 0)
        for i, token in enumerate(tokens):
            f.token(submit.leg, i, token, 1.0 + i)
        assert f.lost(submit.leg.worker, dead=True, now=5.0) == [Ended(reason)]


def test_client_side_endings_finish_both_legs_and_are_idempotent() -> None:
    for end, word in (("stop", "stop"), ("cancel", "cancelled"), ("deadline", "deadline")):
        f = flight()
        p, d = fly(f, [P0, D0])
        actions = getattr(f, end)(2.0)
        assert actions[:2] == [FinishAt(p, word), FinishAt(d, word)]
        assert getattr(f, end)(2.1) == []
        assert f.token(d, 0, 1, 2.2) == [] and f.lost(d.worker, True, 2.3) == []


def test_random_facts_never_repeat_a_token_nor_leave_a_live_leg() -> None:
    fleet = [P0, P1, D0, D1, C0]
    for seed in range(400):
        rng = random.Random(seed)
        f = flight(max_tokens=20)
        delivered: list[int] = []
        ended: list[Ended] = []

        def take(actions: list) -> None:
            for a in actions:
                if isinstance(a, Deliver):
                    delivered.extend(a.token_ids)  # noqa: B023
                elif isinstance(a, Ended):
                    ended.append(a)  # noqa: B023

        for step in range(60):
            now = float(step)
            take(f.place(rng.sample(fleet, k=rng.randint(0, 5)), now, step))
            if not f.legs:
                continue
            leg = rng.choice(f.legs)
            match rng.randint(0, 7):
                case 0:
                    take(f.started(leg, fleet, now, step))
                case 1 | 2 | 3:
                    offset = rng.randint(0, len(f.output_ids))
                    take(f.token(leg, offset, 100 + offset, now))
                case 4:
                    take(f.lost(leg.worker, rng.random() < 0.5, now))
                case 5:
                    take(f.failed(leg, HeadraceError(Code.ABORTED, "x"), "lease_broken", now))
                case 6:
                    take(
                        f.done(leg, rng.choice([FinishReason.HANDED_OFF, FinishReason.CANCELLED]), WorkerLedger(), now)
                    )
                case 7 if rng.random() < 0.1:
                    take(f.stop(now))
            running = [leg for leg in f.legs if leg.live]
            assert len(running) <= 2
            assert f.state is FlightState.RUNNING or not running
        take(f.cancel(99.0))
        assert delivered == [100 + i for i in range(len(delivered))]
        assert len(ended) == 1
        assert not any(leg.live for leg in f.legs)


def test_ledgers_sum_to_their_intervals() -> None:
    f = flight()
    line = f.timeline
    line.received, line.tokenized, line.accepted = 0.0, 0.5, 0.75
    p, d = fly(f, [P0, D0])
    f.prefilled(p, WorkerLedger(queue_s=0.1, prefill_s=0.5, sampling_s=0.05, cached_tokens=3))
    f.token(p, 0, 11, 2.0)
    f.token(d, 1, 12, 3.0)
    f.done(d, FinishReason.LENGTH, WorkerLedger(hand_off_s=0.2, queue_s=0.1, decode_s=0.9), 3.5)
    assert sum(s for _, s in line.to_first_token()) == pytest.approx(2.0)
    assert sum(s for _, s in line.to_end()) == pytest.approx(1.5)
    assert dict(line.to_first_token())["transport"] == pytest.approx(0.35)
    assert dict(line.to_end())["detokenize_and_stream"] == pytest.approx(0.3)


def test_time_of_a_lost_attempt_is_its_own_stage() -> None:
    f = flight()
    p, d = fly(f, [P0, D0])
    f.token(p, 0, 11, 2.0)
    f.lost(d.worker, dead=True, now=4.0)
    [submit] = f.place([C0], 5.0, 0)
    f.token(submit.leg, 1, 12, 6.0)
    f.done(submit.leg, FinishReason.LENGTH, WorkerLedger(queue_s=0.2, prefill_s=0.5, decode_s=0.1), 6.5)
    stages = dict(f.timeline.to_end())
    assert stages["preempted"] == pytest.approx(3.0 + 0.7)
    assert sum(stages.values()) == pytest.approx(4.5)


def test_audit_names_the_holder() -> None:
    idle = GatewayAccount(frozenset(), 0)
    clean = WorkerAccount("d0", answered=True)
    assert findings(idle, [clean]) == []
    leak = WorkerAccount("p0", answered=True, used_blocks=3, live_requests=1, holders=(("request req-9/1", 3),))
    assert findings(idle, [clean, leak]) == [
        "p0: request req-9/1 holds 3 blocks",
        "p0: 1 live requests without a request at the gateway",
    ]
    assert findings(GatewayAccount(frozenset({"req-9"}), 1), [leak]) == [], "a live request may hold blocks"
    busy = GatewayAccount(frozenset({"req-1"}), 1)
    assert findings(busy, [leak]) == ["p0: request req-9/1 holds 3 blocks"], "a leak shows beside live requests"
    assert findings(busy, [WorkerAccount("p0", True, integrity_error="lost")]) == ["p0: lost"]
    aside = WorkerAccount("d0", True, used_blocks=2, quarantined_blocks=2, holders=(("quarantine read 7", 2),))
    assert findings(idle, [aside]) == ["d0: quarantine read 7 holds 2 blocks"]
    assert findings(GatewayAccount(frozenset(), 2), [WorkerAccount("p0", False)]) == [
        "p0: did not answer",
        "gateway: 2 bookings without a request",
    ]


def test_a_finished_prefill_whose_end_was_lost_ends_by_the_readers_word() -> None:
    """The reader adopted nothing since the first token ended the request; the holder died before it could say so."""
    for reader_first in (True, False):
        f = flight(max_tokens=1)
        p, d = fly(f, [P0, D0])
        f.token(p, 0, 11, 2.0)
        actions = []
        for reader in (reader_first, not reader_first):
            if reader:
                actions += f.done(d, FinishReason.CANCELLED, WorkerLedger(), 2.1)
            else:
                actions += f.lost(p.worker, dead=True, now=2.1)
        assert actions == [Ended(FinishReason.LENGTH)]


def test_a_process_that_answers_again_had_not_crashed() -> None:
    f = flight()
    [submit] = f.place([C0], 1.0, 0)
    f.lost(C0.key, dead=True, now=1.1)
    assert f.place([C0], 1.2, 0) == []
    f.recovered(C0.key)
    [submit] = f.place([C0], 1.3, 0)
    assert submit.leg.worker == C0.key and not f.crashed


def test_a_bad_lane_is_given_up_for_one_worker() -> None:
    f = flight()
    for kind in (LegKind.PREFILL, LegKind.PREFILL, LegKind.WHOLE):
        [submit] = f.place([P0, D0], 1.0, 0)
        assert submit.leg.kind is kind
        f.failed(submit.leg, HeadraceError(Code.ABORTED, "x"), "transfer_failed", 1.1)


def test_a_late_revocation_does_not_end_a_request_that_decodes() -> None:
    f = flight()
    p, d = fly(f, [P0, D0])
    f.token(p, 0, 11, 2.0)
    f.token(d, 0, 11, 2.1)
    assert f.failed(p, HeadraceError(Code.ABORTED, "x"), "lease_revoked", 2.2) == []
    assert f.token(d, 1, 12, 2.3) == [Deliver((12,))]


def test_only_workers_of_one_lane_pair() -> None:
    ucx = WorkerView(WorkerKey("p0", "1"), Role.PREFILL, "a", 1000, lane="ucx")
    tcp = WorkerView(WorkerKey("d0", "1"), Role.DECODE, "b", 1000, lane="tcp")
    assert plan(Mode.AUTO, ucx, tcp).whole
    assert plan(Mode.DISAGGREGATED, ucx, tcp) is None
    assert choose_decode([ucx, tcp], ucx.key, (), 10, 0) is None

"""The flight of one branch, its latency ledgers, the audit; the router itself has tests of its own."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import pytest

from headrace.core.records import FinishReason, Role, WorkerLedger, token_hash
from headrace.errors import Code, HeadraceError
from headrace.ids import RequestId
from headrace.sampling import SamplingParams
from router.core.audit import GatewayAccount, WorkerAccount, findings
from router.core.flight import Flight, FlightState
from router.core.legs import AdoptAt, Deliver, Ended, FinishAt, LegKind, PauseAt, SubmitTo
from router.core.placement import Mode, WorkerKey
from router.core.router import Router

EOS = 0


class Member(NamedTuple):
    key: WorkerKey
    role: Role
    lane: str = ""


def view(name: str, role: Role) -> Member:
    return Member(WorkerKey(name, f"{name}.1"), role)


def router(*fleet: Member) -> Router:
    made = Router(lambda: 0.0)
    for worker in fleet:
        made.worker_up(worker.key, worker.role, 10_000, 16, worker.lane, "", f"{worker.key.worker_id}:1")
    return made


P0, P1 = view("p0", Role.PREFILL), view("p1", Role.PREFILL)
D0, D1 = view("d0", Role.DECODE), view("d1", Role.DECODE)
C0 = view("c0", Role.COLOCATED)


def flight(mode: Mode = Mode.AUTO, max_tokens: int = 8, **kw: object) -> Flight:
    handles = itertools.count(1)
    params = SamplingParams(max_tokens=max_tokens)
    return Flight(RequestId("req-1"), (5, 6, 7), params, mode, lambda: next(handles), eos_token_ids=(EOS,), **kw)  # type: ignore[arg-type]


def fly(f: Flight, fleet: list[Member]) -> tuple:
    """Place, start and adopt: (prefill leg, decode leg)."""
    [submit] = f.place(router(*fleet), 1.0)
    assert isinstance(submit, SubmitTo)
    [adopt] = f.started(submit.leg, router(*fleet), 1.1)
    assert isinstance(adopt, AdoptAt)
    return submit.leg, adopt.leg


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


def test_a_prefill_is_given_up_once_its_reader_decodes() -> None:
    f = flight()
    p, d = fly(f, [P0, D0])
    f.token(p, 0, 11, 2.0)
    assert f.token(d, 0, 11, 2.1) == [] and p.live, "its own word may be on the way"
    assert f.token(d, 1, 12, 2.2) == [Deliver((12,)), FinishAt(p, "cancelled")]
    assert f.done(p, FinishReason.HANDED_OFF, WorkerLedger(), 2.3) == [], "it was, and comes too late"
    assert f.token(d, 2, 13, 2.4) == [Deliver((13,))]


def test_a_reader_that_speaks_before_its_prefill_leaves_it_its_word() -> None:
    f = flight()
    p, d = fly(f, [P0, D0])
    assert f.token(d, 0, 11, 2.0) == [Deliver((11,))] and p.live
    assert f.token(p, 0, 11, 2.1) == []
    assert f.token(d, 1, 12, 2.2) == [Deliver((12,)), FinishAt(p, "cancelled")]


def test_a_prefill_is_given_up_when_its_reader_waits_for_a_tool() -> None:
    f = flight(ends_call=lambda token_id: token_id == 99)
    p, d = fly(f, [P0, D0])
    assert f.token(d, 0, 99, 2.0) == [Deliver((99,), paused=True), FinishAt(p, "cancelled"), PauseAt(d)]


def test_a_dropped_or_swapped_token_is_caught_by_the_hash_of_the_output() -> None:
    for made, fails in (([11, 12], False), ([11], True), ([11, 13], True), ([12, 11], True)):
        f = flight()
        [submit] = f.place(router(C0), 1.0)
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
    f.token(d, 0, 11, 2.1)
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
    [submit] = f.place(router(D0), 2.3)
    assert submit.leg.kind is LegKind.WHOLE and submit.leg.worker == D0.key


def test_a_request_in_two_crashes_ends_with_an_error_not_a_third() -> None:
    f = flight()
    [submit] = f.place(router(C0), 1.0)
    f.lost(submit.leg.worker, dead=True, now=1.1)
    again = view("c1", Role.COLOCATED)
    [submit] = f.place(router(C0, again), 1.2)
    [ended] = f.lost(submit.leg.worker, dead=True, now=1.3)
    assert isinstance(ended, Ended) and ended.error.code is Code.ABORTED and "2 worker crashes" in ended.error.message


def test_attempts_are_bounded_even_when_nobody_crashes() -> None:
    f = flight()
    for _ in range(3):
        [submit] = f.place(router(C0), 1.0)
        actions = f.lost(submit.leg.worker, dead=False, now=1.1)
    assert f.state is FlightState.ENDED and actions[-1].error.code is Code.ABORTED


def test_refusals_go_on_to_other_workers_then_reach_the_client() -> None:
    f = flight()
    [submit] = f.place(router(C0), 1.0)
    full = HeadraceError(Code.RESOURCE_EXHAUSTED, "queue full", retry_after_s=2.0)
    assert f.failed(submit.leg, full, "queue_full", 1.1) == []
    [ended] = f.place(router(C0), 1.2)
    assert ended.error is full


def test_a_request_that_was_given_up_for_others_goes_elsewhere_or_back_when_there_is_nobody_else() -> None:
    given_up = HeadraceError(Code.UNAVAILABLE, "the worker needed the room for others")
    c1 = view("c1", Role.COLOCATED)
    for fleet, taken_by in (([C0, c1], c1), ([C0], C0)):
        f = flight()
        [submit] = f.place(router(C0), 1.0)
        assert f.failed(submit.leg, given_up, "preempted", 1.1) == []
        [again] = f.place(router(*fleet), 1.2)
        assert isinstance(again, SubmitTo) and again.leg.worker == taken_by.key


def test_output_that_is_whole_needs_no_other_attempt() -> None:
    for tokens, reason in (([11, EOS], FinishReason.EOS), ([11, 12], FinishReason.LENGTH)):
        f = flight(max_tokens=2)
        [submit] = f.place(router(C0), 1.0)
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
            take(f.place(router(*rng.sample(fleet, k=rng.randint(0, 5))), now))
            if not f.legs:
                continue
            leg = rng.choice(f.legs)
            match rng.randint(0, 7):
                case 0:
                    take(f.started(leg, router(*fleet), now))
                case 1 | 2 | 3:
                    offset = rng.randint(0, len(f.output_ids))
                    take(f.token(leg, offset, 100 + offset, now))
                case 4:
                    take(f.lost(leg.worker, rng.random() < 0.5, now))
                case 5:
                    cause = rng.choice(["lease_broken", "lease_revoked"])
                    take(f.failed(leg, HeadraceError(Code.ABORTED, "x"), cause, now))
                case 6:
                    take(
                        f.done(leg, rng.choice([FinishReason.HANDED_OFF, FinishReason.CANCELLED]), WorkerLedger(), now)
                    )
                case 7 if rng.random() < 0.1:
                    take(f.stop(now))
            running = [leg for leg in f.legs if leg.live]
            assert len(running) <= 2
            kept = [leg.kind for leg in running] == [LegKind.PREFILL] and f.state is FlightState.QUEUED
            assert f.state is FlightState.RUNNING or kept or not running
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
    _, submit = f.place(router(C0), 5.0)
    f.token(submit.leg, 1, 12, 6.0)
    f.done(submit.leg, FinishReason.LENGTH, WorkerLedger(queue_s=0.2, prefill_s=0.5, decode_s=0.1), 6.5)
    stages = dict(f.timeline.to_end())
    assert stages["preempted"] == pytest.approx(3.0 + 0.7)
    assert sum(stages.values()) == pytest.approx(4.5)


def test_audit_names_the_holder() -> None:
    idle = GatewayAccount(frozenset(), 0)
    clean = WorkerAccount("d0", answered=True)
    assert findings([idle], [clean]) == []
    leak = WorkerAccount("p0", answered=True, used_blocks=3, live_requests=1, holders=(("request req-9/1", 3),))
    assert findings([idle], [clean, leak]) == [
        "p0: request req-9/1 holds 3 blocks",
        "p0: 1 live requests without a request at a gateway",
    ]
    live = GatewayAccount(frozenset({"req-9"}), 1)
    for kind in ("request", "fetch", "lease fetch", "staged for"):
        held = WorkerAccount("p0", answered=True, used_blocks=3, holders=((f"{kind} req-9/1", 3),))
        assert findings([live], [held]) == [], "a live request may hold blocks"
        assert findings([idle], [held]) == [f"p0: {kind} req-9/1 holds 3 blocks"]
    assert findings([live], [leak]) == []
    busy = GatewayAccount(frozenset({"req-1"}), 1)
    assert findings([busy], [leak]) == ["p0: request req-9/1 holds 3 blocks"], "a leak shows beside live requests"
    assert findings([busy], [WorkerAccount("p0", True, integrity_error="lost")]) == ["p0: lost"]
    tiers = (("device", 9, 9), ("host", 5, 4))
    assert findings([busy], [WorkerAccount("p0", True, tiers=tiers)]) == ["p0: host tier accounts for 4 of 5 blocks"]
    aside = WorkerAccount("d0", True, used_blocks=2, quarantined_blocks=2, holders=(("quarantine read 7", 2),))
    assert findings([idle], [aside]) == ["d0: quarantine read 7 holds 2 blocks"]
    assert findings([GatewayAccount(frozenset(), 2)], [WorkerAccount("p0", False)]) == [
        "gateway: 2 bookings without a request",
        "p0: did not answer",
    ]
    other = GatewayAccount(frozenset({"req-9"}), 1, "gateway-1")
    assert findings([busy, other], [leak]) == [], "what any gateway has in progress may hold blocks"
    silent = GatewayAccount(frozenset(), 0, "gateway-1", answered=False)
    assert findings([busy, silent], [clean]) == ["gateway-1: did not answer"]


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
    [submit] = f.place(router(C0), 1.0)
    f.lost(C0.key, dead=True, now=1.1)
    assert f.place(router(C0), 1.2) == []
    f.recovered(C0.key)
    [submit] = f.place(router(C0), 1.3)
    assert submit.leg.worker == C0.key and not f.crashed


def test_a_bad_lane_is_given_up_for_one_worker() -> None:
    f = flight()
    p, d = fly(f, [P0, D0])
    f.token(p, 0, 11, 2.0)
    broken = HeadraceError(Code.ABORTED, "x")
    assert f.failed(d, broken, "transfer_failed", 2.1) == []
    [adopt] = f.place(router(P0, D0), 2.1)
    assert isinstance(adopt, AdoptAt) and (adopt.source, adopt.number) == (p, 2)
    assert f.failed(adopt.leg, broken, "transfer_failed", 2.2) == []
    finish, submit = f.place(router(P0, D0), 2.2)
    assert finish == FinishAt(p, "cancelled")
    assert isinstance(submit, SubmitTo) and submit.leg.kind is LegKind.WHOLE


def test_a_late_revocation_does_not_end_a_request_that_decodes() -> None:
    f = flight()
    p, d = fly(f, [P0, D0])
    f.token(p, 0, 11, 2.0)
    f.token(d, 0, 11, 2.1)
    assert f.failed(p, HeadraceError(Code.ABORTED, "x"), "lease_revoked", 2.2) == []
    assert f.token(d, 1, 12, 2.3) == [Deliver((12,))]


def test_only_workers_of_one_lane_pair() -> None:
    ucx, tcp = Member(WorkerKey("p0", "1"), Role.PREFILL, "ucx"), Member(WorkerKey("d0", "1"), Role.DECODE, "tcp")
    [submit] = flight().place(router(ucx, tcp), 1.0)
    assert submit.leg.kind is LegKind.WHOLE
    assert flight(Mode.DISAGGREGATED).place(router(ucx, tcp), 1.0) == []


def test_a_flight_keeps_what_was_decided_and_what_came_of_it() -> None:
    f = flight()
    p, d = fly(f, [P0, D0])
    f.token(p, 0, 11, 1.75)
    assert [(attempt, decision.worker) for attempt, decision in f.decisions] == [(1, p.worker), (1, d.worker)]
    assert f.realised_ms == {1: pytest.approx(750.0)}


def test_an_ask_names_what_is_there_and_what_may_still_come() -> None:
    f = flight(max_tokens=8, expected_output_tokens=6)
    p, _ = fly(f, [P0, D0])
    f.token(p, 0, 11, 1.5)
    ask = f.ask()
    assert (ask.num_tokens, ask.max_tokens, ask.expected_output_tokens, ask.most_tokens) == (4, 7, 5, 11)


def test_a_refusal_of_before_says_nothing_once_another_worker_has_answered() -> None:
    f = flight()
    c1 = view("c1", Role.COLOCATED)
    [submit] = f.place(router(C0), 1.0)
    f.failed(submit.leg, HeadraceError(Code.RESOURCE_EXHAUSTED, "queue full"), "queue_full", 1.1)
    [submit] = f.place(router(C0, c1), 1.2)
    assert submit.leg.worker == c1.key
    f.token(submit.leg, 0, 11, 2.0)
    assert f.lost(c1.key, dead=True, now=3.0) == [] and f.place(router(), 3.1) == []
    assert f.state is FlightState.QUEUED
    [submit] = f.place(router(C0, c1), 3.2)
    assert submit.leg.worker == C0.key

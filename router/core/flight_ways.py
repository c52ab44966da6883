"""A flight's ways from one worker to another: a hand-off that failed goes on (`router.core.recovery` chooses how), and
a worker is left by what is there (`router.core.moving` says how).

See `router.core.flight`. Does not: hear of the workers itself.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.errors import Code, HeadraceError
from router.core.decision import Decision
from router.core.flight_record import FlightRecord, FlightState
from router.core.legs import Action, HoldAt, Leg, LegKind, ResumeAt, SubmitTo
from router.core.moving import Leave, Move, can_leave, only, plan_at, plan_away
from router.core.placement import Mode, WorkerKey
from router.core.recovery import LEASE_FAILURES, MOVED, REVOKED, Failure, OnFailure, recover
from router.core.router import Router


class FlightWays(FlightRecord):
    """The second layer of a flight."""

    __slots__ = ()

    # ---- hand-offs that fail

    def _hand_off_failed(self, cause: str, now: float) -> list[Action]:
        """Its reader has not got the KV. The prefill leg, if it lives, keeps what it has for another one."""
        source = next(leg for leg in reversed(self.legs) if leg.kind is LegKind.PREFILL)
        reader = self.legs[-1]
        if cause in LEASE_FAILURES and reader.kind is LegKind.DECODE:
            self.failed_pairs[source.worker, reader.worker] += 1
        has_kv = source.live and cause != REVOKED
        given_up = self._finish_legs("cancelled", keep=source if has_kv else None)
        if self._complete() is not None:
            return [*given_up, *self._requeue(now)]
        if self.on_failure is OnFailure.FAIL:
            error = HeadraceError(Code.ABORTED, f"the hand-off between two workers failed: {cause}", reason=cause)
            return [*given_up, *self._fail(error, now)]
        if self.failures + 1 >= self.max_attempts:
            return [*given_up, *self._requeue(now)]
        self.failures += 1
        self._advance(FlightState.QUEUED)
        self._failure = Failure(cause, source.worker, has_kv, self._prefill_left_ms(now))
        return given_up

    def _prefill_left_ms(self, now: float) -> float:
        """As the current plan had it."""
        if self.attempt in self.realised_ms or self.timeline.last_submit is None:
            return 0.0
        plan = next(plan for attempt, plan in self.decisions if attempt == self.attempt)
        predicted_ms = plan.predicted_ttft_ms if isinstance(plan, Decision) else 0.0
        return max(0.0, predicted_ms - (now - self.timeline.last_submit) * 1e3)

    def _recover(self, failure: Failure, router: Router, now: float, time_left_s: float | None) -> list[Action]:
        prefill = self._leg(LegKind.PREFILL)
        failure = replace(failure, has_kv=failure.has_kv and prefill is not None)
        left = self.max_attempts - self.failures
        ask, to = self.ask(time_left_s), None if self._leave is None else self._leave.to
        asks = [ask] if to is None else [only(ask, {to}, router), ask]
        ways = (recover(self.on_failure, failure, self.failed_pairs, each, router, now, left) for each in asks)
        found = next((way for way in ways if way is not None), None)
        if found is None:
            return []
        self._failure = None
        self.decisions.append((self.attempt, found))
        way, plan = found.chosen.way, found.chosen.plan
        if way is OnFailure.RETRY and prefill is not None:
            self._advance(FlightState.RUNNING)
            self.timeline.hand_off_lost(now)
            return self._adopt(prefill, plan, router)
        self._whole_next = self._whole_next or way is OnFailure.LOCAL_RECOMPUTE
        self.timeline.attempt_lost(now)
        return [*self._finish_legs("cancelled"), *self._submit(plan, router, now)]

    # ---- leaving a worker

    def move(self, worker: WorkerKey, router: Router, now: float, to: WorkerKey | None = None) -> list[Action] | None:
        """Has the request leave a worker, for `to` or for wherever it is cheapest.

        What decodes takes its KV along. What does not yet, or waits for a tool, gets a new plan when it needs one.
        None, and no change: it is not there, is leaving a worker already, hands its KV on just now, or nobody else can
        take it.
        """
        leg = next((leg for leg in self.legs if leg.live and leg.worker == worker), None)
        if leg is None or self._move is not None or self.state is FlightState.QUEUED:
            return None
        decodes = leg.kind is not LegKind.PREFILL and leg.spoke
        prefill = self._leg(LegKind.PREFILL) if leg.kind is LegKind.DECODE and not leg.spoke else None
        has_come = leg.kind is LegKind.DECODE and not leg.spoke and prefill is None
        if has_come or (leg.kind is LegKind.PREFILL and leg.spoke):
            return None
        ask = replace(self.ask(), mode=Mode.COLOCATED) if decodes else self.ask()
        if not can_leave(ask, worker, to, router, now, None if prefill is None else prefill.worker):
            return None
        self._left = worker
        if decodes and self.state is FlightState.RUNNING:
            self._move = Move(leg, to)
            return [HoldAt(leg)]
        self._leave = Leave(to)
        if self.state is FlightState.PAUSED:
            return [*self._finish_legs("cancelled"), *self._go_on(now)]
        self._advance(FlightState.QUEUED)
        if prefill is not None:
            self._failure = Failure(MOVED, prefill.worker, True, self._prefill_left_ms(now))
            return self._finish_legs("cancelled", keep=prefill)
        self.timeline.attempt_lost(now)
        return self._finish_legs("cancelled")

    def _plan(self, router: Router, now: float, time_left_s: float | None) -> Decision | None:
        """A new plan, where a move was told to go while that worker can take it."""
        ask, to = self.ask(time_left_s), None if self._leave is None else self._leave.to
        plan = None if to is None else plan_at(ask, to, router, now)
        return plan or router.choose(ask, now)

    def _move_on(self, move: Move, router: Router, now: float, time_left_s: float | None) -> list[Action]:
        """The source waits with the KV: somebody else is asked to go on."""
        plan = plan_away(self.ask(time_left_s), move.source.worker, move.to, router, now)
        if plan is None:
            return self._stay(move, now)
        self.attempt += 1
        self._advance(FlightState.RUNNING)
        leg = Leg(LegKind.WHOLE, plan.worker, router.table.address(plan.worker), self.next_handle())
        move.target, move.since = leg, now
        self.legs.append(leg)
        self.decisions.append((self.attempt, plan))
        return [SubmitTo(leg, plan, plan.fetch, moved=True)]

    def _moved(self, move: Move) -> list[Action]:
        """The target has what it needs."""
        assert move.target is not None
        self._move = None
        self.timeline.replaced(move.since)
        self.timeline.submitted(move.since)
        self.decode_worker = move.target.worker.worker_id
        return self._finish_legs("cancelled", keep=move.target)

    def _stay(self, move: Move, now: float) -> list[Action]:
        """Nobody else has taken it: the source, if it lives, goes on as if nothing had been."""
        self._move = None
        if not move.source.live:
            return self._requeue(now)
        self._advance(FlightState.RUNNING)
        move.source.waits, move.source.keeps_kv = False, True
        return [ResumeAt(move.source, ())]

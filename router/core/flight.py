"""One branch of a request while the gateway owns it: facts in, actions out. No sockets, no clock, no text.

    QUEUED --place--> RUNNING --eos, stop, length--> ENDED
       ^                 |
       +---- leg lost ---+      (tokens so far go along; at most `max_attempts` failures, `max_crashes` dead processes)

    RUNNING --a tool is called--> PAUSED --answer, a leg waits for it--> RUNNING
                                         --answer, no leg is left------> QUEUED
    every state --cancel, deadline, stop, failure--> ENDED

A *leg* is the request at one worker: `whole` serves all of it, `prefill` computes the prompt and keeps the KV for a
reader, `decode` adopts it. Facts about a leg of an earlier attempt are dropped, so late frames cannot do harm.
Where a leg goes is the router's choice; the flight knows who may not be chosen again, and keeps each decision.

A hand-off that failed leaves its prefill leg alive for the next `place`, where `router.core.recovery` chooses the way
back: QUEUED may have that one leg, which goes on meanwhile. A request that decodes may be moved (`router.core.moving`):
it is QUEUED for as long as it takes to choose where to, and RUNNING with two legs until the new one has started.

PAUSED: the client runs a tool. The worker may have sampled on before it hears of that: such tokens are dropped, and the
answer goes to it only after it has said that it waits, so that none of them can be taken for what follows the answer. A
leg that is lost meanwhile fails nothing and counts as no attempt: behind the answer there is a new plan.

| invariant | kept by |
| --- | --- |
| a token reaches the client once | `offset` against the output so far; a repeat must be equal |
| no token is lost or changed on the way | the worker's `output_hash` at the end |
| an ended flight has no live leg | every ending and every new plan sends Finish to the legs still live |
| nothing is kept for a reader that has it | Finish to a prefill leg once its reader sends the second token |
| what a prefill worker keeps for a reader is asked for or given up | `_failure` is set while such a leg waits QUEUED |
| a request seen in `max_crashes` dead processes ends with an error | `crashed`, filled when a worker is lost |

In three layers: its data and legs are `router.core.flight_record`, its ways from worker to worker
`router.core.flight_ways`; here are the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.core.records import FinishReason, TokenLogprobs, WorkerLedger, token_hash
from headrace.errors import Code, HeadraceError
from router.core.explained import candidate_rows
from router.core.flight_record import FlightState
from router.core.flight_ways import FlightWays
from router.core.legs import Action, Deliver, Ended, Leg, LegKind, PauseAt
from router.core.moving import Move
from router.core.placement import WorkerKey
from router.core.recovery import DECODE_LOST, LEASE_FAILURES
from router.core.router import Router

__all__ = ["Flight", "FlightState"]

_MOVE_BELOW, _MOVE_MS = 0.8, 20.0
"""A paused request leaves its worker for a plan that costs so much less: predictions are not better than that."""
PREEMPTED = "preempted"
"""The worker needed the room for others, and thinks that another one takes the request sooner."""


class Flight(FlightWays):
    """See the module's docstring. Mutated by facts only; each fact returns the actions to carry out, in order."""

    __slots__ = ()

    # ---- placing

    def place(self, router: Router, now: float, time_left_s: float | None = None) -> list[Action]:
        """Tries to plan a queued flight. No actions: nobody can take it yet, or it has just ended (see `state`)."""
        if self.state is not FlightState.QUEUED:
            return []
        if self._move is not None:
            return self._move_on(self._move, router, now, time_left_s)
        if self._failure is not None:
            return self._recover(self._failure, router, now, time_left_s)
        plan = self._plan(router, now, time_left_s)
        if plan is None:
            if self._refusal is not None:
                return self._fail(self._refusal, now)
            return []
        return self._submit(plan, router, now)

    # ---- facts from workers

    def started(self, leg: Leg, router: Router, now: float) -> list[Action]:
        """The prefill runs: choose the decode worker from fresh load (SPEC E7)."""
        if self._move is not None and leg is self._move.target:
            return self._moved(self._move) if leg.live else []
        if not leg.live or leg.kind is not LegKind.PREFILL or self._adoptions:
            return []
        ask = self.ask()
        failed = {reader for source, reader in self.failed_pairs if source == leg.worker}
        target = router.choose_decode(replace(ask, excluded={*ask.excluded, *failed}), leg.worker, now)
        if target is None:
            self._whole_next = True
            return self._requeue(now)
        return self._adopt(leg, target, router)

    def token(
        self, leg: Leg, offset: int, token_id: int, now: float, logprobs: TokenLogprobs | None = None
    ) -> list[Action]:
        """One token at its place in the output. Repeats are dropped, a gap or a different repeat fails the request."""
        if not leg.live:
            return []
        leg.spoke = True
        if self._move is not None and leg is self._move.source:
            self._move.held.append((offset, token_id, logprobs))
            return []
        have = len(self.output_ids)
        if offset < have:
            is_same = not self.exact or offset != self._repeatable[0] or logprobs == self._repeatable[1]
            if self.output_ids[offset] == token_id and is_same:
                return []
            return self._fail(HeadraceError(Code.INTERNAL, "a repeated token differs from the one delivered"), now)
        if self.state is FlightState.PAUSED:
            return []
        if offset > have:
            return self._fail(HeadraceError(Code.INTERNAL, "a token is missing from the stream"), now)
        if logprobs is None and self.sampling.logprobs is not None:
            return self._fail(HeadraceError(Code.INTERNAL, "a token came without its log-probabilities"), now)
        self.output_ids.append(token_id)
        self.timeline.token(now)
        if self.attempt not in self.realised_ms and self.timeline.last_submit is not None:
            self.realised_ms[self.attempt] = (now - self.timeline.last_submit) * 1e3
            # It was let in: refusals of before say nothing about the next plan.
            self._refusal, self.excluded = None, set(self.crashed)
            self._repeatable = (offset, logprobs)
        told = () if logprobs is None else (logprobs,)
        if self.ends_call is not None and self.ends_call(token_id) and self._complete() is None:
            return [Deliver((token_id,), paused=True, logprobs=told), *self._pause(now)]
        delivery: list[Action] = [Deliver((token_id,), logprobs=told)]
        if leg.kind is LegKind.DECODE and offset == self._repeatable[0] + 1:
            # The reader has told the holder so itself, but its word may be lost.
            delivery += self._finish_legs("cancelled", keep=leg)
        return delivery

    def prefilled(self, leg: Leg, ledger: WorkerLedger) -> None:
        if leg.live:
            self.timeline.first_ledger(ledger)

    def done(
        self, leg: Leg, reason: FinishReason, ledger: WorkerLedger, now: float, output_hash: bytes = b""
    ) -> list[Action]:
        """A worker's part is over in good order. `output_hash` (b"": not told) must be that of what was delivered."""
        if not leg.live:
            return []
        came = self._take_held(self._move, now) if self._move is not None and leg is self._move.source else []
        leg.live = False
        return [*came, *self._done(leg, reason, ledger, now, output_hash)]

    def _done(
        self, leg: Leg, reason: FinishReason, ledger: WorkerLedger, now: float, output_hash: bytes
    ) -> list[Action]:
        if self.state is FlightState.ENDED:
            return []
        if self._move is not None and leg is self._move.target:
            return self._stay(self._move, now)
        if reason is FinishReason.HANDED_OFF:
            return []
        if reason is FinishReason.DEADLINE:
            return self.deadline(now)
        if self.state is FlightState.PAUSED and output_hash != token_hash(self.output_ids):
            return self._go_on(now)  # it went on behind the call, and came to an end
        if reason is FinishReason.CANCELLED:
            if self.state is FlightState.QUEUED:
                return []
            # A reader that had nothing to adopt leaves the ending to the prefill leg, while there is one.
            return [] if self._leg(LegKind.PREFILL) else self._requeue(now)
        if output_hash and output_hash != token_hash(self.output_ids):
            return self._fail(HeadraceError(Code.INTERNAL, "the output differs from the one delivered"), now)
        if leg.kind is LegKind.DECODE:
            self.timeline.last_ledger(ledger)
        else:
            self.timeline.whole_ledger(ledger)
        return self._end(Ended(reason), now)

    def failed(self, leg: Leg, error: HeadraceError, reason: str, now: float) -> list[Action]:
        """A worker refused or gave up."""
        if not leg.live:
            return []
        leg.live = False
        if self.state is FlightState.PAUSED:
            return self._go_on(now)
        if self._move is not None and leg in (self._move.source, self._move.target):
            if leg is self._move.target:
                return self._stay(self._move, now)
            if self._move.target is not None:
                return []
            self._move = None
        if self.state is FlightState.QUEUED:
            return []  # there is one way back less
        if reason in LEASE_FAILURES and leg.kind is not LegKind.WHOLE:
            decode = self._leg(LegKind.DECODE)
            if decode is not None and decode.spoke:
                return []
            return self._hand_off_failed(reason, now)
        if reason == PREEMPTED:
            self.avoided.add(leg.worker)
            return self._requeue(now)
        if error.code in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE):
            self.excluded.add(leg.worker)
            self._refusal = error
            return self._requeue(now)
        return self._fail(error, now)

    def lost(self, worker: WorkerKey, dead: bool, now: float) -> list[Action]:
        """The session to a worker broke; `dead`: its process is gone (or does not answer)."""
        legs = [leg for leg in self.legs if leg.live and leg.worker == worker]
        for leg in legs:
            leg.live = False
        if self.state is FlightState.PAUSED:
            return self._go_on(now)
        if not legs:
            return []
        if dead:
            self.crashed.add(worker)
            self.excluded.add(worker)
        if len(self.crashed) >= self.max_crashes:
            error = HeadraceError(Code.ABORTED, f"the request was present in {len(self.crashed)} worker crashes")
            return self._fail(error, now)
        if (move := self._move) is not None and {id(leg) for leg in legs} & {id(move.source), id(move.target)}:
            if move.target is not None and not move.target.live:
                return self._stay(move, now)
            if move.target is not None:
                return []
            self._move = None
        if legs[0].kind is LegKind.PREFILL and self._leg(LegKind.DECODE):
            # The reader knows whether it has everything: it goes on, or reports its broken lease.
            return []
        if self.state is FlightState.QUEUED:
            return []
        if legs[0].kind is LegKind.DECODE and not legs[0].spoke:
            return self._hand_off_failed(DECODE_LOST, now)
        return self._requeue(now)

    def waits(self, leg: Leg, now: float) -> list[Action]:
        """The worker has paused the request; no token of before comes any more."""
        leg.waits = leg.live
        if self._move is not None and leg is self._move.source and leg.live:
            self._move.held.clear()
            self._advance(FlightState.QUEUED)
            return []
        return self._go_on(now)

    # ---- facts from the client's side

    def answer(self, token_ids: Sequence[int], router: Router, now: float) -> list[Action]:
        """What the tool has answered; perhaps nothing. A no-op unless `answerable`.

        The worker that waits for it goes on with the request, unless another one is clearly predicted to be cheaper.
        """
        if not self.answerable:
            return []
        leg = self._leg(LegKind.WHOLE, LegKind.DECODE)
        moves = leg is not None and leg.waits and self._is_cheaper_elsewhere(leg, len(token_ids), router, now)
        self._answer = tuple(token_ids)
        if self._answer:
            self.inserts.append((len(self.output_ids), self._answer))
        self.timeline.resumed(now)
        given_up = self._finish_legs("cancelled") if moves else []
        return [*given_up, *self._go_on(now)]

    def stop(self, now: float) -> list[Action]:
        """A stop string was found in the text: a completion."""
        return self._end(Ended(FinishReason.STOP), now, finish="stop")

    def cancel(self, now: float) -> list[Action]:
        return self._end(Ended(FinishReason.CANCELLED, HeadraceError(Code.CANCELLED, "the request was cancelled")), now)

    def deadline(self, now: float) -> list[Action]:
        error = HeadraceError(Code.DEADLINE_EXCEEDED, "the request's deadline has passed")
        return self._end(Ended(FinishReason.DEADLINE, error), now, finish="deadline")

    def abort(self, error: HeadraceError, now: float) -> list[Action]:
        return self._fail(error, now)

    # ---- inside

    def _take_held(self, move: Move, now: float) -> list[Action]:
        """The source was at its end before it could wait: what it had sent counts."""
        self._move = None
        actions = [] if move.target is None else self._finish_legs("cancelled", keep=move.source)
        for offset, token_id, logprobs in move.held:
            actions += self.token(move.source, offset, token_id, now, logprobs)
        return actions

    def _pause(self, now: float) -> list[Action]:
        """A leg that decodes waits, its KV perhaps too; a hand-off on its way would only go on computing."""
        self._advance(FlightState.PAUSED)
        self._failure = None
        self.timeline.paused(now)
        leg = self._leg(LegKind.WHOLE, LegKind.DECODE)
        if leg is None or not leg.spoke:
            return self._finish_legs("cancelled")
        return [*self._finish_legs("cancelled", keep=leg), PauseAt(leg)]

    def _is_cheaper_elsewhere(self, leg: Leg, more_tokens: int, router: Router, now: float) -> bool:
        ask = self.ask()
        plan = router.choose(replace(ask, num_tokens=ask.num_tokens + more_tokens, may_wait=False), now)
        if plan is None or plan.worker == leg.worker:
            return False
        here = min((row.cost_ms for row in candidate_rows(plan) if row.worker == leg.worker), default=None)
        return here is not None and plan.cost_ms < _MOVE_BELOW * here - _MOVE_MS

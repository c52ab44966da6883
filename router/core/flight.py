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
| what a prefill worker keeps for a reader is asked for or given up | `_failure` is set while such a leg waits QUEUED |
| a request seen in `max_crashes` dead processes ends with an error | `crashed`, filled when a worker is lost |

Longer than others: one state machine, all of whose facts stand side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from headrace.core.records import FinishReason, TokenLogprobs, WorkerLedger, token_hash
from headrace.errors import Code, HeadraceError
from headrace.ids import RequestId
from headrace.sampling import SamplingParams
from router.core.decision import Decision, RouteAsk
from router.core.explained import candidate_rows
from router.core.latency import Timeline
from router.core.legs import (
    Action,
    AdoptAt,
    Deliver,
    Ended,
    FinishAt,
    HoldAt,
    Leg,
    LegKind,
    PauseAt,
    ResumeAt,
    SubmitTo,
)
from router.core.moving import Move, can_leave, plan_away
from router.core.placement import Mode, WorkerKey
from router.core.recovery import DECODE_LOST, LEASE_FAILURES, MOVED, REVOKED, Failure, OnFailure, Recovery, recover
from router.core.router import Router

_MOVE_BELOW, _MOVE_MS = 0.8, 20.0
"""A paused request leaves its worker for a plan that costs so much less: predictions are not better than that."""
PREEMPTED = "preempted"
"""The worker needed the room for others, and thinks that another one takes the request sooner."""


class FlightState(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    ENDED = "ended"


@dataclass(slots=True)
class Flight:
    """See the module's docstring. Mutated by facts only; each fact returns the actions to carry out, in order."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    mode: Mode
    next_handle: Callable[[], int]
    eos_token_ids: tuple[int, ...] = ()
    max_attempts: int = 3
    max_crashes: int = 2
    on_failure: OnFailure = OnFailure.AUTO
    """Of a hand-off."""
    max_model_len: int = 1 << 31
    exact: bool = False
    """Equal tokens have bit-equal logits: a repeat has the same log-probabilities too."""
    ends_call: Callable[[int], bool] | None = None
    """Told each output token once, in order: does the text of a tool call end with it? None: nobody waits for tools."""
    state: FlightState = FlightState.QUEUED
    attempt: int = 0
    """Plans made so far; the current plan's number."""
    output_ids: list[int] = field(default_factory=list)
    inserts: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """(output tokens before it, tokens) of what tools have answered."""
    legs: list[Leg] = field(default_factory=list)
    crashed: set[WorkerKey] = field(default_factory=set)
    excluded: set[WorkerKey] = field(default_factory=set)
    avoided: set[WorkerKey] = field(default_factory=set)
    """Taken only when nobody else can: they gave the request up for others, and would take it again."""
    timeline: Timeline = field(default_factory=Timeline)
    keys: tuple[int, ...] = ()
    """Of the full blocks of prompt and output so far, for the router; the owner brings them up to date."""
    expected_output_tokens: int = 0
    """Length that the whole output is predicted to have; 0: not predicted."""
    tenant: str = ""
    session: str = ""
    no_cache: bool = False
    decisions: list[tuple[int, Decision | Recovery]] = field(default_factory=list)
    """(attempt, what was chosen), in order; an attempt's first one is its plan."""
    realised_ms: dict[int, float] = field(default_factory=dict)
    """Time from Submit to the first new token, by attempt."""
    disaggregated: bool = False
    prefill_worker: str = ""
    decode_worker: str = ""
    failures: int = 0
    """Plans and hand-offs that came to nothing."""
    failed_pairs: Counter[tuple[WorkerKey, WorkerKey]] = field(default_factory=Counter)
    """Hand-offs of the request that failed, by (prefill worker, decode worker)."""
    _whole_next: bool = False
    _refusal: HeadraceError | None = None
    _answer: tuple[int, ...] | None = None
    """While PAUSED: given, and not yet with a leg."""
    _repeatable: tuple[int, TokenLogprobs | None] = (-1, None)
    """Offset of the attempt's first token, which a reader repeats, and what was told of it."""
    _failure: Failure | None = None
    """Of the hand-off, until the next `place` has chosen the way back."""
    _adoptions: int = 0
    """Of the current plan."""
    _move: Move | None = None
    """Under way."""
    _left: WorkerKey | None = None
    """By the last move: avoided too."""

    @property
    def num_inserted(self) -> int:
        """Tokens that tools have answered: input that is not in the prompt."""
        return sum(len(token_ids) for _, token_ids in self.inserts)

    @property
    def num_tokens(self) -> int:
        """Everything so far."""
        return len(self.prompt_ids) + len(self.output_ids) + self.num_inserted

    @property
    def token_ids(self) -> list[int]:
        """Everything so far, in order. A new list."""
        tokens, done = [*self.prompt_ids], 0
        for position, answer in self.inserts:
            tokens += self.output_ids[done:position]
            tokens += answer
            done = position
        return tokens + self.output_ids[done:]

    @property
    def holds_kv(self) -> bool:
        """In the pool of a worker, where it decodes or waits for a tool."""
        leg = self._leg(LegKind.WHOLE, LegKind.DECODE)
        return leg is not None and leg.keeps_kv

    @property
    def at(self) -> WorkerKey | None:
        """The worker that decodes it, or will, or prefills it; None: there is none just now."""
        leg = self._leg(LegKind.WHOLE, LegKind.DECODE) or self._leg(LegKind.PREFILL)
        return None if leg is None else leg.worker

    @property
    def answerable(self) -> bool:
        """A tool was called and has not answered."""
        return self.state is FlightState.PAUSED and self._answer is None

    def ask(self, time_left_s: float | None = None) -> RouteAsk:
        """What the router is asked about the request as it stands."""
        have, most = len(self.output_ids), self.sampling.max_tokens
        expected = (self.expected_output_tokens or most) - have
        return RouteAsk(
            request_id=self.request_id,
            num_tokens=self.num_tokens,
            keys=self.keys,
            max_tokens=max(1, min(most - have, self.max_model_len - self.num_tokens)),
            expected_output_tokens=max(1, min(expected, most - have)),
            mode=Mode.COLOCATED if self._whole_next else self.mode,
            excluded=self.excluded,
            avoided=self.avoided if self._left is None else {*self.avoided, self._left},
            tenant=self.tenant,
            session=self.session,
            time_left_s=time_left_s,
            no_cache=self.no_cache,
            may_wait=self.attempt == 0 and self._refusal is None,
        )

    # ---- placing

    def place(self, router: Router, now: float, time_left_s: float | None = None) -> list[Action]:
        """Tries to plan a queued flight. No actions: nobody can take it yet, or it has just ended (see `state`)."""
        if self.state is not FlightState.QUEUED:
            return []
        if self._move is not None:
            return self._move_on(self._move, router, now, time_left_s)
        if self._failure is not None:
            return self._recover(self._failure, router, now, time_left_s)
        plan = router.choose(self.ask(time_left_s), now)
        if plan is None:
            if self._refusal is not None:
                return self._fail(self._refusal, now)
            return []
        return self._submit(plan, router, now)

    def _submit(self, plan: Decision, router: Router, now: float) -> list[Action]:
        self.attempt += 1
        self._adoptions = 0
        self.state = FlightState.RUNNING
        self.timeline.submitted(now)
        self.disaggregated = not plan.whole
        kind = LegKind.WHOLE if plan.whole else LegKind.PREFILL
        leg = Leg(kind, plan.worker, router.table.address(plan.worker), self.next_handle())
        self.legs.append(leg)
        self.decisions.append((self.attempt, plan))
        self.prefill_worker = plan.worker.worker_id
        self.decode_worker = plan.worker.worker_id if plan.whole else ""
        return [SubmitTo(leg, plan, plan.fetch)]

    def _adopt(self, prefill: Leg, target: Decision, router: Router) -> list[Action]:
        decode = Leg(LegKind.DECODE, target.worker, router.table.address(target.worker), self.next_handle())
        self.legs.append(decode)
        self.decisions.append((self.attempt, target))
        self.decode_worker = target.worker.worker_id
        self._adoptions += 1
        return [AdoptAt(decode, prefill, target, self._adoptions)]

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
            self._move.held.append((offset, token_id))
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
        return [Deliver((token_id,), logprobs=told)]

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

    def recovered(self, worker: WorkerKey) -> None:
        """The same process answers again: it had not crashed."""
        if worker in self.crashed:
            self.crashed.discard(worker)
            self.excluded.discard(worker)

    def waits(self, leg: Leg, now: float) -> list[Action]:
        """The worker has paused the request; no token of before comes any more."""
        leg.waits = leg.live
        if self._move is not None and leg is self._move.source and leg.live:
            self._move.held.clear()
            self.state = FlightState.QUEUED
            return []
        return self._go_on(now)

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
        if not can_leave(ask, worker, to, router, now, prefill.worker if prefill else None):
            return None
        self._left = worker
        if self.state is FlightState.PAUSED:
            return [*self._finish_legs("cancelled"), *self._go_on(now)]
        if decodes:
            self._move = Move(leg, to)
            return [HoldAt(leg)]
        self.state = FlightState.QUEUED
        if prefill is not None:
            self._failure = Failure(MOVED, prefill.worker, True, self._prefill_left_ms(now))
            return self._finish_legs("cancelled", keep=prefill)
        self.timeline.attempt_lost(now)
        return self._finish_legs("cancelled")

    def _move_on(self, move: Move, router: Router, now: float, time_left_s: float | None) -> list[Action]:
        """The source waits with the KV: somebody else is asked to go on."""
        plan = plan_away(self.ask(time_left_s), move.source.worker, move.to, router, now)
        if plan is None:
            return self._stay(move, now)
        self.attempt += 1
        self.state = FlightState.RUNNING
        leg = Leg(LegKind.WHOLE, plan.worker, router.table.address(plan.worker), self.next_handle())
        move.target, move.since = leg, now
        self.legs.append(leg)
        self.decisions.append((self.attempt, plan))
        return [SubmitTo(leg, plan, plan.fetch)]

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
        self.state = FlightState.RUNNING
        move.source.waits, move.source.keeps_kv = False, True
        return [ResumeAt(move.source, ())]

    def _take_held(self, move: Move, now: float) -> list[Action]:
        """The source was at its end before it could wait: what it had sent counts."""
        self._move = None
        actions = [] if move.target is None else self._finish_legs("cancelled", keep=move.source)
        for offset, token_id in move.held:
            actions += self.token(move.source, offset, token_id, now)
        return actions

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
        self.state = FlightState.QUEUED
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
        found = recover(self.on_failure, failure, self.failed_pairs, self.ask(time_left_s), router, now, left)
        if found is None:
            return []
        self._failure = None
        self.decisions.append((self.attempt, found))
        way, plan = found.chosen.way, found.chosen.plan
        if way is OnFailure.RETRY and prefill is not None:
            self.state = FlightState.RUNNING
            self.timeline.hand_off_lost(now)
            return self._adopt(prefill, plan, router)
        self._whole_next = self._whole_next or way is OnFailure.LOCAL_RECOMPUTE
        self.timeline.attempt_lost(now)
        return [*self._finish_legs("cancelled"), *self._submit(plan, router, now)]

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

    # ---- tools

    def _pause(self, now: float) -> list[Action]:
        """A leg that decodes waits, its KV perhaps too; a hand-off on its way would only go on computing."""
        self.state, self._failure = FlightState.PAUSED, None
        self.timeline.paused(now)
        leg = self._leg(LegKind.WHOLE, LegKind.DECODE)
        return self._finish_legs("cancelled") if leg is None or not leg.spoke else [PauseAt(leg)]

    def _go_on(self, now: float) -> list[Action]:
        """Out of PAUSED, once there is an answer and either a leg that waits for it or none at all."""
        if self.state is not FlightState.PAUSED or self._answer is None:
            return []
        leg = self._leg(LegKind.WHOLE, LegKind.DECODE)
        if leg is None:
            self._answer = None
            self.state = FlightState.QUEUED
            self.timeline.replaced(now)
            return self._finish_legs("cancelled")
        if not leg.waits:
            return []
        answer, self._answer = self._answer, None
        leg.waits, leg.keeps_kv = False, True
        self.state = FlightState.RUNNING
        return [ResumeAt(leg, answer)]

    def _is_cheaper_elsewhere(self, leg: Leg, more_tokens: int, router: Router, now: float) -> bool:
        ask = self.ask()
        plan = router.choose(replace(ask, num_tokens=ask.num_tokens + more_tokens, may_wait=False), now)
        if plan is None or plan.worker == leg.worker:
            return False
        here = min((row.cost_ms for row in candidate_rows(plan) if row.worker == leg.worker), default=None)
        return here is not None and plan.cost_ms < _MOVE_BELOW * here - _MOVE_MS

    # ---- endings

    def _fail(self, error: HeadraceError, now: float) -> list[Action]:
        return self._end(Ended(FinishReason.ERROR, error), now)

    def _end(self, ended: Ended, now: float, finish: str = "cancelled") -> list[Action]:
        if self.state is FlightState.ENDED:
            return []
        self.state = FlightState.ENDED
        self.timeline.ended(now)
        return [*self._finish_legs(finish), ended]

    def _requeue(self, now: float) -> list[Action]:
        """Gives up the current plan; the next `place` goes on with the tokens so far."""
        self._move = None
        finishes = self._finish_legs("cancelled")
        if (reason := self._complete()) is not None:
            return [*finishes, *self._end(Ended(reason), now)]
        self.failures += 1
        if self.failures >= self.max_attempts:
            error = self._refusal or HeadraceError(Code.ABORTED, f"the request failed in {self.failures} attempts")
            return [*finishes, *self._fail(error, now)]
        self.state, self._failure = FlightState.QUEUED, None
        self.timeline.attempt_lost(now)
        return finishes

    def _complete(self) -> FinishReason | None:
        """The reason when the output is whole although its worker could not say so any more."""
        params, have = self.sampling, len(self.output_ids)
        if have > params.min_tokens:
            if self.output_ids[-1] in self.eos_token_ids and not params.ignore_eos:
                return FinishReason.EOS
            if self.output_ids[-1] in params.stop_token_ids:
                return FinishReason.STOP
        return FinishReason.LENGTH if have >= params.max_tokens or self.num_tokens >= self.max_model_len else None

    def _finish_legs(self, reason: str, keep: Leg | None = None) -> list[Action]:
        live = [leg for leg in self.legs if leg.live and leg is not keep]
        for leg in live:
            leg.live = False
        return [FinishAt(leg, reason) for leg in live]

    def _leg(self, *kinds: LegKind) -> Leg | None:
        return next((leg for leg in self.legs if leg.live and leg.kind in kinds), None)

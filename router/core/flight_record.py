"""What a flight is made of: its data, its legs, and the few moves of its state that everything else is made of.

See `router.core.flight`, whose facts change it. Does not: know of workers' facts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from headrace.core.records import FinishReason, TokenLogprobs
from headrace.errors import Code, HeadraceError, InvariantError
from headrace.ids import RequestId
from headrace.sampling import SamplingParams
from router.core.decision import Decision, RouteAsk
from router.core.latency import Timeline
from router.core.legs import Action, AdoptAt, Ended, FinishAt, Leg, LegKind, ResumeAt, SubmitTo
from router.core.moving import Leave, Move
from router.core.placement import Mode, WorkerKey
from router.core.recovery import Failure, OnFailure, Recovery
from router.core.router import Router


class FlightState(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    ENDED = "ended"


TRANSITIONS: dict[FlightState, frozenset[FlightState]] = {
    FlightState.QUEUED: frozenset({FlightState.RUNNING, FlightState.ENDED}),
    FlightState.RUNNING: frozenset({FlightState.QUEUED, FlightState.PAUSED, FlightState.ENDED}),
    FlightState.PAUSED: frozenset({FlightState.QUEUED, FlightState.RUNNING, FlightState.ENDED}),
    FlightState.ENDED: frozenset(),
}


@dataclass(slots=True)
class FlightRecord:
    """Mutated by the flight only."""

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
    _leave: Leave | None = None
    """Until the next plan or adoption."""
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

    def _advance(self, to: FlightState) -> None:
        """Along an edge of TRANSITIONS, or stays where it is; nobody else assigns the state. Raises InvariantError."""
        if to is not self.state and to not in TRANSITIONS[self.state]:
            raise InvariantError(f"request {self.request_id}: no edge {self.state.value} -> {to.value}")
        self.state = to

    # ---- legs

    def _submit(self, plan: Decision, router: Router, now: float) -> list[Action]:
        self.attempt += 1
        self._adoptions = 0
        self._advance(FlightState.RUNNING)
        self.timeline.submitted(now)
        self.disaggregated = not plan.whole
        kind = LegKind.WHOLE if plan.whole else LegKind.PREFILL
        leg = Leg(kind, plan.worker, router.table.address(plan.worker), self.next_handle())
        self.legs.append(leg)
        self.decisions.append((self.attempt, plan))
        self.prefill_worker = plan.worker.worker_id
        self.decode_worker = plan.worker.worker_id if plan.whole else ""
        return [SubmitTo(leg, plan, plan.fetch, self._take_leave())]

    def _adopt(self, prefill: Leg, target: Decision, router: Router) -> list[Action]:
        decode = Leg(LegKind.DECODE, target.worker, router.table.address(target.worker), self.next_handle())
        self.legs.append(decode)
        self.decisions.append((self.attempt, target))
        self.decode_worker = target.worker.worker_id
        self._adoptions += 1
        return [AdoptAt(decode, prefill, target, self._adoptions, self._take_leave())]

    def _take_leave(self) -> bool:
        """Whether what is sent now is a move."""
        moves, self._leave = self._leave is not None, None
        return moves

    def _finish_legs(self, reason: str, keep: Leg | None = None) -> list[Action]:
        live = [leg for leg in self.legs if leg.live and leg is not keep]
        for leg in live:
            leg.live = False
        return [FinishAt(leg, reason) for leg in live]

    def _leg(self, *kinds: LegKind) -> Leg | None:
        return next((leg for leg in self.legs if leg.live and leg.kind in kinds), None)

    def recovered(self, worker: WorkerKey) -> None:
        """The same process answers again: it had not crashed."""
        if worker in self.crashed:
            self.crashed.discard(worker)
            self.excluded.discard(worker)

    # ---- out of a pause

    def _go_on(self, now: float) -> list[Action]:
        """Out of PAUSED, once there is an answer and either a leg that waits for it or none at all."""
        if self.state is not FlightState.PAUSED or self._answer is None:
            return []
        leg = self._leg(LegKind.WHOLE, LegKind.DECODE)
        if leg is None:
            self._answer = None
            self._advance(FlightState.QUEUED)
            self.timeline.replaced(now)
            return self._finish_legs("cancelled")
        if not leg.waits:
            return []
        answer, self._answer = self._answer, None
        leg.waits, leg.keeps_kv = False, True
        self._advance(FlightState.RUNNING)
        return [ResumeAt(leg, answer)]

    # ---- endings

    def _fail(self, error: HeadraceError, now: float) -> list[Action]:
        return self._end(Ended(FinishReason.ERROR, error), now)

    def _end(self, ended: Ended, now: float, finish: str = "cancelled") -> list[Action]:
        if self.state is FlightState.ENDED:
            return []
        self._advance(FlightState.ENDED)
        self.timeline.ended(now)
        return [*self._finish_legs(finish), ended]

    def _requeue(self, now: float) -> list[Action]:
        """Gives up the current plan; the next `place` goes on with the tokens so far."""
        self._move = self._leave = None
        finishes = self._finish_legs("cancelled")
        if (reason := self._complete()) is not None:
            return [*finishes, *self._end(Ended(reason), now)]
        self.failures += 1
        if self.failures >= self.max_attempts:
            error = self._refusal or HeadraceError(Code.ABORTED, f"the request failed in {self.failures} attempts")
            return [*finishes, *self._fail(error, now)]
        self._advance(FlightState.QUEUED)
        self._failure = None
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

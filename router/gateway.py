"""The gateway: owns every request from its acceptance to the last token the client has (DESIGN law 4).

It carries out the actions of the pure `Flight`s: sends frames over the sessions, books work, wakes the consumer. One
call of `generate` is `n` flights and one queue; the consumer side turns tokens into text and finds stop strings. Longer
than others because every action of a flight and every fact of a session has its few lines here, side by side.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from headrace.clock import Clock, monotonic
from headrace.core.records import FinishReason
from headrace.errors import Code, HeadraceError
from headrace.ids import IdFactory, RequestId, random_ids
from headrace.v1 import admin_pb2
from headrace.v1 import worker_pb2 as pb
from headrace.v1.inference_pb2 import RoutingDecision
from kvtransfer.wire import ledger_from_proto, logprobs_from_proto
from router import frames
from router.answer import Branch, Events, deltas
from router.api import Delta, GenerationSpec
from router.core.flight import Flight, FlightState
from router.core.kin import Kin
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
from router.core.placement import Mode
from router.core.recovery import OnFailure
from router.counters import Counters
from router.fleet import Fleet
from router.gate import Admitted, Gate
from router.moves import Moved, Moves
from router.placing import Names, Placing
from router.session import Dial, WorkerSession, dial
from router.spec import GatewaySpec
from router.text import TextModel
from router.tools import Tools, call_finder, check_room, check_unused, waiting
from router.validate import MAX_PRIORITY

log = logging.getLogger("headrace.router.gateway")


class Gateway:
    """Implements `router.api.GatewayService` and `router.session.SessionSink`; lives on one event loop."""

    def __init__(
        self,
        spec: GatewaySpec,
        text: TextModel,
        *,
        ids: IdFactory = random_ids,
        clock: Clock = monotonic,
        chance: Callable[[], float] = random.random,
        dial: Dial = dial,
    ) -> None:
        self.spec = spec
        self.text = text
        self.counters = Counters()
        self.on_completed: Callable[[Flight], None] = lambda flight: None
        """Told each branch that ended in good order; set by whoever keeps metrics."""
        self._ids = ids
        self._clock = clock
        self._mode = Mode(spec.mode)
        self._handles = itertools.count(1)
        self.placing = Placing(spec, chance, lambda: self.fleet.fingerprint())
        self.router = self.placing.router
        self.fleet = Fleet(spec, self, self.router, dial)
        self.gate = Gate(spec)
        self.tools = Tools()
        self._legs: dict[int, tuple[Branch, Leg]] = {}
        self._live: dict[RequestId, Branch] = {}
        self._kin: Kin[Branch] = Kin()
        self._queued = self.placing.queued
        self._moves = Moves(self.fleet, self.placing, clock, self._act, self._place)
        self._draining = False

    # ---- the waist

    async def generate(self, spec: GenerationSpec) -> AsyncIterator[Delta]:
        """See `router.api.GatewayService`."""
        now = self._clock()
        deadline_s = self.spec.default_deadline_s if spec.deadline_s is None else spec.deadline_s
        parents = self._parents(spec)
        check_unused(spec, self._kin.find(spec.tenant, spec.label))
        names = self.placing.names(spec)
        admitted = self._admit(spec, names, deadline_s, now)
        if admitted.best_effort:
            spec = replace(spec, priority=min(spec.priority + self.spec.degradation.best_effort_classes, MAX_PRIORITY))
        events: Events = asyncio.Queue()
        timer = None
        branches = [
            self._branch(spec, i, names, admitted, events, now, now + deadline_s) for i in range(len(spec.sampling))
        ]
        try:
            timer = asyncio.get_running_loop().call_later(deadline_s, self._deadline, branches)
            for branch in branches:
                self._accept(branch, parents, now)
            async for delta in deltas(self.text, spec, branches, events, self._stop):
                yield delta
        finally:
            if timer is not None:
                timer.cancel()
            for branch in branches:
                self._act(branch, branch.flight.cancel(self._clock()))
                self._forget(branch)
            self.placing.ended(spec, branches)

    async def cancel(self, tenant: str, label: str) -> bool:
        """Cancels every live request of the tenant under this label, and their branches."""
        branches = self._kin.find(tenant, label)
        for branch in branches:
            self._act(branch, branch.flight.cancel(self._clock()))
        return bool(branches)

    def resume(self, tenant: str, label: str, index: int, token_ids: Sequence[int], field: str) -> None:
        """See `router.api.GatewayService`."""
        now = self._clock()
        branch = waiting(self._kin.find(tenant, label), index)
        most_tokens = self.spec.endpoint(branch.spec.endpoint).max_context_tokens
        check_room(branch.flight, len(token_ids), self.router.most_capacity_tokens, field, most_tokens)
        self.tools.answered(branch, now)
        self.gate.resumed(branch.ticket, len(token_ids), now)
        self.placing.name_blocks(branch)
        self._act(branch, branch.flight.answer(token_ids, self.router, now))
        self._place(branch, now)

    def move(self, worker_id: str, tenant: str | None, label: str, to_id: str = "") -> Moved:
        """See `router.moves.Moves`."""
        return self._moves.move(self._live.values(), worker_id, tenant, label, to_id)

    def explain(self, tenant: str, label: str) -> list[RoutingDecision] | None:
        """Of a live call under this label, else of the latest one that has ended."""
        return self.placing.explain(self._kin.find(tenant, label), tenant, label)

    def ready(self) -> bool:
        if self._draining:
            return False
        return self.router.can_place(self._mode, 1)

    def fingerprint(self) -> str:
        return self.fleet.fingerprint()

    def live_ids(self) -> frozenset[str]:
        return frozenset(self._live)

    def clear_cache(self, tenant: str | None) -> tuple[list[str], list[str]]:
        """Has the workers forget what is cached for the tenant, or for all (None): (told, told when they are back)."""
        self.placing.cleared(tenant)
        return self.fleet.clear_cache(tenant)

    def drain(self) -> None:
        """No new requests; the running ones go on."""
        self._draining = True

    # ---- admission

    def _admit(self, spec: GenerationSpec, names: Names, deadline_s: float, now: float) -> Admitted:
        """Books the call, or raises its refusal."""
        if self._draining:
            raise self._unavailable(spec, "draining", "the deployment is shutting down", 5.0)
        if not self.ready():
            table = self.router.table
            if closed := next(filter(None, (table.load(key).closed for key in table.roster if key)), ""):
                raise self._unavailable(spec, closed, "no worker takes new requests just now", 5.0)
            raise self._unavailable(spec, "no_worker", "no worker is ready", 2.0)
        need = len(spec.prompt_ids) + max(params.max_tokens for params in spec.sampling)
        can_start = self.router.can_place(self._mode, need)
        return self.gate.enter(spec, names.keys, self.router, can_start, deadline_s, now)

    def _unavailable(self, spec: GenerationSpec, reason: str, message: str, retry_after_s: float) -> HeadraceError:
        self.gate.refused(reason, len(spec.sampling))
        return HeadraceError(Code.UNAVAILABLE, message, retry_after_s=retry_after_s, reason=reason)

    def _parents(self, spec: GenerationSpec) -> list[Branch]:
        """What the call is a branch of. One that is over is refused: its cancellation could not reach the child."""
        found = self._kin.find(spec.tenant, spec.parent)
        parents = [branch for branch in found if branch.flight.state is not FlightState.ENDED]
        if spec.parent and not parents:
            raise HeadraceError(
                Code.FAILED_PRECONDITION, "parent: no request of this id is in progress", field="parent"
            )
        return parents

    def _branch(
        self,
        spec: GenerationSpec,
        index: int,
        names: Names,
        admitted: Admitted,
        events: Events,
        now: float,
        deadline: float,
    ) -> Branch:
        flight = Flight(
            request_id=RequestId(self._ids("req")),
            prompt_ids=spec.prompt_ids,
            sampling=spec.sampling[index],
            mode=self._mode,
            next_handle=lambda: next(self._handles),
            eos_token_ids=tuple(self.text.eos_token_ids),
            max_attempts=self.spec.max_attempts,
            max_crashes=self.spec.max_worker_crashes,
            on_failure=OnFailure(spec.on_transfer_failure or self.spec.on_transfer_failure),
            max_model_len=self.spec.max_model_len,
            exact=self.spec.exact,
            ends_call=call_finder(self.text, spec, spec.sampling[index]),
            tenant=spec.tenant,
            session=spec.session,
            expected_output_tokens=admitted.reserved_output_tokens,
            no_cache=spec.no_cache,
            keys=names.keys,
        )
        flight.timeline.received = spec.received_at or now
        flight.timeline.tokenized = spec.tokenized_at or now
        flight.timeline.accepted = now
        return Branch(
            flight=flight,
            index=index,
            spec=spec,
            namespace=names.namespace,
            hashes=names.hashes,
            hashed_for=names.hashed_for,
            deadline=deadline,
            events=events,
            ticket=admitted.tickets[index],
            reserved_output_tokens=admitted.reserved_output_tokens,
            tenant_index=admitted.tenant_indices[index],
            outlook=admitted.outlook,
        )

    def _accept(self, branch: Branch, parents: list[Branch], now: float) -> None:
        self.counters.accepted += 1
        self._live[branch.flight.request_id] = branch
        self._kin.join(branch, branch.spec.tenant, branch.spec.label, parents)
        self._queued[branch.flight.request_id] = branch
        self._place(branch, now)

    def _forget(self, branch: Branch) -> None:
        """The client has its last piece, or is gone: only now the request's part of the limits is free again, because
        what a slow reader has not taken yet is held here.
        """
        self._live.pop(branch.flight.request_id, None)
        self._queued.pop(branch.flight.request_id, None)
        self._kin.leave(branch)
        self.gate.left(branch.ticket, branch.tenant_index, len(branch.flight.output_ids), self._clock())

    # ---- carrying out actions

    def _place(self, branch: Branch, now: float) -> None:
        flight = branch.flight
        if flight.state is FlightState.QUEUED:
            self.placing.name_blocks(branch)
            self._act(branch, flight.place(self.router, now, branch.deadline - now))

    def _place_queued(self) -> None:
        now = self._clock()
        for branch in self.placing.to_try(now):
            self._place(branch, now)

    def _act(self, branch: Branch, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SubmitTo() | AdoptAt():
                    self.counters.sent(action, branch.flight.attempt)
                    self._deliver_leg(branch, action)
                case FinishAt(leg, reason):
                    self._legs.pop(leg.handle, None)
                    self.fleet.send(leg.worker, frames.finish(leg.handle, reason))
                case PauseAt(leg):
                    spec, flight = branch.spec, branch.flight
                    tool = "" if spec.tool_wait is None else spec.tool_wait.tool
                    frame = frames.pause(leg, len(flight.output_ids), tool, self.tools.outlook(branch))
                    self._tell(branch, leg, frame)
                case HoldAt(leg):
                    self._tell(branch, leg, frames.hold(leg, len(branch.flight.output_ids)))
                case ResumeAt(leg, token_ids):
                    self.gate.service.charge_input(branch.tenant_index, len(token_ids))
                    self._tell(branch, leg, frames.resume(leg, token_ids))
                case Deliver(token_ids=token_ids):
                    self.placing.learn_from_first(branch)
                    self.gate.service.charge_output(branch.tenant_index, len(token_ids))
                    branch.events.put_nowait((branch, action))
                case Ended(reason, error):
                    self._ended(branch, reason, error)
                    branch.events.put_nowait((branch, action))
        request_id = branch.flight.request_id
        if branch.flight.state is FlightState.PAUSED:
            self.gate.paused(branch.ticket, branch.flight.holds_kv, self._clock())
        if branch.flight.state is FlightState.QUEUED and request_id in self._live:
            self._queued[request_id] = branch
        else:
            self._queued.pop(request_id, None)

    def _tell(self, branch: Branch, leg: Leg, frame: pb.SessionRequest) -> None:
        """When the session cannot take the frame the leg counts as lost."""
        if not self.fleet.send(leg.worker, frame):
            self._legs.pop(leg.handle, None)
            self._act(branch, branch.flight.lost(leg.worker, dead=False, now=self._clock()))

    def _deliver_leg(self, branch: Branch, action: SubmitTo | AdoptAt) -> None:
        """Books and sends; when the session cannot take it the booking is undone and the leg counts as lost."""
        flight, leg, router = branch.flight, action.leg, self.router
        self.placing.plans[action.decision.kind, action.decision.reason] += 1
        seq = router.book(action.decision, flight.ask(), self._clock())
        service = self.gate.service.counter(branch.tenant_index)
        body = frames.body(branch, max(branch.deadline - self._clock(), 0.0), service)
        self._legs[leg.handle] = (branch, leg)
        if isinstance(action, AdoptAt):
            frame = frames.adopt(leg, seq, body, action.source, action.number)
        else:
            wanted = action.fetch
            fetch = None if wanted is None else frames.fetch(wanted, router.table.address(wanted.source))
            frame = frames.submit(leg, seq, body, hand_off=leg.kind is LegKind.PREFILL, fetch=fetch)
        if not self.fleet.send(leg.worker, frame):
            router.undo(leg.worker, seq)
            self._legs.pop(leg.handle, None)
            self._act(branch, flight.lost(leg.worker, dead=False, now=self._clock()))

    def _ended(self, branch: Branch, reason: FinishReason, error: HeadraceError | None) -> None:
        self.tools.ended(branch, reason)
        self.gate.ended(branch.spec, branch.flight, branch.outlook, reason)
        self.counters.ended(reason, error)
        if error is None:
            self.on_completed(branch.flight)
        else:
            # One failed choice ends its call and cancels the others, so a failure cannot be told from a cancellation.
            now = self._clock()
            for heir in self._kin.disown(branch):
                self._act(heir, heir.flight.cancel(now))

    def _stop(self, branch: Branch) -> None:
        self._act(branch, branch.flight.stop(self._clock()))

    def _deadline(self, branches: list[Branch]) -> None:
        for branch in branches:
            self._act(branch, branch.flight.deadline(self._clock()))

    # ---- facts from the sessions

    def session_up(self, session: WorkerSession, hello: pb.WorkerHello) -> None:
        self.fleet.session_up(session)
        for branch in self._live.values():
            branch.flight.recovered(session.key)
        self._place_queued()

    def session_broken(self, session: WorkerSession) -> None:
        """Nobody new goes there; what becomes of those who are there is `session_lost`'s."""
        self.router.worker_down(session.key)
        self.fleet.pair()

    def session_lost(self, session: WorkerSession, dead: bool) -> None:
        self.session_broken(session)
        now = self._clock()
        for branch in {id(b): b for b, leg in self._legs.values() if leg.worker == session.key}.values():
            self._act(branch, branch.flight.lost(session.key, dead, now))
        for handle in [h for h, (_, leg) in self._legs.items() if leg.worker == session.key]:
            del self._legs[handle]
        self._place_queued()

    def frame(self, session: WorkerSession, frame: pb.SessionResponse) -> None:
        kind = frame.WhichOneof("kind")
        now = self._clock()
        if kind == "tokens":
            tokens = frame.tokens
            logprobs = logprobs_from_proto(tokens.logprobs) if tokens.HasField("logprobs") else {}
            rows = zip(tokens.handle, tokens.offset, tokens.token_id, strict=True)
            for row, (handle, offset, token_id) in enumerate(rows):
                if (known := self._legs.get(handle)) is not None:
                    branch, leg = known
                    self._act(branch, branch.flight.token(leg, offset, token_id, now, logprobs.get(row)))
            return
        if kind == "load":
            self.fleet.report(session, frames.load(frame.load))
            if self._queued:
                self._place_queued()
            return
        if kind == "cache":
            self.fleet.cache_changed(session, frames.cache_change(frame.cache))
            return
        if kind == "paired":
            self.fleet.paired(session, frame.paired)
            return
        if kind not in ("started", "prefilled", "paused", "done", "failed"):
            return
        message = getattr(frame, kind)
        if (known := self._legs.get(message.handle)) is None:
            return
        branch, leg = known
        flight = branch.flight
        if kind == "started":
            self.gate.started(branch.ticket, now)
            if leg.kind is not LegKind.DECODE:
                computed = flight.num_tokens - message.cached_tokens
                self.gate.service.charge_input(branch.tenant_index, computed, message.cached_tokens)
            self._act(branch, flight.started(leg, self.router, now))
        elif kind == "prefilled":
            flight.prefilled(leg, ledger_from_proto(message.ledger))
        elif kind == "paused":
            leg.keeps_kv = message.keep == "keep"
            self._act(branch, flight.waits(leg, now))
        elif kind == "done":
            del self._legs[leg.handle]
            reason, ledger = FinishReason(message.reason), ledger_from_proto(message.ledger)
            self.placing.learn_lane(session.key, ledger)
            self._act(branch, flight.done(leg, reason, ledger, now, message.output_hash))
        elif kind == "failed":
            del self._legs[leg.handle]
            log.info(
                "leg_failed request=%s worker=%s reason=%s", flight.request_id, session.key.worker_id, message.reason
            )
            self._act(branch, flight.failed(leg, frames.error(message), message.reason, now))
        if flight.state is FlightState.QUEUED:
            self._place(branch, now)

    # ---- accounts and the end

    def account(self) -> admin_pb2.GatewayStatus:
        counters = self.counters
        return admin_pb2.GatewayStatus(
            gateway_id=self.spec.gateway_id,
            live_requests=len(self._live),
            bookings=self.router.table.total,
            tasks=len(asyncio.all_tasks()),
            accepted=counters.accepted,
            completed=counters.completed,
            failed=counters.failed,
            cancelled=counters.cancelled,
            retries=counters.retries,
            moves=counters.moves,
            pid=os.getpid(),
            index_entries=self.router.index.entries,
            index_bytes=self.router.index.memory_bytes,
        )

    async def close(self) -> None:
        """Ends every request with a clear error and all sessions."""
        self._draining = True
        now = self._clock()
        for branch in list(self._live.values()):
            error = HeadraceError(Code.UNAVAILABLE, "the deployment is shutting down", retry_after_s=5.0)
            self._act(branch, branch.flight.abort(error, now))
        await self.fleet.close()

    async def idle(self, timeout_s: float) -> bool:
        """Waits until no request is live; False when some still is."""
        end = time.monotonic() + timeout_s
        while self._live and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return not self._live

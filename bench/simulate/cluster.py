"""A virtual cluster: production schedulers and production routers on one clock, everything between them with its delay.

    job -> gateway: choose -> (wire) -> worker: submit -> steps -> tokens
                                   pair: started -> (wire) -> gateway: choose_decode -> (wire) -> adopt
                                         the hand-off's machines (`bench.simulate.handoff`) -> activate, release

A gateway learns of loads and caches late, books what it has sent, and never looks into a worker. A worker that dies
takes its blocks along; its requests go on elsewhere with the tokens that they have. One seed gives one run.

Block hashes come from the names of a job's pieces, one piece a block: equal leading names are a shared prefix.

Longer than others: what happens to a call and what happens at a worker are one list of events.

Does not: charge for tokenizing, hashing or deciding (`python -m bench routing` measures that), or lose messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count

from bench.simulate.calls import MAX_TOKENS, ROOT, Call, ClusterRun, ClusterSpec, Leg, Prompts
from bench.simulate.fleet import ClusterWorker
from bench.simulate.gateways import Gateway
from bench.simulate.handoff import HandOff
from bench.simulate.worker import EOS, FILLER, Outcome, Step
from bench.simulate.workload import Job
from headrace.core.records import FinishReason
from headrace.core.slo import Timeline
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from kvtransfer.core.handoff import End
from kvtransfer.core.lease import HandOffRecord
from router.core.placement import Mode
from workers.core.plan import StepPlan, StepResult
from workers.core.request import Request, State

WIRE_S = 0.001
RETRY_S = 0.01
"""After which a gateway looks again for a worker for what nobody can take, or what had better wait."""
MAX_ATTEMPTS = 5
MAX_LOOKS = 6_000


class Cluster:
    """Runs once."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.now = 0.0
        self.workers = [
            ClusterWorker(f"w{i}", worker, spec.gateways, WIRE_S, spec.seed + i)
            for i, worker in enumerate(spec.workers)
        ]
        self.gateways = [Gateway(number, spec, self.workers) for number in range(spec.gateways)]
        self._by_key = {worker.key: worker for worker in self.workers}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._prompts = Prompts(self.workers[0].pool.block_size)
        self._request_keys = count(1)
        self._plans: dict[str, int] = {}
        self._open = 0
        for worker in self.workers:
            if worker.spec.dies_at is not None:
                self._at(worker.spec.dies_at, partial(self._die, worker))

    def run(self, jobs: Sequence[Job]) -> ClusterRun:
        """Everything until nothing is left to happen. Raises RuntimeError when requests wait then."""
        outcomes = [Outcome(job, Timeline(job.at_s)) for job in jobs]
        self._open = len(outcomes)
        for number, outcome in enumerate(outcomes):
            self._at(outcome.job.at_s, partial(self._arrive, number, outcome))
        while self._events:
            self.now, _, happen = heappop(self._events)
            happen()
        if self._open:
            raise RuntimeError(f"{self._open} requests wait and nothing runs, at {self.now:.3f} s")
        return ClusterRun(
            outcomes,
            self._plans,
            [worker.prefilled_tokens for worker in self.workers],
            [worker.busy_s for worker in self.workers],
            max((outcome.timeline.ended_at or 0.0 for outcome in outcomes), default=0.0),
        )

    # ---- gateways

    def _arrive(self, number: int, outcome: Outcome) -> None:
        job = outcome.job
        call = Call(
            number=number,
            job=job,
            gateway=self.gateways[number % len(self.gateways)],
            prompt=self._prompts.of(job),
            max_tokens=max(MAX_TOKENS, job.output_tokens),
            outcome=outcome,
        )
        if refused := call.gateway.refusal(call, self.now):
            self._end(call, None, refused)
        self._place(call)

    def _place(self, call: Call) -> None:
        """Plan and submit, or look again later."""
        if call.ended:
            return
        if call.attempt >= MAX_ATTEMPTS:
            self._end(call, None, "attempts")
            return
        gateway = call.gateway
        gateway.catch_up(self.now)
        mode = Mode.COLOCATED if call.whole_next else self.spec.mode
        ask = gateway.ask(call, mode)
        decision = gateway.router.choose(ask, self.now)
        if decision is None:
            if any(worker.alive and worker.key not in call.excluded for worker in self.workers):
                call.looks += 1
                if call.looks < MAX_LOOKS:
                    self._later(RETRY_S, partial(self._place, call))
                    return
            self._end(call, None, "no_worker")
            return
        call.attempt += 1
        worker = self._by_key[decision.worker]
        self._plans[decision.kind] = self._plans.get(decision.kind, 0) + 1
        call.decision = decision
        leg = self._leg(call, worker, "whole" if decision.whole else "prefill")
        seq, leg.undo = gateway.book(decision, ask, self.now)
        if decision.fetch is None:
            self._later(WIRE_S, partial(self._deliver, leg, seq))
        else:
            source = self._by_key[decision.fetch.source]
            self._later(WIRE_S, partial(self._fetch, leg, seq, source, decision.fetch.num_blocks))

    def _leg(self, call: Call, worker: ClusterWorker, kind: str, source: Leg | None = None) -> Leg:
        request = Request(
            key=RequestKey(next(self._request_keys)),
            request_id=RequestId(f"sim-{call.number}"),
            attempt=call.attempt,
            prompt_ids=call.prompt.token_ids,
            sampling=SamplingParams(call.max_tokens),
            root=ROOT,
            resumed_ids=[FILLER] * len(call.token_times),
            hand_off=kind == "prefill",
            adopted=kind == "decode",
            deadline=None if call.job.deadline_s is None else call.job.at_s + call.job.deadline_s,
            tenant=call.job.tenant,
            priority=call.job.priority + call.best_effort * self.spec.best_effort_classes,
            predicted_output_tokens=call.gateway.predicted_tokens(call),
        )
        request.block_hashes = list(call.prompt.hashes)
        left = call.job.output_tokens - len(call.token_times)
        if source is not None:
            # Its first token is the source's, if that has not been sampled yet.
            left = source.tokens_left - (source.request.state is not State.TRANSFERRING)
        leg = Leg(call, worker, request, kind, left, source=source)
        call.legs.append(leg)
        return leg

    def _started(self, leg: Leg) -> None:
        """The prefill runs, as its gateway now knows: the decode worker is chosen from fresh load."""
        call, gateway = leg.call, leg.call.gateway
        if call.ended or not leg.live or call.leg("decode") is not None:
            return
        gateway.catch_up(self.now)
        ask = gateway.ask(call, self.spec.mode)
        chosen = gateway.router.choose_decode(ask, leg.worker.key, self.now)
        if chosen is None:
            call.whole_next = True
            self._drop(leg)
            self._place(call)
            return
        decode = self._leg(call, self._by_key[chosen.worker], "decode", leg)
        seq, decode.undo = gateway.book(chosen, ask, self.now)
        self._later(WIRE_S, partial(self._deliver, decode, seq))

    def _failed(self, leg: Leg, reason: str) -> None:
        """A worker refused or gave up."""
        call = leg.call
        if call.ended or not leg.live:
            return
        leg.live = False
        if reason == "lease_revoked":
            call.whole_next = True
        else:
            call.excluded.add(leg.worker.key)
        for other in call.legs:
            self._drop(other)
        self._place(call)

    def _drop(self, leg: Leg) -> None:
        """The gateway's Finish to a leg that still runs."""
        if leg.live:
            leg.live = False
            self._later(WIRE_S, partial(self._finish, leg, FinishReason.CANCELLED))

    def _die(self, worker: ClusterWorker) -> None:
        worker.alive = False
        for gateway in self.gateways:
            gateway.router.worker_down(worker.key)
        lost = list(worker.legs.values())
        worker.legs.clear()
        calls = {leg.call.number: leg.call for leg in lost}
        for call in calls.values():
            for leg in call.legs:
                leg.live = leg.live and leg.worker is not worker
            call.excluded.add(worker.key)
            for leg in call.legs:
                self._drop(leg)
            self._later(WIRE_S, partial(self._place, call))

    def _end(self, call: Call, reason: FinishReason | None, refused: str = "") -> None:
        if call.ended:
            return
        self._open -= 1
        call.close(reason, refused, self.now)
        call.gateway.ended(call, reason)
        for leg in call.legs:
            self._drop(leg)

    # ---- workers

    def _heard(self, leg: Leg, seq: int) -> bool:
        """A message has reached its worker; False when that is gone, or nobody wants the leg any more."""
        worker, number = leg.worker, leg.call.gateway.number
        if not worker.alive:
            self._failed(leg, "lost")
            return False
        worker.changed(self.now)
        worker.submit_seq[number] = max(worker.submit_seq[number], seq)
        return leg.live

    def _deliver(self, leg: Leg, seq: int) -> None:
        """A Submit or an Adopt has reached its worker."""
        if not self._heard(leg, seq):
            return
        worker, scheduler = leg.worker, leg.worker.scheduler
        take_in = scheduler.adopt if leg.kind == "decode" else scheduler.submit
        rejected = take_in(leg.request, self.now)
        if rejected is not None:
            self._later(WIRE_S, partial(self._failed, leg, rejected.reason))
            return
        worker.legs[leg.request.key] = leg
        self._kick(worker)

    def _fetch(self, leg: Leg, seq: int, source: ClusterWorker, num_blocks: int) -> None:
        """The blocks that the source still has come over its lane before the request is queued."""
        wanted = leg.call.prompt.hashes[:num_blocks]
        found = source.cached_run(wanted) if source.alive else 0
        missing = max(0, found - leg.worker.cached_run(wanted))
        begin = max(self.now, source.lane_free_at)
        source.lane_free_at = begin + missing * self.spec.block_transfer_s
        self._at(source.lane_free_at, partial(self._fetched, leg, seq, found))

    def _fetched(self, leg: Leg, seq: int, num_blocks: int) -> None:
        if leg.worker.alive:
            leg.worker.changed(self.now)
            leg.worker.take_in_prefix(ROOT, leg.call.prompt.hashes[:num_blocks])
            leg.worker.publish_changes(self.now)
        self._deliver(leg, seq)

    def _finish(self, leg: Leg, reason: FinishReason) -> None:
        worker = leg.worker
        if not worker.alive or worker.legs.pop(leg.request.key, None) is None:
            return
        worker.changed(self.now)
        if leg.kind == "decode" and leg.request.state in (State.WAITING, State.TRANSFERRING):
            if leg.hand_off is not None:
                leg.hand_off.cancelled()
            else:
                worker.scheduler.finish_adoption(leg.request.key, reason, (), self.now)
        else:
            worker.scheduler.finish(leg.request.key, reason, self.now)
            if leg.kind == "prefill" and leg.hand_off is not None:
                leg.hand_off.source_ended()
        self._kick(worker)

    def _kick(self, worker: ClusterWorker) -> None:
        """Something has changed: adoptions may come in, and an idle worker may have something to compute."""
        if not worker.alive:
            return
        scheduler = worker.scheduler
        self._notice_lost(worker)
        for key in scheduler.reserve_adoptions(self.now):
            decode = worker.legs[key]
            if decode.source is not None:
                decode.hand_off = decode.source.hand_off = HandOff(self, decode.source, decode)
                decode.hand_off.reserved()
        if worker.step is not None:
            return
        begun = worker.begin_step(self.now)
        if begun is None:
            worker.publish_changes(self.now)
            self._unblock(worker)
            return
        plan, step = begun
        for key in scheduler.started:
            leg = worker.legs[key]
            if leg.kind == "prefill":
                self._later(WIRE_S, partial(self._started, leg))
        self._at(step.end_s, partial(self._step_ends, worker, plan, step))

    def _notice_lost(self, worker: ClusterWorker) -> None:
        """Requests whose deadline has passed, or is lost."""
        lost = worker.scheduler.expire(self.now) + [key for key, _ in worker.scheduler.refused]
        worker.scheduler.refused.clear()
        for key in lost:
            worker.scheduler.release_quarantine(key)
            leg = worker.legs.pop(key, None)
            if leg is not None and leg.live:
                leg.live = False
                self._end(leg.call, FinishReason.DEADLINE)

    def _unblock(self, worker: ClusterWorker) -> None:
        """Nothing can run: the next look, or the reader whose blocks are needed."""
        look = worker.scheduler.next_look(self.now)
        if look is not None:
            self._at(max(look, self.now + WIRE_S), partial(self._kick, worker))
        key = worker.scheduler.revocable(self.now)
        leg = None if key is None else worker.legs.get(key)
        if leg is not None and (decode := leg.call.leg("decode")) is not None and decode.request.block_ids:
            return
        if leg is not None:
            self._finish(leg, FinishReason.ERROR)
            self._later(WIRE_S, partial(self._failed, leg, "lease_revoked"))

    def _step_ends(self, worker: ClusterWorker, plan: StepPlan, step: Step) -> None:
        if not worker.alive:
            return
        worker.changed(self.now)
        worker.step = None
        legs, now = worker.legs, self.now
        token_ids: list[int] = []
        decodes = plan.num_decode_rows
        for key in plan.keys[:decodes]:
            leg = legs.get(key)
            if leg is None:
                token_ids.append(FILLER)
                continue
            leg.tokens_left -= 1
            token_ids.append(FILLER if leg.tokens_left else EOS)
        for place in range(decodes, len(plan.keys)):
            leg = legs.get(plan.keys[place])
            if leg is not None:
                leg.call.count_computed(plan.start_pos[place], plan.num_tokens[place], step.begin_s)
                leg.tokens_left -= plan.samples[place]
            if plan.samples[place]:
                token_ids.append(FILLER if leg is None or leg.tokens_left else EOS)
        events = worker.scheduler.apply(plan, StepResult(token_ids), now)
        for key, offset in zip(events.token_keys, events.token_offsets, strict=True):
            leg = legs.get(key)
            if leg is not None and leg.live and offset == len(leg.call.token_times):
                leg.call.token_times.append(now)
        for key in events.computed:
            leg = worker.legs.get(key)
            if leg is not None and leg.kind == "prefill" and leg.hand_off is not None:
                leg.hand_off.computed()
        for key, reason in events.finished:
            leg = worker.legs.pop(key, None)
            if leg is not None and leg.live:
                leg.live = False
                self._end(leg.call, reason)
        worker.publish_changes(self.now)
        self._kick(worker)

    # ---- hand-off

    def on_the_wire(self, heard: Callable[[], None]) -> None:
        """A message between two workers."""
        self._later(WIRE_S, heard)

    def over_the_lane(self, source: ClusterWorker, num_blocks: int, came: Callable[[], None]) -> None:
        """Blocks that a worker sends one after the other."""
        source.lane_free_at = max(self.now, source.lane_free_at) + num_blocks * self.spec.block_transfer_s
        self._at(source.lane_free_at, came)

    def activated(self, leg: Leg, record: HandOffRecord) -> None:
        worker = leg.worker
        worker.changed(self.now)
        worker.scheduler.activate(leg.request.key, record.output_ids, record.num_tokens, self.now)
        if leg.source is not None:
            leg.source.live = False
        self._kick(worker)

    def released(self, source: Leg) -> None:
        """The reader has everything."""
        worker = source.worker
        if worker.legs.pop(source.request.key, None) is not None:
            worker.changed(self.now)
            worker.scheduler.release_handed_off(source.request.key, self.now)
            self._kick(worker)

    def hand_off_ended(self, leg: Leg, end: End) -> None:
        reason = FinishReason.ERROR if end.failed else FinishReason.CANCELLED
        leg.worker.changed(self.now)
        leg.worker.scheduler.finish_adoption(leg.request.key, reason, end.quarantined, self.now)
        leg.worker.legs.pop(leg.request.key, None)
        if end.failed:
            self._later(WIRE_S, partial(self._failed, leg, end.reason))
        self._kick(leg.worker)

    # ---- time

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heappush(self._events, (when, next(self._order), happen))

    def _later(self, seconds: float, happen: Callable[[], None]) -> None:
        self._at(self.now + seconds, happen)

"""The worker's one decision maker: who is let in, who computes what in the next step, and what a finished step means.

    plan = schedule(now)  ->  the runner computes it  ->  events = apply(plan, result, now)

Packing: running decodes first (they keep their pace), then started prefills in chunks, then new ones after KV admission
(all blocks or none). Memory is optimistic: a request is admitted with blocks for what it has plus one token, and grows
block by block; when a block is short the latest arrival is preempted and recomputes later, reusing what survived in the
prefix cache. Requests may end while a step is on its way: tokens that it samples for them are dropped.

The caller holds one lock around every method, may read everything and changes nothing. It calls `reserve_adoptions`
after every method that may free blocks (an adoption that waits holds up later prefills), and keeps its own reference
to a Request whose ledger it wants. Does not: read clocks, sample, move bytes, talk.
"""

from __future__ import annotations

from headrace.core.records import WorkerLoad
from headrace.errors import InvariantError
from headrace.ids import RequestKey
from workers.core.blocks import BlockPool
from workers.core.limits import SchedulerSettings, end_reason
from workers.core.packing import Flight, Packing
from workers.core.plan import StepEvents, StepPlan, StepResult
from workers.core.preemption import choose_revocable, choose_victim
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request, State
from workers.core.roster import Roster
from workers.core.stages import Stage

__all__ = ["Scheduler", "SchedulerSettings"]


class Scheduler(Roster):
    def __init__(self, settings: SchedulerSettings, pool: BlockPool, cache: PrefixCache) -> None:
        super().__init__(settings, pool, cache)
        self._steps = 0
        self._step_s = 0.0
        self._preemptions = 0
        self._recomputed_tokens = 0

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. Raises InvariantError when one is on its way."""
        if self._flight is not None:
            raise InvariantError("a step is already on its way")
        packing = Packing(self._steps, self._settings)
        self._pack_decodes(packing, now)
        for request in self._queues.prefilling:
            if packing.full:
                break
            packing.add_prefill(request)
        self._pack_new_prefills(packing, now)
        if not packing.rows:
            return None
        self._steps += 1
        started: list[RequestKey] = []
        for request in packing.rows.values():
            if request.first_scheduled_at is None:
                request.first_scheduled_at = now
                started.append(request.key)
            if request.clock.stage is Stage.QUEUE:
                request.clock.enter(Stage.DECODE if request.state is State.DECODING else Stage.PREFILL, now)
            request.last_scheduled_at = now
        self._flight = Flight(packing.plan, packing.rows, started, now)
        return packing.plan

    @property
    def started(self) -> list[RequestKey]:
        """First scheduled in the step on its way, for a shell that announces them before the step ends."""
        return [] if self._flight is None else self._flight.started

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> StepEvents:
        """Take in what the runner computed. Raises InvariantError when it is no answer to the step on its way."""
        flight = self._flight
        if flight is None or flight.plan is not plan:
            raise InvariantError("a result for a step that is not on its way")
        if len(result.token_ids) != sum(plan.samples):
            raise InvariantError("a result with another number of tokens than rows that sample")
        self._flight = None
        self._step_s = max(0.0, now - flight.since)
        events = StepEvents(started=[key for key in flight.started if flight.rows[key].state is not State.FINISHED])
        sampled = iter(result.token_ids)
        for index, request in enumerate(flight.rows.values()):
            self._take_in_computed(request, plan.num_tokens[index], now)
            token_id = next(sampled) if plan.samples[index] else None
            if request.state is State.FINISHED:
                continue
            events.computed.append(request.key)
            if token_id is not None:
                self._take_in_token(request, token_id, result.sample_s, events, now)
        for request in flight.dropped:
            self._forget(request)
        return events

    # ---- looking

    def revocable(self, now: float) -> RequestKey | None:
        """Whose reader to revoke, when nothing else can ever free blocks. Ask when `schedule` has given None."""
        request = None if self._flight is not None else choose_revocable(self._queues)
        return None if request is None else request.key

    def load(self, submit_seq: int, now: float) -> WorkerLoad:
        queues = self._queues
        return WorkerLoad(
            submit_seq=submit_seq,
            waiting_requests=len(queues.waiting) + len(queues.preempted),
            waiting_tokens=queues.waiting_tokens + sum(r.uncomputed_tokens for r in queues.prefilling),
            running_requests=queues.num_computing,
            adopting_requests=len(queues.adopting) + len(queues.reserved),
            free_blocks=self._pool.free_blocks,
            evictable_blocks=self._pool.evictable_blocks,
            total_blocks=self._pool.num_blocks,
            step_age_s=0.0 if self._flight is None else max(0.0, now - self._flight.since),
            step_s=self._step_s,
        )

    def stats(self) -> dict[str, int]:
        """Counters since the start."""
        return {
            "steps": self._steps,
            "preemptions": self._preemptions,
            "recomputed_tokens": self._recomputed_tokens,
            "prefix_lookups": self._residency.prefix_lookups,
            "cached_tokens_hit": self._residency.cached_tokens_hit,
            "evictions": self._pool.evictions,
        }

    # ---- inside

    def _pack_decodes(self, packing: Packing, now: float) -> None:
        """Rows of started prefills are kept free: better a decode that waits for a row than a prefill that starves."""
        decoding = self._queues.decoding
        rows = self._settings.max_num_seqs - len(self._queues.prefilling)
        index = 0
        while index < min(len(decoding), rows):
            request = decoding[index]
            while request.state is State.DECODING and not self._residency.grow(request):
                self._preempt(choose_victim(self._queues), now)
            if request.state is State.DECODING:
                packing.add_decode(request)
                index += 1

    def _pack_new_prefills(self, packing: Packing, now: float) -> None:
        while not packing.full and self._queues.num_computing < self._settings.max_num_seqs:
            request = self._queues.next_prefill()
            if request is None or not self._residency.admit(request, self._spare_blocks()):
                return
            if request.state is State.WAITING:
                request.ledger.cached_tokens = request.computed_tokens
            self._queues.move(request, State.PREFILLING, now)
            packing.add_prefill(request)

    def _preempt(self, request: Request, now: float) -> None:
        request.lost_tokens = max(request.lost_tokens, request.computed_tokens)
        self._preemptions += 1
        self._residency.release(request)
        self._queues.move(request, State.PREEMPTED, now)
        request.clock.enter(Stage.PREEMPTED, now)

    def _take_in_computed(self, request: Request, num_tokens: int, now: float) -> None:
        start = request.computed_tokens
        request.computed_tokens = end = start + num_tokens
        request.ledger.computed_tokens += num_tokens
        self._recomputed_tokens += max(0, min(end, request.lost_tokens) - start)
        self._residency.publish(request)
        if request.clock.stage is Stage.PREEMPTED and end >= request.lost_tokens:
            before_first = request.first_token_at is None and not request.adopted
            request.clock.enter(Stage.PREFILL if before_first else Stage.DECODE, now)

    def _take_in_token(self, request: Request, token_id: int, sample_s: float, events: StepEvents, now: float) -> None:
        request.append(token_id)
        request.last_token_at = now
        if request.first_token_at is None:
            request.first_token_at = now
            if not request.adopted:
                request.clock.enter(None if request.hand_off else Stage.DECODE, now, sampling_s=sample_s)
        for offset in range(request.emitted, len(request.output_ids)):
            events.token_keys.append(request.key)
            events.token_offsets.append(offset)
            events.token_ids.append(request.output_ids[offset])
        request.emitted = len(request.output_ids)
        reason = end_reason(request, self._settings)
        if reason is not None:
            self._end(request, reason, now)
            events.finished.append((request.key, reason))
        elif request.state is State.PREFILLING:
            self._queues.move(request, State.TRANSFERRING if request.hand_off else State.DECODING, now)
            if request.hand_off:
                events.prefilled.append(request.key)

"""The worker's one decision maker: who is let in, who computes what in the next step, and what a finished step means.

    plan = schedule(now)  ->  the runner computes it  ->  events = apply(plan, result, now)

A second step may be planned before the first is applied (`workers.core.flights` says what becomes of whom then); they
are applied in the same order. A step lasts from when it is planned, or from when the one before it is over.

`Selection` fills a step, `Shedding` fits the pool to the memory that there is, `Suspension` takes blocks away for a
while and gives them back, `Roster` lets in and out, `Holdings` is what all of them have.

Requests may end while steps are on their way: tokens that it samples for them are dropped. The caller holds one lock
around every method, may read everything and changes nothing. It calls `reserve_adoptions` after every method that may
free blocks (an adoption that waits holds up later prefills), tells the clients of `refused` and, behind the events of
earlier steps, of `paused`, and keeps its own reference to a Request whose ledger it wants. Does not: read clocks,
sample, move bytes, talk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.core.fairness import ServiceCounters
from headrace.core.predictor import StepPredictor, StepShape
from headrace.core.records import FinishReason, TokenLogprobs, WorkerLoad
from headrace.errors import InvariantError
from headrace.ids import RequestKey
from workers.core.batch import Ints
from workers.core.blocks import BlockPool
from workers.core.flights import MOST, Flight
from workers.core.journal import OFF, Event, Tracing
from workers.core.limits import end_reason
from workers.core.plan import StepEvents, StepPlan, StepResult
from workers.core.preemption import choose_for_class, choose_revocable
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request, State
from workers.core.selection import Selection
from workers.core.settings import Batching, SchedulerSettings
from workers.core.stages import Stage

__all__ = ["Scheduler", "SchedulerSettings"]

_PACE_STEPS = 32
"""Steps between looks at how fast work goes."""
_PACE_TOKENS = 256
_PACE_CONTEXT = 2048
_UNLEARNED_STEPS = 8


class Scheduler(Selection):
    def __init__(
        self,
        settings: SchedulerSettings,
        pool: BlockPool,
        cache: PrefixCache,
        predictor: StepPredictor | None = None,
        service: ServiceCounters | None = None,
        tracing: Tracing = OFF,
    ) -> None:
        super().__init__(settings, pool, cache, predictor, service or ServiceCounters(), tracing)
        self._steps = 0
        self._unlearned: list[tuple[StepShape, float]] = []

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute, or nothing before the step on its way is over.
        Raises InvariantError when `MOST` are on their way."""
        if len(self._flights) == MOST:
            raise InvariantError("as many steps as may be are on their way")
        if len(self._unlearned) >= _UNLEARNED_STEPS:
            self.catch_up()
        packing = self._select(self._steps, now)
        if packing is None or not (packing.num_rows or packing.plan.swap_out or packing.plan.memory):
            return None
        self._steps += 1
        shape = packing.shape
        predicted_s = self._predictor.predict_s(shape) if self._predictor is not None and self._predictor.ready else 0.0
        flight = Flight(
            packing.plan,
            self._batch.at(packing.decode_rows),
            packing.prefills,
            self._take_fresh(packing.decode_rows),
            shape,
            predicted_s,
            host_copies=packing.swapped_in,
            landing=packing.landing,
            restored=packing.restored,
            copied=packing.copied,
        )
        self._flights.depart(flight, packing.decode_rows)
        if len(self._flights) == 1:
            self._begin(flight, now)
        return packing.plan

    @property
    def started(self) -> list[RequestKey]:
        """First scheduled in the step that runs, for a shell that announces them before it ends."""
        return [] if self._flights.running is None else self._flights.running.started

    @property
    def predicted_s(self) -> float:
        """Of the step that was planned last, while it is on its way; 0: not predicted."""
        return 0.0 if self._flights.newest is None else self._flights.newest.predicted_s

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> StepEvents:
        """Take in what the runner computed. Raises InvariantError when it is no answer to the step that runs."""
        flight = self._flights.running
        if flight is None or flight.plan is not plan:
            raise InvariantError("a result for a step that does not run")
        if len(result.token_ids) != sum(plan.samples):
            raise InvariantError("a result with another number of tokens than rows that sample")
        rows = self._flights.land()
        self._step_s = max(0.0, now - flight.since)
        if self._predictor is not None and plan.num_rows:
            self._unlearned.append((flight.shape, self._step_s))
        if self._steps % _PACE_STEPS == 1:
            self._learn_pace()
            self._see_rate(now)
        here = [key for key in flight.started if self.requests[key].state is not State.FINISHED]
        events = StepEvents(started=here)
        self._take_in_decodes(flight, rows, result, events, now)
        sampled = iter(range(plan.num_decode_rows, len(result.token_ids)))
        for index, request in enumerate(flight.prefills, plan.num_decode_rows):
            place = next(sampled) if plan.samples[index] else None
            self._take_in_chunk(request, plan.num_tokens[index], now)
            if request.state is State.FINISHED:
                continue
            events.computed.append(request.key)
            if place is not None:
                self._take_in_first(request, result, place, events, now)
        self._batch.settle()
        if plan.memory:
            self._memory_changed(plan.memory)
        for copy in flight.host_copies:
            self._host.give_back(copy)
        self.tiering.restored(flight.restored)
        self._residency.copied(flight.copied)
        for request in flight.dropped:
            self._forget(request)
        self._pause_wanted(now)
        if self._flights.running is not None:
            self._begin(self._flights.running, now)
        return events

    def catch_up(self) -> None:
        """What a step leaves to do for a time when nobody waits for a plan, since it costs as much as planning: teaches
        the predictor what steps took, hashes the blocks that decodes have filled, and evicts what decodes need next.
        Never necessary: `schedule` calls it when much is left over, and who leaves is hashed to the end."""
        if self._predictor is not None:
            for shape, seconds in self._unlearned:
                self._predictor.observe(shape, seconds)
        self._unlearned.clear()
        for request in self._batch.with_full_blocks():
            self._residency.hash_ahead(request)
        self._pool.evict_ahead(self._batch.blocks_needed_next())

    # ---- looking

    def next_look(self, now: float) -> float | None:
        """When `schedule` may have something although nothing happens until then: a batch's window ends."""
        if self._settings.batching == Batching.CONTINUOUS or self._queues.num_computing or not self._queues.line:
            return None
        return max(now, self._opens_at())

    def revocable(self, now: float) -> RequestKey | None:
        """Whose reader to revoke: when nothing else can ever free blocks, or for a prefill of a higher class.

        Ask when `schedule` has given None, and now and then while it does not.
        """
        request = None
        wants = self._queues.lacking_blocks
        if self._policy.terms.by_class and wants is not None and wants.state is State.WAITING:
            lacking = self._residency.lacking(wants, self._spare_blocks())
            request = choose_for_class(self._queues, wants, lacking, self._settings, self._pace)
        if request is None and not self._flights:
            request = choose_revocable(self._queues)
        return None if request is None else request.key

    def load(self, submit_seq: int, now: float) -> WorkerLoad:
        queues = self._queues
        return WorkerLoad(
            submit_seq=submit_seq,
            waiting_requests=len(queues.line) + len(queues.fetching) + len(queues.preempted),
            waiting_tokens=queues.waiting_tokens
            + sum(r.uncomputed_tokens for r in [*queues.prefilling, *queues.fetching.values()]),
            running_requests=queues.num_computing,
            adopting_requests=len(queues.adopting) + len(queues.reserved),
            free_blocks=self._pool.free_blocks,
            evictable_blocks=self._pool.evictable_blocks,
            total_blocks=self._pool.usable_blocks,
            step_age_s=0.0 if self._flights.running is None else max(0.0, now - self._flights.running.since),
            step_s=self._step_s,
            cache_epoch=self._cache.log.epoch,
            cache_seq=self._cache.log.seq,
            queue_s=self._queue_s(),
            decode_rows=len(self._batch),
            decode_context=self._batch.context_tokens(),
            expected_output_tokens=self._batch.expected_tokens(),
            eviction_ms_per_block=self._pool.idle.next_ms(),
            step_costs=self._predictor.coefficients if self._predictor is not None and self._predictor.ready else (),
            restore_block_s=self._settings.host_copy_block_s,
            closed="" if self.admission.closed is None else self.admission.closed.reason,
        )

    def _queue_s(self) -> float:
        """Predicted time of the prefills that wait or run, without what others compute for them just now, and without
        what the cache had for them when they came."""
        queues = self._queues
        running = sum(request.uncomputed_tokens for request in queues.prefilling)
        for request in queues.fetching.values():
            running += max(1, request.num_tokens - request.fetch_blocks * self._settings.block_size)
        known = queues.cached_tokens + queues.following.shared_tokens
        return max(0, queues.waiting_tokens - known + running) * self._pace.prefill_token_s

    def stats(self) -> dict[str, int]:
        """Counters since the start, and last what the used blocks waste now."""
        return (
            self.counters
            | self.tiering.stats()
            | {
                "steps": self._steps,
                "prefix_lookups": self._residency.prefix_lookups,
                "cached_tokens_hit": self._residency.cached_tokens_hit,
                "partial_tokens_hit": self._residency.partial_tokens_hit,
                "saved_prefill_ms": int(self._residency.saved_prefill_ms),
                "cow_copies": self._residency.cow_copies,
                "staged_blocks": self.staging.staged_blocks,
                "followed": self._queues.following.followed,
                "evictions": self._pool.evictions,
                "evicted_ms": int(self._pool.idle.evicted_ms),
                "unfilled_slots": self.unfilled_slots(),
                "unfilled_permille": int(1000 * self.fragmentation()),
            }
        )

    # ---- when a step is planned, and when it is over

    def _take_fresh(self, rows: slice | Ints) -> list[Request]:
        """Decodes that are in a step for the first time."""
        fresh = [request for request in self._fresh if request.state is State.DECODING]
        chosen = [request for request in fresh if _is_in(rows, request)]
        self._fresh = [request for request in fresh if request not in chosen]
        return chosen

    def _begin(self, flight: Flight, now: float) -> None:
        """A step runs from now on."""
        flight.since = now
        for request in flight.fresh:
            if request.state is State.DECODING:
                self._first_scheduled(request, Stage.DECODE, flight.started, now)
        for request in flight.prefills:
            if request.state is State.PREFILLING:
                self._first_scheduled(request, Stage.PREFILL, flight.started, now)
                request.last_scheduled_at = now
        if not self._journal.idle:
            self._journal.step(flight, now)

    @staticmethod
    def _first_scheduled(request: Request, stage: Stage, started: list[RequestKey], now: float) -> None:
        if request.first_scheduled_at is None:
            request.first_scheduled_at = now
            started.append(request.key)
        if request.clock.stage is Stage.QUEUE:
            request.clock.enter(stage, now)

    def _take_in_decodes(
        self, flight: Flight, rows: slice | Ints, result: StepResult, events: StepEvents, now: float
    ) -> None:
        batch = self._batch
        count = flight.plan.num_decode_rows
        if not count:
            return
        keys, tokens, logprobs = flight.plan.keys[:count], result.token_ids[:count], result.logprobs
        dead = set(batch.dead_rows())
        if dead:
            places = range(count) if isinstance(rows, slice) else rows.tolist()
            alive = [i for i, row in enumerate(places) if row not in dead]
            rows = np.asarray([places[i] for i in alive], np.int64)
            keys, tokens = [keys[i] for i in alive], [tokens[i] for i in alive]
            logprobs = {new: logprobs[old] for new, old in enumerate(alive) if old in logprobs}
        offsets = batch.take_in(rows, tokens)
        self.service.charge_outputs(batch.tenant[rows])
        self.service.charge_residence(
            batch.tenant[rows], batch.capacity[rows] / self._settings.block_size, self._step_s
        )
        self._repeat_handed_over(rows, events)
        if logprobs:
            begin = len(events.token_ids)
            events.token_logprobs |= {begin + i: told for i, told in logprobs.items() if i < len(tokens)}
        events.token_keys += keys
        events.token_offsets += offsets.tolist()
        events.token_ids += tokens
        for request, reason in batch.ended(rows):
            self._end_here(request, reason, events, now)

    def _repeat_handed_over(self, rows: slice | Ints, events: StepEvents) -> None:
        """The first frame about an adopted request begins with what its prefill worker sampled."""
        unsaid, self._unsaid = self._unsaid, []
        for request in unsaid:
            if request.state is State.DECODING and _is_in(rows, request):
                self._tell(request, request.output_ids[request.emitted : -1], request.handed_logprobs, events)
                request.unsaid, request.handed_logprobs = False, ()
            elif request.state is State.DECODING:
                self._unsaid.append(request)

    def _take_in_chunk(self, request: Request, num_tokens: int, now: float) -> None:
        start = request.computed_tokens
        request.computed_tokens = end = start + num_tokens
        request.ledger.computed_tokens += num_tokens
        self.counters["recomputed_tokens"] += max(0, min(end, request.lost_tokens) - start)
        self._residency.publish(request, to_the_end=end == request.num_tokens)
        self._queues.following.moved_on(request)
        if request.clock.stage is Stage.PREEMPTED and end >= request.lost_tokens:
            before_first = request.first_token_at is None and not request.adopted
            request.clock.enter(Stage.PREFILL if before_first else Stage.DECODE, now)

    @staticmethod
    def _tell(request: Request, output: list[int], logprobs: Sequence[TokenLogprobs], events: StepEvents) -> None:
        """Output that goes on from what is emitted; `logprobs` are those of the last tokens of it."""
        begin = len(events.token_ids) + len(output) - len(logprobs)
        events.token_logprobs.update(enumerate(logprobs, begin))
        events.token_keys += [request.key] * len(output)
        events.token_offsets += range(request.emitted, request.emitted + len(output))
        events.token_ids += output

    def _take_in_first(self, request: Request, result: StepResult, place: int, events: StepEvents, now: float) -> None:
        """The token at the end of a prefill, which is the result's at that place."""
        request.append(result.token_ids[place])
        self.service.charge_output(request.tenant_index, 1)
        if request.first_token_at is None:
            request.first_token_at = now
            if not request.adopted:
                request.clock.enter(None if request.hand_off else Stage.DECODE, now, sampling_s=result.sample_s)
                if request.traced:
                    self._journal.note(Event.FIRST_TOKEN, request, now)
        elif request.clock.stage is Stage.PREFILL:
            request.clock.enter(Stage.DECODE, now)  # a tool's answer is computed
        told = () if place not in result.logprobs else (result.logprobs[place],)
        self._tell(request, request.output_ids[request.emitted :], request.handed_logprobs + told, events)
        request.emitted, request.unsaid = request.num_output, False
        request.handed_logprobs = told if request.hand_off else ()
        reason = end_reason(request, self._settings)
        if reason is not None:
            self._end_here(request, reason, events, now)
            return
        self._queues.move(request, State.TRANSFERRING if request.hand_off else State.DECODING, now)
        if request.hand_off:
            events.prefilled.append(request.key)
            if request.traced:
                self._journal.note(Event.HANDED_OFF, request, now)

    def _end_here(self, request: Request, reason: FinishReason, events: StepEvents, now: float) -> None:
        self._end(request, reason, now)
        events.finished.append((request.key, reason))

    def _learn_pace(self) -> None:
        """Seconds of a prompt token in a chunk, and of an output token at the present number of decodes."""
        predictor = self._predictor
        if predictor is None or not predictor.ready:
            return
        rows = max(1, len(self._batch))
        decodes = StepShape(rows, int(self._batch.num_tokens[:rows].sum()), 0, 0, 0, rows)
        chunk = StepShape(0, 0, 1, _PACE_TOKENS, _PACE_TOKENS * _PACE_TOKENS // 2, 1)
        later = replace(chunk, prefill_context=chunk.prefill_context + _PACE_TOKENS * _PACE_CONTEXT)
        chunk_s = predictor.predict_s(chunk)
        self._pace.prefill_token_s = chunk_s / _PACE_TOKENS
        self._pace.prefill_pair_s = max(0.0, predictor.predict_s(later) - chunk_s) / (_PACE_TOKENS * _PACE_CONTEXT)
        self._pace.decode_token_s = predictor.predict_s(decodes)
        self._pace.known = True


def _is_in(rows: slice | Ints, request: Request) -> bool:
    """Whether a request that decodes has one of these rows of the batch."""
    return request.row < rows.stop if isinstance(rows, slice) else request.row in rows

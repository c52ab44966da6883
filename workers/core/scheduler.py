"""The worker's one decision maker: who is let in, who computes what in the next step, and what a finished step means.

    plan = schedule(now)  ->  the runner computes it  ->  events = apply(plan, result, now)

Packing (scheduler article, section 10), with the guards of SPEC B5:

    1. decodes get room for their next token; when blocks are short somebody is preempted by cost
    2. decode rows: all, or those whose turn it is when `max_decode_rows`, prefills' rows or their share leave fewer
    3. started and new prefills by the policy's score, in chunks that fit the tokens and the predicted time that are
       left; a new one after KV admission (all blocks or none), a higher class by preempting a lower one

Two budgets are kept apart (B8): tokens and time of this step, and resident KV with the growth that is expected of it.
Prefills have a share of each step's tokens that no time budget takes from them, so that no number of decodes starves
them. Memory is optimistic: a request is admitted with blocks for what it has plus one token.

Requests may end while a step is on its way: tokens that it samples for them are dropped. The caller holds one lock
around every method, may read everything and changes nothing. It calls `reserve_adoptions` after every method that may
free blocks (an adoption that waits holds up later prefills), tells the clients of `refused`, and keeps its own
reference to a Request whose ledger it wants. Does not: read clocks, sample, move bytes, talk.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from headrace.core.fairness import ServiceCounters
from headrace.core.predictor import StepPredictor, StepShape
from headrace.core.records import FinishReason, WorkerLoad
from headrace.errors import InvariantError
from headrace.ids import RequestKey
from workers.core.batch import Bools, Ints
from workers.core.blocks import BlockPool
from workers.core.journal import OFF, Event, Tracing
from workers.core.limits import end_reason
from workers.core.packing import Flight, Packing
from workers.core.plan import StepEvents, StepPlan, StepResult
from workers.core.preemption import choose_revocable, require
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request, State
from workers.core.settings import Batching, SchedulerSettings
from workers.core.stages import Stage
from workers.core.suspension import Suspension

__all__ = ["Scheduler", "SchedulerSettings"]

_PACE_STEPS = 32
"""Steps between looks at how fast work goes."""
_PACE_TOKENS = 256
_STATIC_WINDOWS = 10
"""Windows without an arrival after which static batching stops waiting for a full batch."""
_UNLEARNED_STEPS = 8


class Scheduler(Suspension):
    def __init__(
        self,
        settings: SchedulerSettings,
        pool: BlockPool,
        cache: PrefixCache,
        predictor: StepPredictor | None = None,
        service: ServiceCounters | None = None,
        tracing: Tracing = OFF,
    ) -> None:
        super().__init__(settings, pool, cache, service or ServiceCounters(), tracing)
        self._predictor = predictor
        self._steps = 0
        self._step_s = 0.0
        self._floor = 0.0
        self._joining = 0
        self._unlearned: list[tuple[StepShape, float]] = []
        self._blocked = False
        """The last new prefill lacked blocks or a row."""

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. Raises InvariantError when one is on its way."""
        if self._flight is not None:
            raise InvariantError("a step is already on its way")
        if len(self._unlearned) >= _UNLEARNED_STEPS:
            self.learn()
        self._refuse_lost(now)
        self._make_room_for_class(now)
        packing = Packing(self._steps, self._settings, self._predictor, self._floor_tokens())
        self._pack_decodes(packing, now)
        self._pack_prefills(packing, now)
        packing.plan.swap_out = self._take_swap_out()
        if not packing.num_rows and not packing.plan.swap_out:
            return None
        self._steps += 1
        started = self._mark_scheduled(packing, now)
        shape = packing.shape
        predicted_s = self._predictor.predict_s(shape) if self._predictor is not None and self._predictor.ready else 0.0
        self._batch.freeze()
        self._flight = Flight(
            packing.plan, packing.decode_rows, packing.prefills, started, now, shape, predicted_s, packing.swapped_in
        )
        if not self._journal.idle:
            self._journal.step(self._flight, now)
        return packing.plan

    @property
    def started(self) -> list[RequestKey]:
        """First scheduled in the step on its way, for a shell that announces them before the step ends."""
        return [] if self._flight is None else self._flight.started

    @property
    def predicted_s(self) -> float:
        """Of the step on its way; 0: not predicted."""
        return 0.0 if self._flight is None else self._flight.predicted_s

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> StepEvents:
        """Take in what the runner computed. Raises InvariantError when it is no answer to the step on its way."""
        flight = self._flight
        if flight is None or flight.plan is not plan:
            raise InvariantError("a result for a step that is not on its way")
        if len(result.token_ids) != sum(plan.samples):
            raise InvariantError("a result with another number of tokens than rows that sample")
        self._flight = None
        self._step_s = max(0.0, now - flight.since)
        if self._predictor is not None and plan.num_rows:
            self._unlearned.append((flight.shape, self._step_s))
        if self._steps % _PACE_STEPS == 1:
            self._learn_pace()
        gone = {request.key for request in flight.dropped}
        events = StepEvents(started=[key for key in flight.started if key not in gone])
        self._take_in_decodes(flight, result, events, now)
        sampled = iter(result.token_ids[plan.num_decode_rows :])
        for index, request in enumerate(flight.prefills, plan.num_decode_rows):
            token_id = next(sampled) if plan.samples[index] else None
            self._take_in_chunk(request, plan.num_tokens[index], now)
            if request.state is State.FINISHED:
                continue
            events.computed.append(request.key)
            if token_id is not None:
                self._take_in_first(request, token_id, result.sample_s, events, now)
        self._batch.thaw()
        for copy in flight.swapped_in:
            self._host.give_back(copy)
        for request in flight.dropped:
            self._forget(request)
        self._pause_wanted(now)
        return events

    def learn(self) -> None:
        """Teaches the predictor what steps took since the last call. For a time when nobody waits for a plan: it costs
        as much as planning. `schedule` calls it when much is left over."""
        if self._predictor is not None:
            for shape, seconds in self._unlearned:
                self._predictor.observe(shape, seconds)
        self._unlearned.clear()

    # ---- looking

    def next_look(self, now: float) -> float | None:
        """When `schedule` may have something although nothing happens until then: a batch's window ends."""
        if self._settings.batching == Batching.CONTINUOUS or self._queues.num_computing or not self._queues.line:
            return None
        return max(now, self._opens_at())

    def revocable(self, now: float) -> RequestKey | None:
        """Whose reader to revoke, when nothing else can ever free blocks. Ask when `schedule` has given None."""
        request = None if self._flight is not None else choose_revocable(self._queues)
        return None if request is None else request.key

    def load(self, submit_seq: int, now: float) -> WorkerLoad:
        queues = self._queues
        return WorkerLoad(
            submit_seq=submit_seq,
            waiting_requests=len(queues.line) + len(queues.preempted),
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
        return self.counters | {
            "steps": self._steps,
            "prefix_lookups": self._residency.prefix_lookups,
            "cached_tokens_hit": self._residency.cached_tokens_hit,
            "evictions": self._pool.evictions,
        }

    # ---- before packing

    def _refuse_lost(self, now: float) -> None:
        """B7: what cannot meet its deadline any more makes room at once, before it has cost anything.

        Not while nobody computes: there is nobody to make room for, and only steps can mend a pace of worse times.
        """
        if not self._queues.num_computing:
            return
        for request in self._queues.line.lost(now):
            if self._settings.lost_deadline == "reject":
                self.counters["deadline_lost"] += 1
                self.refused.append((request.key, "deadline_lost"))
                if request.traced:
                    self._journal.note(Event.DEADLINE_LOST, request, now)
                self._end(request, FinishReason.DEADLINE, now)
            else:
                request.late = True

    def _make_room_for_class(self, now: float) -> None:
        """B9: the next prefill preempts lower classes for blocks or a row that it lacks, if that is enough for it."""
        if len(self._classes) < 2 or not self._policy.terms.by_class or self._settings.batching != Batching.CONTINUOUS:
            return
        request = self._next_new(now)
        if request is None or request.late:
            return
        lower = [r for r in self._computing() if r.priority > request.priority and not r.pinned]
        lacks_row = self._queues.num_computing >= self._settings.max_num_seqs
        if not lower or not (lacks_row or self._residency.lacking(request, self._spare_blocks())):
            return
        freed = sum(1 for r in lower for block in r.block_ids if self._pool.refs(block) == 1)
        if self._residency.lacking(request, self._spare_blocks()) > freed:
            return
        while lower and (lacks_row or self._residency.lacking(request, self._spare_blocks())):
            victim = self._choose_victim(lower, request, now)
            if victim is None:
                return
            self._preempt(victim, now)
            lower.remove(victim)
            lacks_row = self._queues.num_computing >= self._settings.max_num_seqs

    def _floor_tokens(self) -> int:
        """Prompt tokens that the next step computes whatever its time budget says: `min_prefill_share`, saved up.

        Nothing is saved for prefills that wait for blocks or rows: decodes are what they wait for.
        """
        queues, most = self._queues, self._settings.max_num_batched_tokens
        share = self._settings.min_prefill_share * most
        if not queues.prefilling and (self._blocked or not (queues.line or queues.preempted)):
            self._floor = 0.0
            return 0
        self._floor = min(self._floor + share, max(2 * share, self._settings.block_size), most)
        return int(self._floor)

    # ---- decodes

    def _pack_decodes(self, packing: Packing, now: float) -> None:
        batch = self._batch
        rows = self._choose_rows(packing, now)
        short = np.flatnonzero(batch.num_tokens[rows] > batch.capacity[rows])
        if len(short):
            places = short if isinstance(rows, slice) else rows[short]
            blocks = self._pool.alloc(len(short))
            if blocks is not None:
                batch.grow(places, blocks)
            else:
                rows = self._make_room(rows, places, now)
        packing.add_decodes(batch, rows, now)

    def _make_room(self, rows: slice | Ints, places: Ints, now: float) -> slice | Ints:
        """Blocks are short for some of the rows: somebody is preempted. Returns the rows that are left."""
        batch = self._batch
        chosen = batch.requests[:] if isinstance(rows, slice) else [batch.requests[i] for i in rows]
        for request in [batch.requests[i] for i in places]:
            self._grow(request, now)
        if isinstance(rows, slice):
            return slice(0, len(batch))
        return np.asarray([r.row for r in chosen if r.state is State.DECODING], np.int64)

    def _grow(self, request: Request, now: float) -> None:
        """Room for the request's next token; somebody may be preempted for it, perhaps itself."""
        while request.state is State.DECODING and not self._residency.grow(request):
            self._preempt(require(self._choose_victim(self._computing(), request, now)), now)
        if request.state is State.DECODING:
            self._batch.capacity[request.row] = len(request.block_ids) * self._settings.block_size

    def _choose_rows(self, packing: Packing, now: float) -> slice | Ints:
        """All rows of the batch, or those whose turn it is.

        Rows of started prefills are kept free: better a decode that waits for a row than a prefill that starves.
        """
        settings, batch = self._settings, self._batch
        count = len(batch)
        hard = settings.max_num_seqs - len(self._queues.prefilling)
        limit = min(hard, settings.max_decode_rows or hard)
        if not self._policy.terms.decodes_first:
            limit = min(limit, self._rows_by_arrival(packing))
        elif packing.floor_left:
            limit = min(limit, settings.max_num_batched_tokens - self._tokens_before_decodes(packing))
        if count <= limit:
            return slice(0, count)
        overdue = np.zeros(count, np.bool_)
        if settings.next_token_deadline_s:
            overdue = now - batch.scheduled_at[:count] >= settings.next_token_deadline_s
            limit = max(limit, min(hard, int(overdue.sum())))
        order = self._turns(overdue)[: max(min(1, hard), limit)]
        order.sort()
        return order

    def _tokens_before_decodes(self, packing: Packing) -> int:
        """Tokens of the step that prefills have before decodes."""
        started = sum(min(r.uncomputed_tokens, packing.chunk_limit()) for r in self._queues.prefilling)
        return min(packing.floor_left, started + self._queues.waiting_tokens)

    def _rows_by_arrival(self, packing: Packing) -> int:
        """How many decodes come before the step's tokens are gone, when started prefills share their order."""
        left = self._settings.max_num_batched_tokens
        arrivals = sorted(request.arrival for request in self._batch.requests)
        for request in self._queues.prefilling:
            before = bisect_left(arrivals, request.arrival)
            left = max(min(before, left), left - min(request.uncomputed_tokens, packing.chunk_limit()))
        return left

    def _turns(self, overdue: Bools) -> Ints:
        """Rows of the batch in the order in which they get a place in a step that has too few."""
        batch, terms = self._batch, self._policy.terms
        count = len(batch)
        since = batch.scheduled_at[:count]
        arrival = np.fromiter((r.arrival for r in batch.requests), np.int64, count)
        if not terms.decodes_first:
            return np.argsort(arrival, kind="stable")
        rank = np.zeros(count, np.int64)
        if terms.level:
            for request in batch.requests:
                self._sink(request, 1)
            rank = np.fromiter((r.level for r in batch.requests), np.int64, count)
        elif terms.by_class:
            rank = np.fromiter((r.rank for r in batch.requests), np.int64, count)
        elif terms.urgency:
            due = np.fromiter(map(self._policy.due_at, batch.requests), np.float64, count)
            return np.lexsort((arrival, due, ~overdue))
        return np.lexsort((arrival, since, rank, ~overdue))

    # ---- prefills

    def _pack_prefills(self, packing: Packing, now: float) -> None:
        """Started ones and new ones by score; started ones first where the policy has no score."""
        queues, policy = self._queues, self._policy
        started = list(queues.prefilling)
        if policy.reorders:
            started.sort(key=lambda r: (-policy.total(r, now), r.arrival))
        new = self._next_new(now)
        self._blocked = new is None
        queues.lacking_blocks = None
        position = 0
        while not packing.full:
            head = started[position] if position < len(started) else None
            if head is None and new is None:
                break
            if head is not None and (new is None or not policy.reorders or self._before(head, new, now)):
                position += 1
                if policy.reorders and len(started) > 1:
                    head.priority_reason = policy.reason(head, queues.prefilling[0], now)
                if num_tokens := packing.chunk(head):
                    self._add_chunk(packing, head, num_tokens)
                continue
            if new is None or not self._start(packing, new, now):
                new = None
                continue
            new = self._next_new(now)

    def _before(self, head: Request, new: Request, now: float) -> bool:
        return self._policy.total(head, now) >= self._policy.total(new, now)

    def _next_new(self, now: float) -> Request | None:
        """Who starts next: preempted requests before others of their class, and nobody before an older adoption."""
        queues, policy = self._queues, self._policy
        best = queues.line.best(now) if self._may_join(now) else None
        if best is not None and queues.adoption_before(best):
            best = None
        if not queues.preempted:
            return best
        back = queues.preempted[0]
        if policy.reorders:
            back = max(queues.preempted, key=lambda r: (policy.total(r, now), -r.arrival))
        higher = policy.terms.by_class and best is not None and best.priority < back.priority and not best.late
        return best if higher else back

    def _start(self, packing: Packing, request: Request, now: float) -> bool:
        """KV admission and the first chunk; False and no change when rows, blocks, tokens or time do not allow it."""
        self._blocked = self._queues.num_computing >= self._settings.max_num_seqs
        if self._blocked or not packing.chunk(request):
            return False
        line = self._queues.line
        is_alone = request.state is State.WAITING and len(line) == 1
        first = None if is_alone else line.first()
        copy = self._valid_copy(request)
        self._blocked = not self._residency.admit(request, self._spare_blocks())
        if self._blocked:
            self._queues.lacking_blocks = request
            return False
        request.priority_reason = self._policy.reason(request, first, now) if first is not None else "arrival"
        if request.state is State.WAITING:
            request.ledger.cached_tokens = request.computed_tokens
            self.service.charge_input(request.tenant_index, 0, request.computed_tokens)
            self._joining = max(0, self._joining - 1)
        else:
            self._returned(request, now)
        if copy is not None:
            self._swap_in(packing, request, copy, now)
        self._queues.move(request, State.PREFILLING, now)
        # What the cache or the host gave back may have made the chunk smaller, never larger than was asked for.
        self._add_chunk(packing, request, max(1, packing.chunk(request)))
        return True

    def _add_chunk(self, packing: Packing, request: Request, num_tokens: int) -> None:
        over = packing.floor_left
        packing.add_prefill(request, num_tokens)
        self._floor -= over - packing.floor_left
        self.service.charge_input(request.tenant_index, num_tokens)
        if self._policy.terms.level:
            self._sink(request, num_tokens)

    def _sink(self, request: Request, num_tokens: int) -> None:
        """A feedback queue's rule: down a level when the quantum is used up."""
        while request.service_tokens + num_tokens > self._policy.level_end(request.level):
            request.level += 1

    def _may_join(self, now: float) -> bool:
        """Always, in continuous batching; else while a batch is open, and a batch opens when the last one has ended."""
        if self._settings.batching == Batching.CONTINUOUS:
            return True
        queues = self._queues
        if not queues.num_computing and not queues.preempted and queues.line:
            full = len(queues.line) >= self._settings.max_num_seqs
            if full or now >= self._opens_at():
                self._joining = min(len(queues.line), self._settings.max_num_seqs)
        return self._joining > 0

    def _opens_at(self) -> float:
        """When a batch begins although it is not full; somebody waits."""
        window_s, waiting = self._settings.batch_window_s, self._queues.line.requests.values()
        if self._settings.batching == Batching.STATIC:
            return next(reversed(waiting)).accepted_at + _STATIC_WINDOWS * window_s
        return next(iter(waiting)).accepted_at + window_s

    # ---- when a step is planned, and when it is over

    def _mark_scheduled(self, packing: Packing, now: float) -> list[RequestKey]:
        started: list[RequestKey] = []
        rows = packing.decode_rows
        fresh, self._fresh = self._fresh, []
        for request in fresh:
            chosen = request.state is State.DECODING and (isinstance(rows, slice) or request.row in rows)
            if chosen:
                self._first_scheduled(request, Stage.DECODE, started, now)
            elif request.state is State.DECODING:
                self._fresh.append(request)
        for request in packing.prefills:
            self._first_scheduled(request, Stage.PREFILL, started, now)
            request.last_scheduled_at = now
        return started

    @staticmethod
    def _first_scheduled(request: Request, stage: Stage, started: list[RequestKey], now: float) -> None:
        if request.first_scheduled_at is None:
            request.first_scheduled_at = now
            started.append(request.key)
        if request.clock.stage is Stage.QUEUE:
            request.clock.enter(stage, now)

    def _take_in_decodes(self, flight: Flight, result: StepResult, events: StepEvents, now: float) -> None:
        batch, rows = self._batch, flight.decode_rows
        count = flight.plan.num_decode_rows
        if not count:
            return
        keys, tokens = flight.plan.keys[:count], result.token_ids[:count]
        dead = set(batch.dead_rows())
        if dead:
            places = range(count) if isinstance(rows, slice) else rows.tolist()
            alive = [i for i, row in enumerate(places) if row not in dead]
            rows = np.asarray([places[i] for i in alive], np.int64)
            keys, tokens = [keys[i] for i in alive], [tokens[i] for i in alive]
        offsets = batch.take_in(rows, tokens)
        self.service.charge_outputs(batch.tenant[rows])
        self.service.charge_residence(
            batch.tenant[rows], batch.capacity[rows] / self._settings.block_size, self._step_s
        )
        self._repeat_handed_over(flight, events)
        events.token_keys += keys
        events.token_offsets += offsets.tolist()
        events.token_ids += tokens
        for request, reason in batch.ended(rows):
            self._end_here(request, reason, events, now)

    def _repeat_handed_over(self, flight: Flight, events: StepEvents) -> None:
        """The first frame about an adopted request begins with what its prefill worker sampled."""
        unsaid, self._unsaid = self._unsaid, []
        for request in unsaid:
            if request.state is State.DECODING and flight.names(request):
                output = request.output_ids[request.emitted : -1]
                events.token_keys += [request.key] * len(output)
                events.token_offsets += range(request.emitted, request.emitted + len(output))
                events.token_ids += output
                request.unsaid = False
            elif request.state is State.DECODING:
                self._unsaid.append(request)

    def _take_in_chunk(self, request: Request, num_tokens: int, now: float) -> None:
        start = request.computed_tokens
        request.computed_tokens = end = start + num_tokens
        request.ledger.computed_tokens += num_tokens
        self.counters["recomputed_tokens"] += max(0, min(end, request.lost_tokens) - start)
        self._residency.publish(request)
        if request.clock.stage is Stage.PREEMPTED and end >= request.lost_tokens:
            before_first = request.first_token_at is None and not request.adopted
            request.clock.enter(Stage.PREFILL if before_first else Stage.DECODE, now)

    def _take_in_first(self, request: Request, token_id: int, sample_s: float, events: StepEvents, now: float) -> None:
        """The token at the end of a prefill."""
        request.append(token_id)
        if request.first_token_at is None:
            request.first_token_at = now
            if not request.adopted:
                request.clock.enter(None if request.hand_off else Stage.DECODE, now, sampling_s=sample_s)
                if request.traced:
                    self._journal.note(Event.FIRST_TOKEN, request, now)
        elif request.clock.stage is Stage.PREFILL:
            request.clock.enter(Stage.DECODE, now)  # a tool's answer is computed
        output = request.output_ids[request.emitted :]
        events.token_keys += [request.key] * len(output)
        events.token_offsets += range(request.emitted, request.num_output)
        events.token_ids += output
        request.emitted, request.unsaid = request.num_output, False
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
        self._pace.prefill_token_s = predictor.predict_s(chunk) / _PACE_TOKENS
        self._pace.decode_token_s = predictor.predict_s(decodes)
        self._pace.known = True

    def _choose_victim(self, candidates: list[Request], wanted_by: Request, now: float) -> Request | None:
        """Whose blocks go; those of paused requests before all others."""
        idle = [r for r in self._queues.paused.values() if r.block_ids and r.priority >= wanted_by.priority]
        if idle:
            return max(idle, key=lambda r: (len(r.block_ids), r.arrival))
        return self._preemption.choose_victim(candidates, wanted_by, self._host.free_blocks, self._pause_s, now)

    def _computing(self) -> list[Request]:
        return [*self._queues.prefilling, *(r for r in self._batch.requests if r.state is State.DECODING)]

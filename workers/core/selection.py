"""Who goes into the next step, and how much of each: the packing rules (scheduler article, section 10; SPEC B4, B5).

    1. what has lost its deadline leaves; a higher class takes a lower one's blocks or row where that pays
    2. decodes get room for their next token; when blocks are short somebody is preempted by cost
    3. decode rows: all, or those whose turn it is when `max_decode_rows`, prefills' rows or their share leave fewer
    4. started and new prefills by the policy's score, in chunks that fit the tokens and the predicted time that are
       left; a new one after KV admission (all blocks or none)

Two budgets are kept apart (B8): tokens and time of this step, and resident KV with the growth that is expected of it.
Prefills have a share of each step's tokens that no time budget takes from them, so that no number of decodes starves
them. Memory is optimistic: a request is admitted with blocks for what it has plus one token.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from headrace.core.fairness import ServiceCounters
from headrace.core.predictor import StepPredictor
from headrace.core.records import FinishReason
from workers.core.batch import Bools, Ints
from workers.core.blocks import BlockPool
from workers.core.journal import Event, Tracing
from workers.core.packing import Packing
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request, State
from workers.core.settings import Batching, SchedulerSettings
from workers.core.shedding import Shedding

_STATIC_WINDOWS = 10
"""Windows without an arrival after which static batching stops waiting for a full batch."""
_LOOK_AGAIN_STEPS = 8


class Selection(Shedding):
    """See `workers.core.scheduler.Scheduler`, which is the one that workers make."""

    def __init__(
        self,
        settings: SchedulerSettings,
        pool: BlockPool,
        cache: PrefixCache,
        predictor: StepPredictor | None,
        service: ServiceCounters,
        tracing: Tracing,
    ) -> None:
        super().__init__(settings, pool, cache, service, tracing)
        self._predictor = predictor
        self._step_s = 0.0
        """What the last step took."""
        self._floor = 0.0
        self._joining = 0
        self._in_vain: Request | None = None
        """The last request for which preempting lower classes would not have paid, and for how many steps it is not
        looked at."""
        self._look_again = 0
        self._blocked = False
        """The last new prefill lacked blocks or a row."""

    def _select(self, step_id: int, now: float) -> Packing | None:
        """The next step's rows; empty when nobody can compute. None: the step on its way must be over first, since
        somebody is to give blocks up, or memory changes."""
        if self._queues.following:
            self._queues.following.release_stalled(now, self._step_s)
        self._refuse_lost(now)
        if self._flights and (self.resizing or self._is_to_resize):
            return None
        memory = self._fit_memory(now)
        if not self._make_room_for_class(now):
            return None
        floor = self._floor
        packing = Packing(step_id, self._settings, self._predictor, self._floor_tokens())
        packing.plan.memory = memory
        if not self._pack_decodes(packing, now):
            self._floor = floor
            return None
        self._pack_prefills(packing, now)
        packing.plan.swap_out = self._take_swap_out(now)
        return packing

    # ---- before packing

    def _refuse_lost(self, now: float) -> None:
        """B7: what cannot meet its deadline any more makes room at once, before it has cost anything.

        Not while nobody computes: there is nobody to make room for, and only steps can mend a pace of worse times.
        """
        if not self._queues.num_computing:
            return
        for request in self._queues.line.lost(now, self._cached_tokens):
            if request.state is not State.WAITING:
                continue  # it was named twice
            if self._settings.lost_deadline == "reject":
                self.counters["deadline_lost"] += 1
                self.refused.append((request.key, "deadline_lost"))
                if request.traced:
                    self._journal.note(Event.DEADLINE_LOST, request, now)
                self._end(request, FinishReason.DEADLINE, now)
            else:
                request.late = True

    def _make_room_for_class(self, now: float) -> bool:
        """B9: the next prefill preempts lower classes for blocks or a row that it lacks, if that is enough and pays.
        False: it would, when the step on its way is over.

        A look costs a walk over the victims' blocks. When it was in vain, the same request is not looked at again for
        some steps.
        """
        if len(self._classes) < 2 or not self._policy.terms.by_class or self._settings.batching != Batching.CONTINUOUS:
            return True
        request = self._next_new(now)
        if request is None or request.late or (request is self._in_vain and self._look_again > 0):
            self._look_again -= 1
            return True
        self._yield_fetched(request)
        lower = [
            r for r in self._lower_classes(request.priority) if not r.pinned and self._gain_ms(r, request, now) > 0
        ]
        while lower and (for_what := self._lacks(request)):
            victim = self._choose_victim(lower, request, now, for_row=for_what == "row")
            enough = for_what == "row" or self._enough(lower, self._residency.lacking(request, self._spare_blocks()))
            if victim is None or not enough or (victim in lower and not self._pays(victim, request, now)):
                self._in_vain, self._look_again = request, _LOOK_AGAIN_STEPS
                return True
            if self._flights:
                return False
            self._preempt(victim, now)
            if victim in lower:  # else it was paused
                lower.remove(victim)
        return True

    def _lower_classes(self, priority: int) -> list[Request]:
        """Who computes with a class below `priority`."""
        batch = self._batch
        rows = np.flatnonzero(batch.priority[: len(batch)] > priority)
        lower = [r for r in self._queues.prefilling if r.priority > priority]
        return lower + [r for i in rows if (r := batch.requests[i]).state is State.DECODING]

    def _lacks(self, request: Request) -> str:
        """`blocks`, `row`, or empty: it can start."""
        if self._residency.lacking(request, self._spare_blocks()):
            return "blocks"
        return "row" if self._queues.num_computing >= self._settings.max_num_seqs else ""

    def _enough(self, holders: list[Request], num_blocks: int) -> bool:
        """The holders have so many blocks that nobody else uses."""
        return any(freed >= num_blocks for freed in self._residency.freed_by(holders))

    def _gain_ms(self, victim: Request, request: Request, now: float) -> float:
        """What the request is ahead of the victim by: class, and the time that each has waited."""
        classes = (victim.priority - request.priority) * self._settings.class_weight_ms
        return classes + self._policy.age_ms(request, now) - self._policy.waited_ms(victim)

    def _pays(self, victim: Request, request: Request, now: float) -> bool:
        """That is worth more than what the victim's return costs."""
        restore = self._preemption.restore(victim, self._host.available_blocks, 0.0)
        return self._gain_ms(victim, request, now) > restore.cost_ms

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

    def _pack_decodes(self, packing: Packing, now: float) -> bool:
        """False: somebody must give blocks up for them, when the step on its way is over."""
        batch = self._batch
        rows = self._choose_rows(packing, now)
        short = np.flatnonzero(batch.planned_tokens(rows) > batch.capacity[rows])
        if len(short):
            places = short if isinstance(rows, slice) else rows[short]
            if len(short) > self._pool.available_blocks:
                self.fetches.let_go(len(short) - self._pool.available_blocks)
            blocks = self._pool.alloc(len(short))
            if blocks is not None:
                batch.grow(places, blocks)
            elif self._flights:
                return False
            else:
                rows = self._make_room(rows, places, now)
        packing.add_decodes(batch, rows, now)
        return True

    def _choose_rows(self, packing: Packing, now: float) -> slice | Ints:
        """All rows that the batch has for this step, or those whose turn it is.

        Rows of started prefills are kept free: better a decode that waits for a row than a prefill that starves.
        """
        settings, batch = self._settings, self._batch
        rows = batch.open_rows(request for request, _ in self._to_pause)
        count = len(batch.ahead[rows])
        hard = settings.max_num_seqs - len(self._queues.prefilling)
        limit = min(hard, settings.max_decode_rows or hard)
        if not self._policy.terms.decodes_first:
            limit = min(limit, self._rows_by_arrival(packing))
        elif packing.floor_left:
            limit = min(limit, settings.max_num_batched_tokens - self._tokens_before_decodes(packing))
        if count <= limit:
            return rows
        overdue = np.zeros(len(batch), np.bool_)
        if settings.next_token_deadline_s:
            overdue = now - batch.scheduled_at[: len(batch)] >= settings.next_token_deadline_s
            limit = max(limit, min(hard, int(overdue[rows].sum())))
        order = self._turns(overdue)
        if not isinstance(rows, slice):
            order = order[np.isin(order, rows)]
        order = order[: max(min(1, hard), limit)]
        order.sort()
        return order

    def _tokens_before_decodes(self, packing: Packing) -> int:
        """Tokens of the step that prefills have before decodes."""
        started = sum(min(r.unplanned_tokens, packing.chunk_limit()) for r in self._queues.prefilling)
        return min(packing.floor_left, started + self._queues.waiting_tokens)

    def _rows_by_arrival(self, packing: Packing) -> int:
        """How many decodes come before the step's tokens are gone, when started prefills share their order."""
        left = self._settings.max_num_batched_tokens
        arrivals = sorted(request.arrival for request in self._batch.requests)
        for request in self._queues.prefilling:
            before = bisect_left(arrivals, request.arrival)
            left = max(min(before, left), left - min(request.unplanned_tokens, packing.chunk_limit()))
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
        pausing = [request for request, _ in self._to_pause]
        started = [request for request in queues.prefilling if request not in pausing]
        if policy.reorders:
            started.sort(key=lambda r: (-policy.total(r, now), r.arrival))
        queues.lacking_blocks = None
        new = self._next_with_row(now)
        self._blocked = new is None
        position = 0
        while not packing.full:
            head = started[position] if position < len(started) else None
            if head is None and new is None:
                break
            if head is not None and (new is None or not policy.reorders or self._before(head, new, now)):
                position += 1
                if policy.reorders and len(started) > 1:
                    head.priority_reason = policy.reason(head, queues.prefilling[0], now)
                if head.under_way and head.expects_blocks_until:
                    continue  # where it goes on is known when its chunk is over
                if num_tokens := packing.chunk(head):
                    if head.expects_blocks_until:
                        num_tokens = self._take_over(packing, head, now)
                    self._add_chunk(packing, head, num_tokens)
                continue
            if new is None or not self._start(packing, new, now):
                new = None
                continue
            new = self._next_with_row(now)

    def _next_with_row(self, now: float) -> Request | None:
        """`_next_new`, which is not asked in vain: without a free row nobody starts."""
        if self._queues.num_computing < self._settings.max_num_seqs:
            return self._next_new(now)
        self._blocked = True
        return None

    def _before(self, head: Request, new: Request, now: float) -> bool:
        return self._policy.total(head, now) >= self._policy.total(new, now)

    def _next_new(self, now: float) -> Request | None:
        """Who starts next: preempted requests before others of their class, and nobody before an older adoption."""
        queues, policy = self._queues, self._policy
        best = queues.line.best(now) if self._may_join(now) else None
        while best is not None and self._follow(best):
            best = queues.line.best(now)
        if best is not None and queues.adoption_before(best):
            best = None
        if not queues.preempted:
            return best
        back = queues.preempted[0]
        if policy.reorders:
            back = max(queues.preempted, key=lambda r: (policy.total(r, now), -r.arrival))
        if best is None or not policy.terms.by_class or best.priority >= back.priority:
            return back
        return best if policy.total(best, now) > policy.total(back, now) else back

    def _follow(self, request: Request) -> bool:
        """A running prefill computes what the request needs next: it waits for that, out of the way."""
        following = self._queues.following
        if not following.has_leaders or request.no_cache:
            return False
        self._residency.hash_all(request)
        return following.follow(request, self._settings.block_size, by_class=self._policy.terms.by_class)

    def _start(self, packing: Packing, request: Request, now: float) -> bool:
        """KV admission and the first chunk; False and no change when blocks, tokens or time do not allow it."""
        num_tokens = packing.chunk(request)
        if not num_tokens:
            return False
        line = self._queues.line
        is_alone = request.state is State.WAITING and len(line) == 1
        first = None if is_alone else line.first()
        copy = self._valid_copy(request)
        self._yield_fetched(request)
        for idle in self._idle_holders(request):
            self._preempt(idle, now)
        whole_blocks = copy is not None or self._restorable(request)
        copies = self._residency.admit(request, self._spare_blocks(), whole_blocks=whole_blocks)
        self._blocked = copies is None
        if copies is None:
            self._queues.lacking_blocks = request
            return False
        self.fetches.request_left(request.key)
        packing.plan.copies += copies
        packing.copied += [source for source, _ in copies]
        request.priority_reason = self._policy.reason(request, first, now) if first is not None else "arrival"
        if copy is None and whole_blocks:
            self._restore(packing, request)
        if request.state is State.WAITING:
            request.ledger.cached_tokens = request.computed_tokens
            if request.computed_tokens:
                self.service.charge_input(request.tenant_index, 0, request.computed_tokens)
            self._joining = max(0, self._joining - 1)
        else:
            self._returned(request, now)
        if copy is not None:
            self._swap_in(packing, request, copy, now)
        self._queues.move(request, State.PREFILLING, now)
        if not request.no_cache:
            self._residency.hash_all(request)
            self._queues.following.lead(request, self._settings.block_size, now)
        if request.computed_tokens:
            # What the cache or the host gave back may have made the chunk smaller, never larger than was asked for.
            num_tokens = max(1, packing.chunk(request))
        if request.expects_blocks_until:
            num_tokens = self._take_over(packing, request, now)
        self._add_chunk(packing, request, num_tokens)
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
        if not queues.line:
            self._joining = 0
        elif not queues.num_computing and not queues.preempted:
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

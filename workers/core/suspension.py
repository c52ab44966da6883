"""Who gives blocks up for a while: preempted for others, or waiting for a tool that its client runs.

    preempted   back in line, by the cheapest way: blocks dropped and computed again, or copied to the host and back, or
                the request ends here and another worker takes it (`refused`)
    TOOL_WAIT   no step names it; what becomes of its blocks is chosen by cost (`workers.core.tool_wait`). Under
                pressure its blocks go first, its state does not change. It comes back with the tool's tokens: a
                prefill of what is new

Copies to the host are part of the next step, before it writes anything: until that step is over nobody outside it gets
blocks (`Roster.reserve_adoptions`). A request that is to pause while steps name it pauses when they are over; what it
has sampled behind the call's end by then is forgotten before anything of it can enter the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from headrace.core.records import FinishReason
from headrace.errors import InvariantError, Rejected
from headrace.ids import RequestKey
from workers.core.batch import Ints
from workers.core.journal import Event
from workers.core.limits import refusal
from workers.core.packing import Packing
from workers.core.preemption import Way, require
from workers.core.request import TRANSITIONS, HostCopy, Keep, Request, State
from workers.core.roster import Roster
from workers.core.stages import Stage
from workers.core.tool_wait import Call, Costs, Stand, costs

_EASE = 0.1
_PRESSURE_FALL = 0.99


class Suspension(Roster):
    """See `workers.core.scheduler.Scheduler`, which is the one that workers make."""

    _pause_s = 0.0
    """How long preempted requests waited for their return, a running average."""

    # ---- tools

    def pause(self, key: RequestKey, how: Keep | Call, now: float) -> bool:
        """The request's client runs a tool: nothing is computed until `resume`. `paused` tells when it waits, and what
        became of its blocks: as told, or for a `Call` whatever costs least.

        False when it is gone, hands off, or has sampled nothing here yet.
        """
        request = self.requests.get(key)
        if request is None or not _can_pause(request):
            return False
        if self._flights.naming(request) is not None:
            self._to_pause.append((request, how))
        else:
            self._pause(request, how, now)
        return True

    def resume(self, key: RequestKey, token_ids: Sequence[int], now: float) -> bool:
        """The tool has answered with `token_ids`, which are input; there may be none.

        False when the request is gone, not paused, or `resume_refusal` has a reason: then it still waits.
        """
        request = self.requests.get(key)
        if request is None or self.resume_refusal(key, len(token_ids)) is not None:
            return False
        self._to_pause = [(r, how) for r, how in self._to_pause if r is not request]
        if request.state is not State.TOOL_WAIT:
            return False
        if token_ids:
            request.insert(list(token_ids))
        self.admission.rebook(key, request.num_tokens + request.expected_output_tokens, now)
        if request.traced:
            self._journal.note(Event.RESUMED, request, now)
        request.clock.enter(Stage.QUEUE, now)
        # A row that somebody has left is free when the steps that name it are over.
        rows = len(self._queues.prefilling) + len(self._batch)
        fits = rows < self._settings.max_num_seqs and bool(request.block_ids)
        if fits and request not in self._to_offload and self._residency.grow(request):
            self._queues.move(request, State.PREFILLING, now)
            return True
        self._drop(request)
        self._queues.move(request, State.PREEMPTED, now)
        return True

    def resume_refusal(self, key: RequestKey, num_tokens: int) -> Rejected | None:
        """Why a tool's answer of so many tokens can never be taken in: too_long | too_large."""
        request = self.requests.get(key)
        return None if request is None else refusal(request, self._settings, self._pool.num_blocks, num_tokens)

    def reserve_adoptions(self, now: float) -> list[RequestKey]:
        """As in Roster. Blocks of paused requests come from the next step, or at once when there is no copy to make."""
        head = self._queues.next_adoption()
        if head is not None:
            self._yield_fetched(head)
        for idle in [] if head is None else self._idle_holders(head):
            if self._pool.blocks_for(idle.computed_tokens) > self._host.available_blocks:
                self._drop_paused(idle, now)
            elif idle not in self._to_offload:
                self._to_offload.append(idle)
        return super().reserve_adoptions(now)

    def _idle_holders(self, wanted_by: Request) -> list[Request]:
        """Paused requests whose blocks `wanted_by` lacks to start, the largest first; none when all are too few."""
        if not self._queues.paused:
            return []
        lacking = self._residency.lacking(wanted_by, self._spare_blocks())
        idle = [r for r in self._queues.paused.values() if r.block_ids and r.priority >= wanted_by.priority]
        idle.sort(key=lambda r: (-len(r.block_ids), r.arrival))
        enough = (n for n, freed in enumerate(self._residency.freed_by(idle), 1) if freed >= lacking)
        return idle[: next(enough, 0)] if lacking else []

    def _pause_wanted(self, now: float) -> None:
        wanted, self._to_pause = self._to_pause, []
        for request, how in wanted:
            if self._flights.naming(request) is not None:
                self._to_pause.append((request, how))
            elif _can_pause(request):
                self._pause(request, how, now)

    def _pause(self, request: Request, how: Keep | Call, now: float) -> None:
        chosen = None
        if isinstance(how, Call):
            chosen = costs(self._stand(request, how, now), how)
            keep = self._keep(request, how, chosen)
        else:
            keep = how
        self.counters["paused"] += 1
        self.counters[f"tool_{keep}"] += 1
        if request.traced:
            terms = None if chosen is None else chosen.rounded()
            self._journal.note(Event.PAUSED, request, now, keep, cost_ms=terms)
        self._queues.move(request, State.TOOL_WAIT, now)
        request.clock.enter(Stage.TOOL_WAIT, now)
        request.preempted_at = None
        if isinstance(how, Call):
            self._residency.cut(request, how.num_output)
        if request.block_ids:
            self._residency.publish(request)  # whoever goes on with it, here or elsewhere, may need them
        if keep is not Keep.KEEP:
            self.admission.rebook(request.key, 0, now)
        if keep is Keep.OFFLOAD:
            self._to_offload.append(request)
        elif keep is Keep.DROP:
            self._drop(request)
        self.paused.append((request.key, keep))

    def _keep(self, request: Request, call: Call, chosen: Costs) -> Keep:
        """The cheapest, where there is a choice."""
        if not request.block_ids:
            return Keep.DROP if request.host is None else Keep.OFFLOAD
        if not self._residency.can_cut(request, call.num_output):
            return Keep.DROP
        return chosen.cheapest

    def _stand(self, request: Request, call: Call, now: float) -> Stand:
        pool, settings = self._pool, self._settings
        computed = min(request.computed_tokens, request.num_input + call.num_output - 1)
        table = request.block_ids[: pool.blocks_for(computed)]
        token_ms = 1000.0 * self._pace.prefill_token_s
        return Stand(
            kv_blocks=len(table),
            held_blocks=sum(1 for block in table if pool.refs(block) == 1),
            private_blocks=len(table) if request.no_cache else 0,
            private_tokens=computed if request.no_cache and table else 0,
            block_ms=token_ms * pool.block_size,
            token_ms=token_ms,
            copy_ms=1000.0 * settings.host_copy_block_s,
            return_ms=1000.0 * self._pause_s,
            blocks_per_s=self._see_rate(now),
            free_blocks=pool.free_blocks,
            available_blocks=pool.available_blocks,
            saved_ms=self._eviction_ms(),
            free_host_blocks=self._host.available_blocks,
            host_blocks=self._host.num_blocks,
            time_left_s=inf if request.deadline is None else max(0.0, request.deadline - now),
        )

    def _see_rate(self, now: float) -> float:
        hits = self._residency.cached_tokens_hit // self._settings.block_size
        return self._take_rate.see(self._pool.allocated + hits, now)

    def _eviction_ms(self) -> float:
        """Prefill time that an eviction gives up: what a cached block has saved so far, on average."""
        entered = len(self._cache) + self._pool.evictions
        return self._residency.saved_prefill_ms / entered if entered else 0.0

    # ---- preemption

    def _preempt(self, request: Request, now: float) -> None:
        """Takes the request's blocks; it stays in line, or leaves when another worker does it sooner."""
        if request.state is State.TOOL_WAIT:
            if request.traced:
                self._journal.preempted(request, "vacated", None, now)
            self._vacate(request, now)
            return
        restore = self._preemption.restore(request, self._host.available_blocks, self._pause_s)
        if restore.way is Way.ROUTE:
            self.counters["routed"] += 1
            self.refused.append((request.key, "preempted"))
            if request.traced:
                self._journal.preempted(request, Way.ROUTE, self._preemption.score(request, restore, now), now)
            self._end(request, FinishReason.ERROR, now)
            return
        request.preemptions += 1
        request.preempted_at = now
        self.counters["preemptions"] += 1
        self._pressure += len(request.block_ids) / 8
        swapped = restore.way is Way.SWAP and self._copy_out(request)
        if not swapped:
            request.lost_tokens = max(request.lost_tokens, request.computed_tokens)
        if request.traced:
            way = Way.SWAP if swapped else Way.RECOMPUTE
            self._journal.preempted(request, way, self._preemption.score(request, restore, now), now)
        self._queues.move(request, State.PREEMPTED, now)
        self._residency.publish(request, to_the_end=True)
        self._residency.release(request)
        request.clock.enter(Stage.PREEMPTED, now)

    def _vacate(self, request: Request, now: float) -> None:
        """A paused request's blocks are needed: to the host where there is room, else dropped."""
        self._copy_out(request)
        self._drop_paused(request, now)

    def _drop_paused(self, request: Request, now: float) -> None:
        """Nothing is reserved for it until it resumes."""
        self._drop(request)
        self.admission.rebook(request.key, 0, now)

    def _drop(self, request: Request) -> None:
        if request in self._to_offload:
            self._to_offload.remove(request)
        self._residency.publish(request, to_the_end=True)
        self._residency.release(request)

    def _copy_out(self, request: Request) -> bool:
        """Plans the copy of all computed blocks to the host, before the next step writes. False without room."""
        if request.host is not None:
            self._drop_copy(request)
        table = request.block_ids[: self._pool.blocks_for(request.computed_tokens)]
        copy = self._host.take(request, len(table), request.computed_tokens) if table else None
        if copy is None:
            return False
        request.host = copy
        self._swap_out += zip(table, copy.blocks, strict=True)
        self.counters["swapped_out"] += 1
        return True

    def _take_swap_out(self, now: float) -> list[tuple[int, int]]:
        """Copies for the step that is planned now; paused requests that are to be offloaded give their blocks up."""
        waiting, self._to_offload = self._to_offload, []
        for request in waiting:
            if request.state is State.TOOL_WAIT and request.block_ids:
                self._vacate(request, now)
        self._pressure *= _PRESSURE_FALL
        pairs, self._swap_out = self._swap_out, []
        return pairs

    def _choose_victim(
        self, candidates: list[Request], wanted_by: Request, now: float, *, for_row: bool = False
    ) -> Request | None:
        """Whose blocks go; those of paused requests before all others, but those have no row to give."""
        paused = [] if for_row else self._queues.paused.values()
        idle = [r for r in paused if r.block_ids and r.priority >= wanted_by.priority]
        if idle:
            return max(idle, key=lambda r: (len(r.block_ids), r.arrival))
        return self._preemption.choose_victim(candidates, wanted_by, self._host.available_blocks, self._pause_s, now)

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

    def _computing(self) -> list[Request]:
        return [*self._queues.prefilling, *(r for r in self._batch.requests if r.state is State.DECODING)]

    # ---- return

    def _valid_copy(self, request: Request) -> HostCopy | None:
        """The host copy of the request's last preemption; a stale one is dropped, and its KV computed again."""
        copy = request.host
        if copy is not None and (copy.preemption != request.preemptions or copy.num_tokens > request.num_tokens):
            self._drop_copy(request)
            return None
        return copy

    def _swap_in(self, packing: Packing, request: Request, copy: HostCopy, now: float) -> None:
        """Blocks that the cache did not give come from the host; the rest of the prefill starts behind them."""
        matched = request.computed_tokens // self._settings.block_size
        if request.computed_tokens % self._settings.block_size:
            raise InvariantError(f"request {request.key}: the cache gave a part of a block")
        packing.plan.swap_in += list(zip(copy.blocks[matched:], request.block_ids[matched:], strict=False))
        packing.swapped_in.append(copy)
        packing.landing[request.key] = request.computed_tokens
        request.host = None
        request.computed_tokens = max(request.computed_tokens, min(copy.num_tokens, request.num_tokens - 1))
        self.counters["swapped_in"] += 1
        if request.traced:
            self._journal.note(Event.SWAPPED_IN, request, now)

    def _restorable(self, request: Request) -> bool:
        """The host tier has what comes behind the blocks that the device has."""
        if not self._host.num_blocks:
            return False
        chain = self._residency.chain(request)
        return self.tiering.host_run(chain, len(self._cache.match(chain))) > 0

    def _restore(self, packing: Packing, request: Request) -> None:
        """What the host tier has of the blocks that the request computes next is copied from there before it does;
        nothing where the step copies a part of the first one from another block, which would come over it."""
        chain, size = self._residency.chain(request), self._settings.block_size
        start = request.computed_tokens // size
        count = self.tiering.host_run(chain, start)
        if not count or any(target == request.block_ids[start] for _, target in packing.plan.copies):
            return
        copies = self.tiering.restore(chain[start : start + count])
        packing.plan.swap_in += [
            (copy.host_block, block) for copy, block in zip(copies, request.block_ids[start:], strict=False)
        ]
        packing.restored += copies
        packing.landing.setdefault(request.key, request.computed_tokens)
        request.computed_tokens = (start + count) * size

    def _take_over(self, packing: Packing, request: Request, now: float) -> int:
        """What came from disk since a started request was last looked at is not computed. Returns the tokens to
        compute: a block's at most while the next block is promised."""
        before = request.computed_tokens
        self._restore(packing, request)
        if request.computed_tokens > before:
            request.expects_blocks_until = self.tiering.promise(now)
            request.ledger.cached_tokens += request.computed_tokens - before
            self.service.charge_input(request.tenant_index, 0, request.computed_tokens - before)
        num_tokens = max(1, packing.chunk(request))
        size = self._settings.block_size
        if not self.tiering.is_coming(self._residency.chain(request), request.computed_tokens // size):
            request.expects_blocks_until = 0.0
        return min(num_tokens, size) if now < request.expects_blocks_until else num_tokens

    def _returned(self, request: Request, now: float) -> None:
        """The request goes on after a preemption: not again a victim at once."""
        request.protected_tokens = request.num_tokens + self._settings.min_progress_tokens
        if request.preempted_at is not None:
            self._pause_s += _EASE * (now - request.preempted_at - self._pause_s)
            request.preempted_at = None


def _can_pause(request: Request) -> bool:
    """It has sampled here, or will without anything from outside."""
    return State.TOOL_WAIT in TRANSITIONS[request.state] and not request.hand_off

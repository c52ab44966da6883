"""Who is on this worker: requests come in, get or change blocks, and leave; steps are the scheduler's.

Nobody waits while it holds a part of what it needs: an adoption takes all its blocks or none. Preempted requests are
let in first; prefills and adoptions otherwise share one order of arrival. A request that ends while steps name its
blocks is FINISHED at once, and its blocks are given back when the last of them is applied.

Does not: read clocks, move bytes, talk.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from headrace.core.records import CacheChange, FinishReason, TokenLogprobs
from headrace.errors import InvariantError, Rejected
from headrace.ids import RequestKey
from workers.core.holdings import Holdings
from workers.core.journal import Event
from workers.core.limits import refusal
from workers.core.request import Request, State
from workers.core.residency import quarantine_holder
from workers.core.stages import Stage
from workers.core.staging import FetchSource, StageState


class Roster(Holdings):
    """See `workers.core.scheduler.Scheduler`, which is the one that workers make."""

    # ---- coming in

    def submit(self, request: Request, now: float) -> Rejected | None:
        """Queue a request to be prefilled here. A reason of `limits.refusal` or of `QueueAdmission.refusal`.

        With `fetch_blocks` it may wait for a read first: `fetches` has what to read, or nothing.
        """
        if request.adopted:
            raise InvariantError(f"request {request.key} is to be adopted, not prefilled")
        rejected = self._accept(request, now)
        if rejected is None:
            request.clock.enter(Stage.QUEUE, now)
        return rejected

    def adopt(self, request: Request, now: float) -> Rejected | None:
        """Queue a request whose KV will be pulled (`request.adopted`). Reasons as for submit."""
        if not request.adopted or request.hand_off:
            raise InvariantError(f"request {request.key} is not one to adopt")
        return self._accept(request, now)

    def reserve_adoptions(self, now: float) -> list[RequestKey]:
        """Give blocks to as many adoptions as fit, in order: `computed_tokens` of each are in blocks that it shares
        with the cache, its other tokens are to be pulled into its other blocks."""
        reserved: list[RequestKey] = []
        if self._flights.copies_out:
            return reserved  # blocks that are free by now are still to be copied from
        while (request := self._queues.next_adoption()) is not None:
            self._yield_fetched(request)
            if self._residency.admit(request, self._spare_blocks()) is None:
                break
            request.ledger.cached_tokens = request.computed_tokens
            self._queues.move(request, State.TRANSFERRING, now)
            if request.traced:
                self._journal.note(Event.RESERVED, request, now)
            reserved.append(request.key)
        return reserved

    def activate(
        self,
        key: RequestKey,
        output_ids: Sequence[int],
        num_tokens: int,
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        """All KV of the first `num_tokens` tokens is here and verified: the request decodes from the next step on.

        `output_ids`: all output over all attempts, the last just sampled by the peer (the gateway may have known it
        when it asked to adopt). `logprobs`: of the last ones, where the request asks. False when the request is gone or
        already active. Raises InvariantError when the numbers do not fit the request.
        """
        request = self.requests.get(key)
        if request is None or not request.adopted or request.state is not State.TRANSFERRING:
            return False
        known = request.num_output
        if list(output_ids[:known]) != request.output_ids or not output_ids:
            raise InvariantError(f"request {key}: handed-off output does not continue the known one")
        room = len(request.block_ids) * self._pool.block_size
        if num_tokens != request.num_input + len(output_ids) - 1 or num_tokens > room:
            raise InvariantError(f"request {key}: handed-off KV does not cover all tokens but the last")
        for token_id in output_ids[known:]:
            request.append(token_id)
        request.computed_tokens = num_tokens
        self._residency.publish(request, to_the_end=True)
        if request.traced:
            self._journal.adopted(request, now)
        request.unsaid = request.emitted < request.num_output
        self._queues.move(request, State.DECODING, now)
        self._fresh.append(request)
        if request.unsaid:
            request.handed_logprobs = tuple(logprobs)
            self._unsaid.append(request)
        request.clock.enter(Stage.QUEUE, now)
        return True

    # ---- going out

    def finish(self, key: RequestKey, reason: FinishReason, now: float) -> bool:
        """End a request in whatever state. False when it is unknown or has ended: a second call changes nothing.

        An adoption that is being pulled is ended as by `finish_adoption` with every pull target quarantined.
        """
        request = self.requests.get(key)
        if request is None or request.state is State.FINISHED:
            return False
        pulling = request.adopted and request.state is State.TRANSFERRING
        self._end(request, reason, now, self._residency.pull_targets(request) if pulling else ())
        return True

    def finish_adoption(self, key: RequestKey, reason: FinishReason, quarantined: Sequence[int], now: float) -> bool:
        """End an adoption that is not active; only the `quarantined` pull targets may still be written to.

        They stay aside until `release_quarantine(key)`. False when the request is gone, has ended, or is active.
        """
        request = self.requests.get(key)
        if request is None or not request.adopted or request.state not in (State.WAITING, State.TRANSFERRING):
            return False
        self._end(request, reason, now, quarantined)
        return True

    def release_quarantine(self, key: RequestKey) -> int:
        """The reads of an ended adoption are terminal: its blocks are free. Returns how many (0: there were none)."""
        return self._pool.release_quarantine(quarantine_holder(key))

    def release_handed_off(self, key: RequestKey, now: float) -> bool:
        """The reader has what it needs. False when the request is gone; InvariantError when it was never handed off."""
        request = self.requests.get(key)
        if request is None or request.state is State.FINISHED:
            return False
        if not request.hand_off or request.state is not State.TRANSFERRING:
            raise InvariantError(f"request {key} is released by a reader in state {request.state}")
        self._end(request, FinishReason.HANDED_OFF, now)
        return True

    def expire(self, now: float) -> list[RequestKey]:
        """End the requests whose deadline has passed, as `finish` does; in order of their deadlines."""
        expired: list[RequestKey] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heappop(self._deadlines)
            if self.finish(key, FinishReason.DEADLINE, now):
                expired.append(key)
        return expired

    # ---- prefixes that are read from a peer

    def fetch_arrived(self, key: RequestKey, num_blocks: int, now: float) -> int:
        """The first blocks of a fetch are here and verified: they are in the cache, and the request waits in line.
        Returns how many are new."""
        fresh = self.fetches.arrived(key, num_blocks)
        self._end_fetching(key, now)
        return fresh

    def fetch_failed(self, key: RequestKey, quarantined: Sequence[int], now: float) -> None:
        """The request waits in line for what the cache has; `quarantined` targets stay aside until
        `release_quarantine(key)`."""
        self.fetches.failed(key, quarantined)
        self._end_fetching(key, now)

    def open_fetch(self, key: RequestKey, reader: str, hashes: Sequence[bytes], now: float) -> FetchSource | Rejected:
        """For a peer's fetch: the leading run of `hashes` that is cached in any tier, as far as there is room.

        Rejected with closed | no_room | busy, or a reason of `Staging.begin`, when there is nothing to give.
        """
        if self.admission.closed:
            return Rejected("closed")
        blocks = self._pins.pin(key, reader, hashes, self._spare_blocks())
        on_device, reason = len(self._cache.match(hashes)), "no_room"
        if len(blocks) == on_device:
            reason = self._stage(key, reader, hashes[on_device:], now)
        return FetchSource(blocks, is_over=bool(reason)) if blocks or not reason else Rejected(reason)

    def fetch_source(self, key: RequestKey) -> FetchSource | None:
        """What of it is on the device by now; None: its lease is over."""
        stage = self.staging.get(key)
        if stage is None:
            return FetchSource(self._pins.get(key), is_over=True) if key in self._pins else None
        is_over = stage.state is StageState.SEALED
        return FetchSource((*self._pins.get(key), *stage.ready), is_over, stage.reason)

    def close_fetch(self, key: RequestKey) -> bool:
        """The lease is over. False when it was already."""
        pinned, staged = self._pins.unpin(key), self.staging.end(key)
        return pinned or staged

    def revocable_fetches(self) -> list[RequestKey]:
        """Leases of fetching peers that may be revoked, where no read is in flight: somebody here lacks blocks."""
        lacks = self._queues.lacking_blocks is not None or self._queues.adopting
        return list(dict.fromkeys([*self._pins.keys, *self.staging.keys])) if lacks else []

    # ---- readers

    def pin(self, key: RequestKey) -> bool:
        """A reader's lease is open on a hand_off request: it is no victim. False when the request is gone."""
        request = self.requests.get(key)
        if request is None or request.state is State.FINISHED:
            return False
        if not request.hand_off:
            raise InvariantError(f"request {key} has no reader")
        request.pinned = True
        return True

    def unpin(self, key: RequestKey) -> None:
        """The lease is over, the request is not."""
        if (request := self.requests.get(key)) is not None:
            request.pinned = False

    # ---- the cache

    def clear_cache(self, tenant: str | None) -> int:
        """Forget what is cached for a tenant, or for all (None), in every tier. Returns how many blocks of the device.

        Blocks in use go when their requests leave them; what such requests have computed, or have on the host, never
        enters the cache again.
        """
        for request in self.requests.values():
            if tenant not in (None, request.tenant):
                continue
            if request.block_ids or request.host is not None:
                self._queues.following.left(request)
                request.no_cache = True
        self.tiering.clear(tenant)  # first: the log begins a new epoch when nothing is left
        return self._cache.clear(tenant)

    def cache_changes(self, since_epoch: int, since_seq: int, most: int = 1 << 14) -> CacheChange:
        """See `CacheLog.changes`."""
        return self._cache.log.changes(since_epoch, since_seq, most)

    # ---- inside

    def _accept(self, request: Request, now: float) -> Rejected | None:
        if request.key in self.requests or request.state is not State.WAITING:
            raise InvariantError(f"request {request.key} is submitted twice")
        engine_s = self._policy.prefill_s(request) if self._pace.known else 0.0
        rejected = refusal(request, self._settings, self._pool.num_blocks)
        rejected = rejected or self.admission.refusal(request, engine_s, now)
        if rejected is not None:
            self._journal.refused(request, rejected.reason, now)
            return rejected
        self._arrivals += 1
        request.arrival = self._arrivals
        request.accepted_at = now
        request.tenant_index = self.service.enter(request.tenant)
        self.service.raise_to(request.tenant_index, request.tenant_service)
        self._classes[request.priority] += 1
        request.level = self._policy.join_level(request.num_tokens)
        self.requests[request.key] = request
        self.admission.enter(request, engine_s, now)
        request.fetching = bool(request.fetch_blocks) and self._begin_fetch(request, now)
        if not request.adopted:
            request.known_cached = self._cached_tokens(request)
        self._queues.add(request, now)
        if self._settings.disk_blocks and not request.adopted:
            self.tiering.prefetch(request, self._residency.chain(request), now)
        request.traced = self._journal.samples(request.request_id)
        if request.traced:
            self._journal.submitted(request, self._residency.identity(request), now)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.key))
            if len(self._deadlines) > 2 * len(self.requests) + 64:
                # Most of these requests ended long before their deadlines.
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self.requests]
                heapify(self._deadlines)
        return None

    def _begin_fetch(self, request: Request, now: float) -> bool:
        if self._flights.copies_out:
            return False  # blocks that are free by now are still to be copied from
        if self._cached_tokens(request) >= request.fetch_blocks * self._pool.block_size:
            return False
        return self.fetches.begin(request, self._spare_blocks(), self._pace.prefill_token_s, now) is not None

    def _stage(self, key: RequestKey, reader: str, hashes: Sequence[bytes], now: float) -> str:
        """Empty, or why nothing comes from below the device."""
        if self._flights.copies_out and self.tiering.tiers.run(hashes[:1]):
            return "busy"  # blocks that are free by now are still to be copied from
        return self.staging.begin(key, reader, hashes, self._spare_blocks(), self._pace.prefill_token_s, now)

    def _end_fetching(self, key: RequestKey, now: float) -> None:
        request = self.requests.get(key)
        if request is not None and request.state is State.WAITING and request.fetching:
            self._queues.join_line(request, now)

    def _yield_fetched(self, wanted_by: Request) -> None:
        """What was fetched for others and waits goes before anybody lacks blocks; it stays cached until it is taken."""
        if len(self.fetches) and (lacking := self._residency.lacking(wanted_by, self._spare_blocks())):
            self.fetches.let_go(lacking, keep=wanted_by.key)

    def _cached_tokens(self, request: Request) -> int:
        """Tokens of a request without blocks that need not be computed, by what all tiers have now."""
        return self.tiering.cached_tokens(self._residency.chain(request))

    def _end(self, request: Request, reason: FinishReason, now: float, quarantined: Sequence[int] = ()) -> None:
        if request.traced:
            self._journal.finished(request, reason, now)
        last = self._flights.naming(request)
        self._queues.move(request, State.FINISHED, now)
        request.finish_reason = reason
        if last is None:
            self._forget(request, quarantined)
        else:
            last.dropped.append(request)

    def _forget(self, request: Request, quarantined: Sequence[int] = ()) -> None:
        self._residency.publish(request, to_the_end=True)
        self._residency.release(request, quarantined)
        self.fetches.request_left(request.key)
        self._drop_copy(request)
        self.service.leave(request.tenant_index)
        self._classes[request.priority] -= 1
        if not self._classes[request.priority]:
            del self._classes[request.priority]
        del self.requests[request.key]

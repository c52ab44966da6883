"""The worker's middle: what gateways ask for goes into the scheduler, what steps mean goes out over sessions and
leases.

Everything here runs on the event loop and takes the engine's lock for as long as it looks at or changes the scheduler;
the engine thread calls only `step_began` and `step_ended`, which hand over to the loop. Implements both sides of
`kvtransfer.service`: `LeaseSource` (this worker's blocks for readers) and `HandoffSink` (requests adopted from others).
Longer than others because all that gateways, readers and the engine may say meets here, under one lock.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from headrace.clock import Clock, monotonic
from headrace.core.records import CacheChange, FinishReason, TokenLogprobs, token_hash
from headrace.errors import Code, Rejected
from headrace.ids import RequestKey
from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.identity import request_root
from kvtransfer.service import (
    End,
    HandOffRecord,
    HandoffStats,
    LeaseGrant,
    LeaseHolder,
    LeaseReader,
    LeaseSource,
)
from kvtransfer.wire import ledger_to_proto, logprobs_to_proto
from workers.adopted import AdoptedRequest
from workers.core.plan import StepEvents
from workers.core.request import Request, State
from workers.core.scheduler import Scheduler
from workers.engine import Engine
from workers.fetcher import Fetcher
from workers.intake import REFUSAL_CODES, REFUSAL_TEXTS, Entry, request_from
from workers.sessions import GatewaySession
from workers.tool_waits import ToolWaits

log = logging.getLogger("headrace.workers.hub")


class Hub(ToolWaits):
    def __init__(
        self,
        scheduler: Scheduler,
        model_identity: bytes,
        block_size: int,
        make_holder: Callable[[LeaseSource], LeaseHolder],
        reader: LeaseReader,
        clock: Clock = monotonic,
    ) -> None:
        self.sessions: set[GatewaySession] = set()
        self.counters: dict[str, float] = defaultdict(float)
        self.refusals: Counter[str] = Counter()
        """Requests that the scheduler did not take or gave up, by reason."""
        self._scheduler = scheduler
        self._identity = model_identity
        self._block_size = block_size
        self._clock = clock
        self._keys = itertools.count(1)
        self._entries: dict[RequestKey, Entry] = {}
        self._adopted: dict[RequestKey, Entry] = {}
        """Those of them whose KV comes from elsewhere."""
        self._handles: dict[tuple[GatewaySession, int], Entry] = {}
        self._names: dict[tuple[str, int], Entry] = {}
        self._loop = asyncio.get_running_loop()
        self.holder = make_holder(self)
        self.reader = reader
        self.fetcher = Fetcher(scheduler, reader, self.holder, self.counters, clock, self._new_key, self._reserve)
        self._engine: Engine | None = None

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self.fetcher.lock = engine.lock

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    # ---- from gateways

    def open_session(self, session: GatewaySession) -> None:
        self.sessions.add(session)

    def close_session(self, session: GatewaySession) -> None:
        """The gateway is gone: cancel its attempts, which breaks their leases (SPEC A6)."""
        self.sessions.discard(session)
        for entry in [e for e in self._entries.values() if e.session is session]:
            self._cancel(entry, FinishReason.CANCELLED)

    def submit(self, session: GatewaySession, message: pb.Submit) -> None:
        session.submit_seq = message.submit_seq
        body = message.body
        request = request_from(body, self._new_key(), self._root(body), hand_off=message.hand_off)
        request.deadline = self._clock() + body.time_left_s
        request.fetch_blocks = self.fetcher.wants(message)
        entry = Entry(request, session, message.handle, len(body.output_ids), request.deadline)
        with self.engine.lock:
            rejected = self._scheduler.submit(entry.request, self._clock())
            self.engine.wake()
        self._admitted(entry, rejected)
        if rejected is None:
            self.fetcher.begin(request, message.fetch.source)

    def adopt(self, session: GatewaySession, message: pb.Adopt) -> None:
        session.submit_seq = message.submit_seq
        body = message.body
        request = request_from(body, self._new_key(), self._root(body), adopted=True)
        entry = Entry(request, session, message.handle, len(body.output_ids), self._clock() + body.time_left_s)
        with self.engine.lock:
            rejected = self._scheduler.adopt(request, self._clock())
        self._admitted(entry, rejected)
        if rejected is None:
            sink = AdoptedRequest(self, entry)
            entry.adoption = self.reader.adopt(
                request.request_id, request.attempt, message.source, sink, message.number
            )
            self._reserve()

    def finish(self, session: GatewaySession, handle: int, reason: str) -> None:
        """A gateway's Finish. An unknown handle has ended already."""
        entry = self._handles.get((session, handle))
        if entry is not None:
            self._cancel(entry, FinishReason.STOP if reason == "stop" else FinishReason.CANCELLED)

    def meet(self, session: GatewaySession, holders: Sequence[pb.PeerAddress]) -> None:
        """Pairs with workers that requests may send this one to, and tells how that went."""
        for holder in holders:
            self.reader.meet(holder, lambda paired: session.put(pb.SessionResponse(paired=paired)))

    def cache_changes(self, epoch: int, seq: int) -> CacheChange | None:
        """What has changed in the cache since that position; None: nothing."""
        with self.engine.lock:
            change = self._scheduler.cache_changes(epoch, seq)
        return None if (change.epoch, change.to_seq) == (epoch, seq) else change

    def clear_cache(self, tenant: str | None) -> None:
        """Forgets what is cached for the tenant, or for all (None), in every tier."""
        self.fetcher.clear(tenant)
        with self.engine.lock:
            self._scheduler.clear_cache(tenant)
        log.info("cache_cleared tenant=%s", "*" if tenant is None else tenant)
        for session in self.sessions:
            session.load_changed()

    def _new_key(self) -> RequestKey:
        return RequestKey(next(self._keys))

    def _root(self, body: pb.RequestBody) -> bytes:
        return request_root(self._identity, body.namespace)

    def _admitted(self, entry: Entry, rejected: Rejected | None) -> None:
        if rejected is None:
            self._entries[entry.request.key] = entry
            if entry.request.adopted:
                self._adopted[entry.request.key] = entry
            self._handles[entry.session, entry.handle] = entry
            self._names[entry.request.request_id, entry.request.attempt] = entry
        else:
            self.refusals[rejected.reason] += 1
            code = REFUSAL_CODES.get(rejected.reason, Code.INVALID_ARGUMENT)
            self._fail(entry, code, rejected.reason, REFUSAL_TEXTS[rejected.reason], rejected.retry_after_s)
        entry.session.load_changed()

    # ---- from the engine thread

    def step_began(self, keys: Sequence[RequestKey]) -> None:
        """Requests first scheduled in the step that begins now."""
        self._loop.call_soon_threadsafe(self._started, list(keys))

    def step_ended(self, events: StepEvents) -> None:
        self._loop.call_soon_threadsafe(self._publish, events)

    def refused(self, refusals: Sequence[tuple[RequestKey, str]]) -> None:
        """Ended by the scheduler without a step."""
        self._loop.call_soon_threadsafe(self._refused, list(refusals))

    def _refused(self, refusals: list[tuple[RequestKey, str]]) -> None:
        for key, reason in refusals:
            self.refusals[reason] += 1
            if (entry := self._entries.get(key)) is not None:
                self._fail(entry, REFUSAL_CODES[reason], reason, REFUSAL_TEXTS[reason])
        self._reserve()

    def _started(self, keys: list[RequestKey]) -> None:
        for key in keys:
            if (entry := self._entries.get(key)) is not None:
                ledger = entry.request.ledger
                started = pb.Started(handle=entry.handle, cached_tokens=ledger.cached_tokens, queue_s=ledger.queue_s)
                entry.session.put(pb.SessionResponse(started=started))

    def _publish(self, events: StepEvents) -> None:
        """One token frame a session and iteration; then what ended; then leases; then who may come in now."""
        frames: dict[GatewaySession, pb.Tokens] = {}
        logprobs: defaultdict[GatewaySession, dict[int, TokenLogprobs]] = defaultdict(dict)
        firsts: list[Entry] = []
        rows = zip(events.token_keys, events.token_offsets, events.token_ids, strict=True)
        for index, (key, offset, token_id) in enumerate(rows):
            if (entry := self._entries.get(key)) is not None:
                frame = frames.setdefault(entry.session, pb.Tokens())
                frame.handle.append(entry.handle)
                frame.offset.append(offset)
                if index in events.token_logprobs:
                    logprobs[entry.session][len(frame.token_id)] = events.token_logprobs[index]
                frame.token_id.append(token_id)
                if offset == entry.first_offset and not entry.request.adopted:
                    firsts.append(entry)
        for session, told in logprobs.items():
            frames[session].logprobs.CopyFrom(logprobs_to_proto(told))
        for session, frame in frames.items():
            session.put(pb.SessionResponse(tokens=frame))
        for entry in firsts:
            self._tell_prefilled(entry)
        with self.engine.lock:
            self._scheduler.catch_up()
            self._announce(events)
        for key, reason in events.finished:
            if (entry := self._entries.get(key)) is not None:
                if entry.leased:
                    self.holder.handed_off(key, _record(entry.request, finished=True))
                self._done(entry, reason)
        self._reserve()
        for session in self.sessions:
            session.load_changed()

    def _tell_prefilled(self, entry: Entry) -> None:
        ledger = ledger_to_proto(entry.request.ledger)
        entry.session.put(pb.SessionResponse(prefilled=pb.Prefilled(handle=entry.handle, ledger=ledger)))

    def _announce(self, events: StepEvents) -> None:
        """Tells readers which blocks are complete, and the hand-off record when the first token is sampled."""
        for key in events.computed:
            entry = self._entries.get(key)
            if entry is not None and entry.leased:
                self.holder.computed(key, self._complete_blocks(entry.request))
        for key in events.prefilled:
            entry = self._entries.get(key)
            if entry is not None and entry.leased:
                self.holder.handed_off(key, _record(entry.request))

    # ---- this worker's blocks for readers (LeaseSource)

    def grant_lease(self, request_id: str, attempt: int, number: int) -> LeaseGrant | Rejected:
        entry = self._names.get((request_id, attempt))
        if entry is None or not entry.request.hand_off:
            return Rejected("unknown_request", 0.0)
        request = entry.request
        if number <= entry.lease_number:
            return Rejected("leased_already", 0.0)
        if entry.leased:
            self.holder.supersede(request.key)
        with self.engine.lock:
            if not self._scheduler.pin(request.key):
                return Rejected("unknown_request", 0.0)
            record = _record(request) if request.state is State.TRANSFERRING else None
            blocks = self._complete_blocks(request)
        entry.leased, entry.lease_number = True, number
        return LeaseGrant(request.key, blocks, record)

    def grant_fetch(self, request_id: str, attempt: int, hashes: Sequence[bytes]) -> LeaseGrant | Rejected:
        return self.fetcher.grant(request_id, attempt, hashes)

    def lease_ended(self, key: RequestKey, completed: bool) -> None:
        entry = self._entries.get(key)
        if self.fetcher.lease_ended(key) or entry is None:
            return
        entry.leased = False
        with self.engine.lock:
            if completed:
                self._scheduler.release_handed_off(key, self._clock())
            else:
                self._scheduler.unpin(key)
        if completed:
            self._done(entry, FinishReason.HANDED_OFF)
            self._reserve()
        elif entry.revoking:
            self._revoked(entry)

    def revoke(self, entry: Entry) -> None:
        """Takes the blocks of a finished prefill back; a reader with a read in flight or `Held` keeps its lease."""
        entry.revoking = True
        if entry.leased:
            self.holder.revoke(entry.request.key, "pressure")
        else:
            self._revoked(entry)

    def _revoked(self, entry: Entry) -> None:
        self.counters["lease_revocations"] += 1
        with self.engine.lock:
            self._scheduler.finish(entry.request.key, FinishReason.ERROR, self._clock())
            self.engine.wake()
        self._fail(entry, Code.ABORTED, "lease_revoked", "the prefill worker needed the blocks")
        self._reserve()

    # ---- requests adopted from others

    def _reserve(self) -> None:
        """Blocks may have become free: let waiting adoptions and prefills in."""
        with self.engine.lock:
            keys = self._scheduler.reserve_adoptions(self._clock())
            self.engine.wake()
        for key in keys:
            entry = self._entries[key]
            request = entry.request
            if entry.adoption is not None:
                entry.adoption.reserved(request.block_ids, request.computed_tokens // self._block_size)

    def activated(self, entry: Entry, record: HandOffRecord, stats: HandoffStats) -> None:
        request = entry.request
        entry.adoption = None
        ledger = request.ledger
        ledger.hand_off_s = stats.hand_off_s
        ledger.bytes_moved = stats.bytes_moved
        ledger.transfer_s = stats.transfer_s
        ledger.lane = stats.lane
        self.counters["bytes_moved"] += stats.bytes_moved
        self.counters["transfer_s"] += stats.transfer_s
        self.counters["handoffs"] += 1
        with self.engine.lock:
            now = self._clock()
            self._scheduler.activate(request.key, record.output_ids, record.num_tokens, now, record.logprobs)
            self.engine.wake()

    def adoption_ended(self, entry: Entry, end: End) -> None:
        entry.adoption = None
        reason = FinishReason.ERROR if end.failed else FinishReason.CANCELLED
        with self.engine.lock:
            self._scheduler.finish_adoption(entry.request.key, reason, end.quarantined, self._clock())
        if end.failed:
            log.info("hand_off_failed request=%s reason=%s", entry.request.request_id, end.reason)
            self.counters[end.reason] += 1
            self._fail(entry, Code.ABORTED, end.reason, "the hand-off did not complete")
        elif end.reason == "finished":
            # Nothing to adopt: the holder tells the gateway how it ended, unless it cannot any more.
            self._done(entry, FinishReason.CANCELLED)
        else:
            self._forget(entry)
        self._reserve()

    def quarantine_over(self, entry: Entry) -> None:
        with self.engine.lock:
            self._scheduler.release_quarantine(entry.request.key)
        self._reserve()

    # ---- endings

    def tick(self) -> None:
        """Deadlines, and the way out when only readers hold what a waiting request needs."""
        now = self._clock()
        self.fetcher.tick()
        with self.engine.lock:
            idle_fetches = self._scheduler.revocable_fetches()
            expired = [self._entries[key] for key in self._scheduler.expire(now) if key in self._entries]
            stuck = self._scheduler.revocable(now)
        for key in idle_fetches:
            self.holder.revoke(key, "pressure")
        for entry in expired:
            self._done(entry, FinishReason.DEADLINE)
        for entry in [e for e in self._adopted.values() if e.deadline <= now]:
            self._cancel(entry, FinishReason.DEADLINE)
        if stuck is not None and stuck in self._entries:
            self.revoke(self._entries[stuck])
        if expired:
            self._reserve()

    def _cancel(self, entry: Entry, reason: FinishReason) -> None:
        """Ends a request in whatever state; an adoption gives its reads up first."""
        if entry.adoption is not None:
            entry.adoption.cancel_now()
        else:
            with self.engine.lock:
                self._scheduler.finish(entry.request.key, reason, self._clock())
        if reason is FinishReason.DEADLINE:
            self._done(entry, reason)
        else:
            self._forget(entry)
        self._reserve()

    def _done(self, entry: Entry, reason: FinishReason) -> None:
        done = pb.Done(
            handle=entry.handle,
            reason=reason.value,
            ledger=ledger_to_proto(entry.request.ledger),
            output_hash=token_hash(entry.request.output_ids),
        )
        entry.session.put(pb.SessionResponse(done=done))
        self._forget(entry)

    def _fail(self, entry: Entry, code: Code, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        failed = pb.Failed(
            handle=entry.handle, code=code.value, reason=reason, message=message, retry_after_s=retry_after_s
        )
        entry.session.put(pb.SessionResponse(failed=failed))
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        """The last mention of a request; idempotent. A reader that still has a lease learns how it ended."""
        request = entry.request
        if self._entries.pop(request.key, None) is None:
            return
        self._adopted.pop(request.key, None)
        del self._handles[entry.session, entry.handle]
        self._names.pop((request.request_id, request.attempt), None)
        self.fetcher.cancel((request.key,))
        entry.session.load_changed()
        if entry.leased:
            self.holder.request_ended(request.key, "request_ended")

    # ---- looking

    @property
    def live_requests(self) -> int:
        return len(self._entries)

    def _complete_blocks(self, request: Request) -> list[int]:
        """Blocks that no later step writes: the full ones, and once the first token is sampled all of them."""
        size = self._block_size
        done = self._scheduler.complete_tokens(request)
        return request.block_ids[: -(-done // size) if request.state is State.TRANSFERRING else done // size]


def _record(request: Request, finished: bool = False) -> HandOffRecord:
    output, computed = tuple(request.output_ids), request.computed_tokens
    return HandOffRecord(output, computed, finished, request.ledger, request.handed_logprobs)

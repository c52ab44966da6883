"""The shell of `workers.core.fetches` and `workers.core.staging`: reads prefixes from peers' caches, and lets peers
read this worker's.

Part of the hub: runs on the event loop and takes the engine's lock for as long as it changes the scheduler. A read that
fails costs its request nothing but time: it computes what it did not get.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from threading import RLock

from headrace.clock import Clock
from headrace.errors import Rejected
from headrace.ids import RequestKey
from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.lease import whole_blocks
from kvtransfer.service import Adoption, End, HandOffRecord, HandoffStats, LeaseGrant, LeaseHolder, LeaseReader
from workers.core.fetches import Fetch
from workers.core.request import Request
from workers.core.scheduler import Scheduler
from workers.core.staging import FetchSource

log = logging.getLogger("headrace.workers.fetcher")

OVERDUE = "overdue"


class Fetcher:
    """`changed`: called, without the lock, when blocks may have become free or a request has joined the line."""

    def __init__(
        self,
        scheduler: Scheduler,
        reader: LeaseReader,
        holder: LeaseHolder,
        counters: MutableMapping[str, float],
        clock: Clock,
        new_key: Callable[[], RequestKey],
        changed: Callable[[], None],
    ) -> None:
        self.lock: RLock
        """The engine's; set before the first request comes."""
        self._scheduler = scheduler
        self._reader = reader
        self._holder = holder
        self._counters = counters
        self._clock = clock
        self._new_key = new_key
        self._changed = changed
        self._reads: dict[RequestKey, Adoption] = {}
        scheduler.staging.on_change = self._staged

    # ---- reading

    def wants(self, message: pb.Submit) -> int:
        """Leading blocks that a request is to read from a peer; 0: nothing, or only from itself."""
        here = message.fetch.source.worker_id == self._reader.me.worker_id
        return 0 if here else message.fetch.num_blocks

    def begin(self, request: Request, source: pb.PeerAddress) -> None:
        """Starts the read that the scheduler has reserved blocks for, if it has."""
        with self.lock:
            fetch = self._scheduler.fetches.get(request.key)
        if fetch is not None:
            sink = _Read(self, request, fetch, self._clock())
            self._reads[request.key] = self._reader.fetch(
                request.request_id, request.attempt, source, fetch.hashes, fetch.targets, sink
            )

    def cancel(self, keys: Iterable[RequestKey], reason: str = "cancelled") -> None:
        """Gives the reads of these requests up, where there are any; those that still wait go on without."""
        for key in keys:
            if (read := self._reads.get(key)) is not None:
                read.cancel_now(reason)

    def clear(self, tenant: str | None) -> None:
        """Nothing that is under way for the tenant (None: for anybody) enters the cache. To be called before the cache
        is cleared."""
        with self.lock:
            keys = self._scheduler.fetches.clear(tenant)
        self.cancel(keys, "cleared")
        self._changed()

    def tick(self) -> None:
        """Gives up reads that take too long, and what peers wait for too long."""
        with self.lock:
            overdue = self._scheduler.fetches.overdue(self._clock())
            self._scheduler.staging.expire(self._clock())
        self.cancel(overdue, OVERDUE)

    # ---- what a read's end means

    def arrived(self, request: Request, fetch: Fetch, record: HandOffRecord, stats: HandoffStats, began: float) -> None:
        del self._reads[request.key]
        now, num_blocks = self._clock(), record.num_tokens // self._reader.block_size
        ledger = request.ledger
        ledger.bytes_moved += stats.bytes_moved
        ledger.transfer_s += stats.transfer_s
        ledger.lane = stats.lane
        self._count(
            fetches=1,
            fetched_blocks=num_blocks,
            fetched_bytes=stats.bytes_moved,
            fetch_s=now - began,
            fetch_transfer_s=stats.transfer_s,
            fetch_missed_blocks=len(fetch.hashes) - num_blocks,
        )
        with self.lock:
            self._scheduler.fetch_arrived(request.key, num_blocks, now)
        self._changed()

    def ended(self, request: Request, end: End) -> None:
        del self._reads[request.key]
        with self.lock:
            self._scheduler.fetch_failed(request.key, end.quarantined, self._clock())
        self._count(**{f"fetch_failed_{end.reason}": 1})
        log.info("fetch_failed request=%s reason=%s detail=%s", request.request_id, end.reason, end.detail)
        self._changed()

    def quarantine_over(self, key: RequestKey) -> None:
        with self.lock:
            self._scheduler.release_quarantine(key)
        self._changed()

    # ---- being read

    def grant(self, request_id: str, attempt: int, hashes: Sequence[bytes]) -> LeaseGrant | Rejected:
        key = self._new_key()
        with self.lock:
            source = self._scheduler.open_fetch(key, f"{request_id}/{attempt}", hashes, self._clock())
        if isinstance(source, Rejected):
            self._count(**{f"fetch_refused_{source.reason}": 1})
            return source
        self._count(fetch_grants=1)
        return LeaseGrant(key, source.blocks, self._record(source) if source.is_over else None)

    def lease_ended(self, key: RequestKey) -> bool:
        """False when it was not the lease of a fetch."""
        with self.lock:
            found = self._scheduler.close_fetch(key)
        if found:
            self._changed()
        return found

    def _staged(self, key: RequestKey) -> None:
        """Blocks have come up for a peer, or no more will. From any thread, under the lock."""
        if not self._reader.loop.is_closed():
            self._reader.loop.call_soon_threadsafe(self._tell_peer, key)

    def _tell_peer(self, key: RequestKey) -> None:
        with self.lock:
            source = self._scheduler.fetch_source(key)
        if source is None:
            self._changed()  # its lease was over before its last copy was
        elif source.blocks:
            self._holder.computed(key, source.blocks)
            if source.is_over:
                self._holder.handed_off(key, self._record(source))
        elif source.is_over:
            self._count(**{f"fetch_refused_{source.reason}": 1})
            self._holder.request_ended(key, source.reason)

    def _record(self, source: FetchSource) -> HandOffRecord:
        return whole_blocks(len(source.blocks), self._reader.block_size)

    def _count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._counters[name] = self._counters.get(name, 0.0) + amount


class _Read:
    """The worker as one read sees it (HandoffSink)."""

    def __init__(self, fetcher: Fetcher, request: Request, fetch: Fetch, began: float) -> None:
        self._fetcher = fetcher
        self._request = request
        self._fetch = fetch
        self._began = began

    def activated(self, record: HandOffRecord, stats: HandoffStats) -> None:
        self._fetcher.arrived(self._request, self._fetch, record, stats, self._began)

    def ended(self, end: End) -> None:
        self._fetcher.ended(self._request, end)

    def quarantine_over(self) -> None:
        self._fetcher.quarantine_over(self._request.key)

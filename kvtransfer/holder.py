"""The holder's shell: serves Worker.Lease, for hand-offs and for fetches. Decisions are `core.lease`'s."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import grpc

from headrace.errors import Rejected
from headrace.ids import IdFactory, Incarnation, LeaseId, RequestKey, random_ids
from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.lease import (
    Announce,
    HandOffRecord,
    Lease,
    LeaseAction,
    LeaseTable,
    Release,
    SendHandOff,
    SendHeld,
    SendRevoked,
)
from kvtransfer.digests import INLINE_BYTES, block_digests
from kvtransfer.pairing import UNPAIRED, PairServer
from kvtransfer.stream import GONE, Outbox, pump
from kvtransfer.wire import record_to_proto, split_hashes


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A request's blocks as of now; what comes later arrives through `LeaseHolder.computed` and `handed_off`.

    Of a fetch: those on the device, and later those that came up to it.
    """

    key: RequestKey
    blocks: Sequence[int]
    """Complete blocks so far, in logical order."""
    record: HandOffRecord | None = None
    """Set once the first token is sampled, of a fetch once no more comes; `blocks` are all blocks then."""


class LeaseSource(Protocol):
    """The worker, as its leases see it. Called on the event loop's thread; takes the worker's lock itself."""

    def grant_lease(self, request_id: str, attempt: int, number: int) -> LeaseGrant | Rejected:
        """Pins a request's blocks for the reader of its adoption `number`; Rejected when one of this number or a later
        one has them already. `lease_ended` follows a grant."""

    def grant_fetch(self, request_id: str, attempt: int, hashes: Sequence[bytes]) -> LeaseGrant | Rejected:
        """Pins the leading run of these blocks that is cached, under a key of its own, and has what lies below the
        device come up. `lease_ended` follows a grant.

        `request_id`: the reader's, a label here; several readers may use one.
        """

    def lease_ended(self, key: RequestKey, completed: bool) -> None:
        """The pin is gone. `completed`: the reader owns the request now. Once for each lease that was opened."""


@dataclass(slots=True)
class _Served:
    lease: Lease
    outbox: Outbox[pb.LeaseResponse] = field(default_factory=Outbox)


class LeaseHolder:
    """All leases of one worker process. Made on the event loop; the four facts may be told from any thread."""

    def __init__(
        self,
        source: LeaseSource,
        pairs: PairServer,
        *,
        checksums: bool = True,
        liveness_s: float = 8.0,
        ids: IdFactory = random_ids,
    ) -> None:
        """`pairs` knows who may open leases. `checksums`: tell digests of the announced blocks."""
        self.pairs = pairs
        self._source = source
        self._incarnation = Incarnation(pairs.incarnation)
        self._checksums = checksums
        self._liveness_s = liveness_s
        self._ids = ids
        self._loop = asyncio.get_running_loop()
        self._table = LeaseTable()
        self._served: dict[RequestKey, _Served] = {}

    @property
    def leases(self) -> int:
        return len(self._table)

    @property
    def reads_in_flight(self) -> int:
        return self._table.reads_in_flight

    # --- facts of the worker, from any thread; without a lease of that request they are no-ops

    def computed(self, key: RequestKey, blocks: Sequence[int]) -> None:
        """`blocks`: all complete blocks of the request so far."""
        self._tell(key, lambda lease: lease.computed(blocks))

    def handed_off(self, key: RequestKey, record: HandOffRecord) -> None:
        """After the last `computed`."""
        self._tell(key, lambda lease: lease.handed_off(record))

    def revoke(self, key: RequestKey, reason: str) -> None:
        """A wish: nothing happens while a read is in flight or after Held. `lease_ended` tells that it came true."""
        self._tell(key, lambda lease: lease.revoke(reason))

    def request_ended(self, key: RequestKey, reason: str) -> None:
        self._tell(key, lambda lease: lease.request_ended(reason))

    def supersede(self, key: RequestKey) -> None:
        """Ends the request's lease at once, on the event loop's thread: somebody else adopts it, and its reader is
        dead, or does not know yet that it has failed. `lease_ended` has been told when this returns."""
        served = self._served.get(key)
        if served is not None:
            self._do(served, served.lease.request_ended("superseded"))

    def _tell(self, key: RequestKey, fact: Callable[[Lease], list[LeaseAction]]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._apply, key, fact)

    def _apply(self, key: RequestKey, fact: Callable[[Lease], list[LeaseAction]]) -> None:
        served = self._served.get(key)
        if served is not None:
            self._do(served, fact(served.lease))

    # --- the stream

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The body of the servicer's `Lease` method. Returns, or aborts the call, when the lease is over."""
        served = self._open(await self._first_message(context))
        if isinstance(served, Rejected):
            unpaired = served.reason == UNPAIRED
            code = grpc.StatusCode.UNAUTHENTICATED if unpaired else grpc.StatusCode.FAILED_PRECONDITION
            await context.abort(code, served.reason)
            return
        lease = served.lease
        try:
            await pump(
                context.read,
                context.write,
                lambda message: self._hear(served, message),
                served.outbox,
                pb.LeaseResponse(heartbeat=pb.Heartbeat()),
                self._liveness_s,
                num_heard=1,
            )
        finally:
            self._do(served, lease.broken())
            self._table.remove(lease)
            if self._served.get(lease.key) is served:
                del self._served[lease.key]

    async def _first_message(self, context: grpc.aio.ServicerContext[Any, Any]) -> pb.LeaseOpen | None:
        try:
            async with asyncio.timeout(self._liveness_s):
                message = await context.read()
        except (TimeoutError, *GONE):
            return None
        return message.open if message is not grpc.aio.EOF and message.HasField("open") else None

    def _open(self, request: pb.LeaseOpen | None) -> _Served | Rejected:
        if request is None:
            return Rejected("protocol")
        if request.holder_incarnation != self._incarnation:
            return Rejected("stale_incarnation")
        if not self.pairs.signed(request):
            return Rejected(UNPAIRED)
        if request.block_hashes:
            hashes = split_hashes(request.block_hashes)
            if hashes is None:
                return Rejected("protocol")
            grant = self._source.grant_fetch(request.request_id, request.attempt, hashes)
        else:
            grant = self._source.grant_lease(request.request_id, request.attempt, request.number)
        if isinstance(grant, Rejected):
            return grant
        lease = Lease(LeaseId(self._ids("lease")), grant.key, self._incarnation)
        if not self._table.open(lease):
            return Rejected("leased_already")
        served = self._served[grant.key] = _Served(lease)
        served.outbox.put(pb.LeaseResponse(opened=pb.LeaseOpened(lease_id=lease.lease_id)))
        self._do(served, lease.computed(grant.blocks))
        if grant.record is not None:
            self._do(served, lease.handed_off(grant.record))
        return served

    async def _hear(self, served: _Served, message: pb.LeaseRequest) -> None:
        lease = served.lease
        match message.WhichOneof("kind"):
            case "pulled":
                self._do(served, lease.reader_pulled(message.pulled.num_blocks))
            case "verify":
                self._do(served, lease.verify(message.verify.lease_id, message.verify.holder_incarnation))
            case "close":
                self._do(served, lease.close(message.close.completed))
            case "open":
                self._do(served, lease.broken())

    async def _announcement(self, first: int, blocks: tuple[int, ...]) -> pb.LeaseResponse:
        """With digests, of many blocks made beside the event loop: pinned blocks that are complete do not change."""
        lanes, digests = self.pairs.lanes, ()
        if self._checksums and len(blocks) * lanes.block_bytes <= INLINE_BYTES:
            digests = block_digests(lanes.memory, blocks, lanes.block_bytes)
        elif self._checksums:
            digests = await asyncio.to_thread(block_digests, lanes.memory, blocks, lanes.block_bytes)
        return pb.LeaseResponse(announce=pb.LeaseAnnounce(first_block=first, blocks=blocks, digests=digests))

    def _do(self, served: _Served, actions: list[LeaseAction]) -> None:
        for action in actions:
            match action:
                case Announce(first, blocks):
                    served.outbox.put(partial(self._announcement, first, blocks))
                case SendHandOff(record):
                    served.outbox.put(pb.LeaseResponse(hand_off=record_to_proto(record)))
                case SendHeld():
                    served.outbox.put(pb.LeaseResponse(held=pb.LeaseHeld()))
                case SendRevoked(reason):
                    served.outbox.put(pb.LeaseResponse(revoked=pb.LeaseRevoked(reason=reason)))
                case Release(completed):
                    self._source.lease_ended(served.lease.key, completed)
                    served.outbox.end()

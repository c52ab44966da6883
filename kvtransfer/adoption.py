"""One adopted request's or one fetch's shell at the reader: its lease stream and its reads. Decisions are
`core.handoff`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.handoff import (
    AbandonPull,
    Activate,
    CloseLease,
    End,
    Handoff,
    HandoffAction,
    OpenLease,
    ReleaseQuarantine,
    SendPulled,
    SendVerify,
)
from kvtransfer.core.handoff import Pull as StartPull
from kvtransfer.core.lease import HandOffRecord
from kvtransfer.digests import INLINE_BYTES, changed_blocks
from kvtransfer.pairing import UNPAIRED, Pairing, PairingError, PairingFault
from kvtransfer.prober import PairedLane
from kvtransfer.stream import Outbox, Over, pump
from kvtransfer.transports.base import Pull, PullStats, TransferError, TransferFault
from kvtransfer.wire import join_hashes, record_from_proto

if TYPE_CHECKING:
    from kvtransfer.reader import HolderLink, LeaseReader

log = logging.getLogger("headrace.kvtransfer.adoption")

FENCE_S = 1.0
"""How long a failed read has to become terminal before it counts as one that may write for ever, and is not made
again."""


@dataclass(slots=True)
class HandoffStats:
    """What one hand-off moved. Seconds; `transfer_s` sums the reads, overlapped with the prefill or not."""

    lane: str = ""
    """The one that was used last."""
    bytes_moved: int = 0
    transfer_s: float = 0.0
    num_reads: int = 0
    retries: int = 0
    corrupt_blocks: int = 0
    hand_off_s: float = 0.0
    """From the hand-off record's arrival to activation: what the client waits for."""


class HandoffSink(Protocol):
    """The worker, as one adopted request or one fetch sees it. Called on the event loop's thread; takes the
    worker's lock itself.
    """

    def activated(self, record: HandOffRecord, stats: HandoffStats) -> None:
        """All blocks up to `record.num_tokens` hold their KV: the request joins the batch, or the prefix is here. The
        last call."""

    def ended(self, end: End) -> None:
        """Over without a request: free its blocks except `end.quarantined`. `end.failed` tells whether to report it."""

    def quarantine_over(self) -> None:
        """The quarantined blocks are free now. Comes at most once, after `ended` with quarantined blocks, or never."""


class Adoption:
    """One hand-off's shell. `reserved` and `cancel` may be called from any thread, everything else on the loop."""

    def __init__(
        self,
        reader: LeaseReader,
        request_id: str,
        attempt: int,
        source: pb.PeerAddress,
        sink: HandoffSink,
        hashes: Sequence[bytes] = (),
        number: int = 0,
    ) -> None:
        """`hashes`: of the blocks to fetch; none: it is a hand-off of the request."""
        self.stream: asyncio.Task[None] | None = None
        self._reader = reader
        self._request_id, self._attempt, self._address = request_id, attempt, source
        self._number = number
        self._sink = sink
        self._hashes = join_hashes(hashes)
        self._handoff = Handoff(reader.block_size, is_fetch=bool(hashes), max_retries=reader.max_retries)
        self._outbox: Outbox[pb.LeaseRequest] = Outbox()
        self._source: HolderLink | None = None
        self._pairing: Pairing | None = None
        self._pulls: dict[int, Pull] = {}
        self._stats = HandoffStats()
        self._account = reader.account(source.worker_id)
        self._record_at = 0.0

    def reserved(self, local_blocks: Sequence[int], skip_blocks: int) -> None:
        """`local_blocks`: own blocks for the whole request; the first `skip_blocks` already hold their KV."""
        blocks = tuple(local_blocks)
        self._later(lambda: self._do(self._handoff.reserved(blocks, skip_blocks)))

    def cancel(self) -> None:
        self._later(self.cancel_now)

    def cancel_now(self, reason: str = "cancelled") -> None:
        """On the loop. The sink hears of the end, with this reason, before it returns; later calls are no-ops."""
        self._do(self._handoff.cancel(reason))

    def _later(self, work: Callable[[], None]) -> None:
        if not self._reader.loop.is_closed():
            self._reader.loop.call_soon_threadsafe(work)

    # --- the stream

    async def _run(self) -> None:
        reader, handoff = self._reader, self._handoff
        if handoff.ended:
            reader.forget(self)
            return
        source = self._source = await reader.enter(self._address)
        try:
            if handoff.ended:
                return
            try:
                self._pairing = await source.pair()
            except PairingError as error:
                self._do(self._unpaired(error))
                return
            self._stats.lane = self._pairing.lanes[0].name
            if not handoff.ended:
                await self._talk(source, self._pairing)
        finally:
            self._do(handoff.broken("stream"))
            await reader.leave(source)
            reader.forget(self)

    def _unpaired(self, error: PairingError) -> list[HandoffAction]:
        match error.fault:
            case PairingFault.REFUSED:
                return self._handoff.refused(str(error))
            case PairingFault.NO_LANE:
                return self._handoff.unreachable(str(error))
            case PairingFault.BROKEN:
                return self._handoff.broken(str(error))

    async def _talk(self, source: HolderLink, pairing: Pairing) -> None:
        reader, handoff = self._reader, self._handoff
        call: Any = source.stub.Lease()
        try:
            self._outbox.put(pb.LeaseRequest(open=self._open_message(pairing)))
            beat = pb.LeaseRequest(heartbeat=pb.Heartbeat())
            over = await pump(
                call.read, call.write, self._hear, self._outbox, beat, reader.liveness_s, call.done_writing
            )
            match over:
                case Over.SILENT | Over.GAP:
                    self._do(handoff.broken(over.value))
                case Over.GONE:
                    self._do(await self._verdict(source, call))
        finally:
            call.cancel()

    async def _verdict(self, source: HolderLink, call: Any) -> list[HandoffAction]:
        """What the call's status means; the call is over."""
        code, details = await call.code(), await call.details()
        if code is grpc.StatusCode.UNAUTHENTICATED and details == UNPAIRED and self._pairing is not None:
            source.unpair(self._pairing)
        if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED):
            return self._handoff.refused(details)
        return self._handoff.broken(code.name)

    def _open_message(self, pairing: Pairing) -> pb.LeaseOpen:
        return pb.LeaseOpen(
            request_id=self._request_id,
            attempt=self._attempt,
            reader=self._reader.me,
            holder_incarnation=self._address.incarnation,
            proof=pairing.lease_proof(self._request_id, self._attempt, self._number, self._hashes),
            block_hashes=self._hashes,
            number=self._number,
        )

    async def _hear(self, message: pb.LeaseResponse) -> None:
        handoff = self._handoff
        match message.WhichOneof("kind"):
            case "opened":
                self._do(handoff.opened(message.opened.lease_id))
            case "announce":
                told = message.announce
                self._do(handoff.announced(told.first_block, list(told.blocks), list(told.digests)))
            case "hand_off":
                self._record_at = self._reader.loop.time()
                try:
                    record = record_from_proto(message.hand_off)
                except ValueError as error:
                    self._do(handoff.broken(f"protocol: {error}"))
                else:
                    self._do(handoff.handed_off(record))
            case "held":
                self._do(handoff.held())
            case "revoked":
                self._do(handoff.revoked(message.revoked.reason))

    # --- actions

    def _do(self, actions: list[HandoffAction]) -> None:
        for action in actions:
            match action:
                case OpenLease():
                    self.stream = self._reader.loop.create_task(self._run())
                    self.stream.add_done_callback(_raise_from_loop)
                case StartPull():
                    self._pull(action)
                case AbandonPull(action_id):
                    if (pull := self._pulls.get(action_id)) is not None:
                        pull.cancel()
                case SendPulled(num_blocks):
                    self._outbox.put(pb.LeaseRequest(pulled=pb.LeasePulled(num_blocks=num_blocks)))
                case SendVerify(lease_id):
                    verify = pb.LeaseVerify(lease_id=lease_id, holder_incarnation=self._address.incarnation)
                    self._outbox.put(pb.LeaseRequest(verify=verify))
                case Activate(record):
                    self._stats.hand_off_s = self._reader.loop.time() - self._record_at
                    self._account.exposed_s += self._stats.hand_off_s
                    self._sink.activated(record, self._stats)
                case CloseLease(completed):
                    close = pb.LeaseClose(completed=completed, bytes_moved=self._stats.bytes_moved)
                    self._outbox.put(pb.LeaseRequest(close=close))
                    self._outbox.end()
                    self._stop_waiting()
                case End():
                    self._sink.ended(action)
                    if self.stream is None:
                        self._reader.forget(self)
                case ReleaseQuarantine():
                    self._sink.quarantine_over()

    def _stop_waiting(self) -> None:
        """For a pairing: there is nothing to say to the holder."""
        waits = self._source is not None and self._pairing is None
        if waits and self.stream is not None and self.stream is not asyncio.current_task():
            self.stream.cancel()

    def _pull(self, action: StartPull) -> None:
        assert self._pairing is not None
        lane, stats, account = self._pairing.lanes[0], self._stats, self._account
        pull = lane.pull(action.remote_blocks, action.local_blocks)
        self._pulls[action.action_id] = pull
        self._reader.track(pull)
        stats.lane = lane.name
        account.uses(lane)
        stats.retries += action.retry > 0
        account.retries += action.retry > 0

        def done(future: asyncio.Future[PullStats]) -> None:
            error = future.exception()
            if error is None:
                self._count(future.result())
                self._arrived(action, lane)
            elif isinstance(error, TransferError):
                self._reader.spawn(self._failed(action, lane, error, pull))
            else:
                raise error

        pull.done.add_done_callback(done)
        pull.terminal.add_done_callback(lambda _: self._terminal(action.action_id))

    def _count(self, read: PullStats) -> None:
        stats, account = self._stats, self._account
        stats.bytes_moved += read.bytes
        stats.transfer_s += read.seconds
        stats.num_reads += 1
        account.bytes += read.bytes
        account.transfer_s += read.seconds
        account.reads += 1
        account.stalls += read.stalls

    def _arrived(self, action: StartPull, lane: PairedLane) -> None:
        """The bytes are here: are they the holder's?"""
        lanes, pairing, told = self._reader.lanes, self._pairing, action.digests
        if not told or self._handoff.ended or pairing is None or not pairing.digests:
            self._do(self._handoff.pull_done(action.action_id))
        elif len(told) * lanes.block_bytes <= INLINE_BYTES:
            self._compared(action, lane, changed_blocks(lanes.memory, action.local_blocks, lanes.block_bytes, told))
        else:
            self._reader.spawn(self._compare(action, lane))

    async def _compare(self, action: StartPull, lane: PairedLane) -> None:
        """Beside the event loop: the blocks are the hand-off's, or nobody minds what is found in them."""
        lanes = self._reader.lanes
        self._compared(
            action,
            lane,
            await asyncio.to_thread(
                changed_blocks, lanes.memory, action.local_blocks, lanes.block_bytes, action.digests
            ),
        )

    def _compared(self, action: StartPull, lane: PairedLane, changed: Sequence[int]) -> None:
        if not changed:
            self._do(self._handoff.pull_done(action.action_id))
            return
        self._stats.corrupt_blocks += len(changed)
        self._account.corrupt_blocks += len(changed)
        log.error(
            "corrupt_blocks request=%s holder=%s lane=%s blocks=%d",
            self._request_id,
            self._who,
            lane.name,
            len(changed),
        )
        self._go_back(action, lane, TransferFault.CORRUPT, True)

    async def _failed(self, action: StartPull, lane: PairedLane, error: TransferError, pull: Pull) -> None:
        """Tells the machine, once it is known whether the read may still write."""
        if error.kind is TransferFault.CANCELLED:
            self._do(self._handoff.pull_failed(action.action_id, error.kind, pull.terminal.done()))
            return
        log.warning("read_failed request=%s holder=%s lane=%s %s", self._request_id, self._who, lane.name, error)
        if error.kind is TransferFault.PEER_LOST and self._source is not None and self._pairing is not None:
            self._source.unpair(self._pairing)  # a connection that broke is made anew with the next pairing
        await asyncio.wait([pull.terminal], timeout=FENCE_S)
        self._go_back(action, lane, error.kind, pull.terminal.done())

    def _go_back(self, action: StartPull, lane: PairedLane, kind: TransferFault, terminal: bool) -> None:
        assert self._pairing is not None
        self._pairing.demote(lane)
        actions = self._handoff.pull_failed(action.action_id, kind, terminal)
        self._account.failures += not any(isinstance(each, StartPull) for each in actions)
        self._do(actions)

    @property
    def _who(self) -> str:
        return self._address.worker_id

    def _terminal(self, action_id: int) -> None:
        del self._pulls[action_id]
        self._do(self._handoff.read_terminal(action_id))


def _raise_from_loop(task: asyncio.Task[None]) -> None:
    """A fault of this program's own reaches the loop's exception handler at once."""
    if not task.cancelled():
        task.result()

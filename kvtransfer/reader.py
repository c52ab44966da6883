"""The reader's shell: adopts requests and fetches prefixes from other workers; keeps one channel and one pairing for
each holder, and accounts of what came from whom.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from headrace.v1 import worker_pb2 as pb
from headrace.v1.worker_pb2_grpc import WorkerStub
from kvtransfer.adoption import Adoption, HandoffSink
from kvtransfer.pairing import PairClient, Pairing, PairingError, PairingFault
from kvtransfer.prober import PairedLane
from kvtransfer.transports.base import Pull

CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
"""A restarted worker may come back on the same port: its channel shares no back-off with the old one's."""
MAX_LINKS = 256
"""Holders to which a channel is kept though nobody uses it."""
MAX_ACCOUNTS = 256
"""Holders of which an account is kept; names come from outside, and each is a time series in somebody's metrics."""


Dial = Callable[[str], grpc.aio.Channel]
"""Opens a channel to a holder's address."""


def dial(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


@dataclass(slots=True)
class PairAccount:
    """What one worker has read from another, over the holder's incarnations; see the protocol's PairStatus."""

    lane: str = ""
    lane_gbps: float = 0.0
    bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    reads: int = 0
    stalls: int = 0
    retries: int = 0
    failures: int = 0
    corrupt_blocks: int = 0

    def uses(self, lane: PairedLane) -> None:
        self.lane, self.lane_gbps = lane.name, lane.gbps


class HolderLink:
    """A holder's process: its channel, and how it is read from once somebody has asked."""

    def __init__(self, address: pb.PeerAddress, channel: grpc.aio.Channel, client: PairClient) -> None:
        self.address = address
        self.channel = channel
        self.users = 0
        self.stub = WorkerStub(channel)
        self._client = client
        self._pairing: asyncio.Task[Pairing] | None = None
        self._spent: list[PairedLane] = []
        """Of earlier pairings; their peers may be those of a later one."""

    @property
    def paired(self) -> Pairing | None:
        task = self._pairing
        return task.result() if task and task.done() and not task.cancelled() and not task.exception() else None

    async def pair(self) -> Pairing:
        """The pairing, made once for all who ask. Raises PairingError; the next call tries again, unless refused."""
        task = self._pairing
        if task is None:
            task = self._pairing = asyncio.create_task(self._client.pair(self.stub, self.address))
            task.add_done_callback(self._failed)
        return await asyncio.shield(task)

    def unpair(self, pairing: Pairing) -> None:
        """The holder does not know this reader any more, or a connection is broken: who comes next pairs anew."""
        if self.paired is pairing:
            self._pairing = None
            self._spent += pairing.lanes

    def give_up(self) -> None:
        """Nobody waits for the pairing any more."""
        if self._pairing is not None:
            self._pairing.cancel()

    async def close(self) -> None:
        self.give_up()
        if self._pairing is not None:
            await asyncio.gather(self._pairing, return_exceptions=True)
        await self.channel.close()
        pairing = self.paired
        for lane in (*self._spent, *(pairing.lanes if pairing else ())):
            await lane.disconnect()

    def _failed(self, task: asyncio.Task[Pairing]) -> None:
        error = None if task.cancelled() else task.exception()
        refused = isinstance(error, PairingError) and error.fault is PairingFault.REFUSED
        if self._pairing is task and not refused and self.paired is None:
            self._pairing = None


class LeaseReader:
    """All adoptions and fetches of one worker process. Made on the event loop; `adopt` and `fetch` are called there."""

    def __init__(
        self,
        client: PairClient,
        *,
        block_size: int,
        liveness_s: float = 8.0,
        max_retries: int = 1,
        dial: Dial = dial,
    ) -> None:
        """`max_retries`: reads of one hand-off that are made again after they failed."""
        self.client = client
        client.prober.track = self.track
        self.me = client.me
        self.lanes = client.lanes
        self.block_size = block_size
        self.liveness_s = liveness_s
        self.max_retries = max_retries
        self.loop = asyncio.get_running_loop()
        self.accounts: dict[str, PairAccount] = {}
        self._dial = dial
        self._sources: dict[str, HolderLink] = {}
        self._live: set[Adoption] = set()
        self._reads: set[Pull] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def handoffs(self) -> int:
        """Adoptions and fetches that are neither active nor over, and streams that are still being closed."""
        return len(self._live)

    @property
    def reads_in_flight(self) -> int:
        """Reads that may still write, abandoned ones included."""
        return len(self._reads)

    def adopt(
        self, request_id: str, attempt: int, source: pb.PeerAddress, sink: HandoffSink, number: int = 1
    ) -> Adoption:
        """Queues a hand-off; nothing happens until the worker has `reserved` its blocks. `number`: of the adoptions of
        this attempt's prefill."""
        adoption = Adoption(self, request_id, attempt, source, sink, number=number)
        self._live.add(adoption)
        return adoption

    def fetch(
        self,
        request_id: str,
        attempt: int,
        source: pb.PeerAddress,
        hashes: Sequence[bytes],
        local_blocks: Sequence[int],
        sink: HandoffSink,
    ) -> Adoption:
        """Reads the leading run of these blocks that the holder has cached, into `local_blocks` in the same order.

        hashes: 16 bytes each, at least one. request_id: a label. The record that the sink is told has no output.
        """
        fetch = Adoption(self, request_id, attempt, source, sink, hashes)
        self._live.add(fetch)
        fetch.reserved(local_blocks, 0)
        return fetch

    def meet(self, holder: pb.PeerAddress, told: Callable[[pb.Paired], None]) -> None:
        """Pairs with a worker that may be read from later, and tells how it went."""
        self.spawn(self._meet(holder, told))

    async def _meet(self, holder: pb.PeerAddress, told: Callable[[pb.Paired], None]) -> None:
        said = pb.Paired(holder_id=holder.worker_id, holder_incarnation=holder.incarnation)
        source = await self.enter(holder)
        try:
            pairing = await source.pair()
        except PairingError as error:
            said.note, said.refused = str(error), error.fault is PairingFault.REFUSED
        else:
            said.lane, said.note = pairing.lanes[0].name, pairing.note
            for lane in pairing.lanes:
                said.lane_gbps[lane.name] = lane.gbps
            self.account(holder.worker_id).uses(pairing.lanes[0])
        finally:
            await self.leave(source)
        told(said)

    async def close(self) -> None:
        """Cancels all adoptions and closes all streams and channels. The lanes stay open."""
        for adoption in list(self._live):
            adoption.cancel_now()
        for source in self._sources.values():
            source.give_up()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(
            *self._tasks,
            *(a.stream for a in list(self._live) if a.stream is not None),
            return_exceptions=True,
        )
        for source in list(self._sources.values()):
            await source.close()
        self._sources.clear()

    def account(self, worker_id: str) -> PairAccount:
        """Of that holder; of a new one only while there is room, else one that is shown to nobody."""
        known = self.accounts.get(worker_id)
        if known is None:
            known = PairAccount()
            if len(self.accounts) < MAX_ACCOUNTS:
                self.accounts[worker_id] = known
        return known

    # --- for its adoptions

    async def enter(self, address: pb.PeerAddress) -> HolderLink:
        """The holder's process, however its address is written. An earlier one under the same worker's name is
        forgotten, and of many that nobody uses the oldest.
        """
        known = self._sources.get(address.worker_id)
        if known is not None and known.address.incarnation == address.incarnation:
            known.users += 1
            return known
        fresh = self._sources[address.worker_id] = HolderLink(address, self._dial(address.address), self.client)
        fresh.users = 1
        if known is not None:
            await self._retire(known)
        if len(self._sources) > MAX_LINKS:
            unused = next((link for link in self._sources.values() if link.users == 0), None)
            if unused is not None:
                del self._sources[unused.address.worker_id]
                await self._retire(unused)
        return fresh

    async def leave(self, source: HolderLink) -> None:
        source.users -= 1
        await self._retire(source)

    async def _retire(self, source: HolderLink) -> None:
        if source.users == 0 and self._sources.get(source.address.worker_id) is not source:
            await source.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Work beside the streams; cancelled by `close`."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A fault of this program's own reaches the loop's exception handler at once."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    def track(self, pull: Pull) -> None:
        self._reads.add(pull)
        pull.terminal.add_done_callback(lambda _: self._reads.discard(pull))

    def forget(self, adoption: Adoption) -> None:
        self._live.discard(adoption)

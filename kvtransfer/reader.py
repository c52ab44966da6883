"""The reader's shell: adopts requests and fetches prefixes from other workers; keeps one channel and one connected pool
for each holder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from headrace.v1 import worker_pb2 as pb
from kvtransfer.adoption import Adoption, HandoffSink
from kvtransfer.transports.base import Peer, Pull, Transport

CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
"""A restarted worker may come back on the same port: its channel shares no back-off with the old one's."""


@dataclass(slots=True, eq=False)
class HolderLink:
    """A holder's process: its channel, and its pool once connected."""

    address: pb.PeerAddress
    channel: grpc.aio.Channel
    users: int = 0
    peer: Peer | None = None


class LeaseReader:
    """All adoptions and fetches of one worker process. Made on the event loop; `adopt` and `fetch` are called there."""

    def __init__(
        self,
        transport: Transport,
        *,
        me: pb.PeerAddress,
        block_size: int,
        fingerprint: str,
        token: str,
        liveness_s: float = 8.0,
    ) -> None:
        self.transport = transport
        self.me = me
        self.block_size = block_size
        self.fingerprint = fingerprint
        self.token = token
        self.liveness_s = liveness_s
        self.loop = asyncio.get_running_loop()
        self._sources: dict[str, HolderLink] = {}
        self._live: set[Adoption] = set()
        self._reads: set[Pull] = set()

    @property
    def handoffs(self) -> int:
        """Adoptions and fetches that are neither active nor over, and streams that are still being closed."""
        return len(self._live)

    @property
    def reads_in_flight(self) -> int:
        """Reads that may still write, abandoned ones included."""
        return len(self._reads)

    def adopt(self, request_id: str, attempt: int, source: pb.PeerAddress, sink: HandoffSink) -> Adoption:
        """Queues a hand-off; nothing happens until the worker has `reserved` its blocks."""
        adoption = Adoption(self, request_id, attempt, source, sink)
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

    async def close(self) -> None:
        """Cancels all adoptions and closes all streams and channels. The transport stays open."""
        for adoption in list(self._live):
            adoption.cancel_now()
        await asyncio.gather(*(a.stream for a in list(self._live) if a.stream is not None), return_exceptions=True)
        for source in list(self._sources.values()):
            await source.channel.close()
        self._sources.clear()

    # --- for its adoptions

    async def enter(self, address: pb.PeerAddress) -> HolderLink:
        """The holder's process; an earlier one under the same worker's name is forgotten."""
        known = self._sources.get(address.worker_id)
        if known is not None and known.address == address:
            known.users += 1
            return known
        channel = grpc.aio.insecure_channel(address.address, options=CHANNEL_OPTIONS)
        fresh = self._sources[address.worker_id] = HolderLink(address, channel, users=1)
        if known is not None:
            await self._retire(known)
        return fresh

    async def leave(self, source: HolderLink) -> None:
        source.users -= 1
        await self._retire(source)

    async def _retire(self, source: HolderLink) -> None:
        if source.users == 0 and self._sources.get(source.address.worker_id) is not source:
            await source.channel.close()
            if source.peer is not None:
                await self.transport.disconnect(source.peer)

    def track(self, pull: Pull) -> None:
        self._reads.add(pull)
        pull.terminal.add_done_callback(lambda _: self._reads.discard(pull))

    def forget(self, adoption: Adoption) -> None:
        self._live.discard(adoption)

"""Connects to a holder over each lane and reads its probe: which lanes work between two workers, and how fast.

There are a few sets of blocks to read into (`kvtransfer.probe`). A set that an earlier read may still write is left
alone until that read is terminal, so a holder that does not move takes one set away, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.layout import Cut
from kvtransfer.probe import rank_name
from kvtransfer.transports.base import Peer, Pull, Transport, joined_pull
from kvtransfer.transports.select import Lanes, read_probe


@dataclass(slots=True, eq=False)
class PairedLane:
    """Over one transport: the holder's ranks that this reader needs, and which part of each block is there."""

    transport: Transport
    sources: list[tuple[Peer, Cut | None]]
    gbps: float

    @property
    def name(self) -> str:
        return self.transport.name

    def pull(self, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> Pull:
        """Whole own blocks, from whatever ranks have their heads. See `Transport.pull`."""
        pulls = [self.transport.pull(peer, remote_blocks, local_blocks, cut) for peer, cut in self.sources]
        return pulls[0] if len(pulls) == 1 else joined_pull(asyncio.get_running_loop(), pulls)

    async def disconnect(self) -> None:
        for peer, _ in self.sources:
            await self.transport.disconnect(peer)


@dataclass(slots=True)
class Prober:
    lanes: Lanes
    track: Callable[[Pull], None] = lambda _: None
    """Told of each read."""
    _busy: list[int] = field(default_factory=list)
    """Sets that somebody reads into."""
    _late: dict[Pull, int] = field(default_factory=dict)
    """Reads that may still write, and their sets."""
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    async def measure(
        self, transport: Transport, holder: str, accepted: pb.PairAccepted, ranks: Sequence[tuple[int, Cut]]
    ) -> PairedLane:
        """`ranks`: the holder's that are needed, with their parts. Waits for a set to read into. Raises TransferError
        when one of them cannot be read.
        """
        taken, works = await self._take(), False
        lane = PairedLane(transport, [], float("inf"))
        try:
            for rank, cut in ranks:
                name = rank_name(holder, rank)
                peer = await transport.connect(name, accepted.ranks[rank].lanes[transport.name])
                size = self.lanes.block_bytes
                is_whole = cut == Cut(0, 0, size) and peer.block_bytes == size
                lane.sources.append((peer, None if is_whole else cut))
                lane.gbps = min(lane.gbps, await self._read(transport, peer, name, accepted, taken))
            works = True
        finally:
            self._busy.remove(taken)
            self._freed.set()
            if not works:
                await lane.disconnect()
        return lane

    async def _read(self, transport: Transport, peer: Peer, name: str, accepted: pb.PairAccepted, taken: int) -> float:
        lanes = self.lanes
        count = min(accepted.probe_blocks, lanes.area.num_blocks)
        pattern, targets = range(accepted.probe_block, accepted.probe_block + count), lanes.area.scratch(taken)[:count]

        def track(pull: Pull) -> None:
            self._late[pull] = taken
            pull.terminal.add_done_callback(lambda _: self._over(pull))
            self.track(pull)

        return await read_probe(transport, peer, name, pattern, lanes.memory, lanes.block_bytes, targets, track)

    def _over(self, pull: Pull) -> None:
        del self._late[pull]
        self._freed.set()

    async def _take(self) -> int:
        """A set that nobody writes, as soon as there is one."""
        while True:
            unsafe = {*self._busy, *self._late.values()}
            for number in range(self.lanes.area.num_sets):
                if number not in unsafe:
                    self._busy.append(number)
                    return number
            self._freed.clear()
            await self._freed.wait()

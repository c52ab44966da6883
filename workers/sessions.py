"""One gateway's session at a worker: frames out through a bounded buffer that the engine's output never waits for.

When the buffer is full the gateway does not read; its session is reset, which cancels its attempts (DESIGN: engine
output never blocks). Load reports double as heartbeats; they and cache events are made when they are sent, so that
they never queue up. A load report says where the cache's changes stand, so the changes up to there go before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np

from headrace.core.records import CacheChange
from headrace.v1 import worker_pb2 as pb

OUTBOUND_FRAMES = 8192
REPORT_GAP_S = 0.02
"""Load reports follow changes at this distance at least."""
NEVER = (0, 0)
"""Where a gateway that knows nothing stands in the cache's changes."""

Changes = Callable[[int, int], CacheChange | None]
"""What has changed in the cache since (epoch, number); None: nothing."""


class GatewaySession:
    """Lives on the event loop. `put` never blocks; `frames` is what the stream sends."""

    def __init__(
        self, gateway_id: str, heartbeat_s: float, load: Callable[[int], pb.LoadReport], changes: Changes
    ) -> None:
        self.gateway_id = gateway_id
        self.submit_seq = 0
        self.overflowed = asyncio.Event()
        self._heartbeat_s = heartbeat_s
        self._load = load
        self._changes = changes
        self._known = NEVER
        self._frames: asyncio.Queue[pb.SessionResponse] = asyncio.Queue()
        self._reported_at = 0.0
        self._stale_load = True

    def put(self, frame: pb.SessionResponse) -> None:
        if self._frames.qsize() >= OUTBOUND_FRAMES:
            self.overflowed.set()
        else:
            self._frames.put_nowait(frame)

    def load_changed(self) -> None:
        self._stale_load = True

    def resync(self) -> None:
        """The gateway has missed changes of the cache: it gets all of it."""
        self._known = NEVER
        self._stale_load = True

    def _cache_events(self) -> Iterator[pb.SessionResponse]:
        while (change := self._changes(*self._known)) is not None:
            self._known = (change.epoch, change.to_seq)
            yield pb.SessionResponse(
                cache=pb.CacheEvents(
                    epoch=change.epoch,
                    from_seq=change.from_seq,
                    to_seq=change.to_seq,
                    snapshot=change.is_snapshot,
                    stored=np.array(change.stored, "<u8").tobytes(),
                    removed=np.array(change.removed, "<u8").tobytes(),
                )
            )

    async def frames(self) -> AsyncIterator[pb.SessionResponse]:
        """Everything put; cache events and a load report after changes, or after `heartbeat_s` without one."""
        loop = asyncio.get_running_loop()
        while True:
            gap_s = REPORT_GAP_S if self._stale_load else self._heartbeat_s
            wait_s = self._reported_at + gap_s - loop.time()
            if wait_s <= 0:
                self._reported_at = loop.time()
                self._stale_load = False
                for event in self._cache_events():
                    yield event
                yield pb.SessionResponse(load=self._load(self.submit_seq))
                continue
            try:
                async with asyncio.timeout(wait_s):
                    frame = await self._frames.get()
            except TimeoutError:
                continue
            yield frame

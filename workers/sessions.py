"""One gateway's session at a worker: frames out through a bounded buffer that the engine's output never waits for.

When the buffer is full the gateway does not read; its session is reset, which cancels its attempts (DESIGN: engine
output never blocks). Load reports double as heartbeats and are made when they are sent, so that they never queue up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from headrace.v1 import worker_pb2 as pb

OUTBOUND_FRAMES = 8192
REPORT_GAP_S = 0.02
"""Load reports follow changes at this distance at least."""


class GatewaySession:
    """Lives on the event loop. `put` never blocks; `frames` is what the stream sends."""

    def __init__(self, gateway_id: str, heartbeat_s: float, load: Callable[[int], pb.LoadReport]) -> None:
        self.gateway_id = gateway_id
        self.submit_seq = 0
        self.overflowed = asyncio.Event()
        self._heartbeat_s = heartbeat_s
        self._load = load
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

    async def frames(self) -> AsyncIterator[pb.SessionResponse]:
        """Everything put, and a load report after changes or after `heartbeat_s` without one."""
        loop = asyncio.get_running_loop()
        while True:
            gap_s = REPORT_GAP_S if self._stale_load else self._heartbeat_s
            wait_s = self._reported_at + gap_s - loop.time()
            if wait_s <= 0:
                self._reported_at = loop.time()
                self._stale_load = False
                yield pb.SessionResponse(load=self._load(self.submit_seq))
                continue
            try:
                async with asyncio.timeout(wait_s):
                    frame = await self._frames.get()
            except TimeoutError:
                continue
            yield frame

"""The gateway's persistent gRPC session to one worker: frames out through a bounded queue, frames in to a sink,
heartbeats both ways. When it breaks it finds out whether the process is gone, tells the sink once, and connects again
until it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc

from headrace.core.records import Role
from headrace.process import end_process_if_failed
from headrace.v1 import worker_pb2 as pb
from headrace.v1 import worker_pb2_grpc as rpc
from router.core.placement import WorkerKey

log = logging.getLogger("headrace.router.session")

OUTBOUND_FRAMES = 4096
"""More unsent frames than this mean a worker that does not read: the session is reset."""
ROLES = frozenset(role.value for role in Role)
SILENT_PROBE_S = 1.0
BROKEN_PROBE_S = 5.0
"""A closed port answers at once; a busy process may need a while. After silence it has been waited for already."""
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


Dial = Callable[[str], grpc.aio.Channel]
"""Opens a channel to a worker's address."""


def dial(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class SessionSink(Protocol):
    """What the session tells its owner, on the event loop."""

    def session_up(self, session: WorkerSession, hello: pb.WorkerHello) -> None: ...

    def frame(self, session: WorkerSession, frame: pb.SessionResponse) -> None: ...

    def session_broken(self, session: WorkerSession) -> None:
        """Nothing can be sent any more. `session_lost` follows once it is known what became of the process."""
        ...

    def session_lost(self, session: WorkerSession, dead: bool) -> None:
        """`dead`: the process is gone or does not answer; otherwise only the connection broke."""
        ...


class WorkerSession:
    """Reconnects until `close`. `connected` is true between session_up and session_broken."""

    def __init__(
        self,
        gateway_id: str,
        key: WorkerKey,
        address: str,
        cluster_token: str,
        liveness_s: float,
        sink: SessionSink,
        dial: Dial = dial,
    ) -> None:
        self.key = key
        self.address = address
        self.connected = False
        self.refused = ""
        """Why this worker is connected and not used; or ""."""
        self.met: set[WorkerKey] = set()
        """Whom it was told to pair with, over this connection."""
        self.resyncing = False
        """A snapshot of the worker's cache was asked for."""
        self.hello: pb.WorkerHello | None = None
        self._gateway_id = gateway_id
        self._metadata = (("x-headrace-cluster", cluster_token),)
        self._liveness_s = liveness_s
        self._sink = sink
        self._dial = dial
        self._outbound: asyncio.Queue[pb.SessionRequest] = asyncio.Queue(OUTBOUND_FRAMES)
        self._reset = asyncio.Event()
        self._was_up = False
        """session_up was told, session_lost not yet."""
        self._task = asyncio.create_task(self._run(), name=f"session {key.worker_id}")
        self._task.add_done_callback(end_process_if_failed)

    @property
    def usable(self) -> bool:
        """Connected to a worker that may exchange KV with the others."""
        return self.connected and not self.refused

    def send(self, frame: pb.SessionRequest) -> bool:
        """Queues a frame; False when the session is down or its buffer is full (it is then reset)."""
        if not self.connected:
            return False
        try:
            self._outbound.put_nowait(frame)
        except asyncio.QueueFull:
            self._reset.set()
            self._break()
            return False
        return True

    def resync(self) -> None:
        """Asks for all that the worker has cached, unless that is on its way."""
        if not self.resyncing:
            self.resyncing = self.send(pb.SessionRequest(cache_resync=pb.CacheResync()))

    def reset(self) -> None:
        """Cuts the connection; the session comes back by itself."""
        self._reset.set()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def status(self, timeout_s: float, audit: bool = False) -> pb.WorkerStatusResponse | None:
        """The worker's own account; None when it does not answer in time. See WorkerStatusRequest for `audit`."""
        async with self._dial(self.address) as channel:
            try:
                answer: pb.WorkerStatusResponse = await rpc.WorkerStub(channel).WorkerStatus(
                    pb.WorkerStatusRequest(audit=audit), metadata=self._metadata, timeout=timeout_s
                )
                return answer
            except grpc.aio.AioRpcError:
                return None

    async def _run(self) -> None:
        delay_s = 0.05
        while True:
            silent = False
            try:
                await self._serve()
            except grpc.aio.AioRpcError as error:
                log.info("session_error worker=%s code=%s", self.key.worker_id, error.code().name)
            except TimeoutError:
                silent = True
                log.info("session_silent worker=%s", self.key.worker_id)
            finally:
                self._break()
            if self._was_up:
                self._was_up = False
                dead = not await self._alive(SILENT_PROBE_S if silent else BROKEN_PROBE_S)
                log.warning("session_lost worker=%s dead=%s", self.key.worker_id, dead)
                self._sink.session_lost(self, dead)
                delay_s = 0.05
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, 1.0)

    def _break(self) -> None:
        if self.connected:
            self.connected = False
            self._sink.session_broken(self)

    async def _alive(self, timeout_s: float) -> bool:
        """Does the same process still answer? Decides whether a broken session counts as a crash."""
        status = await self.status(timeout_s)
        return status is not None and status.incarnation == self.key.incarnation

    async def _serve(self) -> None:
        """One connection, until it ends or breaks."""
        self._reset.clear()
        async with self._dial(self.address) as channel:
            self._outbound = asyncio.Queue(OUTBOUND_FRAMES)
            call = rpc.WorkerStub(channel).Session(self._requests(self._outbound), metadata=self._metadata)
            reset = asyncio.create_task(self._reset.wait())
            try:
                while True:
                    read = asyncio.ensure_future(call.read())
                    read.add_done_callback(_heard)
                    await asyncio.wait({read, reset}, timeout=self._liveness_s, return_when=asyncio.FIRST_COMPLETED)
                    if not read.done():
                        raise TimeoutError
                    frame = read.result()
                    if frame is grpc.aio.EOF:
                        return
                    self._take(frame)
            finally:
                reset.cancel()
                read.cancel()
                call.cancel()

    def _take(self, frame: pb.SessionResponse) -> None:
        if frame.WhichOneof("kind") == "hello":
            if frame.hello.incarnation != self.key.incarnation or frame.hello.role not in ROLES:
                raise TimeoutError
            self.hello = frame.hello
            self.met.clear()
            self.connected = self._was_up = True
            self.resyncing = False
            self._sink.session_up(self, frame.hello)
        else:
            self._sink.frame(self, frame)

    async def _requests(self, outbound: asyncio.Queue[pb.SessionRequest]) -> AsyncIterator[pb.SessionRequest]:
        """Frames of one connection, from its own queue: grpc may leave this generator waiting after the call."""
        yield pb.SessionRequest(hello=pb.SessionHello(gateway_id=self._gateway_id))
        while True:
            try:
                async with asyncio.timeout(self._liveness_s / 4):
                    frame = await outbound.get()
            except TimeoutError:
                frame = pb.SessionRequest(heartbeat=pb.Heartbeat())
            yield frame


def _heard(read: asyncio.Future[object]) -> None:
    """A read that is given up ends with its call's error, for which nobody waits."""
    if not read.cancelled():
        read.exception()

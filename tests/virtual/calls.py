"""gRPC calls over `tests.virtual.wire`: channels and server contexts as `grpc.aio` has them and the shells use them.

Messages are serialised and parsed for real. A cancelled read cancels its call, as in grpc.aio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc.aio import EOF

from headrace.v1 import worker_pb2 as pb
from tests.virtual.loop import Process
from tests.virtual.wire import Inbox, Message, Sign, Stream, Wire

NO_METADATA = grpc.aio.Metadata()
REQUESTS = {
    "Session": pb.SessionRequest,
    "Lease": pb.LeaseRequest,
    "Pair": pb.PairRequest,
    "WorkerStatus": pb.WorkerStatusRequest,
}
STREAMS = frozenset({"Session", "Lease", "Pair"})


@dataclass(frozen=True, slots=True)
class Status:
    code: grpc.StatusCode
    details: str


OK = Status(grpc.StatusCode.OK, "")
BROKEN = Status(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
REFUSED = Status(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
CANCELLED = Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")


def dialer(wire: Wire, process: Process) -> Callable[[str], Channel]:
    """What the process opens channels with."""
    return lambda address: Channel(wire, process, address)


class Channel:
    """A `grpc.aio.Channel` as generated stubs use it."""

    def __init__(self, wire: Wire, process: Process, address: str) -> None:
        self.wire = wire
        self.process = process
        self.address = address
        self.calls: dict[Call, None] = {}

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        method = path.rpartition("/")[2]

        def call(request_iterator: Any = None, metadata: Any = None, timeout: float | None = None) -> Call:
            return Call(self, method, metadata, response_deserializer, request_iterator)

        return call

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        method = path.rpartition("/")[2]

        async def call(request: Any, metadata: Any = None, timeout: float | None = None) -> Any:
            under = Call(self, method, metadata, response_deserializer, None)
            try:
                async with asyncio.timeout(timeout):
                    await under.write(request)
                    await under.done_writing()
                    if (answer := await under.read()) is EOF:
                        raise _error(BROKEN)
                    return answer
            except TimeoutError:
                raise _error(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")) from None
            except asyncio.InvalidStateError:
                raise _error(REFUSED) from None
            finally:
                under.cancel()

        return call

    async def close(self, grace: float | None = None) -> None:
        for call in list(self.calls):
            call.cancel()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()


class Call:
    """The client's side of a call."""

    def __init__(self, channel: Channel, method: str, metadata: Any, parse: Any, requests: Any) -> None:
        self._channel = channel
        self._parse = parse
        self._status: Status | None = None
        self._half_closed = False
        self._poller: asyncio.Task[None] | None = None
        self._stream: Stream | None = None
        wire, process = channel.wire, channel.process
        found = wire.server(channel.address)
        channel.calls[self] = None
        if found is None:
            self._inbox = Inbox(wire.loop)
            wire.loop.call_later(0.0005, self._end, REFUSED)
        else:
            server, servicer = found
            self._stream = Stream(wire, process, server, method)
            self._inbox = self._stream.down
            self._inbox.on_sign = self._sign
            ServerCall(self._stream, servicer, metadata)
        if requests is not None:
            self._poller = wire.loop.create_task(self._consume(requests))

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._status is CANCELLED

    def cancel(self) -> bool:
        if self.done():
            return False
        if self._stream is not None:
            self._channel.wire.post(self._stream.up, Sign.CANCEL)
        self._end(CANCELLED)
        if self._poller is not None:
            self._poller.cancel()
        return True

    async def read(self) -> Any:
        try:
            while not self._inbox.messages:
                if self._status is not None:
                    if self.cancelled():
                        raise asyncio.CancelledError
                    if self._status.code is not grpc.StatusCode.OK:
                        raise _error(self._status)
                    return EOF
                await self._inbox.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._parse(self._inbox.messages.popleft())

    async def write(self, request: Any) -> None:
        if self.done() or self._half_closed:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._stream is None:
            await self._ended()
            assert self._status is not None
            raise _error(self._status)
        kind = _kind(request)
        if kind == "open":
            self._stream.label = request.open.request_id
        self._channel.wire.post(self._stream.up, Message(kind, _bytes_of(request)))

    async def done_writing(self) -> None:
        if not self.done() and not self._half_closed and self._stream is not None:
            self._half_closed = True
            self._channel.wire.post(self._stream.up, Sign.HALF_CLOSE)

    async def code(self) -> grpc.StatusCode:
        return (await self._ended()).code

    async def details(self) -> str:
        return (await self._ended()).details

    async def _ended(self) -> Status:
        while self._status is None:
            await self._inbox.wait()
        return self._status

    async def _consume(self, requests: Any) -> None:
        try:
            async for request in requests:
                await self.write(request)
            await self.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            self.cancel()

    def _sign(self, sign: Any) -> None:
        assert self._stream is not None
        self._stream.end()
        self._end(sign if isinstance(sign, Status) else BROKEN)

    def _end(self, status: Status) -> None:
        if self._status is None:
            self._status = status
            self._channel.calls.pop(self, None)
            self._inbox.wake()


class ServerCall:
    """The server's side of a call: the context that the servicer's method gets. It begins when its first sign of life
    arrives."""

    def __init__(self, stream: Stream, servicer: Any, metadata: Any) -> None:
        self._stream = stream
        self._wire = stream.wire
        self._metadata = metadata or ()
        self._pipe = stream.up
        self._pipe.on_sign = self._sign
        self._task: asyncio.Task[None] | None = None
        self._half_closed = self._over = False
        self._method = getattr(servicer, stream.method)
        self._request_type = REQUESTS[stream.method]
        self._wire.post(stream.up, self._begin)

    def invocation_metadata(self) -> Any:
        return self._metadata

    async def read(self) -> Any:
        while not self._pipe.messages:
            if self._half_closed or self._over:
                return EOF
            await self._pipe.wait()
        return self._request_type.FromString(self._pipe.messages.popleft())

    async def write(self, message: Any) -> None:
        if self._over:
            raise grpc.aio.UsageError("RPC already finished.")
        self._wire.post(self._stream.down, Message(_kind(message), _bytes_of(message)))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self._finish(Status(code, details))
        raise grpc.aio.AbortError("Locally aborted.")

    def _begin(self) -> None:
        self._task = self._wire.loop.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            if self._stream.method in STREAMS:
                await self._method(None, self)
            else:
                await self.write(await self._method(await self.read(), self))
        except (grpc.aio.AbortError, asyncio.CancelledError):
            pass
        except grpc.aio.BaseError:
            self._finish(Status(grpc.StatusCode.UNKNOWN, "the handler failed"))
        self._finish(OK)

    def _finish(self, status: Status) -> None:
        if not self._over:
            self._over = True
            self._wire.post(self._stream.down, status)

    def _sign(self, sign: Any) -> None:
        if callable(sign):
            sign()
        elif sign is Sign.HALF_CLOSE:
            self._half_closed = True
        else:
            self._over = True
            self._stream.end()
            if self._task is not None:
                self._task.cancel()


def _bytes_of(message: Any) -> bytes:
    """With maps in one order, so that a seed's messages are the same in every process."""
    return bytes(message.SerializeToString(deterministic=True))


def _kind(message: Any) -> str:
    return message.WhichOneof("kind") if "kind" in message.DESCRIPTOR.oneofs_by_name else message.DESCRIPTOR.name


def _error(status: Status) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status.code, NO_METADATA, NO_METADATA, status.details)

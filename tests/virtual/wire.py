"""gRPC between virtual processes, in memory: channels and server contexts as `grpc.aio` has them, and links that break.

Messages are serialised and parsed for real. A stream keeps their order, each has a delay of its own, and what a fault
does to a link, it does to all streams over it: `cut` breaks them and both sides hear; a `dark` link carries nothing, and
nobody hears, until it is lit again (or cut). Faults that no network makes, on single messages, are a `Filter`'s.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from typing import Any

import grpc
from grpc.aio import EOF

from tests.virtual.loop import Life, Process, VirtualLoop

NO_METADATA = grpc.aio.Metadata()
LEAST_GAP_S = 1e-7
"""Between two messages of a stream: timers of one instant have no order."""
LEASE = "Lease"
SESSION = "Session"
PAIR = "Pair"


class Fate(Enum):
    """What becomes of one message."""

    PASS = auto()
    DROP = auto()
    TWICE = auto()
    LATE = auto()
    """Behind the next one of its stream."""


class Sign(Enum):
    """What streams carry beside messages."""

    HALF_CLOSE = auto()
    CANCEL = auto()
    BROKEN = auto()


@dataclass(frozen=True, slots=True)
class Status:
    code: grpc.StatusCode
    details: str


OK = Status(grpc.StatusCode.OK, "")
BROKEN = Status(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
REFUSED = Status(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
CANCELLED = Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")


@dataclass(frozen=True, slots=True)
class Message:
    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Event:
    """A message on its way or here, as faults and tests see it."""

    what: str
    """`Lease.announce sent`, `Session.submit arrived` and so on."""
    sender: Process
    receiver: Process
    stream: Stream


@dataclass(slots=True, eq=False)
class Link:
    """Between two processes, both ways."""

    dark: bool = False
    extra_delay_s: float = 0.0
    held: list[tuple[Pipe, Any]] = field(default_factory=list)
    streams: dict[Stream, None] = field(default_factory=dict)
    carried: int = 0
    swallowed: int = 0


class Wire:
    """All connections of a deployment, and who listens where."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.on_event: Callable[[Event], None] = lambda event: None
        self.filter: Callable[[Event], Fate] | None = None
        self._rng = rng
        self._servers: dict[str, tuple[Process, Any]] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._trace = blake2b(digest_size=16)
        self.messages = 0

    # ---- ends

    def serve(self, address: str, process: Process, servicer: Any) -> None:
        self._servers[address] = (process, servicer)

    def dialer(self, process: Process) -> Callable[[str], Channel]:
        return lambda address: Channel(self, process, address)

    def server(self, address: str) -> tuple[Process, Any] | None:
        found = self._servers.get(address)
        return None if found is None or found[0].life is Life.DEAD else found

    # ---- faults

    def link(self, one: str, other: str) -> Link:
        return self._links.setdefault((min(one, other), max(one, other)), Link())

    def links_of(self, name: str) -> list[Link]:
        return [link for ends, link in sorted(self._links.items()) if name in ends]

    def cut(self, link: Link) -> int:
        """Breaks all streams over the link; how many."""
        streams = list(link.streams)
        for stream in streams:
            stream.cut()
        link.held.clear()
        return len(streams)

    def light(self, link: Link) -> None:
        """What was on its way arrives now, as far as anybody still waits for it."""
        link.dark = False
        held, link.held = link.held, []
        for pipe, item in held:
            self._carry(link, pipe, item)

    def lost(self, process: Process) -> None:
        """The process is dead: whoever spoke with it hears."""
        for ends, link in sorted(self._links.items()):
            if process.name in ends:
                for stream in list(link.streams):
                    if process in (stream.up.sender, stream.up.receiver):
                        stream.cut()

    # ---- carrying

    def post(self, pipe: Pipe, item: Any) -> None:
        link = pipe.stream.link
        if isinstance(item, Message):
            event = Event(f"{pipe.stream.method}.{item.kind} sent", pipe.sender, pipe.receiver, pipe.stream)
            fate = Fate.PASS if self.filter is None else self.filter(event)
            self.on_event(event)
            if fate is Fate.DROP:
                return
            if fate is Fate.LATE:
                pipe.late = item
                return
            self._post(link, pipe, item)
            if fate is Fate.TWICE:
                self._post(link, pipe, item)
            if pipe.late is not None:
                late, pipe.late = pipe.late, None
                self._post(link, pipe, late)
        else:
            self._post(link, pipe, item)

    def _post(self, link: Link, pipe: Pipe, item: Any) -> None:
        if link.dark:
            link.swallowed += 1
            link.held.append((pipe, item))
        else:
            self._carry(link, pipe, item)

    def _carry(self, link: Link, pipe: Pipe, item: Any) -> None:
        delay_s = 0.0001 + self._rng.random() * 0.0009 + link.extra_delay_s
        link.carried += 1
        pipe.arrival = max(self.loop.time() + delay_s, pipe.arrival + LEAST_GAP_S)
        self.loop.call_at(pipe.arrival, self._arrive, pipe, item, context=pipe.context)

    def _arrive(self, pipe: Pipe, item: Any) -> None:
        if not pipe.stream.open:
            return
        if isinstance(item, Message):
            self.messages += 1
            stream = pipe.stream
            note = f"{self.loop.time()!r} {pipe.sender.name} {pipe.receiver.name} {stream.method} {item.kind}"
            self._trace.update(note.encode())
            self._trace.update(item.data)
            self.on_event(Event(f"{stream.method}.{item.kind} arrived", pipe.sender, pipe.receiver, stream))
        pipe.take(item)

    def note(self, text: str) -> None:
        """Something beside messages that a replay must repeat."""
        self._trace.update(f"{self.loop.time()!r} {text}".encode())

    def digest(self) -> str:
        return self._trace.hexdigest()


class Inbox:
    """What has arrived for one reader, who may wait for more."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.messages: deque[bytes] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self.on_sign: Callable[[Any], None] = lambda sign: None
        self._loop = loop

    def take(self, item: Any) -> None:
        if isinstance(item, Message):
            self.messages.append(item.data)
        else:
            self.on_sign(item)
        self.wake()

    def wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter


class Pipe(Inbox):
    """One direction of a stream, at its receiver."""

    def __init__(self, stream: Stream, sender: Process, receiver: Process) -> None:
        super().__init__(stream.wire.loop)
        self.stream = stream
        self.sender = sender
        self.receiver = receiver
        self.context: Context = receiver.context
        self.arrival = 0.0
        self.late: Message | None = None


class Stream:
    """One call between two processes: `up` to the server, `down` to the client."""

    def __init__(self, wire: Wire, client: Process, server: Process, method: str) -> None:
        self.wire = wire
        self.method = method
        self.label = ""
        """The request that a lease is about."""
        self.open = True
        self.link = wire.link(client.name, server.name)
        self.link.streams[self] = None
        self.up = Pipe(self, client, server)
        self.down = Pipe(self, server, client)

    def end(self) -> None:
        self.open = False
        self.link.streams.pop(self, None)

    def cut(self) -> None:
        """Each side that lives hears when its loop runs."""
        self.end()
        for pipe in (self.up, self.down):
            self.wire.loop.call_soon(pipe.take, Sign.BROKEN, context=pipe.context)


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
            return Call(self, method, metadata, request_serializer, response_deserializer, request_iterator)

        return call

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        method = path.rpartition("/")[2]

        async def call(request: Any, metadata: Any = None, timeout: float | None = None) -> Any:
            under = Call(self, method, metadata, request_serializer, response_deserializer, None)
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

    def __init__(self, channel: Channel, method: str, metadata: Any, serialize: Any, parse: Any, requests: Any) -> None:
        self._channel = channel
        self._serialize, self._parse = serialize, parse
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
        self._channel.wire.post(self._stream.up, Message(kind, self._serialize(request)))

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
        self._wire.post(self._stream.down, Message(_kind(message), message.SerializeToString()))

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


def _kind(message: Any) -> str:
    return message.WhichOneof("kind") if "kind" in message.DESCRIPTOR.oneofs_by_name else message.DESCRIPTOR.name


def _error(status: Status) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status.code, NO_METADATA, NO_METADATA, status.details)


def _requests() -> dict[str, Any]:
    from headrace.v1 import worker_pb2 as pb

    return {
        SESSION: pb.SessionRequest,
        LEASE: pb.LeaseRequest,
        PAIR: pb.PairRequest,
        "WorkerStatus": pb.WorkerStatusRequest,
    }


REQUESTS = _requests()
STREAMS = frozenset({SESSION, LEASE, PAIR})

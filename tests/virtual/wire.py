"""The network between virtual processes: streams of messages over links that break.

A stream keeps the order of its messages, and each has a delay of its own. What a fault does to a link, it does to all
streams over it: `cut` breaks them and both sides hear; a `dark` link carries nothing, and nobody hears, until it is lit
again or cut. What no network does, to single messages, is `Wire.filter`'s.
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

from tests.virtual.loop import Life, Process, VirtualLoop

LEAST_GAP_S = 1e-7
"""Between two messages of a stream: timers of one instant have no order."""


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

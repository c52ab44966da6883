"""TCP proxies whose connections break on command, each with the count of bytes that proves it.

A connection is named after the gRPC method that it carries (a gateway has one connection for its session and others to
ask for accounts; a reader has one for its leases), so that a rule can break one link between two processes and spare
the others. gRPC writes the method's path uncompressed into the first headers of a connection. What carries no known
path, such as a KV lane, is named `other`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

PATHS = {
    b"/headrace.v1.Worker/Session": "session",
    b"/headrace.v1.Worker/Lease": "lease",
    b"/headrace.v1.Worker/WorkerStatus": "status",
}
OTHER = "other"
EVERY = frozenset({*PATHS.values(), OTHER})
PIECE_BYTES = 256 << 10
_RST = struct.pack("ii", 1, 0)
"""SO_LINGER: close() sends RST and drops what was not sent."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to each piece of bytes on the named links. The default forwards everything.

    blackhole: bytes are taken and thrown away, ends of connections too; a connection that lost bytes never works again.
    delay_s: each piece waits. bytes_per_s: None is without a limit.
    """

    links: frozenset[str] = frozenset()
    blackhole: bool = False
    delay_s: float = 0.0
    bytes_per_s: float | None = None


@dataclass(slots=True, eq=False)
class _Connection:
    client: socket.socket
    server: socket.socket
    carrier: asyncio.Task[None]
    link: str = OTHER
    swallowed: bool = False


@dataclass(slots=True)
class Counts:
    connections: int = 0
    passed_bytes: int = 0
    swallowed_bytes: int = 0
    delayed_bytes: int = 0
    resets: int = 0


class FaultProxy:
    """One port in front of one server. Made by `Proxies.open`; its methods may be called from any thread."""

    def __init__(self, home: Proxies, target: str) -> None:
        self.counts = Counts()
        self._home = home
        self._target = target
        self._rule = Rule()
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        home.call(self._start)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def aim(self, target: str) -> None:
        """New connections go to this server."""
        self._home.call(lambda: setattr(self, "_target", target))

    def obey(self, rule: Rule) -> None:
        self._home.call(lambda: setattr(self, "_rule", rule))

    def heal(self) -> int:
        """Forwards again. Connections that lost bytes are reset; returns how many."""
        self.obey(Rule())
        return self._home.call(lambda: self._reset(lambda connection: connection.swallowed))

    def reset(self, links: frozenset[str] = EVERY) -> int:
        """Sends RST to both sides of all open connections of these links; returns how many there were."""
        return self._home.call(lambda: self._reset(lambda connection: connection.link in links))

    def close(self) -> None:
        self._home.call(self._close)

    # --- on the proxies' loop

    def _start(self) -> None:
        self._spawn(self._accept())

    def _close(self) -> None:
        self._reset(lambda _: True)
        for task in self._tasks:
            task.cancel()
        self._listener.close()

    def _reset(self, wanted: Callable[[_Connection], bool]) -> int:
        victims = [connection for connection in self._connections if wanted(connection)]
        for connection in victims:
            for sock in (connection.client, connection.server):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
            connection.carrier.cancel()
            self._connections.discard(connection)
        self.counts.resets += len(victims)
        return len(victims)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self._listener)
            self._spawn(self._carry(client))

    async def _carry(self, client: socket.socket) -> None:
        me = asyncio.current_task()
        assert me is not None
        host, _, port = self._target.rpartition(":")
        server = socket.socket()
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(client, server, me)
        ways: list[asyncio.Task[None]] = []
        try:
            await asyncio.get_running_loop().sock_connect(server, (host, int(port)))
            self._connections.add(connection)
            self.counts.connections += 1
            ways = [
                asyncio.ensure_future(self._forward(connection, client, server)),
                asyncio.ensure_future(self._forward(connection, server, client)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            while connection.swallowed and connection in self._connections:
                await asyncio.sleep(0.02)  # nobody hears of an end in a black hole
        except OSError:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)  # nobody listens there
        finally:
            self._connections.discard(connection)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            client.close()
            server.close()

    async def _forward(self, connection: _Connection, source: socket.socket, sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, PIECE_BYTES):
                if connection.link == OTHER and source is connection.client:
                    connection.link = next((name for path, name in PATHS.items() if path in data), OTHER)
                rule = self._rule if connection.link in self._rule.links else Rule()
                wait_s = rule.delay_s + (len(data) / rule.bytes_per_s if rule.bytes_per_s else 0.0)
                if wait_s:
                    self.counts.delayed_bytes += len(data)
                    await asyncio.sleep(wait_s)
                if rule.blackhole or connection.swallowed:
                    connection.swallowed = True
                    self.counts.swallowed_bytes += len(data)
                    continue
                await loop.sock_sendall(sink, data)
                self.counts.passed_bytes += len(data)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass
class Proxies:
    """The thread and the event loop of all proxies of a test."""

    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _open: list[FaultProxy] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for proxy in self._open:
            proxy.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    def open(self, target: str) -> FaultProxy:
        proxy = FaultProxy(self, target)
        self._open.append(proxy)
        return proxy

    def call(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

"""Moves many blocks through one non-blocking socket, without a copy in between.

A wait costs a turn of the event loop, so the socket is watched once for the whole transfer, several blocks go into one
system call, and the kernel is asked to wake the reader only when there is enough to be worth it. A long send does not
even pay that: it blocks in the kernel, in a thread (between two processes of one machine that alone is worth twice the
rate: a sender that sleeps in `epoll` starts again on the reader's core).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

TURN_BYTES = 1 << 20
"""The event loop gets a turn at least this often."""
WAKE_BYTES = 256 << 10
"""A reader sleeps until so much has come, or all that is left."""
MAX_BUFFERS = 64
"""Of one system call."""
THREAD_BYTES = 1 << 20
"""Less goes into the socket's own buffer, or nearly."""
MAX_THREADS = 4


async def receive(
    sock: socket.socket, views: Iterator[memoryview], num_bytes: int, moved: Callable[[int], None]
) -> None:
    """Fills the views, of `num_bytes` in all, in order. `moved`: told of bytes as they come. Raises EOFError or
    OSError.
    """
    loop, missing = asyncio.get_running_loop(), num_bytes
    left: deque[memoryview] = deque()

    def some() -> bool:
        nonlocal missing
        turn = 0
        while missing and turn < TURN_BYTES:
            _fill(left, views)
            received = sock.recvmsg_into(left)[0]
            if not received:
                raise EOFError
            _advance(left, received)
            missing -= received
            turn += received
            moved(received)
            if 0 < missing < WAKE_BYTES:
                _wake_at(sock, missing)
        return not missing

    _wake_at(sock, min(missing, WAKE_BYTES) or 1)
    try:
        await _until(some, sock, loop.add_reader, loop.remove_reader)
    finally:
        _wake_at(sock, 1)


class Sender:
    """Writes blocks into sockets: from a thread where there is enough to send and a thread is free, else on the event
    loop. So readers that have stopped hold up nobody but themselves.
    """

    def __init__(self, stall_s: float) -> None:
        """`stall_s`: a thread gives up a reader that takes nothing for so long."""
        self._stall = struct.pack("ll", int(stall_s), int(stall_s % 1 * 1e6))
        self._threads = ThreadPoolExecutor(MAX_THREADS, "tcp-send")
        self.num_busy = 0
        """Threads in use."""

    async def send(self, sock: socket.socket, views: Iterator[memoryview], num_bytes: int) -> None:
        """The views, of `num_bytes` in all, in order. Raises OSError. Once it is over, cancelled too, nobody uses the
        socket.
        """
        if num_bytes < THREAD_BYTES or self.num_busy >= MAX_THREADS:
            await _send_on_loop(sock, views)
            return
        self.num_busy += 1
        sending = asyncio.get_running_loop().run_in_executor(self._threads, self._send_blocking, sock, views)
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
            await asyncio.wait([sending])
            sending.exception()
            raise
        finally:
            self.num_busy -= 1

    def close(self) -> None:
        """After the last `send`."""
        self._threads.shutdown(wait=False)

    def _send_blocking(self, sock: socket.socket, views: Iterator[memoryview]) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, self._stall)
        left: deque[memoryview] = deque()
        _fill(left, views)
        while left:
            _advance(left, sock.sendmsg(left))
            _fill(left, views)
        sock.setblocking(False)


async def _send_on_loop(sock: socket.socket, views: Iterator[memoryview]) -> None:
    loop = asyncio.get_running_loop()
    left: deque[memoryview] = deque()

    def some() -> bool:
        turn = 0
        while turn < TURN_BYTES:
            _fill(left, views)
            if not left:
                return True
            sent = sock.sendmsg(left)
            _advance(left, sent)
            turn += sent
        return False

    await _until(some, sock, loop.add_writer, loop.remove_writer)


async def _until(
    some: Callable[[], bool],
    sock: socket.socket,
    watch: Callable[[int, Callable[[], None]], None],
    forget: Callable[[int], bool],
) -> None:
    """Calls `some` whenever the socket is ready, until it says that all is done."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ready() -> None:
        if over.done():
            return
        try:
            if some():
                over.set_result(None)
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, EOFError) as error:
            over.set_exception(error)

    descriptor = sock.fileno()
    watch(descriptor, ready)
    try:
        ready()
        await over
    finally:
        forget(descriptor)


def _wake_at(sock: socket.socket, num_bytes: int) -> None:
    """Not before so much is there, or the other side has gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


def _fill(left: deque[memoryview], views: Iterator[memoryview]) -> None:
    while len(left) < MAX_BUFFERS and (view := next(views, None)) is not None:
        left.append(view)


def _advance(left: deque[memoryview], num_bytes: int) -> None:
    while num_bytes:
        first = left[0]
        if num_bytes < len(first):
            left[0] = first[num_bytes:]
            return
        num_bytes -= len(first)
        left.popleft()

"""Both ends of a lease stream: messages out and in, heartbeats, and the verdict that the other side is gone.

Liveness is the application's own, because a connection answers pings while its process hangs: an idle side sends a
heartbeat every liveness_s / 4, and a side that heard nothing for liveness_s counts as gone. Silence is counted in
ticks of this event loop, so that a loop which was itself held up does not blame the other side.

Each side numbers its messages, heartbeats included. A repeat is dropped; a gap ends the stream at once, or with the
next heartbeat when the last message is the one that is missing. Nobody waits for what will never come.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, Generic, TypeVar

import grpc

TOKEN_KEY = "x-headrace-cluster"
"""Metadata key of the cluster token, in what a gateway calls."""
GONE = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What grpc.aio raises when a stream is over."""
_TICKS = 8

M = TypeVar("M")


class Over(Enum):
    """How a stream ended."""

    SAID = "said"
    """The outbox ended it and all was written."""
    GONE = "gone"
    """The other side ended it or its connection broke."""
    SILENT = "silence"
    GAP = "gap"
    """A message of the other side did not arrive."""


class Outbox(Generic[M]):
    """Messages of one stream in order, then its deliberate end."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[M | Callable[[], Awaitable[M]] | None] = asyncio.Queue()

    def put(self, message: M | Callable[[], Awaitable[M]]) -> None:
        """A message, or what makes it when its turn has come: those behind it wait."""
        self._queue.put_nowait(message)

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def get(self) -> M | Callable[[], Awaitable[M]] | None:
        return await self._queue.get()


async def pump(
    read: Callable[[], Awaitable[Any]],
    write: Callable[[Any], Awaitable[None]],
    hear: Callable[[Any], Awaitable[None]],
    outbox: Outbox[Any],
    heartbeat: Any,
    liveness_s: float,
    hang_up: Callable[[], Awaitable[None]] | None = None,
    num_heard: int = 0,
) -> Over:
    """Runs a stream until it is over. Errors of `hear` are raised. Leaves no task behind, cancelled or not.

    hang_up: says that nothing more will be written, once the outbox has ended; then the other side has liveness_s / 4
    to end the stream. Without it the stream is left at once, and a call whose read is cancelled with what it had
    written last perhaps unread.

    num_heard: messages of the other side that were read before.
    """
    heard, numbers = asyncio.Event(), itertools.count(1)

    async def receive() -> bool:
        """False: a message is missing."""
        last = num_heard
        while (message := await read()) is not grpc.aio.EOF:
            heard.set()
            if not 0 < message.number <= last + 1:
                return False
            if message.number == last + 1:
                last = message.number
                await hear(message)
                heard.set()
        return True

    async def send() -> None:
        while True:
            try:
                async with asyncio.timeout(liveness_s / 4):
                    message = await outbox.get()
            except TimeoutError:
                message = heartbeat
            if message is None:
                return
            if callable(message):
                message = await message()
            message.number = next(numbers)
            await write(message)

    async def watch() -> None:
        silent = 0
        while silent < _TICKS:
            await asyncio.sleep(liveness_s / _TICKS)
            silent = 0 if heard.is_set() else silent + 1
            heard.clear()

    receiving, sending, watching = tasks = [asyncio.ensure_future(work()) for work in (receive, send, watch)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        said = sending.done() and not sending.exception()
        if said and hang_up is not None:
            with contextlib.suppress(*GONE):
                await hang_up()
                await asyncio.wait((receiving,), timeout=liveness_s / 4)
        for task in (receiving, sending):
            error = task.exception() if task.done() else None
            if error is not None and not isinstance(error, GONE):
                raise error
        if said:
            return Over.SAID
        if receiving.done() and not receiving.exception() and not receiving.result():
            return Over.GAP
        return Over.SILENT if watching.done() else Over.GONE
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(receiving, sending, watching, return_exceptions=True)

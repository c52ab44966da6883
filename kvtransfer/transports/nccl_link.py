"""One end of a reader's and a holder's pair: an authenticated control connection, a group of two, and the one thread in
which the group's calls block.

    loop     frames in order; one of them for each piece says what comes      broken: once, for ever, with its reason
    thread   sends or receives pieces, in the order of the frames             ends when the group is aborted

The control connection tells that the peer is gone even when the group's backend would wait for ever.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from kvtransfer.transports.base import TransferError, TransferFault
from kvtransfer.transports.nccl_group import Group, Staging
from kvtransfer.transports.tcp_wire import recv_frame, send_frame

MAX_UNREAD_FRAMES = 4

T = TypeVar("T")


class Link:
    """Methods raise TransferError: what the link broke of."""

    def __init__(self, sock: socket.socket, group: Group, thread: ThreadPoolExecutor, timeout_s: float) -> None:
        """Owns all three from now on. A wait of more than `timeout_s` breaks the link."""
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._group = group
        self._thread = thread
        self._timeout_s = timeout_s
        self._frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MAX_UNREAD_FRAMES)
        self.broken: asyncio.Future[None] = self._loop.create_future()
        self.broken.add_done_callback(lambda future: future.exception())
        self._listening = self._loop.create_task(self._listen())
        self.ended = self._loop.create_task(self._end())
        """Over when the thread is: until then the group may write into the staging memory, which goes with the link."""

    def break_off(self, error: TransferError) -> None:
        """The first reason stays."""
        if not self.broken.done():
            self.broken.set_exception(error)

    async def send(self, frame: dict[str, Any]) -> None:
        try:
            await self._unless_broken(send_frame(self._sock, frame))
        except OSError as error:
            self.break_off(TransferError(TransferFault.PEER_LOST, type(error).__name__))
            await self.broken

    async def next_frame(self, timed: bool = True) -> dict[str, Any]:
        return await self._unless_broken(self._frames.get(), timed)

    async def move(self, function: Callable[[Staging, int], None], staging: Staging, num_bytes: int) -> None:
        """Runs a method of the group in the link's thread."""
        try:
            await self._unless_broken(self._loop.run_in_executor(self._thread, function, staging, num_bytes))
        except TransferError as error:
            self.break_off(error)
            raise

    async def _unless_broken(self, work: Awaitable[T], timed: bool = True) -> T:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait(
                {cast("asyncio.Future[object]", task), cast("asyncio.Future[object]", self.broken)},
                timeout=self._timeout_s if timed else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            # A future is done as soon as it is cancelled: whether it came in time is asked first.
            in_time = task.done()
            if not in_time:
                task.cancel()
        if in_time and not self.broken.done():
            return task.result()
        self.break_off(TransferError(TransferFault.TIMEOUT, f"nothing moved for {self._timeout_s} s"))
        await self.broken
        raise AssertionError("a broken link has a reason")

    async def _listen(self) -> None:
        try:
            while True:
                frame = await recv_frame(self._sock)
                if self._frames.full():
                    raise TransferError(TransferFault.FAILED, "too many frames at once")
                self._frames.put_nowait(frame)
        except TransferError as error:
            self.break_off(error)
        except (OSError, EOFError) as error:
            self.break_off(TransferError(TransferFault.PEER_LOST, type(error).__name__))

    async def _end(self) -> None:
        await asyncio.wait({self.broken})
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._sock.close()
        await asyncio.to_thread(self._abort)

    def _abort(self) -> None:
        self._group.abort()
        self._thread.shutdown(wait=True)
        self._group.close()

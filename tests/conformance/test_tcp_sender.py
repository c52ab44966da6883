"""What the holder's side of the TCP lane writes, and whom a reader that has stopped holds up: nobody."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvtransfer.transports.tcp_bulk import MAX_BUFFERS, MAX_THREADS, THREAD_BYTES, Sender
from kvtransfer.transports.tcp_wire import tune
from tests.lanes import run

LONG = 16 * THREAD_BYTES
"""More than any socket takes while nobody reads."""


def data(num_bytes: int) -> memoryview:
    return memoryview(np.random.default_rng(num_bytes).bytes(num_bytes))


def parts(view: memoryview, num_parts: int) -> Iterator[memoryview]:
    size = -(-len(view) // num_parts)
    return (view[at : at + size] for at in range(0, len(view), size))


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        tune(ours)
        tune(theirs)
        yield ours, theirs


async def read(sock: socket.socket, num_bytes: int) -> bytes:
    loop, got = asyncio.get_running_loop(), bytearray()
    while len(got) < num_bytes and (some := await loop.sock_recv(sock, 1 << 16)):
        got += some
    return bytes(got)


@pytest.mark.parametrize("num_bytes", [1, THREAD_BYTES - 1, THREAD_BYTES, LONG + 1])
@pytest.mark.parametrize("num_parts", [1, 2 * MAX_BUFFERS + 1])
def test_all_bytes_arrive_in_order_and_the_connection_serves_again(num_bytes: int, num_parts: int) -> None:
    async def test() -> None:
        sender = Sender(5.0)
        async with connection() as (ours, theirs):
            for _ in range(2):
                whole = data(num_bytes)
                sending = asyncio.create_task(sender.send(ours, parts(whole, num_parts), num_bytes))
                assert await read(theirs, num_bytes) == whole
                await sending
                assert not ours.getblocking()
                await asyncio.get_running_loop().sock_sendall(theirs, b"next")
                assert await read(ours, 4) == b"next"
        sender.close()

    run(test())


def test_readers_that_have_stopped_hold_up_nobody_else() -> None:
    async def test() -> None:
        sender, whole = Sender(5.0), data(LONG)
        async with connection() as (ours, theirs):
            stopped = [connection() for _ in range(MAX_THREADS + 2)]
            stuck = [
                asyncio.create_task(sender.send((await one.__aenter__())[0], parts(whole, 3), LONG)) for one in stopped
            ]
            await asyncio.sleep(0)
            sending = asyncio.create_task(sender.send(ours, parts(whole, 3), LONG))
            assert await read(theirs, LONG) == whole
            await sending
            assert not any(task.done() for task in stuck)
            # and being cancelled, they are over at once
            for task in stuck:
                task.cancel()
            await asyncio.wait_for(asyncio.gather(*stuck, return_exceptions=True), 2.0)
            for one in stopped:
                await one.__aexit__(None, None, None)
        sender.close()

    run(test())


def test_a_thread_is_free_again_after_each_way_to_end() -> None:
    async def test() -> None:
        sender, whole = Sender(0.2), data(LONG)

        async def end_each(way: str) -> None:
            async with connection() as (ours, theirs):
                sending = asyncio.create_task(sender.send(ours, parts(whole, 3), LONG))
                await asyncio.sleep(0.05)
                if way == "cancelled":
                    sending.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await sending
                    return
                if way == "closed":
                    theirs.close()
                # a reader that takes nothing is given up by itself
                assert (await asyncio.wait([sending], timeout=2.0))[0]
                assert isinstance(sending.exception(), OSError)

        for way in ("cancelled", "closed", "silent"):
            for _ in range(MAX_THREADS + 1):
                await end_each(way)
        assert sender.num_busy == 0
        sender.close()

    run(test())

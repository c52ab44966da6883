"""Who gets through the door of a lane with a port: peers, however many strangers stand in it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from kvtransfer.transports import tcp_wire
from kvtransfer.transports.base import TransferError, TransferFault
from kvtransfer.transports.tcp_wire import Listener, dial
from tests.lanes import run

TOKEN, PEER = "secret", "holder/1"


@asynccontextmanager
async def door(max_connections: int = 4) -> AsyncIterator[tuple[str, int]]:
    """The address of a listener that serves each connection for as long as its client stays."""

    async def serve(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_recv(sock, 1)

    listener = Listener(TOKEN, PEER, serve, max_connections)
    await listener.open("127.0.0.1")
    try:
        yield listener.address()
    finally:
        await listener.close()


async def stranger(host: str, port: int) -> socket.socket:
    """Says nothing."""
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, port))
    return sock


def is_shut(sock: socket.socket) -> bool:
    """Whether the other side has ended the connection, behind all that it had said."""
    with suppress(BlockingIOError):
        while sock.recv(1024):
            pass
        return True
    return False


async def shut(socks: list[socket.socket], num_shut: int) -> list[bool]:
    """Which of them are, once so many are."""
    while sum(map(is_shut, socks)) < num_shut:
        await asyncio.sleep(0.01)
    return [is_shut(sock) for sock in socks]


def test_strangers_who_say_nothing_do_not_keep_a_peer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_wire, "MAX_UNPROVEN", 3)

    async def test() -> None:
        async with door(max_connections=2) as (host, port):
            first = await dial(host, port, TOKEN, PEER)
            strangers = [await stranger(host, port) for _ in range(5)]
            # 1. the oldest two went for the newest two
            assert await shut(strangers, 2) == [True, True, False, False, False]
            # 2. a peer comes in, and who is in stays
            second = await dial(host, port, TOKEN, PEER)
            assert not is_shut(first) and not is_shut(second)
            for sock in (first, second, *strangers):
                sock.close()

    run(test())


def test_a_burst_of_strangers_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_wire, "MAX_UNPROVEN", 1)

    async def test() -> None:
        async with door() as (host, port):
            strangers = [socket.create_connection((host, port)) for _ in range(40)]
            for sock in strangers:
                sock.setblocking(False)
            assert await shut(strangers, 39) == [True] * 39 + [False]
            (await dial(host, port, TOKEN, PEER)).close()
            for sock in strangers:
                sock.close()

    run(test())


def test_one_peer_too_many_is_told_so_and_comes_in_when_another_has_left() -> None:
    async def test() -> None:
        async with door(max_connections=2) as (host, port):
            peers = [await dial(host, port, TOKEN, PEER) for _ in range(2)]
            with pytest.raises(TransferError, match="too many connections") as error:
                await dial(host, port, TOKEN, PEER)
            assert error.value.kind is TransferFault.FAILED
            # Who does not know the token learns nothing of it.
            with pytest.raises(TransferError, match="unauthenticated"):
                await dial(host, port, "guess", PEER)
            peers.pop().close()
            while len(peers) < 2:  # the listener hears of it with its next turn
                with suppress(TransferError):
                    peers.append(await dial(host, port, TOKEN, PEER))
            for sock in peers:
                sock.close()

    run(test())


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "\ud800"], ids=["empty label", "too long", "half a character"])
def test_a_host_that_is_no_name_is_a_refusal_like_any_other(host: str) -> None:
    async def test() -> None:
        with pytest.raises(TransferError, match="malformed host") as error:
            await dial(host, 5, TOKEN, PEER)
        assert error.value.kind is TransferFault.FAILED

    run(test())

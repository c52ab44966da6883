"""Transport over plain TCP: always there, and it fences an abandoned read at once by closing the connection.

One connection carries one read at a time; idle ones are kept for the next. After the handshake (`tcp_wire`), repeated:

    client: {blocks: u32 ids, offset, bytes}
    server: {} | {refused}, then these bytes of each block in that order

Block bytes go from pool to socket and from socket to pool without a copy in between. They are neither encrypted nor
signed: the port belongs on the cluster's private network.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from headrace.errors import InvariantError
from kvtransfer.core.layout import Cut
from kvtransfer.transports.base import (
    STALL_S,
    Descriptor,
    Peer,
    Pool,
    PoolBytes,
    Progress,
    Pull,
    TransferError,
    TransferFault,
    failed_pull,
)
from kvtransfer.transports.tcp_bulk import Sender, receive
from kvtransfer.transports.tcp_wire import (
    MAX_BLOCKS_A_REQUEST,
    Listener,
    check_answer,
    dial,
    is_quiet,
    make_request,
    parse_address,
    parse_request,
    recv_frame,
    send_frame,
)

MAX_CONNECTIONS = 1024
MAX_IDLE_A_PEER = 4


@dataclass(slots=True)
class TcpPeer:
    peer_id: str
    num_blocks: int
    block_bytes: int
    descriptor: bytes
    host: str
    port: int
    idle: list[socket.socket] = field(default_factory=list)
    closed: bool = False


class TcpTransport:
    name = "tcp"

    def __init__(self, peer_id: str, token: str, host: str = "127.0.0.1", read_timeout_s: float = 30.0) -> None:
        self.peer_id = peer_id
        self._token = token
        self._host = host
        self._read_timeout_s = read_timeout_s
        self._pool: Pool | None = None
        self._listener = Listener(token, peer_id, self._serve, MAX_CONNECTIONS)
        self._sender = Sender(read_timeout_s)
        self._peers: dict[str, TcpPeer] = {}
        self._reading: set[asyncio.Task[None]] = set()

    async def start(self, memory: PoolBytes, block_bytes: int) -> None:
        self._pool = Pool(memory, block_bytes)
        await self._listener.open(self._host)

    def descriptor(self) -> bytes:
        pool, details = self._own_pool(), msgpack.packb(self._listener.address())
        return Descriptor(self.name, self.peer_id, pool.num_blocks, pool.block_bytes, details).encode()

    async def connect(self, peer_id: str, descriptor: bytes) -> TcpPeer:
        known = self._peers.get(peer_id)
        if known is not None and known.descriptor == descriptor:
            return known
        found = Descriptor.decode(descriptor, self.name, peer_id)
        host, port = parse_address(found.details)
        peer = TcpPeer(peer_id, found.num_blocks, found.block_bytes, descriptor, host, port)
        _give_back(peer, await dial(peer.host, peer.port, self._token, peer.peer_id))
        other = self._peers.get(peer_id)
        if other is not None and other.descriptor == descriptor:
            await self.disconnect(peer)  # two callers dialled at once; the first one's is everybody's
            return other
        if other is not None:
            await self.disconnect(other)
        self._peers[peer_id] = peer
        return peer

    def pull(
        self, peer: Peer, remote_blocks: Sequence[int], local_blocks: Sequence[int], cut: Cut | None = None
    ) -> Pull:
        loop = asyncio.get_running_loop()
        if not isinstance(peer, TcpPeer):
            raise InvariantError("a peer of another transport")
        try:
            cut = self._own_pool().check_pull(peer, remote_blocks, local_blocks, cut)
        except TransferError as error:
            return failed_pull(loop, error)
        pull = Pull(loop, lambda: _cancel(task))
        task = loop.create_task(self._read(peer, list(remote_blocks), list(local_blocks), cut, pull))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        pull.follow(task)
        return pull

    async def disconnect(self, peer: Peer) -> None:
        if self._peers.get(peer.peer_id) is peer:
            del self._peers[peer.peer_id]
        if isinstance(peer, TcpPeer):
            peer.closed = True
            while peer.idle:
                peer.idle.pop().close()

    async def close(self) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        await self._listener.close()
        self._sender.close()
        for peer in list(self._peers.values()):
            await self.disconnect(peer)

    def twin(self, peer_id: str) -> TcpTransport:
        return TcpTransport(peer_id, self._token, self._host, self._read_timeout_s)

    # --- reader

    async def _read(self, peer: TcpPeer, remote: list[int], local: list[int], cut: Cut, pull: Pull) -> None:
        loop = asyncio.get_running_loop()
        progress = Progress(loop.time())
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(self._read_timeout_s) as limit:
                sock = await self._take(peer)
                for at in range(0, len(remote), MAX_BLOCKS_A_REQUEST):
                    part = slice(at, at + MAX_BLOCKS_A_REQUEST)
                    await send_frame(sock, make_request(remote[part], cut.remote_offset, cut.num_bytes))
                    check_answer(await recv_frame(sock))
                    await self._receive(sock, local[part], cut, progress, limit)
            _give_back(peer, sock)
            sock = None
            pull.finish(progress.stats())
        except TransferError as error:
            pull.fail(error)
        except TimeoutError:
            pull.fail(TransferError(TransferFault.TIMEOUT, f"nothing moved for {self._read_timeout_s} s"))
        except (OSError, EOFError) as error:
            pull.fail(TransferError(TransferFault.PEER_LOST, type(error).__name__))
        finally:
            if sock is not None:
                sock.close()

    async def _receive(
        self, sock: socket.socket, local: list[int], cut: Cut, progress: Progress, limit: asyncio.Timeout
    ) -> None:
        loop, read_timeout_s = asyncio.get_running_loop(), self._read_timeout_s
        told = loop.time()

        def moved(num_bytes: int) -> None:
            nonlocal told
            now = loop.time()
            progress.moved(num_bytes, now)
            if now - told > STALL_S:
                told = now
                limit.reschedule(now + read_timeout_s)

        pool = self._own_pool()
        views = pool.views(local, cut.local_offset, cut.num_bytes, pool.memory.nbytes)
        await receive(sock, views, len(local) * cut.num_bytes, moved)
        limit.reschedule(loop.time() + read_timeout_s)

    async def _take(self, peer: TcpPeer) -> socket.socket:
        while peer.idle:
            sock = peer.idle.pop()
            if is_quiet(sock):
                return sock
            sock.close()
        return await dial(peer.host, peer.port, self._token, peer.peer_id)

    # --- holder

    async def _serve(self, sock: socket.socket) -> None:
        while True:
            await self._answer(sock, await recv_frame(sock))

    async def _answer(self, sock: socket.socket, request: dict[str, Any]) -> None:
        pool = self._own_pool()
        blocks, offset, num_bytes = parse_request(request)
        if refusal := pool.refusal(blocks, offset, num_bytes):
            await send_frame(sock, {"refused": refusal})
            return
        await send_frame(sock, {})
        views = pool.views(blocks, offset, num_bytes, pool.memory.nbytes)
        await self._sender.send(sock, views, len(blocks) * num_bytes)

    def _own_pool(self) -> Pool:
        if self._pool is None:
            raise InvariantError("the transport is not started")
        return self._pool


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _give_back(peer: TcpPeer, sock: socket.socket) -> None:
    if peer.closed or len(peer.idle) >= MAX_IDLE_A_PEER:
        sock.close()
    else:
        peer.idle.append(sock)

"""Transport over torch.distributed's point-to-point operations: NCCL between GPUs, gloo between CPUs. Reading on top of
two sides that both take part:

    reader                                              holder
    control connection (tcp_wire), {backend} ---------> opens a store for the pair
    group of two <------------- {port, key} ----------- group of two
    {blocks, offset, bytes} --------------------------> {} | {refused}
    staging memory <=========== a piece ================ staging memory, packed from these bytes of the blocks
    pool

A group's operations cannot be taken back: what is under way may be written long after everybody gave it up. So nothing
but staging memory is ever given to a group, and a piece is copied into the pool on the event loop only while its read
wants it: a read that was given up is terminal at once. The staging memory of a pair that broke is never used again, and
is freed when the group is aborted and its thread has ended.

A piece is the unit of progress: one that takes longer than `read_timeout_s` breaks the pair. The bytes are neither
encrypted nor signed, and a store believes whoever reaches its port: they belong on the cluster's private network.
This module imports torch.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgpack

from headrace.errors import InvariantError
from kvtransfer.core.layout import Cut
from kvtransfer.transports.base import (
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
from kvtransfer.transports.nccl_group import BACKENDS, HOLDER, READER, Group, Staging, Store
from kvtransfer.transports.nccl_link import Link
from kvtransfer.transports.tcp_wire import (
    HANDSHAKE_S,
    MAX_BLOCKS_A_REQUEST,
    Listener,
    check_answer,
    dial,
    make_request,
    parse_address,
    parse_request,
    recv_frame,
    send_frame,
)

PIECE_BYTES = 4 << 20
WINDOW = 2
"""Pieces of a pair under way: while one is copied into the pool the next one comes."""
COPY_BYTES = 1 << 20
"""The event loop gets a turn at least this often."""
MAX_PAIRS = 64
"""As holder; each has a few threads."""
PAIR_S = 5.0
"""How long the two members of a group wait for each other."""


@dataclass(slots=True)
class _Pair:
    """A reader's end and its staging memory."""

    link: Link
    group: Group
    free: asyncio.Queue[Staging]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Requests and receives come in the same order."""


@dataclass(slots=True, eq=False)
class NcclPeer:
    peer_id: str
    num_blocks: int
    block_bytes: int
    descriptor: bytes
    host: str
    port: int
    pair: _Pair | None = None
    pairing: asyncio.Lock = field(default_factory=asyncio.Lock)
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """`cut` of each of these blocks: what one request asks for."""

    remote: list[int]
    local: list[int]
    cut: Cut

    @property
    def num_bytes(self) -> int:
        return len(self.remote) * self.cut.num_bytes


def pieces_of(remote: list[int], local: list[int], cut: Cut, max_bytes: int) -> Iterator[Piece]:
    """As many blocks a piece as fit into `max_bytes`; of longer ones a part of one block."""
    for at in range(0, cut.num_bytes, max_bytes):
        part = Cut(cut.remote_offset + at, cut.local_offset + at, min(max_bytes, cut.num_bytes - at))
        step = min(max_bytes // part.num_bytes, MAX_BLOCKS_A_REQUEST)
        for first in range(0, len(remote), step):
            yield Piece(remote[first : first + step], local[first : first + step], part)


class NcclTransport:
    name = "nccl"

    def __init__(
        self, peer_id: str, token: str, host: str = "127.0.0.1", read_timeout_s: float = 30.0, backend: str = "gloo"
    ) -> None:
        """`backend`: gloo moves over the CPUs and the network of `host`; nccl needs a GPU for each of the two."""
        if backend not in BACKENDS:
            raise InvariantError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
        self.peer_id = peer_id
        self._token = token
        self._host = host
        self._read_timeout_s = read_timeout_s
        self._backend = backend
        self._pool: Pool | None = None
        self._closed = False
        self._listener = Listener(token, peer_id, self._serve, MAX_PAIRS)
        self._peers: dict[str, NcclPeer] = {}
        self._reads: set[asyncio.Task[None]] = set()
        self._fetches: set[asyncio.Task[None]] = set()
        self._links: set[Link] = set()
        self._ending: set[asyncio.Task[None]] = set()
        """Threads, and links with theirs, that come to an end."""

    async def start(self, memory: PoolBytes, block_bytes: int) -> None:
        self._pool = Pool(memory, block_bytes)
        await self._listener.open(self._host)

    def descriptor(self) -> bytes:
        pool, details = self._own_pool(), msgpack.packb(self._listener.address())
        return Descriptor(self.name, self.peer_id, pool.num_blocks, pool.block_bytes, details).encode()

    async def connect(self, peer_id: str, descriptor: bytes) -> NcclPeer:
        known = self._peers.get(peer_id)
        if known is not None and known.descriptor == descriptor:
            return known
        found = Descriptor.decode(descriptor, self.name, peer_id)
        host, port = parse_address(found.details)
        peer = NcclPeer(peer_id, found.num_blocks, found.block_bytes, descriptor, host, port)
        await self._pair_of(peer)
        other = self._peers.get(peer_id)
        if other is not None and other.descriptor == descriptor:
            await self.disconnect(peer)  # two callers paired at once; the first one's is everybody's
            return other
        if other is not None:
            await self.disconnect(other)
        self._peers[peer_id] = peer
        return peer

    def pull(
        self, peer: Peer, remote_blocks: Sequence[int], local_blocks: Sequence[int], cut: Cut | None = None
    ) -> Pull:
        loop = asyncio.get_running_loop()
        if not isinstance(peer, NcclPeer):
            raise InvariantError("a peer of another transport")
        try:
            if self._closed:
                raise TransferError(TransferFault.CANCELLED, "the transport was closed")
            cut = self._own_pool().check_pull(peer, remote_blocks, local_blocks, cut)
        except TransferError as error:
            return failed_pull(loop, error)
        pull = Pull(loop, lambda: pull.end())
        task = _spawn(self._reads, self._read(peer, list(remote_blocks), list(local_blocks), cut, pull))
        pull.follow(task)
        return pull

    async def disconnect(self, peer: Peer) -> None:
        if self._peers.get(peer.peer_id) is peer:
            del self._peers[peer.peer_id]
        if isinstance(peer, NcclPeer):
            peer.closed = True
            if peer.pair is not None:
                peer.pair.link.break_off(_given_up())
                await asyncio.wait({peer.pair.link.ended})

    async def close(self) -> None:
        self._closed = True
        for task in self._reads:
            task.cancel()
        for link in self._links:
            link.break_off(_given_up())
        await asyncio.gather(*self._reads, *self._fetches, return_exceptions=True)
        await self._listener.close()
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._peers.clear()

    def twin(self, peer_id: str) -> NcclTransport:
        return NcclTransport(peer_id, self._token, self._host, self._read_timeout_s, self._backend)

    # --- reader

    async def _read(self, peer: NcclPeer, remote: list[int], local: list[int], cut: Cut, pull: Pull) -> None:
        progress = Progress(asyncio.get_running_loop().time())
        coming: deque[asyncio.Task[None]] = deque()
        try:
            async with asyncio.timeout(self._read_timeout_s):
                pair = await self._pair_of(peer)
            for piece in pieces_of(remote, local, cut, PIECE_BYTES):
                if len(coming) == WINDOW:
                    await coming.popleft()
                if pull.done.done():
                    return
                coming.append(_spawn(self._fetches, self._fetch(pair, piece, pull, progress)))
            await asyncio.gather(*coming)
            pull.finish(progress.stats())
        except TransferError as error:
            pull.fail(error)
        except TimeoutError:
            pull.fail(TransferError(TransferFault.TIMEOUT, f"no pair after {self._read_timeout_s} s"))

    async def _fetch(self, pair: _Pair, piece: Piece, pull: Pull, progress: Progress) -> None:
        """Goes on when its read is given up: the group's next piece would be taken for this one."""
        staging = await pair.free.get()
        try:
            async with pair.turn:
                await pair.link.send(make_request(piece.remote, piece.cut.remote_offset, piece.cut.num_bytes))
                check_answer(await pair.link.next_frame())
                receiving = asyncio.ensure_future(pair.link.move(pair.group.receive, staging, piece.num_bytes))
            await receiving
            await self._copy(staging, piece, pull)
            progress.moved(piece.num_bytes, asyncio.get_running_loop().time())
        except TransferError as error:
            pull.fail(error)
            pull.end()
        finally:
            pair.free.put_nowait(staging)

    async def _copy(self, staging: Staging, piece: Piece, pull: Pull) -> None:
        pool, source, since_yield = self._own_pool(), staging.bytes.data, 0
        for view in pool.views(piece.local, piece.cut.local_offset, piece.cut.num_bytes, COPY_BYTES):
            if pull.done.done():
                return
            view[:] = source[: len(view)]
            source = source[len(view) :]
            since_yield += len(view)
            if since_yield >= COPY_BYTES:
                since_yield = 0
                await asyncio.sleep(0)

    async def _pair_of(self, peer: NcclPeer) -> _Pair:
        async with peer.pairing:
            if peer.closed or self._closed:
                raise _given_up()
            if peer.pair is None or peer.pair.link.broken.done():
                peer.pair = None
                peer.pair = await self._join(peer)
            return peer.pair

    async def _join(self, peer: NcclPeer) -> _Pair:
        sock = await dial(peer.host, peer.port, self._token, peer.peer_id)

        async def make(thread: ThreadPoolExecutor) -> Group:
            run = asyncio.get_running_loop().run_in_executor
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    await send_frame(sock, {"backend": self._backend})
                    answer = check_answer(await recv_frame(sock))
            except (OSError, EOFError) as error:
                raise TransferError(TransferFault.PEER_LOST, type(error).__name__) from error
            port, key = answer.get("port"), answer.get("key")
            if not (isinstance(port, int) and isinstance(key, str)):
                raise TransferError(TransferFault.FAILED, "malformed answer")
            store = await run(thread, Store, peer.host, port, key, PAIR_S)
            return await run(thread, Group, self._backend, store, self._host, READER, PAIR_S, 2 * self._read_timeout_s)

        link, group = await self._link(sock, make)
        free: asyncio.Queue[Staging] = asyncio.Queue()
        for _ in range(WINDOW):
            free.put_nowait(Staging(self._backend, PIECE_BYTES))
        return _Pair(link, group, free)

    # --- holder

    async def _serve(self, sock: socket.socket) -> None:
        async def make(thread: ThreadPoolExecutor) -> Group:
            run = asyncio.get_running_loop().run_in_executor
            async with asyncio.timeout(HANDSHAKE_S):
                request = await recv_frame(sock)
            if request.get("backend") != self._backend:
                await send_frame(sock, {"refused": f"this worker's backend is {self._backend}"})
                raise TransferError(TransferFault.FAILED, "another backend")
            listening, key = socket.create_server((self._host, 0), family=sock.family), secrets.token_hex(16)
            port = listening.getsockname()[1]
            store = await run(thread, Store, self._host, port, key, PAIR_S, listening.detach())
            await send_frame(sock, {"port": port, "key": key})
            return await run(thread, Group, self._backend, store, self._host, HOLDER, PAIR_S, 2 * self._read_timeout_s)

        link, group = await self._link(sock, make)
        try:
            await self._answer(link, group)
        finally:
            link.break_off(_given_up())
            await asyncio.wait({link.ended})

    async def _answer(self, link: Link, group: Group) -> None:
        pool, staging = self._own_pool(), Staging(self._backend, PIECE_BYTES)
        while True:
            blocks, offset, num_bytes = parse_request(await link.next_frame(timed=False))
            refusal = pool.refusal(blocks, offset, num_bytes)
            if not refusal and not 0 < len(blocks) * num_bytes <= PIECE_BYTES:
                refusal = f"a piece has at most {PIECE_BYTES} bytes"
            if refusal:
                await link.send({"refused": refusal})
                continue
            await link.send({})
            pack = partial(_pack_and_send, group, pool, blocks, offset, num_bytes)
            await link.move(pack, staging, len(blocks) * num_bytes)

    # --- both

    async def _link(
        self, sock: socket.socket, make: Callable[[ThreadPoolExecutor], Awaitable[Group]]
    ) -> tuple[Link, Group]:
        """What the two have in common. Whatever fails in `make`, neither the connection nor the thread stays."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="kv-pair")
        link: Link | None = None
        try:
            group = await make(thread)
            link = Link(sock, group, thread, self._read_timeout_s)
            self._links.add(link)
            self._ending.add(link.ended)
            link.ended.add_done_callback(self._ending.discard)
            link.ended.add_done_callback(lambda _: self._links.discard(link))
            if self._closed:
                link.break_off(_given_up())
            return link, group
        except TimeoutError as error:
            raise TransferError(TransferFault.TIMEOUT, "no answer to the pairing") from error
        finally:
            if link is None:
                sock.close()
                _spawn(self._ending, asyncio.to_thread(thread.shutdown))

    def _own_pool(self) -> Pool:
        if self._pool is None:
            raise InvariantError("the transport is not started")
        return self._pool


def _pack_and_send(
    group: Group, pool: Pool, blocks: list[int], offset: int, num_bytes: int, staging: Staging, total_bytes: int
) -> None:
    target = staging.bytes.data
    for view in pool.views(blocks, offset, num_bytes, total_bytes):
        target[: len(view)] = view
        target = target[len(view) :]
    group.send(staging, total_bytes)


def _given_up() -> TransferError:
    return TransferError(TransferFault.CANCELLED, "given up")


def _spawn(group: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work)
    group.add(task)
    task.add_done_callback(group.discard)
    return task

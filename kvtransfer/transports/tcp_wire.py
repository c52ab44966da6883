"""Authenticated connections between transports: frames, and the handshake of both sides. After accept:

    server: {nonce}                             both prove that they know the cluster token, over both nonces and the
    client: {nonce, peer_id, proof}             name of the process that the client wants; a restarted worker on the
    server: {proof} | {refused}                 same port answers "stale"

A frame is a 4-byte length and msgpack, at most MAX_FRAME_BYTES.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgpack
import numpy as np

from headrace.errors import InvariantError
from kvtransfer.transports.base import TransferError, TransferFault

MAX_FRAME_BYTES = 1 << 20
MAX_BLOCKS_A_REQUEST = 1 << 16
MAX_HANDSHAKE_BYTES = 4 << 10
"""Before the other side has proved that it knows the token."""
HANDSHAKE_S = 5.0
MAX_UNPROVEN = 128
"""Connections at a time whose other side has not proved yet that it knows the token."""


class Listener:
    """Accepts connections and runs `serve` on each that knows the token and wants this process, at most
    `max_connections` of them; one more is refused. A connection ends with its `serve`, which may raise OSError,
    EOFError or TransferError: its client left, was silent or sent nonsense.

    Of those that have not proved that they know the token the oldest goes when there would be more than MAX_UNPROVEN:
    strangers who say nothing keep no peer out.
    """

    def __init__(
        self, token: str, peer_id: str, serve: Callable[[socket.socket], Awaitable[None]], max_connections: int
    ) -> None:
        self._token = token
        self._peer_id = peer_id
        self._serve = serve
        self._max_connections = max_connections
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproven: dict[asyncio.Task[None], None] = {}
        """The oldest first."""
        self._served: set[asyncio.Task[None]] = set()

    async def open(self, host: str) -> None:
        """On a free port of this address. Raises OSError."""
        family = (await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM))[0][0]
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self._socket.setblocking(False)
        self._spawn(self._accept(self._socket))

    def address(self) -> tuple[str, int]:
        if self._socket is None:
            raise InvariantError("the transport is not started")
        host, port = self._socket.getsockname()[:2]
        return host, port

    async def close(self) -> None:
        """Ends all connections, too."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # out of descriptors or an aborted connection: not a reason to stop listening
                await asyncio.sleep(0.05)
                continue
            if len(self._unproven) >= MAX_UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
            tune(sock)
            task = self._spawn(self._run(sock))
            self._unproven[task] = None
            task.add_done_callback(functools.partial(self._over, sock))
            await asyncio.sleep(0)  # those who are in have their turns, however many stand in line

    async def _run(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                accepted = await welcome(sock, self._token, self._peer_id, self._let_in)
            if accepted:
                await self._serve(sock)
        except (OSError, EOFError, TransferError):
            pass

    def _let_in(self) -> bool:
        """The client of the running task has proved itself. False: there is no room."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._served) >= self._max_connections:
            return False
        self._unproven.pop(task, None)
        self._served.add(task)
        return True

    def _over(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before its first turn."""
        self._unproven.pop(task, None)
        self._served.discard(task)
        sock.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def dial(host: str, port: int, token: str, peer_id: str) -> socket.socket:
    """A connection to the process named `peer_id`, authenticated both ways.

    Raises TransferError: peer_lost when nobody answers, timeout after HANDSHAKE_S, failed when the other side refuses
    or does not know the token, or when `host` cannot be a name.
    """
    loop = asyncio.get_running_loop()
    sock: socket.socket | None = None
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            info = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            sock = socket.socket(info[0][0], socket.SOCK_STREAM)
            tune(sock)
            await loop.sock_connect(sock, info[0][4])
            theirs, ours = _nonce(await recv_frame(sock, MAX_HANDSHAKE_BYTES)), secrets.token_bytes(16)
            proof = _proof(token, b"reader", theirs, ours, peer_id)
            await send_frame(sock, {"nonce": ours, "peer_id": peer_id, "proof": proof})
            answer = check_answer(await recv_frame(sock, MAX_HANDSHAKE_BYTES))
        if not _same(answer.get("proof"), _proof(token, b"holder", ours, theirs, peer_id)):
            raise TransferError(TransferFault.FAILED, "the peer does not know the cluster token")
        connected, sock = sock, None
        return connected
    except TimeoutError as error:
        raise TransferError(TransferFault.TIMEOUT, "no answer to the handshake") from error
    except (OSError, EOFError) as error:
        raise TransferError(TransferFault.PEER_LOST, type(error).__name__) from error
    except UnicodeError as error:  # a descriptor's host, on its way to the resolver
        raise TransferError(TransferFault.FAILED, "malformed host") from error
    finally:
        if sock is not None:
            sock.close()


async def welcome(sock: socket.socket, token: str, peer_id: str, let_in: Callable[[], bool]) -> bool:
    """The server's part; False when the client was refused. `let_in` is asked once it has proved itself."""
    ours = secrets.token_bytes(16)
    await send_frame(sock, {"nonce": ours})
    hello = await recv_frame(sock, MAX_HANDSHAKE_BYTES)
    theirs, wanted = _nonce(hello), hello.get("peer_id")
    refusal = ""
    if not isinstance(wanted, str) or not _same(hello.get("proof"), _proof(token, b"reader", ours, theirs, wanted)):
        refusal = "unauthenticated"
    elif wanted != peer_id:
        refusal = "stale: another incarnation listens here"
    elif not let_in():
        refusal = "too many connections"
    if refusal:
        await send_frame(sock, {"refused": refusal})
        return False
    await send_frame(sock, {"proof": _proof(token, b"holder", theirs, ours, peer_id)})
    return True


def tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def is_quiet(sock: socket.socket) -> bool:
    """True when the connection is open and nothing is waiting in it."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def parse_address(details: bytes) -> tuple[str, int]:
    """Host and port of a descriptor. Raises TransferError(failed)."""
    try:
        host, port = msgpack.unpackb(details)
        if not (isinstance(host, str) and isinstance(port, int) and 0 < port < 1 << 16):
            raise ValueError("wrong types")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise TransferError(TransferFault.FAILED, "malformed descriptor") from error
    return host, port


def make_request(blocks: Sequence[int], offset: int, num_bytes: int) -> dict[str, Any]:
    """Asks for these bytes of each of at most MAX_BLOCKS_A_REQUEST blocks."""
    return {"blocks": np.asarray(blocks, "<u4").tobytes(), "offset": offset, "bytes": num_bytes}


def parse_request(frame: dict[str, Any]) -> tuple[list[int], int, int]:
    """(blocks, offset, bytes of each), unchecked. Raises TransferError(failed) on nonsense."""
    packed, offset, num_bytes = frame.get("blocks"), frame.get("offset"), frame.get("bytes")
    if (
        not (isinstance(packed, bytes) and isinstance(offset, int) and isinstance(num_bytes, int))
        or len(packed) % 4
        or len(packed) > 4 * MAX_BLOCKS_A_REQUEST
    ):
        raise TransferError(TransferFault.FAILED, "malformed request")
    return np.frombuffer(packed, "<u4").tolist(), offset, num_bytes


def check_answer(frame: dict[str, Any]) -> dict[str, Any]:
    if "refused" in frame:
        raise TransferError(TransferFault.FAILED, f"refused: {frame['refused']}"[:200])
    return frame


async def send_frame(sock: socket.socket, message: dict[str, Any]) -> None:
    body = msgpack.packb(message)
    await asyncio.get_running_loop().sock_sendall(sock, len(body).to_bytes(4, "big") + body)


async def recv_frame(sock: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> dict[str, Any]:
    """Raises EOFError when the connection ends, TransferError(failed) on nonsense or more than `max_bytes`."""
    length = int.from_bytes(await _recv_exactly(sock, 4), "big")
    if length > max_bytes:
        raise TransferError(TransferFault.FAILED, "frame too long")
    body = await _recv_exactly(sock, length)
    try:
        frame = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise TransferError(TransferFault.FAILED, "malformed frame") from error
    if not isinstance(frame, dict):
        raise TransferError(TransferFault.FAILED, "malformed frame")
    return frame


async def _recv_exactly(sock: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        received = await asyncio.get_running_loop().sock_recv_into(sock, view)
        if received == 0:
            raise EOFError
        view = view[received:]
    return data


def _nonce(frame: dict[str, Any]) -> bytes:
    nonce = frame.get("nonce")
    if not isinstance(nonce, bytes) or len(nonce) != 16:
        raise TransferError(TransferFault.FAILED, "malformed handshake")
    return nonce


def _proof(token: str, side: bytes, first: bytes, second: bytes, peer_id: str) -> bytes:
    return hmac.digest(token.encode(), side + b"|" + first + second + peer_id.encode(), hashlib.sha256)


def _same(proof: object, expected: bytes) -> bool:
    return isinstance(proof, bytes) and hmac.compare_digest(proof, expected)

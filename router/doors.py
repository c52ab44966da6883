"""Both doors of a gateway at one pair of ports: its own, or those that it shares with its siblings.

Ports are shared with SO_REUSEPORT: the kernel gives each new connection to one of the listening gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn
from starlette.types import ASGIApp

from headrace.errors import StartupError
from router.grpc_api import GrpcDoor

HTTP_CLOSE_S = 3.0


class Doors:
    def __init__(self, grpc_door: GrpcDoor, app: ASGIApp, host: str) -> None:
        self.grpc_address = ""
        self.http_address = ""
        self._grpc = grpc_door
        self._host = host
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http="httptools",
            timeout_keep_alive=30,
            h11_max_incomplete_event_size=64 << 10,
        )
        self._http = uvicorn.Server(config)
        self._http.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._http_task: asyncio.Task[None] | None = None

    async def open(self, grpc_port: int, http_socket: socket.socket) -> None:
        """Serves when it returns. Raises StartupError when the gRPC port is taken."""
        try:
            port = self._grpc.bind(f"{self._host}:{grpc_port}")
        except RuntimeError:
            raise StartupError(f"grpc_port: {self._host}:{grpc_port} is in use") from None
        await self._grpc.start()
        self._http_task = asyncio.create_task(self._http._serve(sockets=[http_socket]))
        while not self._http.started:
            if self._http_task.done():
                self._http_task.result()
            await asyncio.sleep(0.01)
        self.grpc_address = f"{self._host}:{port}"
        self.http_address = f"{self._host}:{http_socket.getsockname()[1]}"

    def drain(self) -> None:
        self._grpc.set_serving(False)

    async def close(self) -> None:
        await self._grpc.stop(grace=1.0)
        self._http.should_exit = True
        if self._http_task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._http_task, timeout=HTTP_CLOSE_S)


def bound(host: str, port: int, field: str, *, is_shared: bool = False) -> socket.socket:
    """A TCP socket at the port, not listening yet. Raises StartupError, one line, when that cannot be."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise StartupError(f"{field}: {host}:{port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock

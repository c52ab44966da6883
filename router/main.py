"""The gateway process: text, sessions, both doors and the admin service on one event loop.

python -m router.main < spec.json      one line of GatewaySpec in, one line of GatewayReady out, then until SIGTERM
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys

import uvicorn

import kernels.environment  # noqa: F401  (first: it decides where numba keeps compiled code)
from headrace.errors import StartupError
from headrace.process import die_with_parent, log_to_stderr, serve
from headrace.v1.admin_pb2_grpc import add_AdminServicer_to_server
from router.admin import AdminService
from router.auth import Authenticator
from router.core.router import warm_up
from router.fleet_metrics import FleetMetrics
from router.gateway import Gateway
from router.grpc_api import ModelFacts, build_server
from router.metrics import DoorMetrics
from router.openai_api import build_app
from router.spec import GatewayReady, GatewaySpec
from router.text import TextModel
from router.worker_metrics import WorkerMetrics

log = logging.getLogger("headrace.router.main")


class GatewayProcess:
    """start -> wait -> stop. Errors before readiness are StartupError with one clear line."""

    def __init__(self, spec: GatewaySpec) -> None:
        self.spec = spec
        self.gateway: Gateway | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> GatewayReady:
        spec = self.spec
        http_socket = _listen(spec.host, spec.http_port, "http_port")
        # Before anybody waits for an answer, and in a thread: signals are heard.
        await asyncio.to_thread(warm_up)
        text = TextModel.load(spec.model_path, spec.chat_template)
        self.gateway = gateway = Gateway(spec, text)
        authenticator = Authenticator(spec.api_keys)
        metrics = DoorMetrics(spec.served_model_name)
        gateway.on_completed = FleetMetrics(gateway, metrics.registry).ended
        gateway.tools.on_answer = metrics.tool_wait.observe
        metrics.refresh = WorkerMetrics(gateway, metrics.registry).refresh
        facts = ModelFacts(block_size=spec.block_size, dtype=spec.dtype)
        self._grpc = build_server(gateway, spec, authenticator, metrics=metrics, facts=facts)
        add_AdminServicer_to_server(AdminService(gateway, authenticator), self._grpc.server)
        try:
            port = self._grpc.bind(f"{spec.host}:{spec.grpc_port}")
        except RuntimeError:
            raise StartupError(f"grpc_port: {spec.host}:{spec.grpc_port} is in use") from None
        await self._grpc.start()
        config = uvicorn.Config(
            build_app(gateway, spec, authenticator, metrics=metrics),
            log_level="warning",
            access_log=False,
            lifespan="off",
            http="httptools",
            timeout_keep_alive=30,
            h11_max_incomplete_event_size=64 << 10,
        )
        self._http = uvicorn.Server(config)
        self._http.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._http_task = asyncio.create_task(self._http._serve(sockets=[http_socket]))
        while not self._http.started:
            if self._http_task.done():
                self._http_task.result()
            await asyncio.sleep(0.01)
        return GatewayReady(
            gateway_id=spec.gateway_id,
            grpc_address=f"{spec.host}:{port}",
            http_address=f"{spec.host}:{http_socket.getsockname()[1]}",
            pid=os.getpid(),
        )

    async def wait(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        """Not ready any more, a short grace for what runs, explicit errors for the rest."""
        gateway = self.gateway
        if gateway is None or self._stopped.is_set():
            return
        gateway.drain()
        self._grpc.set_serving(False)
        await gateway.idle(self.spec.drain_timeout_s)
        await gateway.close()
        await self._grpc.stop(grace=1.0)
        self._http.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._http_task, timeout=3.0)
        self._stopped.set()


def _listen(host: str, port: int, field: str) -> socket.socket:
    """A listening socket, bound before anything expensive so that a port in use is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise StartupError(f"{field}: {host}:{port}: {error.strerror}") from None
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def main() -> None:
    spec = GatewaySpec.model_validate_json(sys.stdin.readline())
    log_to_stderr(spec.gateway_id)
    die_with_parent(spec.controller_pid)

    async def run() -> int:
        return await serve(GatewayProcess(spec))

    sys.exit(asyncio.run(run()))


if __name__ == "__main__":
    main()

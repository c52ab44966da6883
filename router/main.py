"""The gateway process: text, sessions, both doors and the admin service on one event loop.

python -m router.main < spec.json      one line of GatewaySpec in, one line of GatewayReady out, then until SIGTERM
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import kernels.environment  # noqa: F401  (first: it decides where numba keeps compiled code)
from headrace.clock import monotonic
from headrace.errors import StartupError
from headrace.process import die_with_parent, end_process_if_failed, log_to_stderr, serve
from headrace.v1.admin_pb2_grpc import add_AdminServicer_to_server
from router.admin import AdminService, Presence
from router.auth import Authenticator
from router.core.router import warm_up
from router.doors import Doors, bound
from router.fleet_metrics import FleetMetrics
from router.gateway import Gateway
from router.grpc_api import ModelFacts, build_server
from router.merged_metrics import merged
from router.metrics import DoorMetrics
from router.openai_api import build_app, build_fallback
from router.siblings import Siblings
from router.spec import GatewayReady, GatewaySpec
from router.text import TextModel
from router.worker_metrics import WorkerMetrics

log = logging.getLogger("headrace.router.main")

READY_POLL_S = 0.02


class GatewayProcess:
    """start -> wait -> stop. Errors before readiness are StartupError with one clear line.

    A gateway with siblings has doors of its own from the start, for the controller and for whoever means this one; it
    opens those that all share once it can place requests, so that no client meets a newcomer that knows no worker. It
    waits `liveness_s` for that: where there is no worker, clients shall be told so.
    """

    def __init__(self, spec: GatewaySpec) -> None:
        self.spec = spec
        self.gateway: Gateway | None = None
        self._presence = Presence()
        self._siblings = Siblings(spec.cluster_token)
        self._doors: list[Doors] = []
        self._opening: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> GatewayReady:
        spec = self.spec
        # Before anything expensive, so that a port in use is told at once.
        http_socket = bound(spec.host, spec.http_port, "http_port")
        http_socket.listen(1024)
        if spec.shared_grpc_port is not None:
            for port, field in ((spec.shared_grpc_port, "grpc_port"), (spec.shared_http_port or 0, "http_port")):
                bound(spec.host, port, field, is_shared=True).close()
        # Before anybody waits for an answer, and in a thread: signals are heard.
        await asyncio.to_thread(warm_up)
        text = TextModel.load(spec.model_path, spec.chat_template)
        self.gateway = gateway = Gateway(spec, text)
        authenticator = Authenticator(spec.api_keys)
        metrics = DoorMetrics(spec.served_model_name)
        gateway.on_completed = FleetMetrics(gateway, metrics.registry).ended
        gateway.tools.on_answer = metrics.tool_wait.observe
        workers = WorkerMetrics(gateway, metrics.worker_registry)
        metrics.refresh = workers.refresh
        facts = ModelFacts(block_size=spec.block_size, dtype=spec.dtype)
        admin = AdminService(gateway, authenticator, self._siblings, self._presence, metrics)
        fallback = build_fallback(spec)

        async def scrape_all() -> bytes:
            name = spec.gateway_id.partition(".")[0]
            _, siblings = await asyncio.gather(workers.refresh(), self._siblings.accounts(metrics=True))
            texts = {
                each.gateway.gateway_id.partition(".")[0]: each.metrics.decode() if each.gateway.pid else None
                for each in siblings
            }
            return merged(texts | {name: metrics.text().decode()}).encode() + metrics.workers_text()

        def doors(is_shared: bool) -> Doors:
            grpc_door = build_server(
                gateway,
                spec,
                authenticator,
                metrics=metrics,
                facts=facts,
                siblings=self._siblings,
                is_shared=is_shared,
            )
            add_AdminServicer_to_server(admin, grpc_door.server)
            scrape = scrape_all if is_shared else None
            app = build_app(gateway, spec, authenticator, metrics=metrics, scrape=scrape, fallback=fallback)
            self._doors.append(Doors(grpc_door, app, spec.host))
            return self._doors[-1]

        own = doors(is_shared=False)
        await own.open(spec.grpc_port, http_socket)
        self._presence.grpc_address, self._presence.http_address = own.grpc_address, own.http_address
        ready = GatewayReady(
            gateway_id=spec.gateway_id, grpc_address=own.grpc_address, http_address=own.http_address, pid=os.getpid()
        )
        if spec.shared_grpc_port is None:
            self._presence.is_open = True
            return ready
        self._opening = asyncio.create_task(self._open_shared(doors(is_shared=True)))
        self._opening.add_done_callback(end_process_if_failed)
        shared = {
            "shared_grpc_address": f"{spec.host}:{spec.shared_grpc_port}",
            "shared_http_address": f"{spec.host}:{spec.shared_http_port}",
        }
        return ready.model_copy(update=shared)

    async def _open_shared(self, doors: Doors) -> None:
        assert self.gateway is not None and self.spec.shared_grpc_port is not None
        end = monotonic() + self.spec.liveness_s
        while not self.gateway.ready() and monotonic() < end:
            await asyncio.sleep(READY_POLL_S)
        try:
            http_socket = bound(self.spec.host, self.spec.shared_http_port or 0, "http_port", is_shared=True)
            await doors.open(self.spec.shared_grpc_port, http_socket)
        except (StartupError, OSError) as error:
            log.error("shared_doors_closed error=%s", error)
            self._stopped.set()  # nobody would reach it: the controller starts another
            return
        self._presence.is_open = True

    async def wait(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        """Not ready any more, a short grace for what runs, explicit errors for the rest."""
        gateway = self.gateway
        if gateway is None or self._stopped.is_set():
            return
        if self._opening is not None:
            self._opening.cancel()
        gateway.drain()
        for doors in self._doors:
            doors.drain()
        await gateway.idle(self.spec.drain_timeout_s)
        await gateway.close()
        await self._siblings.close()
        await asyncio.gather(*(doors.close() for doors in self._doors))
        self._stopped.set()


def main() -> None:
    spec = GatewaySpec.model_validate_json(sys.stdin.readline())
    log_to_stderr(spec.gateway_id)
    die_with_parent(spec.controller_pid)

    async def run() -> int:
        return await serve(GatewayProcess(spec))

    sys.exit(asyncio.run(run()))


if __name__ == "__main__":
    main()

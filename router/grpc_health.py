"""grpc.health.v1 for one gateway: SERVING only while a request could be served and nobody is draining it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_POLL_S = 0.2


class ReadinessHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package has no types
    """`ready` is asked at each Check and polled by each Watch; `set_serving(False)` announces a drain at once."""

    def __init__(self, ready: Callable[[], bool], services: tuple[str, ...]) -> None:
        self._ready = ready
        self._services = frozenset(("", *services))
        self._draining = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """False: every service is NOT_SERVING from now on, whatever `ready` says. Wakes the watchers."""
        self._draining = not serving
        self._changed.set()
        self._changed = asyncio.Event()

    def status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus | None:
        """None: no such service."""
        if service not in self._services:
            return None
        return SERVING if self._ready() and not self._draining else NOT_SERVING

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self.status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "service: no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        last = None
        while True:
            changed = self._changed
            status = self.status(request.service)
            status = SERVICE_UNKNOWN if status is None else status
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            try:
                async with asyncio.timeout(_POLL_S):
                    await changed.wait()
            except TimeoutError:
                continue

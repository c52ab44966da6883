"""The Ray actor of one gateway: delegation only."""

from __future__ import annotations

import asyncio

from headrace.process import crash_on_broken_invariant
from router.main import GatewayProcess
from router.spec import GatewaySpec


class GatewayActor:
    """`start` returns a GatewayReady as JSON; `wait` returns when the gateway has stopped serving."""

    def __init__(self) -> None:
        self._gateway: GatewayProcess | None = None

    async def start(self, spec_json: str) -> str:
        crash_on_broken_invariant(asyncio.get_running_loop())
        self._gateway = GatewayProcess(GatewaySpec.model_validate_json(spec_json))
        return (await self._gateway.start()).model_dump_json()

    async def wait(self) -> str:
        if self._gateway is not None:
            await self._gateway.wait()
        return "stopped"

    async def stop(self) -> None:
        if self._gateway is not None:
            await self._gateway.stop()

"""The Ray actor of one worker rank: delegation only. Tokens and KV never pass through it."""

from __future__ import annotations

import asyncio

import ray

from headrace.process import crash_on_broken_invariant
from workers.main import Worker
from workers.spec import WorkerSpec


class WorkerActor:
    """`start` returns a WorkerReady as JSON; `wait` returns when the worker has stopped serving."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    async def start(self, spec_json: str) -> str:
        spec = WorkerSpec.model_validate_json(spec_json)
        if spec.host == "auto":
            spec = spec.model_copy(update={"host": ray.util.get_node_ip_address()})
        crash_on_broken_invariant(asyncio.get_running_loop())
        self._worker = Worker(spec)
        return (await self._worker.start()).model_dump_json()

    async def wait(self) -> str:
        if self._worker is not None:
            await self._worker.wait()
        return "stopped"

    async def stop(self) -> None:
        if self._worker is not None:
            await self._worker.stop()

"""The Ray actor of one worker rank: delegation only. Tokens and KV never pass through it."""

from __future__ import annotations

from workers.main import Worker
from workers.spec import WorkerSpec


class WorkerActor:
    """`start` returns a WorkerReady as JSON; `wait` returns when the worker has stopped serving."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    async def start(self, spec_json: str) -> str:
        self._worker = Worker(WorkerSpec.model_validate_json(spec_json))
        return (await self._worker.start()).model_dump_json()

    async def wait(self) -> str:
        if self._worker is not None:
            await self._worker.wait()
        return "stopped"

    async def stop(self) -> None:
        if self._worker is not None:
            await self._worker.stop()

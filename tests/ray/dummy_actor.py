"""A small real actor with the interface of the product's: serves nothing."""

from __future__ import annotations

import asyncio
import json
import os

from headrace.errors import StartupError


class DummyActor:
    def __init__(self) -> None:
        self._stopped = asyncio.Event()

    async def start(self, spec_json: str) -> str:
        spec = json.loads(spec_json)
        if spec["model_path"] == "broken":
            raise StartupError("model: broken on purpose")
        return json.dumps(
            {
                "worker_id": spec["worker_id"],
                "incarnation": spec["incarnation"],
                "role": spec["role"],
                "address": "127.0.0.1:1",
                "pid": os.getpid(),
                "fingerprint": os.environ["OMP_NUM_THREADS"],
                "total_blocks": 1,
                "block_size": 16,
                "lane": "none",
            }
        )

    async def wait(self) -> str:
        await self._stopped.wait()
        return ""

    async def stop(self) -> None:
        self._stopped.set()

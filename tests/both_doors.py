"""Both doors of a world's gateway on real sockets, and requests that stay until they are told to go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx

from headrace.client import HeadraceClient
from router.api import GenerationSpec
from router.grpc_api import build_server
from router.openai_api import build_app
from tests.world import Answer, World, spec
from workers.core.request import Request

PROMPT = [5] * 10


def run(coroutine: object, timeout_s: float = 60.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await coroutine  # type: ignore[misc]

    asyncio.run(bounded())


@dataclass
class Doors:
    """Both doors of a world's gateway; the gRPC client is synchronous and runs in threads."""

    http: httpx.AsyncClient
    grpc: HeadraceClient

    async def complete(self, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True} | body
        return await self.http.post("/v1/completions", json=body, headers=headers)

    async def generate(self, **options: object) -> object:
        options = {"max_tokens": 8, "ignore_eos": True} | options
        return await asyncio.to_thread(self.grpc.generate, PROMPT, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def doors(w: World) -> AsyncIterator[Doors]:
    server = build_server(w.gateway, w.gateway.spec)
    port = server.bind("127.0.0.1:0")
    await server.start()
    transport = httpx.ASGITransport(build_app(w.gateway, w.gateway.spec))  # type: ignore[arg-type]
    client = HeadraceClient(f"127.0.0.1:{port}", timeout_s=20)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Doors(http, client)
    finally:
        client.close()
        await server.stop(0)


def holder(label: str = "", first: int = 7) -> GenerationSpec:
    """40 tokens of prompt and 200 of output that nobody stops, for the tenant that callers without a key are."""
    return replace(spec([first] * 40, 200, ignore_eos=True), tenant="default", label=label)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def hold(w: World, count: int) -> list[asyncio.Task[Answer]]:
    """One request runs, the others wait at the worker, whose batch has one row. No prompt is cached for another."""
    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(w.ask(holder(first=7 + number))))
        await until(lambda n=number: w.gateway.gate.admission.held.live_requests == n + 1)
        if number == 0:
            await until(lambda: w.gateway.gate.admission.held.waiting_requests == 0)
    return tasks


def seen(w: World) -> Callable[[], list[Request]]:
    hub = w.workers["colocated-0"].hub
    return lambda: [entry.request for entry in hub._entries.values()]

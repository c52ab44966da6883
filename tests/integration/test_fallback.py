"""What is refused for want of room or time goes to the fallback deployment; what it answers, or fails to, reaches the
client in one piece.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.client_ports import held
from cluster.config.schema import GatewayConfig
from headrace.core.records import Role
from headrace.errors import Code, HeadraceError
from router.main import GatewayProcess
from router.metrics import DoorMetrics
from router.openai_api import build_app
from router.spec import GatewaySpec
from tests.both_doors import Doors, doors, hold, holder, run, seen, until
from tests.model_fixtures import tiny_model
from tests.world import World, spec, world

C = Role.COLOCATED
CHAT = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 12, "ignore_eos": True}
FULL = {"max_live_requests": 1}
LOST = {"refuse_lost_deadlines": True}


@dataclass
class Stub:
    """An upstream that does as it is told and remembers what it was sent."""

    behave: Callable[[Send], Awaitable[None]]
    bodies: list[dict[str, object]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        self.bodies.append(json.loads(body))
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        work = asyncio.create_task(self.behave(send))
        while not work.done():
            left = asyncio.create_task(receive())
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                work.cancel()
                self.gone.set()
                return
            left.cancel()


def says(status: int, *chunks: bytes, then: float = 0.0) -> Callable[[Send], Awaitable[None]]:
    """Answers with these pieces, and waits before the end."""

    async def behave(send: Send) -> None:
        headers = [(b"content-type", b"text/x-stub"), (b"location", b"/v1/elsewhere")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await asyncio.sleep(then)
        await send({"type": "http.response.body", "body": b""})

    return behave


async def hangs(send: Send) -> None:
    await asyncio.sleep(60)


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Base URL of the application on a loopback port."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", lifespan="off", http="httptools", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server._serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await serving


def to(url: str, **options: object) -> dict[str, object]:
    """A gateway that sends everything to this fallback."""
    there = {"url": url, "model": "other", "timeout_s": 0.3} | options
    return {"degradation": {"lost_deadline": "fallback", "overload": "fallback", "fallback": there}}


@asynccontextmanager
async def busy(
    url: str,
    gateway: dict[str, object] | None = None,
    worker: dict[str, object] | None = None,
    **options: object,
) -> AsyncIterator[tuple[World, Doors]]:
    """A deployment with a fallback, whose one place is taken."""
    settings = to(url, **options) | FULL | (gateway or {})
    async with (
        world(C, step_s=0.01, gateway=settings, **({"max_num_seqs": 1} | (worker or {}))) as w,  # type: ignore[arg-type]
        doors(w) as d,
    ):
        tasks = await hold(w, 1)
        try:
            yield w, d
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await w.assert_drained()


async def chat(d: Doors, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
    return await d.http.post("/v1/chat/completions", json=CHAT | body, headers=headers)


def refused_with(response: httpx.Response, outcome: str | None) -> None:
    """The original rejection, whole, and why the fallback did not help."""
    error = response.json()["error"]
    assert (response.status_code, error["reason"], error.get("fallback")) == (429, "concurrency", outcome)
    assert error["message"].startswith("at most 1 requests may be in progress")
    assert ("fallback" in error["message"]) is (outcome is not None)
    assert int(response.headers["retry-after-ms"]) > 0
    assert "x-headrace-fallback" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["concurrency", "deadline_lost"])
def test_the_answer_of_another_deployment_is_passed_through_and_says_so(reason: str, stream: bool) -> None:
    async def main() -> None:
        async with (
            world(C, gateway={"served_model_name": "other"}) as elsewhere,
            served(build_app(elsewhere.gateway, elsewhere.gateway.spec)) as url,
            httpx.AsyncClient() as direct,
        ):
            # Ten seconds here: lost by far.
            asked = CHAT | {"stream": stream, "seed": 5, "temperature": 0.8, "max_tokens": 200}
            headers = {"x-request-timeout-s": "3", "x-request-id": "mine"}
            wanted = await direct.post(f"{url}/chat/completions", json=asked | {"model": "other"})
            gateway = to(url, timeout_s=20.0) | (FULL if reason == "concurrency" else LOST)
            async with world(C, step_s=0.05, max_num_seqs=1, gateway=gateway) as w, doors(w) as d:
                await w.ask(spec([3] * 20, 4, ignore_eos=True))
                [task] = await hold(w, 1)
                response = await chat(d, headers, **asked, model="tiny")
                assert (response.status_code, response.headers["x-headrace-fallback"]) == (200, "other")
                assert response.headers["content-type"] == wanted.headers["content-type"]
                assert response.headers["x-request-id"] == "mine"
                assert texts(response, stream) == texts(wanted, stream) != [""]
                assert w.gateway.gate.decisions["route", reason] == 1
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await w.assert_drained()
            await elsewhere.assert_drained()

    run(main())


def test_full_queues_of_all_workers_and_no_worker_at_all_are_overload_too() -> None:
    async def main() -> None:
        async with served(stub := Stub(says(200, b"yes"))) as url:
            async with world(gateway=to(url)) as nobody, doors(nobody) as d:
                assert (await chat(d)).text == (await chat(d, stream=True)).text == "yes"
                assert nobody.gateway.gate.decisions["reject", "no_worker"] == 2
            async with busy(url, {"max_live_requests": 64}, worker={"max_waiting_requests": 1}) as (w, d):
                waiting = asyncio.create_task(w.ask(holder(first=50)))
                await until(lambda: len(seen(w)()) == 2)
                assert (await chat(d)).text == (await chat(d, stream=True)).text == "yes"
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            assert len(stub.bodies) == 4

    run(main())


def texts(response: httpx.Response, stream: bool) -> list[str]:
    if not stream:
        return [choice["message"]["content"] for choice in response.json()["choices"]]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    return ["".join(choice["delta"].get("content") or "" for choice in choices)]


def test_both_doors_of_a_gateway_with_siblings_send_on_as_many_as_one(tmp_path: Path) -> None:
    async def main() -> None:
        both = held(GatewayConfig(replicas=2, grpc_port=0, http_port=0))
        streamed = CHAT | {"stream": True}
        async with served(stub := Stub(says(200, b"first", then=60.0))) as url, httpx.AsyncClient() as client:
            with both as (grpc_port, http_port):
                gateway = GatewayProcess(
                    GatewaySpec(
                        gateway_id="gateway-0",
                        model_path=str(tiny_model(tmp_path)),
                        served_model_name="tiny",
                        max_model_len=1024,
                        shared_grpc_port=grpc_port,
                        shared_http_port=http_port,
                        liveness_s=0.1,
                        cluster_token="t" * 16,
                        **to(url, timeout_s=20.0, max_requests=1),
                    )
                )
                ready = await gateway.start()
                try:
                    await until(lambda: gateway._presence.is_open)
                    addresses = (ready.http_address, ready.shared_http_address)
                    own, shared = (f"http://{address}/v1/chat/completions" for address in addresses)
                    async with client.stream("POST", own, json=streamed) as first:
                        assert await anext(first.aiter_bytes()) == b"first"
                        assert (await client.post(shared, json=CHAT)).json()["error"]["fallback"] == "busy"
                    await asyncio.wait_for(stub.gone.wait(), 10)
                finally:
                    await gateway.stop()

    run(main())


def test_what_is_sent_has_the_fallbacks_model_and_key_and_the_time_left_and_nothing_of_the_clients() -> None:
    async def main() -> None:
        async with served(stub := Stub(says(200, b"yes"))) as url, busy(url, api_key="theirs") as (_, d):
            asked = {
                "authorization": "Bearer mine",
                "x-request-timeout-s": "7",
                "x-headrace-task": "t",
                "cookie": "c=1",
            }
            response = await chat(d, asked, model="tiny", user="u", seed=3)
            assert (response.status_code, response.text) == (200, "yes")
            assert stub.bodies == [CHAT | {"model": "other", "user": "u", "seed": 3}]
            [sent] = stub.headers
            assert sent["authorization"] == "Bearer theirs" and sent["x-headrace-no-fallback"] == "1"
            assert 6.0 < float(sent["x-request-timeout-s"]) < 7.0
            assert "cookie" not in sent and "x-headrace-task" not in sent

    run(main())


def test_a_request_that_comes_from_a_fallback_never_falls_back_again() -> None:
    """Two full deployments, each the other's fallback: one request each, not a ring."""

    async def main() -> None:
        async with served(stub := Stub(says(200, b"yes"))) as third, busy(third) as (second, _):
            app = build_app(second.gateway, second.gateway.spec, metrics=DoorMetrics("tiny"))
            async with served(app) as url, busy(url, model=None) as (_, d):
                refused_with(await chat(d), "refused")
                assert not stub.bodies

    run(main())


def test_only_want_of_room_or_time_sends_a_call_on() -> None:
    async def main() -> None:
        limits = {"tenants": {"default": {"max_concurrent_requests": 1}}, "max_live_requests": 64}
        async with served(stub := Stub(says(200, b"yes"))) as url, busy(url, limits) as (_, d):
            for asked, status in ((CHAT, 429), (CHAT | {"max_tokens": 5000}, 400), (CHAT | {"model": "none"}, 404)):
                response = await d.http.post("/v1/chat/completions", json=asked)
                assert response.status_code == status and "fallback" not in response.json()["error"]
            assert not stub.bodies

    run(main())


@pytest.mark.parametrize("same_model", [False, True])
def test_token_ids_are_sent_to_the_same_model_alone(same_model: bool) -> None:
    async def main() -> None:
        stub, model = Stub(says(200, b"yes")), None if same_model else "other"
        async with served(stub) as url, busy(url, model=model) as (_, d):
            ids = [
                ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4}),
                ("/v1/chat/completions", CHAT | {"stop_token_ids": [5]}),
                ("/v1/chat/completions", CHAT | {"logit_bias": {"5": 1}}),
                ("/v1/chat/completions", CHAT | {"return_token_ids": True}),
            ]
            for path, asked in ids:
                response = await d.http.post(path, json=asked)
                assert response.status_code == (200 if same_model else 429)
            assert len(stub.bodies) == (len(ids) if same_model else 0)
            assert (await d.http.post("/v1/completions", json={"prompt": "abc"})).status_code == 200
            # gRPC streams tokens, for which the other API has no form.
            with pytest.raises(HeadraceError) as caught:
                await d.generate()
            assert (caught.value.code, caught.value.reason) == (Code.RESOURCE_EXHAUSTED, "concurrency")

    run(main())


def test_a_client_that_leaves_ends_its_call_there_and_no_more_than_so_many_are_sent() -> None:
    async def main() -> None:
        stub, streamed = Stub(says(200, b"first", then=60.0)), CHAT | {"stream": True}
        async with (
            served(stub) as url,
            busy(url, timeout_s=20.0, max_requests=1) as (w, _),
            served(build_app(w.gateway, w.gateway.spec)) as here,
            httpx.AsyncClient() as client,
        ):
            async with client.stream("POST", f"{here}/chat/completions", json=streamed) as first:
                assert await anext(first.aiter_bytes()) == b"first", "it comes before the rest is there"
                refused_with(await client.post(f"{here}/chat/completions", json=CHAT), "busy")
            await asyncio.wait_for(stub.gone.wait(), 10)
            # The place is free again.
            async with client.stream("POST", f"{here}/chat/completions", json=streamed) as again:
                assert await anext(again.aiter_bytes()) == b"first"

    run(main())


def test_nothing_is_waited_for_beyond_the_deadline() -> None:
    async def main() -> None:
        async with served(Stub(hangs)) as url, busy(url, timeout_s=50.0) as (_, d):
            async with asyncio.timeout(10):
                refused_with(await chat(d, {"x-request-timeout-s": "0.3"}), "timeout")

    run(main())


def test_a_lost_deadline_may_be_served_in_a_lower_class_instead() -> None:
    async def main() -> None:
        policy = {"degradation": {"lost_deadline": "best_effort", "best_effort_classes": 3}}
        async with world(C, gateway=LOST | policy, step_s=0.01, scheduling={"lost_deadline": "best_effort"}) as w:
            await w.ask(spec([3] * 20, 4, ignore_eos=True))
            [other] = await hold(w, 1)
            await until(lambda: w.gateway.router.table.total == 0)
            lost = replace(holder(first=50), deadline_s=0.5, priority=-1)
            task = asyncio.create_task(w.ask(lost))
            await until(lambda: len(seen(w)()) == 2)
            assert sorted(request.priority for request in seen(w)()) == [0, 2]
            assert w.gateway.gate.decisions["accept", "deadline_lost"] == 1
            with pytest.raises(HeadraceError) as caught:
                await task
            assert caught.value.code is Code.DEADLINE_EXCEEDED, "its deadline holds all the same"
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            await w.assert_drained()

    run(main())

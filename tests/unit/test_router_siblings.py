"""What one gateway asks the others: found wherever it is, asked once, and nobody waits for one that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from headrace.errors import Code, HeadraceError
from headrace.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from router import siblings
from router.siblings import RELAYED_KEY, Siblings


class Gateway(inference_pb2_grpc.InferenceServicer):
    """Knows the request `has`; None: never answers."""

    def __init__(self, has: str | None) -> None:
        self.has = has
        self.heard: list[dict[str, str]] = []

    async def Explain(
        self, request: inference_pb2.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ExplainResponse:
        self.heard.append(dict(context.invocation_metadata()))
        if self.has is None:
            await asyncio.Event().wait()
        if self.has != request.request_id:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        return inference_pb2.ExplainResponse(request_id=request.request_id)

    async def Resume(
        self, request: inference_pb2.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ResumeResponse:
        if self.has != request.request_id:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        trailers = (("headrace-reason", "not_paused"),)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it does not wait", trailers)
        raise AssertionError


class Caller:
    """The context of a client's call."""

    def __init__(self, **metadata: str) -> None:
        self._metadata = tuple(metadata.items())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


@asynccontextmanager
async def siblings_of(*gateways: Gateway) -> AsyncIterator[Siblings]:
    known, servers, members = Siblings("token"), [], []
    for number, gateway in enumerate(gateways):
        servers.append(grpc.aio.server())
        inference_pb2_grpc.add_InferenceServicer_to_server(gateway, servers[-1])
        port = servers[-1].add_insecure_port("127.0.0.1:0")
        await servers[-1].start()
        members.append(admin_pb2.Sibling(name=f"gateway-{number}", incarnation="i", address=f"127.0.0.1:{port}"))
    known.set_members(members)
    yield known
    await known.close()
    for server in servers:
        await server.stop(None)


def explain(name: str) -> inference_pb2.ExplainRequest:
    return inference_pb2.ExplainRequest(request_id=name)


def test_a_request_is_found_wherever_it_is_with_the_clients_own_key_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(siblings, "ASK_S", 1e4)

    async def main() -> None:
        holder, hung = Gateway("mine"), Gateway(None)
        async with asyncio.timeout(30), siblings_of(hung, Gateway("other"), holder) as known:
            answer = await known.explain(explain("mine"), Caller(authorization="Bearer key"))
            assert answer is not None and answer.request_id == "mine"
            heard = holder.heard[0]
            assert (heard["authorization"], heard[RELAYED_KEY]) == ("Bearer key", "1")
            assert "token" not in heard.values()

    asyncio.run(main())


def test_a_relayed_call_goes_no_further_and_what_nobody_has_is_not_found() -> None:
    async def main() -> None:
        other = Gateway("mine")
        async with asyncio.timeout(30), siblings_of(other, Gateway("other")) as known:
            assert await known.explain(explain("mine"), Caller(**{RELAYED_KEY: "1"})) is None
            assert other.heard == []
            assert await known.explain(explain("nobody's"), Caller()) is None

    asyncio.run(main())


def test_a_refusal_of_who_has_the_request_is_the_answer() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), siblings_of(Gateway("other"), Gateway("mine")) as known:
            with pytest.raises(HeadraceError) as caught:
                await known.resume(inference_pb2.ResumeRequest(request_id="mine"), Caller())
            assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "not_paused")

    asyncio.run(main())


def test_one_that_is_gone_is_named_without_a_pid_and_asked_no_more() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), siblings_of() as known:
            known.set_members([admin_pb2.Sibling(name="gateway-7", incarnation="i", address="127.0.0.1:1")])
            (account,) = await known.accounts()
            assert (account.gateway.gateway_id, account.gateway.pid) == ("gateway-7", 0)
            known.set_members([])
            assert await known.accounts() == []

    asyncio.run(main())

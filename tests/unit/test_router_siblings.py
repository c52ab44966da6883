"""What one gateway asks the others: found wherever it is, asked once, and nobody waits for one that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from headrace.errors import Code, HeadraceError
from headrace.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from router import siblings
from router.grpc_api import server_options
from router.siblings import RELAYED_KEY, Siblings
from tests.doors_fixtures import gateway_spec


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
        self.heard.append(dict(context.invocation_metadata()))
        if self.has is None:
            await asyncio.Event().wait()
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


@pytest.mark.parametrize("what", ["explain", "resume"])
def test_one_that_is_killed_while_it_hangs_has_no_answer(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(siblings, "ASK_S", 1e4)

    async def main() -> None:
        hung = Gateway(None)
        async with asyncio.timeout(30), siblings_of(hung) as known:
            if what == "explain":
                asked = asyncio.create_task(known.explain(explain("mine"), Caller()))
            else:
                asked = asyncio.create_task(known.resume(inference_pb2.ResumeRequest(request_id="mine"), Caller()))
            while not hung.heard:
                await asyncio.sleep(0.005)
            known.set_members([])
            assert await asked is None

    asyncio.run(main())


def test_a_client_that_goes_ends_what_was_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "ASK_S", 1e4)

    async def main() -> None:
        hung = Gateway(None)
        async with asyncio.timeout(30), siblings_of(hung) as known:
            asked = asyncio.create_task(known.explain(explain("mine"), Caller()))
            while not hung.heard:
                await asyncio.sleep(0.005)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    asyncio.run(main())


class Told(admin_pb2_grpc.AdminServicer):
    """A gateway with as many requests in progress as make its account this large."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    async def Account(
        self, request: admin_pb2.AccountRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.AccountResponse:
        name = "req-" + 60 * "0"
        return admin_pb2.AccountResponse(
            gateway=admin_pb2.GatewayStatus(pid=7), live=[name] * (self._num_bytes // len(name))
        )


def test_an_account_may_be_as_large_as_a_gateway_sends_any() -> None:
    async def main() -> None:
        server = grpc.aio.server(options=server_options(gateway_spec()))
        admin_pb2_grpc.add_AdminServicer_to_server(Told(24 << 20), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        known = Siblings("token")
        known.set_members([admin_pb2.Sibling(name="gateway-1", incarnation="i", address=f"127.0.0.1:{port}")])
        (account,) = await known.accounts()
        assert account.gateway.pid == 7 and account.ByteSize() > 24 << 20
        await known.close()
        await server.stop(None)

    asyncio.run(main())

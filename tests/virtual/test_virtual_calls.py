"""The virtual calls behave as those of grpc.aio: one suite over both, so that what is found on them means something."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from headrace.v1 import worker_pb2 as pb
from headrace.v1 import worker_pb2_grpc as rpc
from tests.virtual.calls import dialer
from tests.virtual.loop import Process, VirtualLoop
from tests.virtual.wire import Wire

Scenario = Callable[["Servicer", Any], Awaitable[None]]


class Servicer(rpc.WorkerServicer):
    """Answers `pulled` with an announce; `verify` ends the call, `close` aborts it."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.over: list[str] = []

    async def Lease(self, request_iterator: Any, context: Any) -> None:
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                kind = message.WhichOneof("kind")
                self.heard.append(kind)
                if kind == "pulled":
                    announce = pb.LeaseAnnounce(blocks=[message.pulled.num_blocks])
                    await context.write(pb.LeaseResponse(announce=announce))
                elif kind == "verify":
                    self.over.append("returned")
                    return
                elif kind == "close":
                    self.over.append("aborted")
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")
            self.over.append("half-closed")
        except asyncio.CancelledError:
            self.over.append("cancelled")
            raise

    async def WorkerStatus(self, request: Any, context: Any) -> pb.WorkerStatusResponse:
        return pb.WorkerStatusResponse(worker_id="x", used_blocks=int(request.audit))


def over_grpc(scenario: Scenario) -> None:
    async def main() -> None:
        servicer, server = Servicer(), grpc.aio.server()
        rpc.add_WorkerServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await scenario(servicer, rpc.WorkerStub(channel))
        finally:
            await server.stop(grace=None)

    asyncio.run(main())


def over_the_wire(scenario: Scenario) -> None:
    loop = VirtualLoop()
    wire, servicer = Wire(loop, random.Random(0)), Servicer()
    client, server = Process("client"), Process("server")
    wire.serve("there", server, servicer)

    async def main() -> None:
        await client.run(lambda: loop.create_task(scenario(servicer, rpc.WorkerStub(dialer(wire, client)("there")))))

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


async def settled() -> None:
    await asyncio.sleep(0.1)


def pulled(n: int) -> pb.LeaseRequest:
    return pb.LeaseRequest(pulled=pb.LeasePulled(num_blocks=n))


async def messages_keep_their_order_and_a_half_close_ends_in_order(servicer: Servicer, stub: Any) -> None:
    call = stub.Lease()
    for n in range(5):
        await call.write(pulled(n))
    await call.done_writing()
    assert [list((await call.read()).announce.blocks) for _ in range(5)] == [[n] for n in range(5)]
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK and servicer.over == ["half-closed"]


async def a_server_that_returns_ends_the_call(servicer: Servicer, stub: Any) -> None:
    call = stub.Lease()
    await call.write(pulled(1))
    await call.write(pb.LeaseRequest(verify=pb.LeaseVerify()))
    assert (await call.read()).announce.blocks == [1]
    assert await call.read() is grpc.aio.EOF and await call.read() is grpc.aio.EOF
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(pulled(2))
    await call.done_writing()


async def an_abort_is_the_status_of_the_read(servicer: Servicer, stub: Any) -> None:
    call = stub.Lease()
    await call.write(pb.LeaseRequest(close=pb.LeaseClose()))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert (error.value.code(), error.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "no")
    assert (await call.code(), await call.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "no")


async def a_cancelled_call_cancels_its_handler(servicer: Servicer, stub: Any) -> None:
    call = stub.Lease()
    await call.write(pulled(1))
    await call.read()
    assert call.cancel() and not call.cancel()
    await settled()
    assert servicer.heard == ["pulled"] and servicer.over in (["cancelled"], ["half-closed"])
    with pytest.raises(asyncio.CancelledError):
        await call.read()


async def a_cancelled_read_cancels_its_call(servicer: Servicer, stub: Any) -> None:
    call = stub.Lease()
    await call.write(pulled(1))
    await call.read()
    read = asyncio.ensure_future(call.read())
    await settled()
    read.cancel()
    await asyncio.wait([read])
    await settled()
    assert call.cancelled() and servicer.over in (["cancelled"], ["half-closed"])
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(pulled(2))


async def a_unary_call_answers(servicer: Servicer, stub: Any) -> None:
    answer = await stub.WorkerStatus(pb.WorkerStatusRequest(audit=True), timeout=5)
    assert (answer.worker_id, answer.used_blocks) == ("x", 1)


SCENARIOS = [
    messages_keep_their_order_and_a_half_close_ends_in_order,
    a_server_that_returns_ends_the_call,
    an_abort_is_the_status_of_the_read,
    a_cancelled_call_cancels_its_handler,
    a_cancelled_read_cancels_its_call,
    a_unary_call_answers,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("run", [over_grpc, over_the_wire])
def test_calls_over_the_wire_are_those_of_grpc(run: Callable[[Scenario], None], scenario: Scenario) -> None:
    run(scenario)

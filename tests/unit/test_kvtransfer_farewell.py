"""The last words of a lease stream: a reader whose outbox has ended leaves only when the holder could hear them.

grpc.aio cancels a call whose read is cancelled. A reader that stopped listening at once when it had written its close
took that close back from a holder which was busy: the hand-off counted as broken there, and the prefill worker kept the
request's blocks for as long as the decode lasted.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from headrace.v1 import worker_pb2 as pb
from headrace.v1.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server
from kvtransfer.stream import Outbox, Over, pump

LIVENESS_S = 4.0


class BusyHolder(WorkerServicer):
    """Reads one message in 50 ms."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.over = asyncio.Event()

    async def Lease(self, request_iterator: Any, context: Any) -> None:
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                self.heard.append(message.WhichOneof("kind"))
                await asyncio.sleep(0.05)
            self.heard.append("end")
        finally:
            self.over.set()


def test_a_close_reaches_a_holder_that_reads_late() -> None:
    async def main() -> None:
        holder, server = BusyHolder(), grpc.aio.server()
        add_WorkerServicer_to_server(holder, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = WorkerStub(channel).Lease()
            outbox: Outbox[pb.LeaseRequest] = Outbox()
            outbox.put(pb.LeaseRequest(open=pb.LeaseOpen()))
            outbox.put(pb.LeaseRequest(pulled=pb.LeasePulled(num_blocks=1)))
            outbox.put(pb.LeaseRequest(verify=pb.LeaseVerify()))
            outbox.put(pb.LeaseRequest(close=pb.LeaseClose(completed=True)))
            outbox.end()

            async def hear(message: pb.LeaseResponse) -> None: ...

            beat = pb.LeaseRequest(heartbeat=pb.Heartbeat())
            over = await pump(call.read, call.write, hear, outbox, beat, LIVENESS_S, hang_up=call.done_writing)
            assert over is Over.SAID
            call.cancel()
            await holder.over.wait()
        await server.stop(grace=None)
        assert holder.heard == ["open", "pulled", "verify", "close", "end"]

    asyncio.run(main())

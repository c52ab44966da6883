"""A lease stream whose messages are lost, repeated or overtaken: nobody waits for what cannot come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.v1 import worker_pb2 as pb
from kvtransfer.stream import Outbox, Over, pump

LIVENESS_S = 0.4


class Wire:
    """One direction: what one side writes, the other reads, without the messages whose numbers are in `lost`."""

    def __init__(self, lost: tuple[int, ...] = ()) -> None:
        self._lost = lost
        self._queue: asyncio.Queue[pb.LeaseRequest] = asyncio.Queue()

    async def write(self, message: pb.LeaseRequest) -> None:
        if message.number not in self._lost:
            self.put(message)

    def put(self, message: pb.LeaseRequest) -> None:
        copy = pb.LeaseRequest()
        copy.CopyFrom(message)
        self._queue.put_nowait(copy)

    async def read(self) -> pb.LeaseRequest:
        return await self._queue.get()


def pulled(num_blocks: int, number: int = 0) -> pb.LeaseRequest:
    return pb.LeaseRequest(number=number, pulled=pb.LeasePulled(num_blocks=num_blocks))


class Side:
    def __init__(self, incoming: Wire, outgoing: Wire) -> None:
        self.outbox: Outbox[pb.LeaseRequest] = Outbox()
        self.heard: list[int] = []
        beat = pb.LeaseRequest(heartbeat=pb.Heartbeat())
        self.run = pump(incoming.read, outgoing.write, self._hear, self.outbox, beat, LIVENESS_S)

    async def _hear(self, message: Any) -> None:
        if message.HasField("pulled"):
            self.heard.append(message.pulled.num_blocks)


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    return lambda: asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize(("lost", "heard"), [((2,), [10]), ((3,), [10, 11])], ids=["in the middle", "the last one"])
def test_a_lost_message_ends_the_stream_and_nothing_behind_it_is_heard(lost: tuple[int, ...], heard: list[int]) -> None:
    @in_loop
    async def run() -> None:
        there, back = Wire(lost), Wire()
        sender, reader = Side(back, there), Side(there, back)
        sending = asyncio.ensure_future(sender.run)
        for num_blocks in (10, 11, 12):
            sender.outbox.put(pulled(num_blocks))
        assert await reader.run is Over.GAP, "heartbeats keep a stream alive that has lost what it waits for"
        assert reader.heard == heard
        sending.cancel()

    run()


@in_loop
async def test_a_repeated_message_is_heard_once() -> None:
    there, back = Wire(), Wire()
    reader = Side(there, back)
    reading = asyncio.ensure_future(reader.run)
    for message in (pulled(10, 1), pulled(11, 2), pulled(10, 1), pulled(11, 2), pulled(12, 3)):
        there.put(message)
    while len(reader.heard) < 3:
        await asyncio.sleep(0)
    assert reader.heard == [10, 11, 12]
    reader.outbox.end()
    assert await reading is Over.SAID


@in_loop
async def test_an_overtaken_message_ends_the_stream() -> None:
    there = Wire()
    reader = Side(there, Wire())
    for message in (pulled(10, 1), pulled(12, 3), pulled(11, 2)):
        there.put(message)
    assert await reader.run is Over.GAP
    assert reader.heard == [10]

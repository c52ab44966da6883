"""Workers without a gateway: a test speaks to each over a session of its own, and says itself what is fetched from
whom.

`workers` runs them in this process and event loop, with FakeRunner, whose tokens betray any wrong block. `Session` also
speaks to workers in other processes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import grpc

from headrace.core.records import Role
from headrace.sampling import SamplingParams
from headrace.v1 import worker_pb2 as pb
from headrace.v1 import worker_pb2_grpc as rpc
from kvtransfer.probe import ProbeArea, fill_pattern
from kvtransfer.service import TOKEN_KEY
from kvtransfer.transports.base import Transport
from kvtransfer.transports.select import Lanes
from tests.doors_fixtures import EOS
from workers.main import Worker
from workers.runner.fake import FakeRunner, fake_next_token
from workers.spec import WorkerReady, WorkerSpec

TOKEN = "cluster-secret"
VOCAB = 267
BLOCK_SIZE = 16
FAKE_BLOCK_BYTES = FakeRunner().layout.block_bytes
MakeLane = Callable[[str], Transport]


def address_of(ready: WorkerReady, **changes: str) -> pb.PeerAddress:
    where = {"worker_id": ready.worker_id, "incarnation": ready.incarnation, "address": ready.address}
    return pb.PeerAddress(**(where | changes))


def expected(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """FakeRunner's greedy output of a run alone."""
    history = list(prompt)
    for _ in range(max_tokens):
        history.append(fake_next_token(history, SamplingParams(max_tokens), (), VOCAB))
    return history[len(prompt) :]


@dataclass(slots=True)
class Answer:
    """What one submitted request has become."""

    tokens: list[int] = field(default_factory=list)
    started: pb.Started | None = None
    done: pb.Done | None = None
    failed: pb.Failed | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Session:
    """One gateway session to one worker."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        self.answers: dict[int, Answer] = {}
        self._channel = grpc.aio.insecure_channel(address)
        self._metadata = ((TOKEN_KEY, token),)
        self._handles = itertools.count(1)
        self._call: Any = None
        self._writing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, name: str = "test") -> Session:
        self._call = rpc.WorkerStub(self._channel).Session(metadata=self._metadata)
        await self._write(pb.SessionRequest(hello=pb.SessionHello(gateway_id=name)))
        self._tasks = [asyncio.create_task(part) for part in (self._receive(), self._beat())]
        return self

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._call.cancel()
        await self._channel.close()

    async def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        source: pb.PeerAddress | None = None,
        num_blocks: int = 0,
        request_id: str = "",
        time_left_s: float = 60.0,
        hand_off: bool = False,
        adopt_from: pb.PeerAddress | None = None,
        **body: Any,
    ) -> int:
        """Returns the handle. `num_blocks` of `source`'s cache are to be fetched; 0: all that the prompt fills."""
        handle = next(self._handles)
        self.answers[handle] = Answer()
        message = pb.RequestBody(
            request_id=request_id or f"req-{handle}",
            attempt=1,
            prompt_ids=prompt,
            sampling=pb.Sampling(max_tokens=max_tokens, top_p=1.0, ignore_eos=True),
            time_left_s=time_left_s,
            **({"namespace": b"n" * 16, "tenant": "t"} | body),
        )
        if adopt_from is not None:
            frame = pb.SessionRequest(adopt=pb.Adopt(handle=handle, submit_seq=handle, body=message, source=adopt_from))
        else:
            submit = pb.Submit(handle=handle, submit_seq=handle, body=message, hand_off=hand_off)
            if source is not None:
                num_blocks = num_blocks or len(prompt) // BLOCK_SIZE
                submit.fetch.CopyFrom(pb.Fetch(source=source, num_blocks=num_blocks))
            frame = pb.SessionRequest(submit=submit)
        await self._write(frame)
        return handle

    async def ask(self, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Answer:
        return await self.over(await self.submit(prompt, max_tokens, **options))

    async def over(self, handle: int) -> Answer:
        answer = self.answers[handle]
        await answer.over.wait()
        return answer

    async def finish(self, handle: int, reason: str = "cancelled") -> None:
        await self._write(pb.SessionRequest(finish=pb.Finish(handle=handle, reason=reason)))

    async def status(self) -> pb.WorkerStatusResponse:
        request = pb.WorkerStatusRequest(audit=True)
        status: pb.WorkerStatusResponse = await rpc.WorkerStub(self._channel).WorkerStatus(
            request, metadata=self._metadata, timeout=10
        )
        return status

    async def _write(self, frame: pb.SessionRequest) -> None:
        async with self._writing:
            await self._call.write(frame)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            await self._write(pb.SessionRequest(heartbeat=pb.Heartbeat()))

    async def _receive(self) -> None:
        while (frame := await self._call.read()) is not grpc.aio.EOF:
            match frame.WhichOneof("kind"):
                case "started":
                    self.answers[frame.started.handle].started = frame.started
                case "tokens":
                    for handle, offset, token in zip(
                        frame.tokens.handle, frame.tokens.offset, frame.tokens.token_id, strict=True
                    ):
                        tokens = self.answers[handle].tokens
                        if offset == len(tokens):
                            tokens.append(token)
                        else:
                            assert tokens[offset] == token, "an output was repeated with another token"
                case "done":
                    self.answers[frame.done.handle].done = frame.done
                    self.answers[frame.done.handle].over.set()
                case "failed":
                    self.answers[frame.failed.handle].failed = frame.failed
                    self.answers[frame.failed.handle].over.set()


class Workers:
    def __init__(self) -> None:
        self.all: dict[str, Worker] = {}
        self.sessions: dict[str, Session] = {}
        self.ready: dict[str, WorkerReady] = {}

    async def start(self, name: str, role: Role, num_blocks: int, step_s: float, **options: object) -> None:
        values = {"transport": "tcp", "liveness_s": 2.0, "max_num_batched_tokens": 64, "max_num_seqs": 32}
        spec = WorkerSpec(
            worker_id=name,
            incarnation=f"inc-{name}",
            role=role,
            model_path="fake",
            max_model_len=1024,
            threads=1,
            kv_cache_bytes=1 << 20,
            cluster_token=TOKEN,
            long_prefill_token_threshold=32,
            **(values | options),  # type: ignore[arg-type]
        )
        host_blocks = spec.swap_bytes // FAKE_BLOCK_BYTES
        self.all[name] = Worker(
            spec,
            lambda _: FakeRunner(
                1024,
                num_blocks=num_blocks,
                vocab_size=VOCAB,
                eos_token_ids=(EOS,),
                step_s=step_s,
                host_blocks=host_blocks,
            ),
        )
        self.ready[name] = await self.all[name].start()
        self.sessions[name] = await Session(self.ready[name].address).open()

    def __getitem__(self, name: str) -> Session:
        return self.sessions[name]

    def address(self, name: str, **changes: str) -> pb.PeerAddress:
        return address_of(self.ready[name], **changes)

    def lane(self, name: str) -> Any:
        return self.all[name]._lanes.first

    def counters(self, name: str) -> dict[str, float]:
        return dict(self.all[name].service.status(audit=False).counters)

    async def kill(self, name: str) -> None:
        """The process is gone: sockets closed, nothing said."""
        worker = self.all.pop(name)
        lane = worker._lanes.first
        if hasattr(lane, "die"):
            lane.die()
        await worker._server.stop(grace=None)
        await self.sessions.pop(name).close()
        await worker.stop()

    async def pair(self) -> None:
        """All with all, as a gateway has them do."""
        told: list[pb.Paired] = []
        for name, worker in self.all.items():
            for other in self.all.keys() - {name}:
                worker.hub.reader.meet(self.address(other), told.append)
        await until(lambda: len(told) == len(self.all) * (len(self.all) - 1))
        assert all(paired.lane for paired in told), told

    async def assert_drained(self, settle_s: float = 5.0) -> None:
        end = asyncio.get_running_loop().time() + settle_s
        while held := [line for name in self.all for line in self._held(name)]:
            assert asyncio.get_running_loop().time() < end, held
            await asyncio.sleep(0.02)

    def _held(self, name: str) -> list[str]:
        status = self.all[name].service.status(audit=True)
        assert status.integrity_error == ""
        parts = ("live_requests", "leases", "handoffs", "transfers", "used_blocks", "quarantined_blocks")
        held = [f"{name}: {n} {what}" for what in parts if (n := getattr(status, what))]
        return held + [f"{name}: {holder.holder} has {holder.blocks}" for holder in status.holders]


@asynccontextmanager
async def workers(
    *names: str, make_lane: MakeLane | None = None, num_blocks: int = 256, step_s: float = 0.0, **options: object
) -> AsyncIterator[Workers]:
    """`names`: `ROLE-NUMBER`. `make_lane`: a transport from its peer id, instead of one that `options` name."""

    async def start(name: str, memory: Any, block_bytes: int, area: ProbeArea, *, peer_id: str, **_: object) -> Lanes:
        assert make_lane is not None
        transport = make_lane(peer_id)
        await transport.start(memory, block_bytes)
        fill_pattern(memory, area, block_bytes, peer_id)
        return Lanes(memory, block_bytes, area, {transport.name: transport}, {transport.name: 0.0})

    running = Workers()
    try:
        with patch("workers.main.start_lanes", start) if make_lane is not None else nullcontext():
            for name in names:
                await running.start(name, Role(name.partition("-")[0]), num_blocks, step_s, **options)
        await running.pair()
        yield running
    finally:
        for session in running.sessions.values():
            await session.close()
        for worker in running.all.values():
            await worker.stop()


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)

"""A whole deployment in one process and one event loop: real gateway, sessions, leases and transports over loopback,
FakeRunner instead of a model. The expected output of any request is computable, so that every fault test can demand
exact tokens.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, field

from headrace.core.records import Role, TokenLogprobs
from headrace.ids import counting_ids
from headrace.sampling import SamplingParams
from headrace.v1 import admin_pb2
from router.api import GenerationSpec, Usage
from router.gateway import Gateway
from tests.doors_fixtures import EOS, gateway_spec, text_model
from workers.main import Worker
from workers.runner.fake import FakeRunner, fake_logprobs, fake_next_token
from workers.spec import WorkerReady, WorkerSpec

TOKEN = "cluster-secret"
GATEWAY: dict[str, object] = {
    "max_model_len": 1024,
    "liveness_s": 2.0,
    "cluster_token": TOKEN,
    # A pair whenever both pools live: most worlds are about the hand-off. By cost, workers as quick as these may well
    # serve whole requests, and no test would notice that it tests nothing.
    "routing_policy": "least_loaded",
}
VOCAB = 267
FAKE_BLOCK_BYTES = FakeRunner().layout.block_bytes


@dataclass
class Answer:
    """What one client saw."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    usage: Usage | None = None


class World:
    """Workers by name; `kill` ends one abruptly, `restart` brings a new incarnation."""

    def __init__(
        self,
        runner: Callable[[WorkerSpec], FakeRunner],
        by_role: dict[Role, dict[str, object]] | None = None,
        **options: object,
    ) -> None:
        self._by_role = by_role or {}
        self.workers: dict[str, Worker] = {}
        self.ready: dict[str, WorkerReady] = {}
        self.gateway: Gateway
        self.siblings: list[Gateway] = []
        self._runner = runner
        self._options = options
        self._incarnations = itertools.count(1)
        self._versions = itertools.count(1)

    async def start_worker(self, name: str, role: Role) -> None:
        options = {"transport": "tcp", "liveness_s": 2.0, "max_num_batched_tokens": 64, "max_num_seqs": 32}
        options |= {"long_prefill_token_threshold": 32}
        spec = WorkerSpec(
            worker_id=name,
            incarnation=f"inc-{next(self._incarnations)}",
            role=role,
            model_path="fake",
            max_model_len=1024,
            threads=1,
            kv_cache_bytes=1 << 20,
            cluster_token=TOKEN,
            **(options | self._options | self._by_role.get(role, {})),  # type: ignore[arg-type]
        )
        worker = Worker(spec, self._runner)
        self.ready[name] = await worker.start()
        self.workers[name] = worker

    def push_members(self) -> None:
        members = [
            admin_pb2.Member(worker_id=r.worker_id, incarnation=r.incarnation, address=r.address, role=r.role.value)
            for r in self.ready.values()
        ]
        version = next(self._versions)
        for gateway in self.gateways:
            gateway.fleet.set_members(version, members)

    async def connected(self) -> None:
        async with asyncio.timeout(10):
            for gateway in self.gateways:
                while sum(s.connected for s in gateway.fleet.sessions) < len(self.ready):
                    await asyncio.sleep(0.01)

    @property
    def gateways(self) -> list[Gateway]:
        return [self.gateway, *self.siblings]

    async def lose(self, gateway: Gateway) -> None:
        """The gateway's process is gone: its sessions break, and it says nothing."""
        self.siblings.remove(gateway)
        gateway.fleet.send = lambda *_: True  # type: ignore[method-assign]
        await gateway.close()

    async def kill(self, name: str) -> None:
        """The process is gone: sockets closed, nothing said."""
        worker = self.workers.pop(name)
        self.ready.pop(name)
        await worker._server.stop(grace=None)
        await worker.stop()

    async def restart(self, name: str, role: Role) -> None:
        if name in self.workers:
            await self.kill(name)
        await self.start_worker(name, role)
        self.push_members()

    async def ask(self, spec: GenerationSpec, gateway: Gateway | None = None) -> Answer:
        answer = Answer()
        async for delta in (gateway or self.gateway).generate(spec):
            answer.tokens += delta.token_ids
            answer.logprobs += delta.logprobs
            answer.text += delta.text
            if delta.finish_reason:
                answer.finish_reasons.append(delta.finish_reason)
            answer.usage = delta.usage or answer.usage
        return answer

    async def assert_drained(self, settle_s: float = 5.0) -> None:
        """CASES law c: at idle every process has given everything back."""
        end = asyncio.get_running_loop().time() + settle_s
        while True:
            held = await self._held()
            if not held:
                return
            assert asyncio.get_running_loop().time() < end, held
            await asyncio.sleep(0.02)

    async def _held(self) -> list[str]:
        held = []
        for gateway in self.gateways:
            if (
                gateway._live
                or gateway._legs
                or gateway._queued
                or len(gateway._kin)
                or any(astuple(gateway.gate.admission.held))
            ):
                held.append(
                    f"{gateway.spec.gateway_id}: {len(gateway._live)} live, {len(gateway._legs)} legs, "
                    f"{len(gateway._queued)} queued"
                )
        for name, worker in self.workers.items():
            status = worker.service.status(audit=True)
            for what in ("live_requests", "leases", "handoffs", "transfers", "used_blocks", "quarantined_blocks"):
                if n := getattr(status, what):
                    held.append(f"{name}: {n} {what} {[(h.holder, h.blocks) for h in status.holders]}")
            assert status.integrity_error == ""
        return held


def spec(prompt: list[int], max_tokens: int = 16, **options: object) -> GenerationSpec:
    names = ("temperature", "seed", "min_tokens", "ignore_eos", "logprobs")
    params = {name: options.pop(name) for name in names if name in options}
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    named: dict[str, object] = {"tenant": "t", "label": ""} | options
    return GenerationSpec(prompt_ids=tuple(prompt), sampling=(sampling,), **named)  # type: ignore[arg-type]


def expected(request: GenerationSpec) -> list[int]:
    """The output of the run without faults."""
    params = request.sampling[0]
    history = list(request.prompt_ids)
    out: list[int] = []
    while len(out) < params.max_tokens:
        banned = (EOS,) if len(out) < params.min_tokens and not params.ignore_eos else ()
        token = fake_next_token(history, params, banned, VOCAB)
        out.append(token)
        history.append(token)
        if token == EOS and not params.ignore_eos and len(out) > params.min_tokens:
            break
    return out


def expected_logprobs(request: GenerationSpec) -> list[TokenLogprobs]:
    """What is told of each token of `expected`."""
    num_top = request.sampling[0].logprobs
    if num_top is None:
        return []
    output = expected(request)
    return [
        fake_logprobs([*request.prompt_ids, *output[:at]], token, num_top, VOCAB) for at, token in enumerate(output)
    ]


@asynccontextmanager
async def world(
    *roles: Role,
    num_gateways: int = 1,
    step_s: float = 0.0,
    num_blocks: int = 256,
    gateway: dict[str, object] | None = None,
    by_role: dict[Role, dict[str, object]] | None = None,
    **options: object,
) -> AsyncIterator[World]:
    """All workers up and connected; ends with everything closed, drained or not.

    `options`: fields of every worker's spec; `by_role`: further ones for the workers of a role.
    """

    def runner(spec: WorkerSpec) -> FakeRunner:
        return FakeRunner(
            1024,
            num_blocks=num_blocks,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            step_s=step_s,
            host_blocks=spec.swap_bytes // FAKE_BLOCK_BYTES,
        )

    running = World(runner, by_role, **options)
    text = text_model()
    ids = counting_ids()
    running.gateway, *running.siblings = (
        Gateway(gateway_spec(**(GATEWAY | {"gateway_id": f"gateway-{i}"} | (gateway or {}))), text, ids=ids)
        for i in range(num_gateways)
    )
    counts: dict[Role, int] = {}
    try:
        for role in roles:
            await running.start_worker(f"{role.value}-{counts.get(role, 0)}", role)
            counts[role] = counts.get(role, 0) + 1
        running.push_members()
        await running.connected()
        yield running
    finally:
        for each in running.gateways:
            await each.close()
        for worker in running.workers.values():
            await worker.stop()
        text.close()

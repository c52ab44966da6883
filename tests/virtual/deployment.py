"""A whole deployment in virtual time: production's gateways and workers, clients, and a controller that restarts what
died. What happens is a function of the seed alone.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache

from headrace.core.records import Role
from headrace.errors import HeadraceError
from headrace.ids import counting_ids
from headrace.sampling import SamplingParams
from router.api import GenerationSpec, Usage
from router.gateway import Gateway
from router.text import TextModel
from tests.doors_fixtures import EOS, gateway_spec, text_model
from tests.virtual.calls import dialer
from tests.virtual.loop import PROCESS, Life, Process, VirtualLoop
from tests.virtual.wire import Wire
from tests.virtual.worker import MAX_MODEL_LEN, VOCAB, VirtualWorker, worker_spec
from workers.runner.fake import fake_next_token

TOKEN = "cluster-secret"
LIVENESS_S = 2.0
READ_TIMEOUT_S = 1.0
DEADLINE_S = 20.0
"""Of requests without one of their own."""
RESTART_S = (0.2, 1.0)
BURIAL_ROUNDS = 30
GOOD = "good"
"""The tenant whom nobody disturbs directly."""
ROUGH = "rough"


@cache
def shared_text() -> TextModel:
    """Immutable, and slow to make."""
    return text_model()


def expected(request: GenerationSpec) -> list[int]:
    """The output of the run without faults."""
    params = request.sampling[0]
    history, out = list(request.prompt_ids), []
    while len(out) < params.max_tokens:
        token = fake_next_token(history, params, (), VOCAB)
        out.append(token)
        history.append(token)
        if token == EOS:
            break
    return out


@dataclass(slots=True)
class Record:
    """One request, and what its client saw."""

    request: GenerationSpec
    at_s: float
    cancel_after_s: float | None = None
    slow_s: float = 0.0
    """Pause of the client after each piece."""
    tokens: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    usage: Usage | None = None
    ends: list[str] = field(default_factory=list)
    """completed | refused | cancelled | gateway_lost | an error's code; the laws demand exactly one."""
    began: float = 0.0
    ended: float = 0.0
    gateway: str = ""
    process: Process | None = None
    """The gateway's."""
    task: asyncio.Task[None] | None = None
    slow_total_s: float = 0.0
    """What it has paused so far."""
    disturbed: str = ""
    """A fault that was aimed at it, and which."""


class VirtualGateway:
    def __init__(
        self, name: str, loop: VirtualLoop, wire: Wire, rng: random.Random, options: dict[str, object]
    ) -> None:
        self.name = name
        self.process = Process(name)
        chance = random.Random(rng.getrandbits(32)).random
        spec = gateway_spec(gateway_id=name, **options)
        prefix = counting_ids()
        self.core = self.process.run(
            lambda: Gateway(
                spec,
                shared_text(),
                ids=lambda kind: f"{name}/{prefix(kind)}",
                clock=loop.time,
                chance=chance,
                dial=dialer(wire, self.process),
            )
        )


class Deployment:
    """`members` are what the controller pushes. All times in virtual seconds."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        roles: list[Role],
        num_gateways: int,
        num_blocks: int,
        gateway: dict[str, object] | None = None,
        worker: dict[str, object] | None = None,
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.context = copy_context()
        """Of no process."""
        self.wire = Wire(loop, random.Random(rng.getrandbits(32)))
        self.workers: dict[str, VirtualWorker] = {}
        self.gateways: dict[str, VirtualGateway] = {}
        self.dead: list[Process] = []
        self.exits: list[str] = []
        """Workers that ended themselves in good order: quarantine over its cap."""
        self.broken: list[str] = []
        """What production ends a process for, and exceptions that nobody caught: never in good order."""
        self.on_worker: Callable[[VirtualWorker], None] = lambda worker: None
        self._gateway_options = {
            "max_model_len": MAX_MODEL_LEN,
            "liveness_s": LIVENESS_S,
            "cluster_token": TOKEN,
            "default_deadline_s": DEADLINE_S,
            "max_attempts": 100,
            "max_worker_crashes": 100,
        } | (gateway or {})
        self._worker_options = {
            "liveness_s": LIVENESS_S,
            "read_timeout_s": READ_TIMEOUT_S,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 16,
            "long_prefill_token_threshold": 32,
        } | (worker or {})
        self._num_blocks = num_blocks
        self._incarnations = itertools.count(1)
        self._ports = itertools.count(1)
        self._versions = itertools.count(1)
        loop.set_exception_handler(self._uncaught)
        counts: dict[Role, int] = {}
        for role in roles:
            self.start_worker(f"{role.value}-{counts.get(role, 0)}", role)
            counts[role] = counts.get(role, 0) + 1
        for i in range(num_gateways):
            self.start_gateway(f"gateway-{i}")

    # ---- the controller

    def start_worker(self, name: str, role: Role, address: str | None = None) -> None:
        spec = worker_spec(name, f"inc-{next(self._incarnations)}", role, TOKEN, **self._worker_options)
        address = address or f"10.0.0.1:{next(self._ports)}"
        worker = VirtualWorker(spec, address, self.wire, self.rng, self._num_blocks)
        worker.on_exit = self._exit
        self.workers[name] = worker
        self.on_worker(worker)

    def start_gateway(self, name: str) -> None:
        self.gateways[name] = VirtualGateway(name, self.loop, self.wire, self.rng, self._gateway_options)

    def push_members(self) -> None:
        members = [worker.member for worker in self.workers.values() if worker.process.life is not Life.DEAD]
        for gateway in self.gateways.values():
            if gateway.process.life is Life.RUNNING:
                gateway.process.run(gateway.core.fleet.set_members, next(self._versions), members)

    def kill_worker(self, name: str) -> None:
        """And start it again a little later, under the same name, perhaps at the same address."""
        worker = self.workers[name]
        worker.die()
        self.dead.append(worker.process)
        self.wire.note(f"killed {name}")
        address = worker.address if self.rng.random() < 0.5 else None

        def again() -> None:
            self.start_worker(name, worker.spec.role, address)
            self.loop.call_later(0.01, self.push_members)

        self.loop.call_later(self.rng.uniform(*RESTART_S), again)

    def kill_gateway(self, name: str) -> None:
        gateway = self.gateways[name]
        self.loop.kill_process(gateway.process)
        self.wire.lost(gateway.process)
        self.dead.append(gateway.process)
        self.wire.note(f"killed {name}")

        def again() -> None:
            self.start_gateway(name)
            self.push_members()

        self.loop.call_later(self.rng.uniform(*RESTART_S), again)

    def _uncaught(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        process = PROCESS.get()
        error = context.get("exception")
        text = f"{process.name if process else 'nobody'}: {context['message']}: {error!r} {context.get('task', '')!r}"
        self.broken.append(text)

    def _exit(self, worker: VirtualWorker, code: int) -> None:
        self.exits.append(f"{worker.spec.worker_id} {code}")
        self.loop.call_soon(self.kill_worker, worker.spec.worker_id)

    # ---- waiting

    async def until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        end = self.loop.time() + limit_s
        while not condition():
            if self.loop.time() >= end:
                return False
            await asyncio.sleep(0.01)
        return True

    def connected(self) -> bool:
        return all(
            gateway.process.life is Life.RUNNING
            and len(gateway.core.fleet.sessions) == len(self.workers)
            and all(
                session.connected and session.key.incarnation == self.workers[session.key.worker_id].spec.incarnation
                for session in gateway.core.fleet.sessions
            )
            for gateway in self.gateways.values()
        ) and all(worker.process.life is Life.RUNNING and worker.ready for worker in self.workers.values())

    # ---- clients

    def ask(self, record: Record) -> asyncio.Task[None]:
        """The door's part of the gateway that is there now."""
        alive = [g for g in self.gateways.values() if g.process.life is Life.RUNNING]
        gateway = self.rng.choice(alive or list(self.gateways.values()))
        record.gateway, record.began, record.process = gateway.name, self.loop.time(), gateway.process
        record.task = task = gateway.process.run(lambda: self.loop.create_task(self._ask(record, gateway)))
        if record.cancel_after_s is not None:
            self.loop.call_later(record.cancel_after_s, task.cancel, context=gateway.process.context)
        return task

    async def _ask(self, record: Record, gateway: VirtualGateway) -> None:
        try:
            while not gateway.core.ready():  # what a client does that is refused before it began is to ask again
                await asyncio.sleep(0.1)
            async for delta in gateway.core.generate(record.request):
                record.tokens += delta.token_ids
                if delta.finish_reason:
                    record.finish_reasons.append(delta.finish_reason)
                record.usage = delta.usage or record.usage
                if record.slow_s:
                    record.slow_total_s += record.slow_s
                    await asyncio.sleep(record.slow_s)
            record.ends.append("completed")
        except HeadraceError as error:
            record.ends.append(error.code.value)
        except asyncio.CancelledError:
            record.ends.append("cancelled")
        record.ended = self.loop.time()

    async def bury(self) -> None:
        """Ends everything, the dead too. Nobody looks at what is left."""
        self.loop.set_exception_handler(lambda loop, context: None)
        for process in self.dead + [each.process for each in (*self.workers.values(), *self.gateways.values())]:
            self.loop.wind_up(process)
        for _ in range(BURIAL_ROUNDS):
            tasks = asyncio.all_tasks(self.loop) - {asyncio.current_task(self.loop)}
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            for _ in range(4):
                await asyncio.sleep(0)
        assert len(asyncio.all_tasks(self.loop)) == 1, asyncio.all_tasks(self.loop)
        await self.loop.shutdown_asyncgens()
        for worker in self.workers.values():
            if worker.ready:
                worker.transport.die()


def request(rng: random.Random, tenant: str, shared: list[int], most_prompt: int = 40) -> GenerationSpec:
    head = shared[: rng.choice((0, 0, 16, 40))]
    prompt = head + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, most_prompt))]
    options: dict[str, object] = {"temperature": 0.8, "seed": rng.randrange(1 << 30)} if rng.random() < 0.3 else {}
    params = SamplingParams(max_tokens=rng.choice((1, 2, 3, 4, 8)), **options)  # type: ignore[arg-type]
    return GenerationSpec(tenant=tenant, label="", prompt_ids=tuple(prompt), sampling=(params,))

"""A worker as `workers.main` puts it together, for a virtual process: without threads, on the loop's clock, with a pool
that its death garbles.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from headrace.core.fairness import ServiceCounters
from headrace.core.predictor import StepPredictor
from headrace.core.records import Role
from headrace.ids import counting_ids
from headrace.v1 import admin_pb2
from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.layout import Cut
from kvtransfer.core.pairing import card_of
from kvtransfer.pairing import PairClient, PairServer
from kvtransfer.probe import ProbeArea, fill_pattern
from kvtransfer.service import LeaseHolder, LeaseReader, LeaseSource
from kvtransfer.transports.base import Peer, PoolBytes, Pull, PullStats, peer_name
from kvtransfer.transports.memory import MemoryTransport
from kvtransfer.transports.select import Lanes
from tests.doors_fixtures import EOS
from tests.virtual.calls import dialer
from tests.virtual.loop import Process, VirtualLoop
from tests.virtual.wire import Wire
from workers.core.blocks import BlockPool
from workers.core.prefix_cache import PrefixCache
from workers.core.scheduler import Scheduler
from workers.engine import Engine
from workers.hub import Hub
from workers.main import EXIT_QUARANTINE, IDLE_TICKS, TICK_S, scheduler_settings
from workers.runner.fake import FakeRunner
from workers.server import WorkerService
from workers.spec import WorkerSpec

VOCAB = 267
READ_BLOCK_S = 0.0005
PROBE_BLOCKS = 2
FAKE_BLOCK_BYTES = FakeRunner(num_blocks=1).layout.block_bytes
MAX_MODEL_LEN = 256


class Unlearned(StepPredictor):
    """Steps here have no times worth learning, and learning costs more than they do."""

    def observe(self, *_: object, **__: object) -> None:
        pass


class VirtualEngine(Engine):
    """The same steps without a thread: each lasts `step_s` of virtual time, at whose end it reads and writes its KV."""

    def __init__(self, *args: object, loop: VirtualLoop, step_s: Callable[[int], float]) -> None:
        super().__init__(*args, clock=loop.time)  # type: ignore[arg-type]
        self._loop = loop
        self._step_s = step_s
        self._busy = False
        self._look: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._look = self._loop.call_soon(self._go)  # type: ignore[assignment]

    def wake(self) -> None:
        if not self._busy and not self._woken:
            self._woken = True
            self._look_in(0.0)

    def _look_in(self, delay_s: float) -> None:
        if self._look is not None:
            self._look.cancel()
        self._look = self._loop.call_later(delay_s, self._go)

    def _go(self) -> None:
        plan = self.begin()
        if plan is None:
            self._busy = False
            if not self._woken:
                self._look_in(self._patience_s())
            return
        self._busy = True
        self._loop.call_later(self._step_s(len(plan.token_ids)), self._finish, plan)

    def _finish(self, plan: object) -> None:
        self.end(plan, self._runner.run(plan))  # type: ignore[arg-type]
        self._go()


class WatchedTransport(MemoryTransport):
    """Tells how far its reads are, and turns a bit of what came over those in `to_flip`."""

    on_read: Callable[[str, str, Pull], None]
    num_blocks: int
    memory: PoolBytes
    flipped = 0

    def __init__(self, peer_id: str, read_timeout_s: float) -> None:
        super().__init__(peer_id, read_timeout_s)
        self.to_flip: set[Pull] = set()

    def pull(
        self, peer: Peer, remote_blocks: Sequence[int], local_blocks: Sequence[int], cut: Cut | None = None
    ) -> Pull:
        pull = super().pull(peer, remote_blocks, local_blocks, cut)
        if local_blocks[0] >= self.num_blocks:
            return pull  # of a probe
        finish = pull.finish

        def finish_flipped(stats: PullStats) -> None:
            if pull in self.to_flip:
                self.to_flip.remove(pull)
                self.memory[local_blocks[-1] * FAKE_BLOCK_BYTES + 5] ^= 0x10
                self.flipped += 1
            finish(stats)

        pull.finish = finish_flipped  # type: ignore[method-assign]
        self.on_read(peer.peer_id, "began", pull)
        half_s = len(local_blocks) * READ_BLOCK_S / 2
        asyncio.get_running_loop().call_later(half_s, self.on_read, peer.peer_id, "half", pull)
        return pull


class VirtualWorker:
    def __init__(self, spec: WorkerSpec, address: str, wire: Wire, rng: random.Random, num_blocks: int) -> None:
        self.spec = spec
        self.address = address
        self.process = Process(spec.worker_id)
        self.on_exit: Callable[[VirtualWorker, int], None] = lambda worker, code: None
        self.on_read: Callable[[VirtualWorker, str, str, Pull], None] = lambda worker, holder, part, pull: None
        self.ready = False
        self._wire = wire
        self._rng = random.Random(rng.getrandbits(32))
        self._num_blocks = num_blocks
        self.process.run(lambda: wire.loop.create_task(self._start()))

    @property
    def member(self) -> admin_pb2.Member:
        spec = self.spec
        return admin_pb2.Member(
            worker_id=spec.worker_id, incarnation=spec.incarnation, address=self.address, role=spec.role.value
        )

    async def _start(self) -> None:
        spec, loop = self.spec, self._wire.loop
        self.runner = FakeRunner(MAX_MODEL_LEN, num_blocks=self._num_blocks, vocab_size=VOCAB, eos_token_ids=(EOS,))
        layout, identity = self.runner.layout, self.runner.fingerprint()
        self.transport = WatchedTransport(peer_name(spec.worker_id, spec.incarnation), spec.read_timeout_s)
        self.transport.delay_s = READ_BLOCK_S
        self.transport.on_read = lambda holder, part, pull: self.on_read(self, holder, part, pull)
        area, name, card = (
            ProbeArea(self._num_blocks, PROBE_BLOCKS),
            self.transport.peer_id,
            card_of(self.runner.identity_fields(), layout.block_size),
        )
        self.transport.num_blocks = self._num_blocks
        memory = self.transport.memory = self.runner.lane_pool[: area.end * layout.block_bytes]
        await self.transport.start(memory, layout.block_bytes)
        fill_pattern(memory, area, layout.block_bytes, name)
        lanes = Lanes(memory, layout.block_bytes, area, {self.transport.name: self.transport})
        self.pool = BlockPool(self.runner.num_blocks, layout.block_size)
        settings, predictor = scheduler_settings(spec, self.runner), Unlearned()
        self.scheduler = Scheduler(
            settings, self.pool, PrefixCache(self.pool), predictor, ServiceCounters(spec.service)
        )
        me = pb.PeerAddress(worker_id=spec.worker_id, incarnation=spec.incarnation, address=self.address)

        token, liveness_s, nonces = spec.cluster_token, spec.liveness_s, self._rng.randbytes
        pairs = PairServer(name, spec.incarnation, token, card, lanes, liveness_s, nonces=nonces)

        def make_holder(source: LeaseSource) -> LeaseHolder:
            return LeaseHolder(source, pairs, liveness_s=liveness_s, ids=counting_ids())

        reader = LeaseReader(
            PairClient(me, token, card, lanes, liveness_s, layout, nonces=nonces),
            block_size=layout.block_size,
            liveness_s=liveness_s,
            dial=dialer(self._wire, self.process),
        )
        self.hub = Hub(self.scheduler, identity, layout.block_size, make_holder, reader, clock=loop.time)
        self.engine = VirtualEngine(self.scheduler, self.runner, self.hub, loop=loop, step_s=self._step_s)
        self.hub.attach(self.engine)
        hello = pb.WorkerHello(
            worker_id=spec.worker_id,
            incarnation=spec.incarnation,
            role=spec.role.value,
            fingerprint=identity.hex(),
            block_size=layout.block_size,
            total_blocks=self.runner.num_blocks,
            max_model_len=spec.max_model_len,
            lane=self.transport.name,
            chunk_tokens=settings.chunk_tokens,
            card=card,
        )
        self.service = WorkerService(spec, hello, self.hub, self.scheduler, self.pool, predictor, 0, layout.block_bytes)
        self.engine.start()
        self._wire.serve(self.address, self.process, self.service)
        self._monitor_task = loop.create_task(self._monitor())
        self.ready = True

    def _step_s(self, num_tokens: int) -> float:
        return 0.004 + num_tokens * 0.0001 + self._rng.random() * 0.002

    async def _monitor(self) -> None:
        """See `workers.main.Worker._monitor`."""
        idle_ticks = 0
        while True:
            await asyncio.sleep(TICK_S)
            self.hub.tick()
            idle_ticks = 0 if self.hub.live_requests else idle_ticks + 1
            if idle_ticks == IDLE_TICKS:
                self.scheduler.check_integrity()
            if self.pool.quarantined_blocks * self.runner.layout.block_bytes > self.spec.quarantine_cap_bytes:
                self.on_exit(self, EXIT_QUARANTINE)

    def die(self) -> None:
        """The process is gone; what its pool held is anybody's by now."""
        self._wire.loop.kill_process(self.process)
        self._wire.lost(self.process)
        if self.ready:
            self.transport.die()
            self.runner.kv_pool[:] = 0x5A


def worker_spec(worker_id: str, incarnation: str, role: Role, token: str, **options: object) -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id,
        incarnation=incarnation,
        role=role,
        model_path="fake",
        max_model_len=MAX_MODEL_LEN,
        threads=1,
        kv_cache_bytes=1 << 20,
        cluster_token=token,
        **options,  # type: ignore[arg-type]
    )

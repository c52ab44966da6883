"""The worker process: runner, engine thread, KV transport and gRPC service put together.

python -m workers.main < spec.json     one line of WorkerSpec in, one line of WorkerReady out, then until SIGTERM
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import grpc

from headrace.control_groups import available_bytes
from headrace.core.fairness import ServiceCounters
from headrace.errors import StartupError
from headrace.paths import cache_root
from headrace.process import die_with_parent, end_process_if_failed, log_to_stderr, serve
from headrace.v1 import worker_pb2 as pb
from headrace.v1 import worker_pb2_grpc as rpc
from kvtransfer.core.pairing import card_of
from kvtransfer.pairing import PairClient, PairServer
from kvtransfer.probe import probe_area
from kvtransfer.service import LeaseHolder, LeaseReader, LeaseSource
from kvtransfer.transports.base import peer_name
from kvtransfer.transports.select import Lanes, start_lanes
from workers.core.blocks import BlockPool
from workers.core.journal import OFF
from workers.core.prefix_cache import PrefixCache
from workers.core.scheduler import Scheduler, SchedulerSettings
from workers.core.watermarks import Marks
from workers.disk_store import DiskStore, file_bytes
from workers.engine import Engine
from workers.hub import Hub
from workers.journal_file import open_journal
from workers.memory_watch import MemoryWatch
from workers.movers import Movers
from workers.predictor_file import load_predictor, profile_key
from workers.runner.base import DeviceMemory, Runner
from workers.runner.pool import is_pinned
from workers.server import SERVER_OPTIONS, WorkerService
from workers.spec import WorkerReady, WorkerSpec

log = logging.getLogger("headrace.workers.main")

TICK_S = 0.1
IDLE_TICKS = 10
"""Conservation of blocks is checked once in each idle time, after this many ticks of it."""
SWITCH_INTERVAL_S = 0.001
"""How long the event loop's thread may keep the interpreter from an engine thread whose kernels are done, or the other
way round. Python's own 5 ms is a twentieth of a step."""
GC_THRESHOLDS = (10_000, 50, 1_000_000)
"""Young objects are collected as usual; everything only when idle: it walks all requests, for longer than a step."""
COLLECT_EVERY_S = 600.0
"""And at least so often, for a worker that is never idle."""
EXIT_HUNG = 71
EXIT_QUARANTINE = 72


def torch_runner(spec: WorkerSpec) -> Runner:
    """The real runner, loaded, self-tested and warm. torch is imported here and nowhere above."""
    if spec.engine.device != "cpu":
        return gpu_runner(spec)
    from workers.runner.torch_runner import TorchRunner

    runner = TorchRunner(
        spec.model_path,
        spec.max_model_len,
        block_size=spec.block_size,
        kv_cache_bytes=spec.kv_cache_bytes,
        threads=spec.threads,
        exact=spec.exact,
        weight_format=spec.weight_format,
        max_batched_tokens=spec.max_num_batched_tokens,
        max_seqs=spec.max_num_seqs,
        swap_bytes=spec.swap_bytes,
    )
    runner.warm_up()
    return runner


def gpu_runner(spec: WorkerSpec) -> Runner:
    """The runner of a worker whose engine is not a CPU's."""
    from workers.runner.gpu_runner import GpuRunner

    if spec.exact:
        raise StartupError("exact needs engine.device: cpu; engine.batch_invariant is what a GPU can keep")
    runner = GpuRunner(
        spec.model_path,
        spec.max_model_len,
        device=spec.engine.device,
        block_size=spec.block_size,
        kv_cache_bytes=spec.kv_cache_bytes,
        gpu_memory_utilization=spec.engine.gpu_memory_utilization,
        weight_format=spec.weight_format,
        max_batched_tokens=spec.max_num_batched_tokens,
        max_seqs=spec.max_num_seqs,
        swap_bytes=spec.swap_bytes,
        cuda_graphs=spec.engine.cuda_graphs,
        batch_invariant=spec.engine.batch_invariant,
    )
    runner.warm_up()
    return runner


class Worker:
    """start -> wait -> stop. Errors before readiness are StartupError with one clear line."""

    def __init__(self, spec: WorkerSpec, make_runner: Callable[[WorkerSpec], Runner] = torch_runner) -> None:
        self.spec = spec
        self.hub: Hub
        self.engine: Engine
        self.service: WorkerService
        self._make_runner = make_runner
        self._stopped = asyncio.Event()
        self._stopping = False

    async def start(self) -> WorkerReady:
        began, spec = time.monotonic(), self.spec
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._events = open_journal(spec)
        runner = await asyncio.to_thread(self._make_runner, spec)
        if isinstance(runner.lane_pool, DeviceMemory):
            raise StartupError("no lane reads and writes KV in device memory yet; set engine.device: cpu")
        layout, identity = runner.layout, runner.fingerprint()
        fingerprint = identity.hex()
        card = card_of(runner.identity_fields(), layout.block_size)
        peer_id = peer_name(spec.worker_id, spec.incarnation)
        self._lanes: Lanes = await start_lanes(
            spec.transport,
            runner.lane_pool,
            layout.block_bytes,
            probe_area(runner.num_blocks, layout.block_bytes),
            peer_id=peer_id,
            token=spec.cluster_token,
            host=spec.host,
            read_timeout_s=spec.read_timeout_s,
        )
        self.pool = BlockPool(runner.num_blocks, layout.block_size)
        self.predictor = load_predictor(spec, profile_key(spec, runner))
        tracing = OFF if self._events is None else self._events.tracing
        settings = scheduler_settings(spec, runner)
        self.scheduler = Scheduler(
            settings,
            self.pool,
            PrefixCache(self.pool),
            self.predictor,
            ServiceCounters(spec.service),
            tracing,
        )
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        port = self._server.add_insecure_port(f"{spec.host}:0")
        address = f"{spec.host}:{port}"
        me = pb.PeerAddress(worker_id=spec.worker_id, incarnation=spec.incarnation, address=address)
        lanes, token, liveness_s = self._lanes, spec.cluster_token, spec.liveness_s
        pairs = PairServer(peer_id, spec.incarnation, token, card, lanes, liveness_s)

        def make_holder(source: LeaseSource) -> LeaseHolder:
            return LeaseHolder(source, pairs, checksums=spec.checksums, liveness_s=liveness_s)

        reader = LeaseReader(
            PairClient(me, token, card, lanes, liveness_s, layout),
            block_size=layout.block_size,
            liveness_s=liveness_s,
            max_retries=spec.read_retries,
        )
        self.hub = Hub(self.scheduler, identity, layout.block_size, make_holder, reader)
        self.engine = Engine(self.scheduler, runner, self.hub, overlap=spec.overlap)
        self.hub.attach(self.engine)
        self.memory_watch = MemoryWatch(
            Marks(spec.low_memory_bytes, spec.critical_memory_bytes),
            self.hub,
            self.scheduler,
            self.pool,
            layout.block_bytes,
            available_bytes,
            gives_back=not is_pinned(),
        )
        hello = pb.WorkerHello(
            worker_id=spec.worker_id,
            incarnation=spec.incarnation,
            role=spec.role.value,
            fingerprint=fingerprint,
            block_size=layout.block_size,
            total_blocks=runner.num_blocks,
            max_model_len=spec.max_model_len,
            lane=lanes.common,
            chunk_tokens=settings.chunk_tokens,
            card=card,
        )
        self._movers = Movers(self.scheduler, self.engine.lock, runner, disk_store(spec, runner))
        self.service = WorkerService(
            spec,
            hello,
            self.hub,
            self.scheduler,
            self.pool,
            self.predictor,
            runner.host_blocks,
            layout.block_bytes,
        )
        rpc.add_WorkerServicer_to_server(self.service, self._server)
        if self._events is not None:
            self._events.start()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self.engine.start()
        self._movers.start()
        await self._server.start()
        self._runner = runner
        self._monitor_task = asyncio.create_task(self._monitor(layout.block_bytes))
        self._monitor_task.add_done_callback(end_process_if_failed)
        return WorkerReady(
            worker_id=spec.worker_id,
            incarnation=spec.incarnation,
            role=spec.role,
            address=address,
            pid=os.getpid(),
            fingerprint=fingerprint,
            total_blocks=runner.num_blocks,
            block_size=layout.block_size,
            lane=lanes.first.name,
            lane_gbps=lanes.gbps[lanes.first.name],
            lane_note=lanes.note,
            memory_plan=runner.memory_plan(),
            weight_storage=runner.weight_storage,
            exact_rows=runner.exact_rows,
            start_s=time.monotonic() - began,
        )

    async def wait(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        """Idempotent. Sessions and leases end, then the engine after its running step, then the transport."""
        if self._stopping:
            await self._stopped.wait()
            return
        self._stopping = True
        self._monitor_task.cancel()
        await self._server.stop(grace=0.2)
        await self.hub.reader.close()
        await asyncio.to_thread(self.engine.stop)
        await asyncio.to_thread(self._movers.stop)
        if self._events is not None:
            await asyncio.to_thread(self._events.stop)
        await self._lanes.close()
        self._stopped.set()

    async def _monitor(self, block_bytes: int) -> None:
        """Deadlines and stuck readers; and the three reasons for a worker to end itself (DESIGN laws 3, 8, 9)."""
        cap, idle_ticks = self.spec.quarantine_cap_bytes, 0
        collect_at = time.monotonic() + COLLECT_EVERY_S
        while True:
            await asyncio.sleep(TICK_S)
            self.hub.tick()
            self.memory_watch.tick(time.monotonic())
            self.hub.counters.update(self._runner.counters)
            if self._events is not None:
                self.hub.counters.update(self._events.counters)
            idle_ticks = 0 if self.hub.live_requests else idle_ticks + 1
            if idle_ticks == IDLE_TICKS or time.monotonic() > collect_at:
                gc.collect()
                collect_at = time.monotonic() + COLLECT_EVERY_S
            if idle_ticks == IDLE_TICKS:
                with self.engine.lock:
                    self.scheduler.check_integrity()
            if self.engine.hung:
                log.critical("engine_hung worker=%s step_age_s=%.1f", self.spec.worker_id, self.engine.step_age_s)
                os._exit(EXIT_HUNG)
            if self.pool.quarantined_blocks * block_bytes > cap:
                log.critical("quarantine_full worker=%s blocks=%d", self.spec.worker_id, self.pool.quarantined_blocks)
                os._exit(EXIT_QUARANTINE)


def scheduler_settings(spec: WorkerSpec, runner: Runner) -> SchedulerSettings:
    """What the scheduler of a worker with this spec and runner obeys."""
    return SchedulerSettings(
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_num_seqs=spec.max_num_seqs,
        long_prefill_token_threshold=spec.long_prefill_token_threshold,
        block_size=spec.block_size,
        max_waiting_requests=spec.max_waiting_requests,
        max_waiting_tokens=spec.max_waiting_tokens,
        watermark_blocks=max(1, runner.num_blocks // 100),
        max_model_len=spec.max_model_len,
        eos_token_ids=runner.eos_token_ids,
        max_queue_s=spec.max_queue_s,
        max_reserved_kv_tokens=spec.max_reserved_kv_tokens,
        host_blocks=runner.host_blocks,
        host_copy_block_s=runner.host_copy_block_s,
        disk_blocks=disk_blocks(spec, runner),
        **asdict(spec.scheduling),
    )


def disk_blocks(spec: WorkerSpec, runner: Runner) -> int:
    """Cached blocks that the disk may hold; none without host memory, through which they go."""
    return spec.disk_cache_bytes // file_bytes(runner.layout.block_bytes) if runner.host_blocks else 0


def disk_store(spec: WorkerSpec, runner: Runner) -> DiskStore | None:
    """Opened by the thread that uses it: readiness does not wait for a disk. None: the spec wants no disk cache."""
    most = disk_blocks(spec, runner)
    folder = Path(spec.disk_cache_dir) if spec.disk_cache_dir else cache_root() / "kv"
    identity = runner.fingerprint()
    return DiskStore(folder, spec.worker_id, identity, runner.layout.block_bytes, most) if most else None


def main() -> None:
    spec = WorkerSpec.model_validate_json(sys.stdin.readline())
    log_to_stderr(spec.worker_id)
    die_with_parent(spec.controller_pid)

    async def run() -> int:
        return await serve(Worker(spec))

    sys.exit(asyncio.run(run()))


if __name__ == "__main__":
    main()

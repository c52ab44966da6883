"""The worker's gRPC service: sessions of gateways, leases of readers, the worker's account. Thin: the hub decides
nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from dataclasses import asdict
from typing import Any

import grpc

from headrace.core.predictor import StepPredictor
from headrace.core.records import WorkerLoad
from headrace.errors import InvariantError
from headrace.process import end_process
from headrace.v1 import worker_pb2 as pb
from headrace.v1 import worker_pb2_grpc as rpc
from kvtransfer.service import TOKEN_KEY
from workers.core.blocks import BlockPool
from workers.core.scheduler import Scheduler
from workers.disk_store import file_bytes
from workers.hub import Hub
from workers.sessions import GatewaySession
from workers.spec import WorkerSpec

GONE = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, TimeoutError)
"""What a session's tasks raise when the gateway is gone or silent."""
MAX_TENANTS = 32
"""In the worker's account: names come from outside, and every one is a time series in somebody's metrics."""
SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
]


class WorkerService(rpc.WorkerServicer):
    """A gateway's call carries the cluster token; workers prove that they know it when they pair."""

    def __init__(
        self,
        spec: WorkerSpec,
        hello: pb.WorkerHello,
        hub: Hub,
        scheduler: Scheduler,
        pool: BlockPool,
        predictor: StepPredictor,
        host_blocks: int,
        block_bytes: int,
    ) -> None:
        self._spec = spec
        self._hello = hello
        self._hub = hub
        self._scheduler = scheduler
        self._pool = pool
        self._predictor = predictor
        self._host_blocks = host_blocks
        self._block_bytes = block_bytes

    async def Session(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """One gateway, until either side ends it, the gateway is silent for `liveness_s`, or it does not read."""
        await self._check(context)
        async with asyncio.timeout(self._spec.liveness_s):
            first = await context.read()
        if first is grpc.aio.EOF or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with hello")
        session = GatewaySession(first.hello.gateway_id, self._spec.liveness_s / 8, self._load, self._hub.cache_changes)
        await context.write(pb.SessionResponse(hello=self._hello))
        self._hub.open_session(session)
        work = (self._send(session, context), self._receive(session, context), session.overflowed.wait())
        tasks = [asyncio.create_task(part) for part in work]  # type: ignore[arg-type]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hub.close_session(session)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, GONE):
                    end_process(result)

    async def Lease(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            await self._hub.holder.serve(context)
        except InvariantError as error:
            end_process(error)

    async def Pair(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await self._hub.holder.pairs.serve(context)

    async def WorkerStatus(
        self, request: pb.WorkerStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WorkerStatusResponse:
        await self._check(context)
        return self.status(request.audit)

    def status(self, audit: bool) -> pb.WorkerStatusResponse:
        """The worker's own account; with `audit` who holds what, and whether all blocks are conserved (O(blocks))."""
        hub = self._hub
        integrity, holders = "", {}
        with hub.engine.lock:
            if audit:
                holders = self._scheduler.holders()
                try:
                    self._scheduler.check_integrity()
                except InvariantError as error:
                    integrity = str(error)
            steps = hub.engine.stats
            counters = {name: float(n) for name, n in self._scheduler.stats().items()} | {
                "prefill_tokens": float(steps.prefill_tokens),
                "decode_tokens": float(steps.decode_tokens),
                "partial_prefills": float(steps.partial_prefills),
            }
            used, quarantined = self._pool.used_blocks, self._pool.quarantined_blocks
            scheduling = self._scheduling()
            scheduling.MergeFrom(self._caches())
        answer = pb.WorkerStatusResponse(
            worker_id=self._spec.worker_id,
            incarnation=self._spec.incarnation,
            role=self._spec.role.value,
            load=self._load(0),
            live_requests=hub.live_requests,
            leases=hub.holder.leases,
            handoffs=hub.reader.handoffs,
            transfers=hub.reader.reads_in_flight,
            quarantined_blocks=quarantined,
            used_blocks=used + quarantined,
            holders=[pb.BlockHolder(holder=name, blocks=n) for name, n in holders.items()],
            integrity_error=integrity,
            sessions=len(hub.sessions),
            counters=counters | dict(hub.counters),
            pid=os.getpid(),
            transport=hub.reader.lanes.first.name,
            refusals=hub.refusals,
            pairs=[pb.PairStatus(holder_id=name, **asdict(told)) for name, told in hub.reader.accounts.items()],
        )
        answer.MergeFrom(scheduling)
        return answer

    def _scheduling(self) -> pb.WorkerStatusResponse:
        """What the scheduler and its steps have done; the caller holds the engine's lock."""
        engine, scheduler, predictor = self._hub.engine, self._scheduler, self._predictor
        return pb.WorkerStatusResponse(
            policy=self._spec.scheduling.policy,
            predictor_ready=predictor.ready,
            predictor_error=predictor.error,
            predictor_samples=predictor.samples,
            histograms={
                name: pb.Histogram(bounds=told.bounds, counts=told.counts, sum=told.total)
                for name, told in engine.stats.histograms.items()
            },
            tenant_service=scheduler.service.most_served(MAX_TENANTS),
            last_schedule_s=engine.last_schedule_s,
            last_apply_s=engine.last_apply_s,
            host_blocks=self._host_blocks,
            free_host_blocks=scheduler.free_host_blocks,
            reserved_kv_tokens=scheduler.admission.reserved_kv_tokens,
            queue_s=scheduler.admission.queue_s,
        )

    def _caches(self) -> pb.WorkerStatusResponse:
        """What is cached in which tier, and whose it is; the caller holds the engine's lock."""
        tiering = self._scheduler.tiering
        sizes = {"device": self._block_bytes, "host": self._block_bytes, "disk": file_bytes(self._block_bytes)}
        owners = tiering.by_tenant().most_common(MAX_TENANTS)
        return pb.WorkerStatusResponse(
            tiers=[
                pb.TierStatus(
                    name=tier.name,
                    capacity_blocks=tier.capacity,
                    cached_blocks=tier.cached,
                    used_blocks=tier.used,
                    free_blocks=tier.free,
                    block_bytes=sizes[tier.name],
                )
                for tier in tiering.accounts()
            ],
            tenant_caches=[pb.TenantCache(tenant=name, blocks=n) for name, n in owners],
        )

    async def _send(self, session: GatewaySession, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async for frame in session.frames():
            await context.write(frame)

    async def _receive(self, session: GatewaySession, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            async with asyncio.timeout(self._spec.liveness_s):
                message = await context.read()
            if message is grpc.aio.EOF:
                return
            match message.WhichOneof("kind"):
                case "submit":
                    self._hub.submit(session, message.submit)
                case "adopt":
                    self._hub.adopt(session, message.adopt)
                case "finish":
                    self._hub.finish(session, message.finish.handle, message.finish.reason)
                case "cache_resync":
                    session.resync()
                case "clear_cache":
                    self._hub.clear_cache(None if message.clear_cache.all else message.clear_cache.tenant)
                case "peers":
                    self._hub.meet(session, message.peers.holders)
                case "pause":
                    self._hub.pause(session, message.pause)
                case "resume":
                    self._hub.resume(session, message.resume)

    def _load(self, submit_seq: int) -> pb.LoadReport:
        engine = self._hub.engine
        with engine.lock:
            load: WorkerLoad = self._scheduler.load(submit_seq, engine.now())
        return pb.LoadReport(
            submit_seq=load.submit_seq,
            waiting_requests=load.waiting_requests,
            waiting_tokens=load.waiting_tokens,
            running_requests=load.running_requests,
            adopting_requests=load.adopting_requests,
            free_blocks=load.free_blocks,
            evictable_blocks=load.evictable_blocks,
            total_blocks=load.total_blocks,
            step_age_s=engine.step_age_s,
            step_s=load.step_s,
            cache_epoch=load.cache_epoch,
            cache_seq=load.cache_seq,
            queue_s=load.queue_s,
            decode_rows=load.decode_rows,
            decode_context=load.decode_context,
            expected_output_tokens=load.expected_output_tokens,
            step_costs=load.step_costs,
            eviction_ms_per_block=load.eviction_ms_per_block,
            restore_block_s=load.restore_block_s,
            closed=load.closed,
        )

    async def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        metadata = {key: value for key, value in context.invocation_metadata() or ()}
        token = str(metadata.get(TOKEN_KEY, ""))
        if not hmac.compare_digest(token.encode(), self._spec.cluster_token.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster token is missing or wrong")

"""The Admin service of a gateway: membership from the controller; status, audit and cache control for people."""

from __future__ import annotations

import asyncio

import grpc

from headrace.v1 import admin_pb2 as pb
from headrace.v1 import admin_pb2_grpc as rpc
from router.auth import Authenticator, cluster_token_ok
from router.core.audit import GatewayAccount, WorkerAccount, findings
from router.gateway import Gateway

SAMPLE_GAP_S = 0.25


class AdminService(rpc.AdminServicer):
    """Status and Audit want a key like every other call, or the cluster token; SetMembers wants the token."""

    def __init__(self, gateway: Gateway, authenticator: Authenticator) -> None:
        self._gateway = gateway
        self._authenticator = authenticator

    async def SetMembers(
        self, request: pb.SetMembersRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetMembersResponse:
        if not self._is_cluster(context):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the cluster token is missing or wrong")
        self._gateway.fleet.set_members(request.version, list(request.members))
        return pb.SetMembersResponse()

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusResponse:
        await self._check(context)
        return await self._gateway.status()

    async def Audit(self, request: pb.AuditRequest, context: grpc.aio.ServicerContext) -> pb.AuditResponse:
        """Waits up to settle_s for quiescence; a finding counts when two samples in a row show it."""
        await self._check(context)
        await self._gateway.idle(request.settle_s or 2.0)
        end = asyncio.get_running_loop().time() + (request.settle_s or 2.0)
        status = await self._gateway.status(audit=True)
        found = self._findings(status)
        while found:
            await asyncio.sleep(SAMPLE_GAP_S)
            status = await self._gateway.status(audit=True)
            again = set(self._findings(status))
            found = [line for line in found if line in again] if again else []
            if asyncio.get_running_loop().time() >= end:
                break
        workers = [w.status for w in status.workers]
        return pb.AuditResponse(
            clean=not found,
            findings=found,
            used_blocks=sum(w.used_blocks for w in workers),
            leases=sum(w.leases for w in workers),
            transfers=sum(w.transfers + w.handoffs for w in workers),
            bookings=status.gateway.bookings,
            quarantined_blocks=sum(w.quarantined_blocks for w in workers),
        )

    async def ClearCache(
        self, request: pb.ClearCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.ClearCacheResponse:
        """A key's own tenant; any tenant, or all, with the cluster token or where no keys are in use."""
        own = "" if self._is_cluster(context) else await self._authenticator.require_grpc(context)
        is_free = not own or not self._authenticator.required
        if not is_free and (request.all or request.tenant not in ("", own)):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "a key clears its own tenant only")
        tenant = request.tenant or own
        if not request.all and not tenant:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "tenant: a name is needed, or all")
        try:
            told, unreachable = self._gateway.clear_cache(None if request.all else tenant)
        except OSError as error:
            await context.abort(grpc.StatusCode.INTERNAL, f"nothing was cleared: {error.strerror}")
        return pb.ClearCacheResponse(workers=told, unreachable=unreachable)

    def _findings(self, status: pb.StatusResponse) -> list[str]:
        gateway = GatewayAccount(self._gateway.live_ids(), status.gateway.bookings)
        return findings(gateway, [_account(worker) for worker in status.workers])

    def _is_cluster(self, context: grpc.aio.ServicerContext) -> bool:
        return cluster_token_ok(context.invocation_metadata(), self._gateway.spec.cluster_token)

    async def _check(self, context: grpc.aio.ServicerContext) -> None:
        if not self._is_cluster(context):
            await self._authenticator.require_grpc(context)


def _account(view: pb.WorkerView) -> WorkerAccount:
    s = view.status
    return WorkerAccount(
        name=view.worker_id,
        answered=view.HasField("status"),
        used_blocks=s.used_blocks,
        quarantined_blocks=s.quarantined_blocks,
        leases=s.leases,
        transfers=s.transfers,
        handoffs=s.handoffs,
        live_requests=s.live_requests,
        holders=tuple((h.holder, h.blocks) for h in s.holders),
        integrity_error=s.integrity_error,
        tiers=tuple((t.name, t.capacity_blocks, t.cached_blocks + t.used_blocks + t.free_blocks) for t in s.tiers),
    )

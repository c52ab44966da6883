"""The Admin service of a gateway: membership from the controller; status, audit and cache control for people."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from headrace.errors import HeadraceError
from headrace.v1 import admin_pb2 as pb
from headrace.v1 import admin_pb2_grpc as rpc
from router.auth import Authenticator, cluster_token_ok
from router.core.audit import GatewayAccount, WorkerAccount, findings
from router.gateway import Gateway
from router.metrics import DoorMetrics
from router.siblings import Siblings

SAMPLE_GAP_S = 0.25
WORKER_ANSWER_S = 2.0
CLEAR_WAIT_S = 5.0
"""For other gateways that clear at the same time."""
CLEAR_RETRY_S = 0.01


@dataclass(slots=True)
class Presence:
    """Where this gateway listens itself, and whether it answers where clients go."""

    grpc_address: str = ""
    http_address: str = ""
    is_open: bool = False


class AdminService(rpc.AdminServicer):
    """Calls want a key like those of the other services, or the cluster token; SetMembers and Account want the token.

    Whichever gateway is asked answers for all: its siblings tell it their accounts, and a cleared cache has other
    names at once for all of them (`router.generations`).
    """

    def __init__(
        self,
        gateway: Gateway,
        authenticator: Authenticator,
        siblings: Siblings,
        presence: Presence,
        metrics: DoorMetrics,
    ) -> None:
        self._gateway = gateway
        self._authenticator = authenticator
        self._siblings = siblings
        self._presence = presence
        self._metrics = metrics

    async def SetMembers(
        self, request: pb.SetMembersRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetMembersResponse:
        await self._require_cluster(context)
        if self._gateway.fleet.set_members(request.version, list(request.members)):
            self._siblings.set_members(request.siblings)
        return pb.SetMembersResponse()

    async def Account(self, request: pb.AccountRequest, context: grpc.aio.ServicerContext) -> pb.AccountResponse:
        await self._require_cluster(context)
        account = self._account()
        if request.metrics:
            account.metrics = self._metrics.text()
        return account

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusResponse:
        await self._check(context)
        workers, siblings = await asyncio.gather(
            self._gateway.fleet.accounts(WORKER_ANSWER_S, audit=False),
            self._siblings_accounts(request.alone),
        )
        return pb.StatusResponse(
            model=self._gateway.spec.served_model_name,
            gateway=self._account().gateway,
            workers=workers,
            siblings=[sibling.gateway for sibling in siblings],
        )

    async def Audit(self, request: pb.AuditRequest, context: grpc.aio.ServicerContext) -> pb.AuditResponse:
        """Waits up to settle_s for quiescence; a finding counts when two samples in a row show it."""
        await self._check(context)
        await self._gateway.idle(request.settle_s or 2.0)
        end = asyncio.get_running_loop().time() + (request.settle_s or 2.0)
        gateways, views = await self._accounts()
        found = _findings(gateways, views)
        while found:
            await asyncio.sleep(SAMPLE_GAP_S)
            gateways, views = await self._accounts()
            again = set(_findings(gateways, views))
            found = [line for line in found if line in again] if again else []
            if asyncio.get_running_loop().time() >= end:
                break
        workers = [view.status for view in views]
        return pb.AuditResponse(
            clean=not found,
            findings=found,
            used_blocks=sum(w.used_blocks for w in workers),
            leases=sum(w.leases for w in workers),
            transfers=sum(w.transfers + w.handoffs for w in workers),
            bookings=sum(gateway.gateway.bookings for gateway in gateways),
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
            told, unreachable = await self._clear_cache(None if request.all else tenant)
        except OSError as error:
            await context.abort(grpc.StatusCode.INTERNAL, f"nothing was cleared: {error.strerror}")
        return pb.ClearCacheResponse(workers=told, unreachable=unreachable)

    async def Move(self, request: pb.MoveRequest, context: grpc.aio.ServicerContext) -> pb.MoveResponse:
        """Of all gateways' requests: a worker serves several."""
        own = "" if self._is_cluster(context) else await self._authenticator.require_grpc(context)
        is_free = not own or not self._authenticator.required
        if not is_free and request.tenant not in ("", own):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "a key moves its own tenant's requests only")
        if not request.worker_id and not request.request_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "worker_id: a worker or a request is needed")
        tenant = request.tenant or (None if is_free else own)
        try:
            moved = self._gateway.move(request.worker_id, tenant, request.request_id, request.to)
        except HeadraceError as error:
            await context.abort(grpc.StatusCode[error.code.name], error.message)
        others = await self._siblings.move(request, context)
        return pb.MoveResponse(
            moved=moved.moved + sum(other.moved for other in others),
            stay=moved.stay + sum(other.stay for other in others),
        )

    async def _clear_cache(self, tenant: str | None) -> tuple[list[str], list[str]]:
        """In turn with the other gateways. Raises OSError; nothing has changed then."""
        end = asyncio.get_running_loop().time() + CLEAR_WAIT_S
        while True:
            try:
                return self._gateway.clear_cache(tenant)
            except BlockingIOError:
                if asyncio.get_running_loop().time() >= end:
                    raise
            await asyncio.sleep(CLEAR_RETRY_S)

    async def _accounts(self) -> tuple[list[pb.AccountResponse], list[pb.WorkerView]]:
        """Of all gateways, this one first, and of all workers with who holds what."""
        views, siblings = await asyncio.gather(
            self._gateway.fleet.accounts(WORKER_ANSWER_S, audit=True), self._siblings.accounts()
        )
        return [self._account(), *siblings], views

    def _account(self) -> pb.AccountResponse:
        account, presence = self._gateway.account(), self._presence
        account.grpc_address, account.http_address = presence.grpc_address, presence.http_address
        account.open = presence.is_open
        return pb.AccountResponse(gateway=account, live=self._gateway.live_ids())

    async def _siblings_accounts(self, alone: bool) -> list[pb.AccountResponse]:
        return [] if alone else await self._siblings.accounts()

    async def _require_cluster(self, context: grpc.aio.ServicerContext) -> None:
        if not self._is_cluster(context):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the cluster token is missing or wrong")

    def _is_cluster(self, context: grpc.aio.ServicerContext) -> bool:
        return cluster_token_ok(context.invocation_metadata(), self._gateway.spec.cluster_token)

    async def _check(self, context: grpc.aio.ServicerContext) -> None:
        if not self._is_cluster(context):
            await self._authenticator.require_grpc(context)


def _findings(gateways: list[pb.AccountResponse], views: list[pb.WorkerView]) -> list[str]:
    return findings([_of_gateway(gateway) for gateway in gateways], [_of_worker(view) for view in views])


def _of_gateway(account: pb.AccountResponse) -> GatewayAccount:
    gateway = account.gateway
    return GatewayAccount(frozenset(account.live), gateway.bookings, gateway.gateway_id, answered=gateway.pid > 0)


def _of_worker(view: pb.WorkerView) -> WorkerAccount:
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

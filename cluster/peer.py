"""The controller's calls to one incarnation: is it alive, what does it see, the membership. Errors become values."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.core.lifecycle import Kind
from cluster.core.reconcile import MemberView, SiblingView
from headrace.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc

PROBE_TIMEOUT_S = 1.5
STATUS_TIMEOUT_S = 5.0
PUSH_TIMEOUT_S = 3.0
_NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Peer:
    """Owns one channel. Made and closed with the incarnation, so that nothing is sent to a later process by mistake."""

    def __init__(self, kind: Kind, address: str, cluster_token: str) -> None:
        self._kind = kind
        self._metadata = (("x-headrace-cluster", cluster_token),)
        # Local subchannels: a channel to the same address must not share a broken connection's back-off.
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 1000))
        self._channel = grpc.aio.insecure_channel(reachable(address), options=options)
        self._worker = worker_pb2_grpc.WorkerStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def close(self) -> None:
        await self._channel.close(grace=None)

    async def answers(self) -> bool:
        """True when the process's event loop answered anything at all within the time limit."""
        try:
            if self._kind is Kind.WORKER:
                request = worker_pb2.WorkerStatusRequest()
                await self._worker.WorkerStatus(request, timeout=PROBE_TIMEOUT_S, metadata=self._metadata)
            else:
                await self._health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return error.code() not in _NO_ANSWER
        return True

    async def connected(self) -> frozenset[str] | None:
        """Gateways: the worker incarnations it holds a session with, none before clients can reach it; None without an
        answer."""
        try:
            status = await self._admin.Status(
                admin_pb2.StatusRequest(alone=True), timeout=STATUS_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            return None
        return frozenset(view.incarnation for view in status.workers if view.connected and status.gateway.open)

    async def push(self, version: int, members: tuple[MemberView, ...], siblings: tuple[SiblingView, ...] = ()) -> bool:
        request = admin_pb2.SetMembersRequest(
            version=version,
            members=[
                admin_pb2.Member(worker_id=m.worker_id, incarnation=m.incarnation, address=m.address, role=m.role)
                for m in members
            ],
            siblings=[admin_pb2.Sibling(name=s.name, incarnation=s.incarnation, address=s.address) for s in siblings],
        )
        try:
            await self._admin.SetMembers(request, timeout=PUSH_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError:
            return False
        except asyncio.CancelledError:
            # `close` cancels calls in flight; that is no cancellation of the caller's task.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return False
        return True


def reachable(address: str) -> str:
    """Where to connect for a listening address: a wildcard host means this machine."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "::", "") else address

"""A worker or a gateway that answers only the controller: the spec on stdin says which. Run as a process."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.errors import StartupError
from headrace.process import die_with_parent, serve
from headrace.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.spec import GatewayReady, GatewaySpec
from workers.spec import WorkerReady, WorkerSpec


class DummyWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.stopped = asyncio.Event()

    async def WorkerStatus(self, request, context):
        return worker_pb2.WorkerStatusResponse(worker_id=self.spec.worker_id, incarnation=self.spec.incarnation)

    async def start(self) -> WorkerReady:
        if os.environ.get("DUMMY_BROKEN") == self.spec.worker_id:
            raise StartupError("config.json: broken on purpose")
        await asyncio.sleep(float(os.environ.get("DUMMY_START_S", "0")))
        self.server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return WorkerReady(
            worker_id=self.spec.worker_id,
            incarnation=self.spec.incarnation,
            role=self.spec.role,
            address=f"127.0.0.1:{port}",
            pid=os.getpid(),
            fingerprint=os.environ["OMP_NUM_THREADS"],
            total_blocks=8,
            block_size=16,
            lane="none",
        )

    async def wait(self) -> None:
        await self.stopped.wait()

    async def stop(self) -> None:
        await self.server.stop(0)
        self.stopped.set()


class DummyGateway(admin_pb2_grpc.AdminServicer, health_pb2_grpc.HealthServicer):
    def __init__(self, spec: GatewaySpec) -> None:
        self.spec = spec
        self.members: list[admin_pb2.Member] = []
        self.version = 0
        self.stopped = asyncio.Event()

    async def SetMembers(self, request, context):
        assert ("x-headrace-cluster", self.spec.cluster_token) in list(context.invocation_metadata())
        if request.version > self.version:
            self.version, self.members = request.version, list(request.members)
        return admin_pb2.SetMembersResponse()

    async def Status(self, request, context):
        views = [
            admin_pb2.WorkerView(
                worker_id=m.worker_id, incarnation=m.incarnation, address=m.address, connected=await self._sees(m)
            )
            for m in self.members
        ]
        return admin_pb2.StatusResponse(workers=views, gateway=admin_pb2.GatewayStatus(open=True))

    async def _sees(self, member: admin_pb2.Member) -> bool:
        async with grpc.aio.insecure_channel(member.address) as channel:
            try:
                stub = worker_pb2_grpc.WorkerStub(channel)
                await stub.WorkerStatus(worker_pb2.WorkerStatusRequest(), timeout=0.5)
            except grpc.aio.AioRpcError:
                return False
        return True

    async def Check(self, request, context):
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def start(self) -> GatewayReady:
        self.server = grpc.aio.server()
        admin_pb2_grpc.add_AdminServicer_to_server(self, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self, self.server)
        port = self.server.add_insecure_port(f"{self.spec.host}:{self.spec.grpc_port}")
        await self.server.start()
        return GatewayReady(
            gateway_id=self.spec.gateway_id,
            grpc_address=f"127.0.0.1:{port}",
            http_address=f"127.0.0.1:{self.spec.http_port or port}",
            pid=os.getpid(),
        )

    async def wait(self) -> None:
        await self.stopped.wait()

    async def stop(self) -> None:
        await asyncio.sleep(float(os.environ.get("DUMMY_DRAIN_S", "0")))
        await self.server.stop(0)
        self.stopped.set()


async def run(data: dict) -> int:
    process = DummyGateway(GatewaySpec(**data)) if "gateway_id" in data else DummyWorker(WorkerSpec(**data))
    return await serve(process)


if __name__ == "__main__":
    spec = json.loads(sys.stdin.readline())
    die_with_parent(spec["controller_pid"])
    sys.exit(asyncio.run(run(spec)))

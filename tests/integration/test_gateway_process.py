"""Gateways at one address, without their processes: what each tells the others of itself, and what one does whose
shared doors do not open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.client_ports import held
from cluster.config.schema import GatewayConfig
from headrace import process
from headrace.v1 import admin_pb2, admin_pb2_grpc
from router.doors import Doors
from router.main import GatewayProcess
from tests.doors_fixtures import gateway_spec
from tests.model_fixtures import tiny_model

TOKEN = "cluster-secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def gateways(model: Path, *names: str) -> AsyncIterator[list[GatewayProcess]]:
    """Started, at one address; without workers and waiting for none."""
    with held(GatewayConfig(replicas=2, grpc_port=0, http_port=0)) as (grpc_port, http_port):
        shared = {"shared_grpc_port": grpc_port, "shared_http_port": http_port, "liveness_s": 0.01}
        own = {"model_path": str(model), "cluster_token": TOKEN, "grpc_port": 0, "http_port": 0}
        started = [GatewayProcess(gateway_spec(gateway_id=name, **own, **shared)) for name in names]
        try:
            for each in started:
                await each.start()
            yield started
        finally:
            for each in started:
                await each.stop()


def test_gateways_tell_each_other_their_own_series_and_workers_stand_once(model: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), gateways(model, "gateway-0.i", "gateway-1.i") as (zero, one):
            while not (zero._presence.is_open and one._presence.is_open):
                await asyncio.sleep(0.01)
            # 1. A gateway's account carries its own series alone, its own address those of workers, too.
            metadata = [("x-headrace-cluster", TOKEN)]
            async with grpc.aio.insecure_channel(one._presence.grpc_address) as channel:
                admin = admin_pb2_grpc.AdminStub(channel)
                account = await admin.Account(admin_pb2.AccountRequest(metrics=True), metadata=metadata)
            told = {family.name for family in text_string_to_metric_families(account.metrics.decode())}
            async with httpx.AsyncClient(timeout=20) as http:
                alone = (await http.get(f"http://{one._presence.http_address}/metrics")).text
            known = {family.name for family in text_string_to_metric_families(alone)}
            of_workers = {"headrace_step_seconds", "headrace_kv_cache_usage_perc", "headrace_tier_blocks"}
            assert told < known and of_workers <= known - told
            assert {"headrace_branches", "headrace_tenant_service", "headrace_requests"} <= told
            # 2. Whoever takes the connection tells of both, and of one that does not answer that it does not.
            there = admin_pb2.Sibling(name="gateway-1", incarnation="i", address=one._presence.grpc_address)
            gone = admin_pb2.Sibling(name="gateway-2", incarnation="i", address="127.0.0.1:1")
            zero._siblings.set_members([there, gone])
            back = admin_pb2.Sibling(name="gateway-0", incarnation="i", address=zero._presence.grpc_address)
            one._siblings.set_members([back, gone])
            async with httpx.AsyncClient(timeout=20) as http:
                whole = (await http.get(f"http://127.0.0.1:{zero.spec.shared_http_port}/metrics")).text
            families = [family.name for family in text_string_to_metric_families(whole)]
            assert len(families) == len(set(families)) and set(families) == known | {"headrace_gateway_up"}
            for number, is_up in enumerate((1.0, 1.0, 0.0)):
                assert f'headrace_gateway_up{{gateway="gateway-{number}"}} {is_up}\n' in whole

    asyncio.run(main())


def test_a_gateway_whose_shared_doors_fail_unforeseen_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(process, "end_process", ended.set_result)
        opens = Doors.open

        async def fails_at_shared(self: Doors, grpc_port: int, http_socket: object) -> None:
            if grpc_port:
                http_socket.close()  # type: ignore[attr-defined]
                raise RuntimeError("nobody has thought of this")
            await opens(self, grpc_port, http_socket)  # type: ignore[arg-type]

        monkeypatch.setattr(Doors, "open", fails_at_shared)
        async with asyncio.timeout(60), gateways(model, "gateway-0.i") as (alone,):
            assert isinstance(await ended, RuntimeError)
            assert not alone._presence.is_open

    asyncio.run(main())

"""A deployment whose workers do wrong on command, each behind proxies: one for its gRPC port, one for its TCP lane.

The gateway is told the proxies' addresses and passes them on to readers, so that sessions, leases and KV all go
through them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from headrace.core.records import Role
from headrace.v1 import worker_pb2
from tests.fault_proxy import FaultProxy, Proxies
from tests.fleet import Fleet
from workers.spec import WorkerReady


class FaultyFleet(Fleet):
    worker_module = "tests.faulty_worker"

    def __init__(self, proxies: Proxies, model_path: Path, roles: list[Role], **options: object) -> None:
        self._proxies = proxies
        self.control: dict[str, FaultProxy] = {}
        self.lanes: dict[str, FaultProxy] = {}
        """Empty where KV moves over another lane than TCP."""
        self._aimed: dict[str, str] = {}
        super().__init__(model_path, roles, **options)  # type: ignore[arg-type]

    def member_address(self, ready: WorkerReady) -> str:
        name = ready.worker_id
        if self._aimed.get(name) != ready.incarnation:
            self._aimed[name] = ready.incarnation
            self._aim(self.control, name, ready.address)
            if ready.lane == "tcp":
                lane = self._aim(self.lanes, name, ready.address)
                port = int(lane.address.rpartition(":")[2])
                real = self.workers[name].ask(do="advertise", port=port)["port"]
                lane.aim(f"{ready.address.rpartition(':')[0]}:{real}")
        return self.control[name].address

    def _aim(self, proxies: dict[str, FaultProxy], name: str, target: str) -> FaultProxy:
        if name not in proxies:
            proxies[name] = self._proxies.open(target)
        proxies[name].aim(target)
        return proxies[name]

    def lost_after(self, name: str, since: float, within_s: float) -> float | None:
        """Seconds from `since` (monotonic) until the gateway gave the worker's session up; None: not within that."""
        while (at := self.gateway.said(f"session_lost worker={name} ", since)) is None:
            if time.monotonic() > since + within_s:
                return None
            time.sleep(0.01)
        return at - since

    def accounts(self) -> dict[str, worker_pb2.WorkerStatusResponse]:
        """Of the workers that answer, asked past the proxies."""
        found = {}
        for name in self.ready:
            try:
                found[name] = self.worker_status(name)
            except grpc.RpcError:
                continue
        return found

    def held(self) -> dict[str, dict[str, int]]:
        """What workers still have, by worker; {} when all of them answer and have nothing."""
        accounts = self.accounts()
        found: dict[str, dict[str, int]] = {name: {"silent": 1} for name in self.ready if name not in accounts}
        for name, told in accounts.items():
            kinds = ("used_blocks", "quarantined_blocks", "leases", "handoffs", "transfers", "live_requests")
            if kept := {kind: getattr(told, kind) for kind in kinds if getattr(told, kind)}:
                found[name] = kept
        return found

    def wait_nothing_held(self, within_s: float) -> dict[str, dict[str, int]]:
        """What is still held after so long; {} as soon as nothing is."""
        end = time.monotonic() + within_s
        while (held := self.held()) and time.monotonic() < end:
            time.sleep(0.02)
        return held


@contextmanager
def faulty_fleet(model_path: Path, *roles: Role, **options: object) -> Iterator[FaultyFleet]:
    with Proxies() as proxies:
        running = FaultyFleet(proxies, model_path, list(roles), **options)
        try:
            yield running
        finally:
            running.close()

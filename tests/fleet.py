"""A deployment of plain processes under a test's control: start, SIGKILL, SIGSTOP, restart, each on its own.

The production controller would mend what a test breaks; here nothing happens that the test does not do.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from headrace.client import HeadraceClient
from headrace.core.records import Role
from headrace.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.spec import GatewayReady, GatewaySpec
from workers.spec import WorkerReady, WorkerSpec

TOKEN = "test-cluster-token"
ROOT = Path(__file__).parent.parent


class Proc:
    """A child that speaks the spec-in, ready-line-out protocol; its stderr is kept."""

    def __init__(self, module: str, spec: WorkerSpec | GatewaySpec) -> None:
        self.spec = spec
        env = os.environ | {"PYTHONPATH": str(ROOT), "HEADRACE_LOG": os.environ.get("HEADRACE_LOG", "WARNING")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=env,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(spec.model_dump_json() + "\n")
        self.process.stdin.flush()
        self.errors: list[str] = []
        self.error_times: list[float] = []
        """When each line came, in monotonic seconds."""
        self._drain = threading.Thread(target=self._read_errors, daemon=True)
        self._drain.start()

    def ready_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(10)
            self._drain.join(5)
            raise RuntimeError(f"{self.process.args} did not start: {''.join(self.errors)}")
        return line

    def ask(self, **command: object) -> dict:
        """Has a `tests.faulty_worker` obey; its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def said(self, text: str, since: float) -> float | None:
        """When the first line with this text came after `since` (monotonic seconds); None: none has."""
        lines = list(zip(self.error_times, self.errors, strict=False))
        return next((at for at, line in lines if at >= since and text in line), None)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def state(self) -> str:
        """The kernel's letter: R, S, T (stopped), Z; '' when gone."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return ""

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.error_times.append(time.monotonic())
            self.errors.append(line)
            if os.environ.get("HEADRACE_LOG"):
                sys.stderr.write(line)


class Fleet:
    worker_module = "workers.main"

    def __init__(self, model_path: Path, roles: list[Role], *, gateway: dict | None = None, **worker: object) -> None:
        self.model_path = model_path
        self._worker_options = {
            "max_model_len": 4096,
            "threads": 1,
            "kv_cache_bytes": 256 << 20,
            "transport": "tcp",
            "exact": True,
            "liveness_s": 4.0,
        } | worker
        self._incarnations = itertools.count(1)
        self._version = itertools.count(1)
        self.workers: dict[str, Proc] = {}
        self.ready: dict[str, WorkerReady] = {}
        counts: dict[Role, int] = {}
        names = []
        for role in roles:
            names.append((f"{role.value}-{counts.get(role, 0)}", role))
            counts[role] = counts.get(role, 0) + 1
        options = {
            "gateway_id": "gateway-0",
            "model_path": str(model_path),
            "served_model_name": "tiny",
            "max_model_len": self._worker_options["max_model_len"],
            "grpc_port": 0,
            "http_port": 0,
            "cluster_token": TOKEN,
            "controller_pid": os.getpid(),
            "liveness_s": self._worker_options["liveness_s"],
            "exact": self._worker_options["exact"],
            # A pair whenever both pools live, as in `tests.world`.
            "routing_policy": "least_loaded",
        } | (gateway or {})
        self.gateway = Proc("router.main", GatewaySpec(**options))
        for name, role in names:
            self._spawn(name, role)
        for name, _ in names:
            self.ready[name] = WorkerReady.model_validate_json(self.workers[name].ready_line())
        self.gateway_ready = GatewayReady.model_validate_json(self.gateway.ready_line())
        self.push_members()
        self.wait_connected(len(names))

    def _spawn(self, name: str, role: Role) -> None:
        spec = WorkerSpec(
            worker_id=name,
            incarnation=f"inc-{next(self._incarnations)}",
            role=role,
            model_path=str(self.model_path),
            cluster_token=TOKEN,
            controller_pid=os.getpid(),
            **self._worker_options,
        )
        self.workers[name] = Proc(self.worker_module, spec)

    def restart(self, name: str) -> None:
        """A new incarnation under the same name, told to the gateway once ready."""
        spec = self.workers[name].spec
        assert isinstance(spec, WorkerSpec)
        self.ready.pop(name, None)
        self._spawn(name, spec.role)
        self.ready[name] = WorkerReady.model_validate_json(self.workers[name].ready_line())
        self.push_members()

    def member_address(self, ready: WorkerReady) -> str:
        """Where the gateway, and so the other workers, find this one."""
        return ready.address

    def push_members(self) -> None:
        members = [
            admin_pb2.Member(
                worker_id=r.worker_id, incarnation=r.incarnation, address=self.member_address(r), role=r.role.value
            )
            for r in self.ready.values()
        ]
        request = admin_pb2.SetMembersRequest(version=next(self._version), members=members)
        with grpc.insecure_channel(self.gateway_ready.grpc_address) as channel:
            admin_pb2_grpc.AdminStub(channel).SetMembers(request, metadata=(("x-headrace-cluster", TOKEN),), timeout=10)

    def wait_connected(self, count: int, timeout_s: float = 20.0) -> None:
        end = time.monotonic() + timeout_s
        with self.client() as client:
            while sum(w.connected for w in client.status().workers) < count:
                if time.monotonic() > end:
                    raise TimeoutError(f"{count} workers did not connect")
                time.sleep(0.05)

    def client(self) -> HeadraceClient:
        return HeadraceClient(self.gateway_ready.grpc_address)

    @property
    def http(self) -> str:
        return f"http://{self.gateway_ready.http_address}"

    def worker_status(self, name: str) -> worker_pb2.WorkerStatusResponse:
        with grpc.insecure_channel(self.ready[name].address) as channel:
            return worker_pb2_grpc.WorkerStub(channel).WorkerStatus(
                worker_pb2.WorkerStatusRequest(audit=True), metadata=(("x-headrace-cluster", TOKEN),), timeout=10
            )

    def audit(self, settle_s: float = 5.0) -> admin_pb2.AuditResponse:
        with self.client() as client:
            return client.audit(settle_s)

    def assert_drained(self, settle_s: float = 5.0) -> None:
        audit = self.audit(settle_s)
        assert audit.clean, list(audit.findings)
        assert (audit.used_blocks, audit.leases, audit.transfers, audit.bookings) == (0, 0, 0, 0)

    def footprint(self) -> dict[str, tuple[int, int]]:
        """(open descriptors, threads) of every process, and the gateway's asyncio tasks."""
        procs = {"gateway": self.gateway, **self.workers}
        found = {}
        for name, proc in procs.items():
            folder = f"/proc/{proc.process.pid}"
            found[name] = (len(os.listdir(f"{folder}/fd")), len(os.listdir(f"{folder}/task")))
        with self.client() as client:
            found["gateway tasks"] = (client.status().gateway.tasks, 0)
        return found

    def assert_accounts_close(self) -> None:
        """CASES law a: every accepted request ended in exactly one way, and none is open."""
        with self.client() as client:
            gateway = client.status().gateway
        assert gateway.accepted == gateway.completed + gateway.failed + gateway.cancelled, gateway
        assert gateway.live_requests == 0

    def assert_back_at(self, before: dict[str, tuple[int, int]], slack: int = 8, settle_s: float = 10.0) -> None:
        """CASES law c for what the kernel counts. `slack`: pools of connections or threads that opened once."""
        end = time.monotonic() + settle_s
        while True:
            after = self.footprint()
            over = {
                n: (before[n], after[n])
                for n in before
                if any(a > b + slack for a, b in zip(after[n], before[n], strict=True))
            }
            if not over:
                return
            assert time.monotonic() < end, over
            time.sleep(0.2)

    def close(self) -> None:
        procs = [self.gateway, *self.workers.values()]
        for proc in procs:
            if proc.process.poll() is None:
                proc.signal(signal.SIGCONT)
                proc.signal(signal.SIGTERM)
        for proc in procs:
            try:
                proc.process.wait(10)
            except subprocess.TimeoutExpired:
                proc.kill()


@contextmanager
def fleet(model_path: Path, *roles: Role, **options: object) -> Iterator[Fleet]:
    running = Fleet(model_path, list(roles), **options)  # type: ignore[arg-type]
    try:
        yield running
    finally:
        running.close()

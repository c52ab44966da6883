"""What the controller needs of a process maker. Two implementations: Ray actors and plain processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cluster.core.lifecycle import Kind
from router.spec import GatewayReady, GatewaySpec
from workers.spec import WorkerReady, WorkerSpec

Spec = WorkerSpec | GatewaySpec
Ready = WorkerReady | GatewayReady


@dataclass(slots=True)
class Handle:
    """One incarnation of one slot. `impl` belongs to the backend; `pid` is 0 until known."""

    slot: str
    incarnation: str
    kind: Kind
    pid: int = 0
    impl: Any = None

    @property
    def name(self) -> str:
        """Unique over restarts."""
        return f"{self.slot}.{self.incarnation}"


class Backend(Protocol):
    """Methods run on one event loop and never block it. Only `open`, `start` and `wait_ready` raise StartupError."""

    name: str

    async def open(self) -> None:
        """Once, before the first start."""

    async def start(self, slot: str, incarnation: str, spec: Spec) -> Handle:
        """Begins one process and returns before it is ready."""
        ...

    async def wait_ready(self, handle: Handle, timeout_s: float) -> Ready:
        """Raises StartupError with the reason when the process ends first or time is up (it may still run then)."""
        ...

    async def wait_dead(self, handle: Handle) -> str:
        """Returns, within a second of it, when the process has ended (not: was told to), with the reason."""
        ...

    async def kill(self, handle: Handle) -> None:
        """SIGKILL, also of a stopped process. Idempotent; `wait_dead` tells when it is over."""

    async def stop(self, handle: Handle, grace_s: float) -> None:
        """Asks the process to drain, waits up to `grace_s`, then kills. Returns when it has ended."""

    async def close(self) -> None:
        """Ends whatever this backend started and leaves nothing behind. Idempotent."""


def ready_type(kind: Kind) -> type[WorkerReady] | type[GatewayReady]:
    return WorkerReady if kind is Kind.WORKER else GatewayReady


def process_env(spec: Spec) -> dict[str, str]:
    """Variables that must be set before libraries load.

    Thread counts are set on purpose: the libraries' own default, every core in every process, makes workers fight.
    """
    threads = str(spec.threads) if isinstance(spec, WorkerSpec) else "1"
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "NUMBA_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }

"""`headrace serve`: from a configuration to a running deployment and back to nothing.

Whatever happens, no process, port, shared memory or file of the deployment outlives the launcher: it stops them in
order, and the guardian ends the rest.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from rich.console import Console

from cluster import banner, client_ports, prepare, ready_file
from cluster.backend import Backend
from cluster.config import Deployment, ServeConfig, kept_secret, read_machine, read_model_facts, resolve
from cluster.controller import Controller
from cluster.run_dir import RunDir
from headrace.clock import monotonic
from headrace.errors import StartupError
from headrace.paths import cache_root

T = TypeVar("T")

HARD_END_S = 5.0
LOG_WIDTH = 120
"""Columns of the table when standard error is no terminal."""


def serve(config: ServeConfig, ready_path: Path | None = None, console: Console | None = None) -> int:
    """Runs until SIGINT, SIGTERM or SIGHUP; returns the exit status (0 after an ordered stop).

    A signal before it serves, or a second one, ends at once with 128 + its number. Raises StartupError when the
    deployment cannot start.
    """
    began = monotonic()
    out = console or Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else LOG_WIDTH)
    return asyncio.run(_serve(config, ready_path.absolute() if ready_path else None, out, began))


async def _serve(config: ServeConfig, ready_path: Path | None, console: Console, began: float) -> int:
    prepare.check_path(config.model.path)
    if ready_path is not None and not ready_path.parent.is_dir():
        raise StartupError(f"--ready-file: {ready_path.parent}: no such directory")
    with client_ports.held(config.gateway) as ports:
        run_dir = RunDir([ready_path] if ready_path else [])
        try:
            with _Signals(run_dir, console) as signals:
                await _Launch(config, ports, ready_path, console, began, run_dir, signals).run()
        finally:
            keep_logs = bool(os.environ.get("HEADRACE_KEEP_LOGS"))
            await asyncio.to_thread(run_dir.close, keep_logs=keep_logs)
            if keep_logs:
                console.print(f"logs: {run_dir.path}")
    return 0


class _Signals:
    """While serving, the first signal asks for an ordered stop and the second ends everything now.

    Before that there is nothing to finish, and a start cannot be taken back step by step (a half-started Ray cannot be
    shut down): the first signal ends everything now. The exit status is 128 + the signal's number then.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, run_dir: RunDir, console: Console) -> None:
        self.is_serving = False
        self.stop = asyncio.Event()
        self._run_dir = run_dir
        self._console = console

    def __enter__(self) -> Self:
        for number in self.NUMBERS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *exc: object) -> None:
        for number in self.NUMBERS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self.is_serving and not self.stop.is_set():
            self.stop.set()
            return
        self._console.show_cursor()
        self._console.print("ended at once" if self.is_serving else "ended before it was ready")
        self._run_dir.close(timeout_s=HARD_END_S)
        os._exit(128 + number)


@dataclass(slots=True)
class _Launch:
    config: ServeConfig
    ports: tuple[int, int]
    ready_path: Path | None
    console: Console
    began: float
    run_dir: RunDir
    signals: _Signals

    async def run(self) -> None:
        backend = await asyncio.to_thread(_make_backend, self.config, self.run_dir)
        try:
            with self.console.status("preparing the model and the cluster"):
                deployment = self._placed(await _prepare(self.config, backend))
            await self._operate(deployment, backend)
        finally:
            await backend.close()

    def _placed(self, deployment: Deployment) -> Deployment:
        """With what only the running launcher knows."""
        here: dict[str, object] = {"run_dir": str(self.run_dir.path)}
        if len(deployment.gateways) > 1:
            here |= {"shared_grpc_port": self.ports[0], "shared_http_port": self.ports[1]}
        gateways = tuple(gateway.model_copy(update=here) for gateway in deployment.gateways)
        return deployment.model_copy(update={"gateways": gateways})

    async def _operate(self, deployment: Deployment, backend: Backend) -> None:
        controller = Controller(
            deployment,
            backend,
            on_event=lambda line: self.console.print(line, markup=False),
            on_members=lambda: self._write_ready(deployment, controller),
        )
        loop = asyncio.create_task(controller.run())
        try:
            with self.console.status("starting the workers and the gateway"):
                await _with(loop, controller.wait_serving())
            self.signals.is_serving = True
            self._write_ready(deployment, controller)
            banner.show(self.console, deployment, controller.processes(), monotonic() - self.began)
            await _with(loop, self.signals.stop.wait())
        finally:
            loop.cancel()
            await asyncio.wait([loop])
        self.console.print("stopping: running requests may finish; Ctrl-C again ends at once")
        await controller.stop(deployment.cluster.drain_timeout_s)

    def _write_ready(self, deployment: Deployment, controller: Controller) -> None:
        if self.ready_path is not None:
            model = deployment.gateways[0].served_model_name
            ready_file.write(self.ready_path, ready_file.render(model, os.getpid(), controller.processes()))


async def _with(loop: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; the controller's loop only ends by a fault, which is raised here."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task, loop], return_when=asyncio.FIRST_COMPLETED)
        if loop.done():
            loop.result()
        return task.result()
    finally:
        task.cancel()


async def _prepare(config: ServeConfig, backend: Backend) -> Deployment:
    """The model and Ray take seconds each: at the same time."""
    opening = asyncio.create_task(backend.open())
    try:
        folder = await prepare.prepare_model(config.model.path, kernels=True)
        facts = await asyncio.to_thread(read_model_facts, folder, config.model.weight_format)
        kept_at = cache_root() / "kv" / "namespace_secret"
        return resolve(config, facts, read_machine(), _new_secret, lambda: kept_secret(kept_at, _new_secret))
    finally:
        # Also after a fault: a cluster that is half up cannot be shut down.
        await opening


def _new_secret() -> str:
    return secrets.token_hex(16)


def _make_backend(config: ServeConfig, run_dir: RunDir) -> Backend:
    if config.cluster.backend == "process":
        from cluster.process_backend import ProcessBackend

        return ProcessBackend()
    from cluster.ray_backend import RayBackend  # importing Ray takes a second

    return RayBackend(
        address=config.cluster.address, temp_dir=str(run_dir.path), namespace=f"headrace-{run_dir.path.name}"
    )

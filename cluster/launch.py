"""`headrace serve`: from a configuration to a running deployment and back to nothing.

Whatever happens, no process, port, shared memory or file of the deployment outlives the launcher: it stops them in
order, and the guardian ends the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from cluster import banner, prepare, ready_file
from cluster.backend import Backend
from cluster.config import Deployment, ServeConfig, read_machine, read_model_facts, resolve
from cluster.controller import Controller
from cluster.run_dir import RunDir
from headrace.clock import monotonic
from headrace.errors import StartupError

T = TypeVar("T")

LOG_WIDTH = 120
"""Columns of the table when standard error is no terminal."""


def serve(config: ServeConfig, ready_path: Path | None = None, console: Console | None = None) -> int:
    """Runs until SIGINT, SIGTERM or SIGHUP; returns the exit status (0 after an ordered stop).

    A second signal while stopping ends at once with 128 + its number. Raises StartupError when the
    deployment cannot start.
    """
    began = monotonic()
    out = console or Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else LOG_WIDTH)
    return asyncio.run(_serve(config, ready_path.absolute() if ready_path else None, out, began))


async def _serve(config: ServeConfig, ready_path: Path | None, console: Console, began: float) -> int:
    prepare.check_path(config.model.path)
    check_ports(config.gateway.host, config.gateway.grpc_port, config.gateway.http_port)
    if ready_path is not None and not ready_path.parent.is_dir():
        raise StartupError(f"--ready-file: {ready_path.parent}: no such directory")
    run_dir = RunDir([ready_path] if ready_path else [])
    stopping = asyncio.Event()
    try:
        with _signals(stopping, run_dir, console):
            launch = _Launch(config, ready_path, console, began, run_dir, stopping)
            await launch.run()
    finally:
        keep_logs = bool(os.environ.get("HEADRACE_KEEP_LOGS"))
        await asyncio.to_thread(run_dir.close, keep_logs=keep_logs)
        if keep_logs:
            console.print(f"logs: {run_dir.path}")
    return 0


@dataclass(slots=True)
class _Launch:
    config: ServeConfig
    ready_path: Path | None
    console: Console
    began: float
    run_dir: RunDir
    stopping: asyncio.Event

    async def run(self) -> None:
        backend = await asyncio.to_thread(_make_backend, self.config, self.run_dir)
        try:
            with self.console.status("preparing the model and the cluster"):
                deployment = await self._unless_stopped(_prepare(self.config, backend))
            if deployment is not None:
                await self._operate(deployment, backend)
        finally:
            await backend.close()

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
                await self._unless_stopped(_with(loop, controller.wait_serving()))
            if not self.stopping.is_set():
                self._write_ready(deployment, controller)
                banner.show(self.console, deployment, controller.processes(), monotonic() - self.began)
                await self._unless_stopped(_with(loop, asyncio.Event().wait()))
            self.console.print("stopping: running requests may finish; Ctrl-C again ends at once")
        finally:
            loop.cancel()
            await asyncio.wait([loop])
        await controller.stop(deployment.cluster.drain_timeout_s)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result, or None when a signal came first."""
        task, signal_task = asyncio.create_task(work), asyncio.create_task(self.stopping.wait())
        await asyncio.wait([task, signal_task], return_when=asyncio.FIRST_COMPLETED)
        signal_task.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    def _write_ready(self, deployment: Deployment, controller: Controller) -> None:
        if self.ready_path is not None:
            model = deployment.gateway.served_model_name
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
        folder = await prepare.prepare_model(config.model.path)
        facts = await asyncio.to_thread(read_model_facts, folder)
        return resolve(config, facts, read_machine(), lambda: secrets.token_hex(16))
    finally:
        # Also after a fault: a cluster that is half up cannot be shut down.
        await opening


def _make_backend(config: ServeConfig, run_dir: RunDir) -> Backend:
    if config.cluster.backend == "process":
        from cluster.process_backend import ProcessBackend

        return ProcessBackend()
    from cluster.ray_backend import RayBackend  # importing Ray takes a second

    return RayBackend(
        address=config.cluster.address, temp_dir=str(run_dir.path), namespace=f"headrace-{run_dir.path.name}"
    )


def check_ports(host: str, grpc_port: int, http_port: int) -> None:
    """Raises StartupError for a port that is taken or an address that is not this machine's."""
    for field, port, flag in (
        ("gateway.grpc_port", grpc_port, "--grpc-port"),
        ("gateway.http_port", http_port, "--http-port"),
    ):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError as error:
                hint = f"; choose another with {flag}" if error.errno == errno.EADDRINUSE else ""
                raise StartupError(f"{field}: {host}:{port}: {error.strerror or error}{hint}") from None


@contextlib.contextmanager
def _signals(stopping: asyncio.Event, run_dir: RunDir, console: Console) -> Iterator[None]:
    """The first signal asks for an ordered stop, the second ends everything now."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if not stopping.is_set():
            stopping.set()
            return
        console.print("ended at once")
        run_dir.close(timeout_s=5.0)
        os._exit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

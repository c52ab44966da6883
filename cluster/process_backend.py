"""Plain processes: `python -m workers.main` and `python -m router.main`. For tests and machines without Ray.

A child reads its spec from stdin (secrets stay out of the process list), prints its ready record as one line and serves
until SIGTERM. It has its own session, so that Ctrl-C reaches the launcher alone. It dies with the launcher: the spec
names the launcher's process, and the child asks the kernel for its death signal first thing (a `preexec_fn` here would
fork a process in which gRPC's threads run).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from cluster.backend import Handle, Ready, Spec, process_env, ready_type
from cluster.core.lifecycle import Kind
from headrace.errors import StartupError
from workers.spec import WorkerSpec

REPO_ROOT = Path(__file__).resolve().parent.parent
COMMANDS: dict[Kind, tuple[str, ...]] = {
    Kind.WORKER: (sys.executable, "-m", "workers.main"),
    Kind.GATEWAY: (sys.executable, "-m", "router.main"),
}
_LINE_LIMIT_BYTES = 1 << 20

LogSink = Callable[[str, str], None]
"""Takes a slot's name and one line that its process printed."""


@dataclass(slots=True)
class _Child:
    process: asyncio.subprocess.Process
    ready: asyncio.Future[str]
    exited: asyncio.Future[str]
    tasks: list[asyncio.Task[None]]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))


class ProcessBackend:
    name = "process"

    def __init__(self, log: LogSink | None = None, commands: Mapping[Kind, Sequence[str]] | None = None) -> None:
        self._log = log or _print_line
        self._commands = dict(commands or COMMANDS)
        self._children: dict[str, Handle] = {}

    async def open(self) -> None:
        pass

    async def start(self, slot: str, incarnation: str, spec: Spec) -> Handle:
        kind = Kind.WORKER if isinstance(spec, WorkerSpec) else Kind.GATEWAY
        path = os.pathsep.join(filter(None, [str(REPO_ROOT), os.environ.get("PYTHONPATH")]))
        process = await asyncio.create_subprocess_exec(
            *self._commands[kind],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **process_env(spec), "PYTHONPATH": path},
            start_new_session=True,
            limit=_LINE_LIMIT_BYTES,
        )
        loop = asyncio.get_running_loop()
        child = _Child(process, loop.create_future(), loop.create_future(), [])
        handle = Handle(slot, incarnation, kind, pid=process.pid, impl=child)
        self._children[handle.name] = handle
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        readers = [
            loop.create_task(self._read(handle, child, process.stdout, is_stdout=True)),
            loop.create_task(self._read(handle, child, process.stderr, is_stdout=False)),
        ]
        child.tasks = [*readers, loop.create_task(self._watch(child, readers))]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died at once: `_watch` tells
            process.stdin.write(
                spec.model_copy(update={"controller_pid": os.getpid()}).model_dump_json().encode() + b"\n"
            )
            await process.stdin.drain()
        return handle

    async def wait_ready(self, handle: Handle, timeout_s: float) -> Ready:
        child: _Child = handle.impl
        await asyncio.wait([child.ready, child.exited], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if child.ready.done():
            try:
                return ready_type(handle.kind).model_validate_json(child.ready.result())
            except ValidationError:
                raise StartupError(f"{handle.slot}: its first line of output is not a ready record") from None
        if child.exited.done():
            raise StartupError(f"{handle.slot}: {child.exited.result()}")
        raise StartupError(f"{handle.slot}: not ready after {timeout_s:g} s")

    async def wait_dead(self, handle: Handle) -> str:
        child: _Child = handle.impl
        return await asyncio.shield(child.exited)

    async def kill(self, handle: Handle) -> None:
        _signal_group(handle.pid, signal.SIGKILL, handle.impl)

    async def stop(self, handle: Handle, grace_s: float) -> None:
        child: _Child = handle.impl
        _signal_group(handle.pid, signal.SIGTERM, child)
        await asyncio.wait([child.exited], timeout=grace_s)
        _signal_group(handle.pid, signal.SIGKILL, child)
        await asyncio.shield(child.exited)

    async def close(self) -> None:
        handles = list(self._children.values())
        for handle in handles:
            await self.kill(handle)
        for handle in handles:
            await self.wait_dead(handle)
            await asyncio.gather(*handle.impl.tasks)
        self._children.clear()

    async def _read(self, handle: Handle, child: _Child, stream: asyncio.StreamReader, *, is_stdout: bool) -> None:
        while True:
            try:
                raw = await stream.readline()
            except ValueError:  # a line over the limit; the reader has dropped it
                continue
            if not raw:
                return
            line = raw.decode("utf-8", "replace").rstrip()
            if is_stdout and not child.ready.done():
                child.ready.set_result(line)
                continue
            if line:
                child.last_lines.append(line)
                self._log(handle.slot, line)

    async def _watch(self, child: _Child, readers: list[asyncio.Task[None]]) -> None:
        status = await child.process.wait()
        # What it said last is the reason; a grandchild may keep the pipes open, so the wait is short.
        await asyncio.wait(readers, timeout=0.2)
        for reader in readers:
            reader.cancel()
        how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        last = child.last_lines[-1] if status > 0 and child.last_lines else ""
        child.exited.set_result(f"{last} ({how})" if last else f"ended by {how}" if status < 0 else f"ended with {how}")


def _signal_group(pid: int, number: signal.Signals, child: _Child) -> None:
    if child.process.returncode is None and not child.exited.done():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


def _print_line(slot: str, line: str) -> None:
    print(f"[{slot}] {line}", file=sys.stderr, flush=True)

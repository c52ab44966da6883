"""Plain processes: start, ready, death, kill and stop, with tiny child scripts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cluster.backend import Handle
from cluster.core.lifecycle import Kind
from cluster.process_backend import ProcessBackend
from headrace.errors import StartupError
from tests.unit.cluster_builders import is_gone, worker_spec
from workers.spec import WorkerReady

READY = """
import json, os, sys, time
spec = json.loads(sys.stdin.readline())
print("first words", file=sys.stderr, flush=True)
print(json.dumps(dict(worker_id=spec["worker_id"], incarnation=spec["incarnation"], role=spec["role"],
    address="a:1", pid=os.getpid(), fingerprint=os.environ["OMP_NUM_THREADS"], total_blocks=1,
    block_size=16, lane="none")), flush=True)
"""
SERVES = READY + "time.sleep(60)"
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SERVES


def run(
    script: str, scenario: Callable[[ProcessBackend, Handle], Coroutine[Any, Any, None]], threads: int = 1
) -> list[tuple[str, str]]:
    """Runs a scenario on one child. Asserts that no child is left. Returns the lines that it printed."""
    lines: list[tuple[str, str]] = []

    async def main() -> None:
        backend = ProcessBackend(
            log=lambda slot, line: lines.append((slot, line)), commands={Kind.WORKER: (sys.executable, "-c", script)}
        )
        handle = await backend.start("prefill-0", "inc-1", worker_spec(threads=threads))
        try:
            await scenario(backend, handle)
        finally:
            await backend.close()
        assert is_gone(handle.pid)

    asyncio.run(main())
    return lines


def test_it_gets_its_spec_and_its_threads_and_stops_when_asked() -> None:
    async def scenario(backend: ProcessBackend, handle: Handle) -> None:
        ready = await backend.wait_ready(handle, 10)
        assert isinstance(ready, WorkerReady)
        assert (ready.incarnation, ready.pid, ready.fingerprint) == ("inc-1", handle.pid, "3")
        await backend.stop(handle, 5)
        assert await backend.wait_dead(handle) == "ended by SIGTERM"

    assert run(SERVES, scenario, threads=3) == [("prefill-0", "first words")]


def test_a_sigkill_is_noticed_within_a_second() -> None:
    async def scenario(backend: ProcessBackend, handle: Handle) -> None:
        await backend.wait_ready(handle, 10)
        os.kill(handle.pid, signal.SIGKILL)
        began = time.monotonic()
        assert await backend.wait_dead(handle) == "ended by SIGKILL"
        assert time.monotonic() - began < 1

    run(SERVES, scenario)


def test_a_stopped_process_is_killed_all_the_same() -> None:
    async def scenario(backend: ProcessBackend, handle: Handle) -> None:
        await backend.wait_ready(handle, 10)
        os.kill(handle.pid, signal.SIGSTOP)
        await backend.kill(handle)
        await asyncio.wait_for(backend.wait_dead(handle), 2)
        await backend.kill(handle)  # idempotent

    run(SERVES, scenario)


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    async def scenario(backend: ProcessBackend, handle: Handle) -> None:
        await backend.wait_ready(handle, 10)
        await backend.stop(handle, 0.2)
        assert await backend.wait_dead(handle) == "ended by SIGKILL"

    run(IGNORES_SIGTERM, scenario)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; print('no room', file=sys.stderr); sys.exit(1)", "prefill-0: no room (exit code 1)"),
        ("import os; os.kill(os.getpid(), 11)", "prefill-0: ended by SIGSEGV"),
        (
            "print('hello', flush=True); import time; time.sleep(9)",
            "prefill-0: its first line of output is not a ready",
        ),
        ("import time; time.sleep(9)", "prefill-0: not ready after 1 s"),
    ],
)
def test_a_failed_start_says_why(script: str, said: str) -> None:
    async def scenario(backend: ProcessBackend, handle: Handle) -> None:
        with pytest.raises(StartupError) as caught:
            await backend.wait_ready(handle, 1 if "not ready after" in said else 10)
        assert str(caught.value).startswith(said)

    run(script, scenario)


def test_what_it_prints_later_cannot_block_it() -> None:
    noisy = (
        READY + "sys.stdout.write('x' * 300_000 + '\\n'); sys.stdout.write('y' * 3_000_000 + '\\n'); sys.stdout.flush()"
    )

    async def scenario(backend: ProcessBackend, handle: Handle) -> None:
        await backend.wait_ready(handle, 10)
        assert await asyncio.wait_for(backend.wait_dead(handle), 10) == "ended with exit code 0"

    run(noisy, scenario)

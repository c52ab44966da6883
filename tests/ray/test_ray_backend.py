"""The Ray backend against a private Ray cluster: one cluster for the whole file, actors that serve nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core.lifecycle import Kind
from cluster.ray_backend import RayBackend
from headrace.core.records import Role
from headrace.errors import StartupError
from workers.spec import WorkerSpec

pytestmark = pytest.mark.ray


def spec(incarnation: str, model_path: str = "fine") -> WorkerSpec:
    return WorkerSpec(
        worker_id="prefill-0",
        incarnation=incarnation,
        role=Role.PREFILL,
        model_path=model_path,
        max_model_len=64,
        threads=3,
        kv_cache_bytes=1,
        cluster_token="t" * 16,
    )


def processes_with(text: str) -> list[str]:
    lines = subprocess.run(
        ["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in lines if text in line and " Z" not in line]


def is_gone(pid: int) -> bool:
    try:
        return " Z" in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, RayBackend]]:
    # A short path: Ray's Unix sockets live below it.
    temp_dir = f"/tmp/hr-test-{os.getpid()}"
    shm_before = set(os.listdir("/dev/shm"))
    home_token = Path.home() / ".ray" / "auth_token"
    had_token = home_token.exists()
    backend = RayBackend(temp_dir=temp_dir, classes={Kind.WORKER: "tests.ray.dummy_actor:DummyActor"})
    with asyncio.Runner() as runner:
        runner.run(backend.open())
        yield runner, backend
        runner.run(backend.close())
    assert processes_with(temp_dir) == []
    assert set(os.listdir("/dev/shm")) <= shm_before
    assert home_token.exists() == had_token
    subprocess.run(["rm", "-rf", temp_dir], check=True)


def test_an_actor_starts_with_its_threads_and_a_killed_one_is_noticed_within_a_second(
    world: tuple[asyncio.Runner, RayBackend],
) -> None:
    runner, backend = world

    async def scenario() -> None:
        # 1. it starts; the thread count was set before its libraries loaded
        handle = await backend.start("prefill-0", "inc-1", spec("inc-1"))
        ready = await backend.wait_ready(handle, 30)
        assert ready.fingerprint == "3" and handle.pid == ready.pid
        # 2. SIGKILL is noticed
        os.kill(ready.pid, signal.SIGKILL)
        began = time.monotonic()
        reason = await asyncio.wait_for(backend.wait_dead(handle), 5)
        assert time.monotonic() - began < 1.0
        assert "dead" in reason
        # 3. the same slot starts again under its next incarnation, and stops when asked
        again = await backend.start("prefill-0", "inc-2", spec("inc-2"))
        second = await backend.wait_ready(again, 30)
        await backend.stop(again, 5)
        assert is_gone(second.pid)

    runner.run(scenario())


def test_a_stopped_process_is_really_gone_after_kill(world: tuple[asyncio.Runner, RayBackend]) -> None:
    """Ray calls a SIGSTOPped actor dead while its process lives on: it could still write into memory it reads into."""
    runner, backend = world

    async def scenario() -> None:
        handle = await backend.start("prefill-0", "inc-3", spec("inc-3"))
        ready = await backend.wait_ready(handle, 30)
        os.kill(ready.pid, signal.SIGSTOP)
        await backend.kill(handle)
        await asyncio.wait_for(backend.wait_dead(handle), 5)
        assert is_gone(ready.pid)

    runner.run(scenario())


def test_a_start_that_fails_says_why_in_one_line(world: tuple[asyncio.Runner, RayBackend]) -> None:
    runner, backend = world

    async def scenario() -> None:
        handle = await backend.start("prefill-0", "inc-4", spec("inc-4", model_path="broken"))
        with pytest.raises(StartupError) as caught:
            await backend.wait_ready(handle, 30)
        assert str(caught.value) == "prefill-0: model: broken on purpose"
        await asyncio.wait_for(backend.wait_dead(handle), 5)

    runner.run(scenario())

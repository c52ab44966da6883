"""The launcher with dummy processes: whatever ends it, nothing of the deployment is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cluster_builders import is_gone, model_folder

LAUNCHER = Path(__file__).with_name("cluster_launcher.py")
REPO_ROOT = LAUNCHER.parent.parent.parent


def until(condition: Callable[[], Any], timeout_s: float) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.02)
    return value


class Launched:
    def __init__(self, tmp_path: Path, **env: str) -> None:
        self.ready_file = tmp_path / "ready.json"
        self.tmp = tmp_path / "tmp"
        self.tmp.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, str(LAUNCHER), str(model_folder(tmp_path / "model")), str(self.ready_file)],
            env={**os.environ, "PYTHONPATH": str(REPO_ROOT), "TMPDIR": str(self.tmp), **env},
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> dict[str, Any]:
        until(lambda: self.ready_file.exists() or self.process.poll() is not None, 20)
        return self.now()

    def now(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.ready_file.read_text())
        return data

    def pids(self) -> list[int]:
        data = self.now()
        return [*(gateway["pid"] for gateway in data["gateways"]), *(worker["pid"] for worker in data["workers"])]

    def assert_nothing_is_left(self, pids: list[int], within_s: float) -> None:
        until(lambda: all(is_gone(pid) for pid in pids), within_s)
        until(lambda: not self.ready_file.exists() and not list(self.tmp.iterdir()), within_s)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(**env: str) -> Launched:
        launched.append(Launched(tmp_path, **env))
        return launched[-1]

    yield start
    for each in launched:
        with contextlib.suppress(ProcessLookupError):
            each.process.kill()
        each.process.communicate(timeout=10)


def test_it_starts_restarts_a_killed_worker_and_stops_in_order(launch: Callable[..., Launched]) -> None:
    # 1. ready: both workers and the gateway are in the file
    deployment = launch()
    data = deployment.ready()
    assert [worker["worker_id"] for worker in data["workers"]] == ["prefill-0", "decode-0"]
    assert data["pid"] == deployment.process.pid
    # 2. a killed worker comes back as a new incarnation, and the file says so
    victim = data["workers"][0]
    os.kill(victim["pid"], signal.SIGKILL)
    again = until(
        lambda: next((w for w in deployment.now()["workers"] if w["worker_id"] == "prefill-0" and w["restarts"]), None),
        10,
    )
    assert again["incarnation"] != victim["incarnation"]
    # 3. a killed gateway comes back on the same port
    os.kill(data["gateways"][0]["pid"], signal.SIGKILL)
    until(lambda: any(gateway["restarts"] for gateway in deployment.now()["gateways"]), 10)
    assert deployment.now()["grpc"] == data["grpc"]
    # 4. SIGTERM ends everything in order
    pids = deployment.pids()
    deployment.process.terminate()
    assert deployment.process.wait(15) == 0
    deployment.assert_nothing_is_left(pids, 0.5)


def test_a_stopped_worker_is_killed_and_replaced(launch: Callable[..., Launched]) -> None:
    deployment = launch()
    victim = deployment.ready()["workers"][1]
    os.kill(victim["pid"], signal.SIGSTOP)
    # liveness_s is 2 here
    until(lambda: any(w["worker_id"] == "decode-0" and w["restarts"] == 1 for w in deployment.now()["workers"]), 12)
    assert is_gone(victim["pid"])


def test_sigkill_of_the_launcher_leaves_nothing(launch: Callable[..., Launched]) -> None:
    deployment = launch()
    deployment.ready()
    pids = deployment.pids()
    deployment.process.kill()
    deployment.assert_nothing_is_left(pids, 5)


def test_a_second_signal_while_stopping_ends_at_once_with_its_own_code(launch: Callable[..., Launched]) -> None:
    deployment = launch(DUMMY_DRAIN_S="30")
    deployment.ready()
    pids = deployment.pids()
    deployment.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert deployment.process.poll() is None
    deployment.process.send_signal(signal.SIGINT)
    assert deployment.process.wait(5) == 128 + signal.SIGINT
    deployment.assert_nothing_is_left(pids, 1)


def test_a_signal_before_it_serves_ends_it_at_once(launch: Callable[..., Launched]) -> None:
    deployment = launch(DUMMY_START_S="30")
    until(lambda: list(deployment.tmp.iterdir()), 20)
    time.sleep(1.0)
    deployment.process.send_signal(signal.SIGINT)
    assert deployment.process.wait(5) == 128 + signal.SIGINT
    deployment.assert_nothing_is_left([], 1)
    assert "cluster_child" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


def test_a_worker_that_cannot_start_ends_the_launch_with_one_line(launch: Callable[..., Launched]) -> None:
    deployment = launch(DUMMY_BROKEN="decode-0")
    _, said = deployment.process.communicate(timeout=20)
    assert deployment.process.returncode == 1
    assert said.strip().splitlines()[-1] == "decode-0: config.json: broken on purpose (exit code 1)"
    assert "Traceback" not in said
    deployment.assert_nothing_is_left([], 0.5)

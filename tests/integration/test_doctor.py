"""The real `headrace doctor`: it measures, says what is wrong, ends, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.doctor import lanes, machine
from cluster.doctor.examine import limited
from headrace.core.findings import Finding, Level, ok
from tests.unit.cluster_builders import is_gone

REPO_ROOT = Path(__file__).resolve().parent.parent.parent
QUICKSTART = REPO_ROOT / "configs" / "quickstart.yaml"
LIMIT_S = 100.0
"""Of the command: the machine may be busy with other tests."""


def run(folder: Path, *args: str, **env: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and findings by check; asserts that nothing is left. It runs in an empty folder."""
    mark = f"doctor-test-{secrets.token_hex(8)}"
    temporary = folder / "tmp"
    temporary.mkdir()
    shared = shared_memory()
    ended = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "doctor", "--json", f"--limit-s={LIMIT_S}", *args],
        cwd=temporary,
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT), "TMPDIR": str(temporary), "DOCTOR_TEST": mark, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 30,
    )
    assert ended.stdout, ended.stderr
    answer = json.loads(ended.stdout)
    assert [pid for pid in marked(mark) if not is_gone(pid)] == []
    assert list(temporary.iterdir()) == []
    assert shared_memory() <= shared
    assert ended.returncode == (1 if answer["level"] == "fail" else 0)
    return ended.returncode, {finding["check"]: finding for finding in answer["findings"]}


def marked(mark: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                yield int(entry.name)
        except OSError:  # it ended meanwhile
            continue


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("ucx", "torch", "headrace"))}


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def test_it_measures_the_lanes_of_the_shipped_configuration_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12")
    _, found = run(tmp_path, str(QUICKSTART))
    # 1. The configuration resolves, and what it asks for is looked at.
    assert found["configuration"]["level"] == "ok"
    assert {"packages", "ports", "keys and tokens", "Ray", "huge pages", "/dev/shm", "versions"} <= found.keys()
    # 2. Both lanes moved bytes, and were compared with plain copies in the same run.
    for lane in ("ucx", "tcp"):
        numbers = found[f"lane {lane}"]["numbers"]
        assert min(numbers["gbps"], numbers["memcpy_gbps"], numbers["socket_gbps"]) > 0
    # 3. UCX said what it used.
    assert " through " in found["lane ucx"]["found"]


def test_each_thing_that_is_wrong_has_its_line(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12")
    config, no_folder = tmp_path / "wrong.yaml", tmp_path / "file"
    no_folder.touch()
    with taken_port() as port:
        config.write_text(
            f"model: {{path: {tmp_path}/missing}}\n"
            f"gateway: {{http_port: {port}, grpc_port: 0, api_keys: [secret]}}\n"
            f"pools: [{{role: colocated, disk_cache_bytes: 1GiB, disk_cache_dir: {no_folder}}}]\n"
        )
        config.chmod(0o644)
        code, found = run(
            tmp_path,
            str(config),
            UCX_TLS="tcp",
            PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
            RAY_AUTH_MODE="disabled",
        )
    assert code == 1
    levels = {check: finding["level"] for check, finding in found.items()}
    assert levels["configuration"] == levels["ports"] == levels[f"folder {no_folder}"] == "fail"
    assert f":{port}: Address already in use" in found["ports"]["found"]
    assert "missing" in found["configuration"]["found"]
    assert levels["CUDA allocator"] == levels["Ray"] == levels["keys and tokens"] == levels["lane ucx"] == "warn"
    assert "UCX fell back to TCP" in found["lane ucx"]["found"]
    assert all(finding["advice"] for finding in found.values() if finding["level"] != "ok")


def test_a_package_that_shadows_ours_is_named_and_not_run(tmp_path: Path) -> None:
    shadow = tmp_path / "site" / "kernels"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise SystemExit('somebody else ran')\n")
    code, found = run(tmp_path, PYTHONPATH=os.pathsep.join([str(shadow.parent), str(REPO_ROOT)]))
    assert code == 1
    assert list(found) == ["packages"]
    assert str(shadow / "__init__.py") in found["packages"]["found"]


@pytest.mark.parametrize(
    ("holder_does", "is_late", "error"),
    [
        ("time.sleep(600)", True, ""),
        ("print('no such device', flush=True); os._exit(1)", False, "its process ended: no such device"),
    ],
)
def test_processes_of_a_lane_that_hang_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder_does: str, is_late: bool, error: str
) -> None:
    # The reader hangs before any code of ours runs; the holder too, or it ends at once.
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys, time\nif '\"is_holder\": true' in sys.stdin.readline():\n    {holder_does}\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPO_ROOT)]))
    facts = lanes.measure("tcp", "auto", "127.0.0.1", 1 << 20, limit_s=2.0 if is_late else 60.0)
    assert (facts.is_late, facts.error) == (is_late, error)
    assert children() == []


def test_torch_is_asked_where_there_is_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.read_gpus(60.0).num_devices == len(list(Path("/dev").glob("nvidia[0-9]*")))
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(machine, "_DEVICES", tmp_path)
    facts = machine.read_gpus(60.0)
    assert (facts.num_devices, facts.torch_error) == (2, "")
    assert machine.read_gpus(0.01).torch_error == "torch gave no answer within 0.01 s"
    assert children() == []


def test_a_check_that_hangs_or_breaks_is_a_finding() -> None:
    hanging = threading.Event()

    def broken() -> list[Finding]:
        raise ValueError("odd")

    def hang() -> list[Finding]:
        hanging.wait()
        return []

    assert [finding.level for finding in limited("ports", 0.6, hang)] == [Level.WARN]
    hanging.set()
    (finding,) = limited("ports", 5.0, broken)
    assert (finding.check, finding.level) == ("ports", Level.WARN)
    assert "odd" in finding.found
    # With no time left a check is not begun.
    (finding,) = limited("ports", 0.0, broken)
    assert (finding.level, "left out" in finding.found) == (Level.WARN, True)
    assert limited("ports", 5.0, lambda: [ok("ports", "free")]) == [ok("ports", "free")]


def children() -> list[str]:
    return [
        pid
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
        if not is_gone(int(pid))
    ]

"""Measures a lane between two processes, and ends them whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import IO, Any

from cluster.core.doctor.lanes import LaneFacts, read_transports
from cluster.doctor.lane_end import MARK, READER, EndSpec
from headrace.clock import monotonic
from headrace.installation import child_environment

_END_S = 1.0
_UCX_TELLS = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}


def measure(lane: str, wanted: str, host: str, block_bytes: int, limit_s: float) -> LaneFacts:
    """Blocks for about limit_s at most; both processes are gone when it returns."""
    end = monotonic() + limit_s
    spec = EndSpec(lane, host, block_bytes, secrets.token_hex(16), os.getpid(), is_holder=True)
    with (
        _end(spec, {}) as holder,
        _end(replace(spec, is_holder=False), _UCX_TELLS) as reader,
        _killed_after(end - monotonic(), holder, reader) as is_late,
    ):
        told, log = _answer(holder)
        if "error" not in told:
            _say(reader, told)
            told, log = _answer(reader)
    if is_late.is_set():
        return LaneFacts(lane, wanted, is_late=True)
    if "error" in told:
        return LaneFacts(lane, wanted, error=str(told["error"]))
    return LaneFacts(lane, wanted, **told, transports=read_transports(log, READER))


@contextlib.contextmanager
def _end(spec: EndSpec, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.doctor.lane_end"],
        env={**child_environment(), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        _say(process, asdict(spec))
        yield process
    finally:
        _close(process.stdin)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _close(process.stdout)


@contextlib.contextmanager
def _killed_after(limit_s: float, *processes: subprocess.Popen[str]) -> Iterator[threading.Event]:
    """Kills them when the time is over, which sets the event: who waits for what they print sees its end."""
    is_late = threading.Event()

    def kill() -> None:
        is_late.set()
        for process in processes:
            process.kill()

    timer = threading.Timer(limit_s, kill)
    timer.daemon = True
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()


def _say(process: subprocess.Popen[str], data: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: its last words are read next
        process.stdin.write(json.dumps(data) + "\n")
        process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """What an end says, and what was printed before it. One that ends without a word: its last line as the error."""
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK)), "".join(said)
        said.append(line)
    last = next((line.strip() for line in reversed(said) if line.strip()), "without a word")
    return {"error": f"its process ended: {last}"}, ""


def _close(pipe: IO[str] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()

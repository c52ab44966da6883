"""How long a user waits: from the command `headrace serve` to readiness, and to the first token of a first request."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headrace.client import HeadraceClient, chat

HEADRACE = Path(sys.executable).parent / "headrace"
TIMEOUT_S = 180.0


def once(config: str) -> tuple[float, float]:
    """(seconds to ready, seconds to the first token) of one start; the deployment is stopped again."""
    with tempfile.TemporaryDirectory() as folder:
        ready_file = Path(folder) / "ready.json"
        began = time.monotonic()
        process = subprocess.Popen(
            [HEADRACE, "serve", config, f"--ready-file={ready_file}", "--grpc-port=0", "--http-port=0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not ready_file.exists():
                if process.poll() is not None or time.monotonic() - began > TIMEOUT_S:
                    raise SystemExit(f"headrace serve {config} did not become ready")
                time.sleep(0.01)
            ready_s = time.monotonic() - began
            with HeadraceClient(json.loads(ready_file.read_text())["grpc"]) as client:
                next(iter(client.stream(chat("What is the capital of France?"), temperature=0, max_tokens=8)))
            return ready_s, time.monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def run(config: str, runs: int) -> None:
    results = [once(config) for _ in range(runs)]
    for name, column in (("ready", [r for r, _ in results]), ("first token", [t for _, t in results])):
        print(f"{name:12s} median {statistics.median(column):6.2f} s   min {min(column):6.2f}   max {max(column):6.2f}")

"""Outlives the launcher by a moment and ends what it left: `python guardian.py RUN_DIR [FILE...]`.

A launcher that is killed with SIGKILL cannot clean up, and Ray leaves two of its agents running for ever then. The
guardian holds the reading end of a pipe whose only writer is the launcher. At its end, whatever ended the launcher, the
guardian kills every process of the deployment and removes the run directory and the files. `keep` on the pipe spares
the directory (logs).

A process belongs to the deployment when its environment names the run directory. Ray's own agents overwrite their
environment with their title: they are known by the logs that they keep open below the directory. Standard library only:
it starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

ENV_RUN_DIR = "HEADRACE_RUN_DIR"
SWEEP_LIMIT_S = 8.0


def belongs(pid: str, run_dir: str) -> bool:
    """Whether a process of this user carries the mark of the deployment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"{ENV_RUN_DIR}={run_dir}".encode() in file.read().split(b"\0"):
                return True
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read(5) != b"ray::":
                return False
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(run_dir + "/"):
                    return True
    except OSError:  # ended meanwhile, or another user's
        return False
    return False


def is_zombie(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def members(run_dir: str) -> list[int]:
    """Living processes of the deployment, this one and its parent excluded."""
    mine = {os.getpid(), os.getppid()}
    pids = [entry for entry in os.listdir("/proc") if entry.isdigit() and int(entry) not in mine]
    return [int(pid) for pid in pids if belongs(pid, run_dir) and not is_zombie(pid)]


def sweep(run_dir: str, limit_s: float = SWEEP_LIMIT_S) -> int:
    """Kills until nobody is left or the time is over. Returns how many processes it had to kill."""
    killed: set[int] = set()
    end = time.monotonic() + limit_s
    while found := members(run_dir):
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        if time.monotonic() >= end:
            break
        time.sleep(0.05)
    return len(killed)


def main() -> None:
    run_dir, *files = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    said = sys.stdin.buffer.read()
    sweep(run_dir)
    for path in files:
        with contextlib.suppress(OSError):
            os.unlink(path)
    if b"keep" not in said:
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()

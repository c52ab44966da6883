"""The life of a child process that serves: spec on stdin, one ready line on stdout, then until SIGTERM. No actor, no
Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from typing import Protocol

from headrace.errors import StartupError

EXIT_STARTUP = 1


class Served(Protocol):
    async def start(self) -> Ready: ...

    async def wait(self) -> None: ...

    async def stop(self) -> None: ...


class Ready(Protocol):
    def model_dump_json(self) -> str: ...


def log_to_stderr(name: str) -> None:
    """One line an event: time, process, level, event."""
    level = os.environ.get("HEADRACE_LOG", "WARNING").upper()
    logging.basicConfig(level=level, stream=sys.stderr, format=f"%(asctime)s {name} %(levelname)s %(message)s")


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel for SIGKILL when the parent ends, however it ends; exits at once when it is gone already."""
    if not parent_pid:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(EXIT_STARTUP)


async def serve(process: Served) -> int:
    """Starts, prints the ready line, serves until SIGTERM or SIGINT; the exit status.

    A second signal while stopping ends the process at once.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, on_signal)
    try:
        ready = await process.start()
    except StartupError as error:
        print(error, file=sys.stderr)
        return EXIT_STARTUP
    print(ready.model_dump_json(), flush=True)
    ended = asyncio.create_task(process.wait())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    await process.stop()
    ended.cancel()
    return 0

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
import threading
from typing import Any, NoReturn, Protocol

from headrace.errors import InvariantError, StartupError

log = logging.getLogger("headrace.process")

EXIT_STARTUP = 1
EXIT_BROKEN = 70


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


def end_process(error: BaseException) -> NoReturn:
    """Logs and ends the process at once, without clean-up that could act on broken state."""
    log.critical("process_broken error=%s", type(error).__name__, exc_info=error)
    os._exit(EXIT_BROKEN)


def end_process_if_failed(task: asyncio.Task[Any]) -> None:
    """Done-callback of a task that must run for as long as the process does."""
    if not task.cancelled() and (error := task.exception()) is not None:
        end_process(error)


def crash_on_broken_invariant(loop: asyncio.AbstractEventLoop) -> None:
    """A broken invariant in a callback, a task or a thread ends the process: who may be wrong must not go on."""

    def on_loop(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, InvariantError):
            end_process(error)
        loop.default_exception_handler(context)

    def on_thread(args: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(args)
        os._exit(EXIT_BROKEN)

    loop.set_exception_handler(on_loop)
    threading.excepthook = on_thread


async def serve(process: Served) -> int:
    """Starts, prints the ready line, serves until SIGTERM or SIGINT; the exit status.

    A second signal while stopping ends the process at once.
    """
    loop = asyncio.get_running_loop()
    crash_on_broken_invariant(loop)
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

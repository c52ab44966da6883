"""An event loop in virtual time, and processes on it that can be stopped and killed.

Time passes only when nothing is ready: it jumps to the next timer. No sockets, no threads, no waiting: the same program
with the same seed does the same things at the same instants.
"""

from __future__ import annotations

import asyncio
import heapq
import weakref
from asyncio import events
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from typing import Any, TypeVar

START_S = 1000.0
"""Where virtual time begins: as in production, far from zero."""
R = TypeVar("R")


class Life(Enum):
    RUNNING = "running"
    STOPPED = "stopped"
    DEAD = "dead"


class Process:
    """Whatever runs in its context belongs to it: callbacks, timers, tasks, and what those start."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.life = Life.RUNNING
        self.parked: list[events.Handle] = []
        """What would have run while it was stopped or dead, in order."""
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.buried: list[asyncio.Task[Any]] = []
        """Of a dead process: kept, so that no `finally` of theirs runs while somebody looks."""
        self.stopped_s = 0.0
        """For how long it was stopped so far."""
        self._stopped_at = 0.0
        self._context = copy_context()
        self._context.run(PROCESS.set, self)

    @property
    def context(self) -> Context:
        return self._context.copy()

    def run(self, call: Callable[..., R], *args: Any) -> R:
        return self.context.run(call, *args)

    def open_tasks(self) -> list[asyncio.Task[Any]]:
        return [task for task in self.tasks if not task.done()]


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class NothingLeft(RuntimeError):
    """Nothing is ready and no timer runs: whoever waits will wait for ever."""


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = START_S
        self.callbacks = 0

    def time(self) -> float:
        return self._now

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        return self.call_soon(callback, *args, context=context)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        task = super().create_task(coro, name=name, context=context)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.tasks.add(task)
        return task

    # ---- processes

    def stop_process(self, process: Process) -> None:
        assert process.life is Life.RUNNING
        process.life = Life.STOPPED
        process._stopped_at = self._now

    def continue_process(self, process: Process) -> None:
        assert process.life is Life.STOPPED
        process.stopped_s += self._now - process._stopped_at
        self.wind_up(process)

    def wind_up(self, process: Process) -> None:
        """Whatever its life: its tasks run on, so that they can be ended."""
        process.life = Life.RUNNING
        self._ready.extend(process.parked)
        process.parked.clear()

    def kill_process(self, process: Process) -> None:
        process.life = Life.DEAD
        process.buried = process.open_tasks()

    # ---- running

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        if self._timer_cancelled_count > 100 and self._timer_cancelled_count * 2 > len(scheduled):
            kept = [timer for timer in scheduled if not timer._cancelled]
            for timer in scheduled:
                timer._scheduled = not timer._cancelled
            heapq.heapify(kept)
            self._scheduled = scheduled = kept
            self._timer_cancelled_count = 0
        if not ready and not self._stopping:
            while scheduled and scheduled[0]._cancelled:
                self._drop_first(scheduled)
            if not scheduled:
                raise NothingLeft
            self._now = max(self._now, scheduled[0]._when)
        while scheduled and (scheduled[0]._cancelled or scheduled[0]._when <= self._now):
            timer = self._drop_first(scheduled)
            if not timer._cancelled:
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None and process.life is not Life.RUNNING:
                process.parked.append(handle)
                continue
            self.callbacks += 1
            handle._run()

    def _drop_first(self, scheduled: list[Any]) -> Any:
        timer = heapq.heappop(scheduled)
        timer._scheduled = False
        if timer._cancelled:
            self._timer_cancelled_count -= 1
        return timer

    def _process_events(self, event_list: Any) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """There are no threads to wake."""

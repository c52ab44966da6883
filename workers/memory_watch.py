"""The shell of `workers.core.watermarks`: looks at the memory that is left, and tells the scheduler.

Runs on the event loop; a look reads a few files of the kernel's, for some 0.1 ms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from workers.core.blocks import BlockPool
from workers.core.scheduler import Scheduler
from workers.core.watermarks import CALM_S, Level, Marks, Watermarks
from workers.hub import Hub

log = logging.getLogger("headrace.workers.memory_watch")

LOOK_EVERY_S = 1.0
MEMORY_PRESSURE = "memory_pressure"


class MemoryWatch:
    """`available_bytes`: what this process may still take. `gives_back`: the system takes the pages of the KV pool
    back, which it does not where they are pinned; then admission is all that changes."""

    def __init__(
        self,
        marks: Marks,
        hub: Hub,
        scheduler: Scheduler,
        pool: BlockPool,
        block_bytes: int,
        available_bytes: Callable[[], int],
        gives_back: bool,
    ) -> None:
        self.available_bytes = available_bytes
        self._watermarks = Watermarks(marks)
        self._hub = hub
        self._scheduler = scheduler
        self._pool = pool
        self._block_bytes = block_bytes
        self._gives_back = gives_back
        self._next_look = 0.0
        if marks.low_bytes and not gives_back:
            log.warning("kv_memory_is_pinned: it is not given back when memory is short")

    @property
    def level(self) -> Level:
        return self._watermarks.level

    def tick(self, now: float) -> None:
        """Looks when it is time to."""
        if now >= self._next_look and self._watermarks.marks.low_bytes:
            self._next_look = now + LOOK_EVERY_S
            self.look(now)

    def look(self, now: float) -> None:
        was, available = self.level, self.available_bytes()
        level = self._watermarks.look(available, now)
        with self._hub.engine.lock:
            self._obey(level, available, now)
        if level is not was:
            self._tell(was, level, available)

    def _obey(self, level: Level, available: int, now: float) -> None:
        scheduler, host = self._scheduler, self._scheduler.host_blocks
        if level is Level.OPEN:
            scheduler.open()
        else:
            scheduler.close(MEMORY_PRESSURE, CALM_S)
        if not self._gives_back or scheduler.resizing:
            return
        retired, host_retired = self._pool.retired_blocks, host.retired_blocks
        missing_blocks, size = self._watermarks.missing_blocks, self._block_bytes
        more, host_more = missing_blocks(available, size, self._pool.num_blocks, retired, now), 0
        if more > 0 and host.available_blocks:
            # Host memory only saves work: it goes first, as a whole, since nobody knows how much of it was ever used.
            host_more = host.available_blocks
            more = more if level is Level.SHED else 0
        elif not retired and level is Level.OPEN:
            host_more = missing_blocks(available, size, host.num_blocks, host_retired, now)
        scheduler.resize(retired + more, host_retired + host_more, shed=level is Level.SHED)
        if more or host_more:
            self._hub.engine.wake()

    def _tell(self, was: Level, level: Level, available: int) -> None:
        if was is Level.OPEN:
            self._hub.counters["memory_closed"] += 1
        marks = self._watermarks.marks
        log.log(
            logging.INFO if level is Level.OPEN else logging.WARNING,
            "memory_level level=%s was=%s available_bytes=%d low_bytes=%d critical_bytes=%d retired_blocks=%d "
            "retired_host_blocks=%d live_requests=%d",
            level,
            was,
            available,
            marks.low_bytes,
            marks.critical_bytes,
            self._pool.retired_blocks,
            self._scheduler.host_blocks.retired_blocks,
            self._hub.live_requests,
        )
        for session in self._hub.sessions:
            session.load_changed()

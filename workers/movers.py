"""The threads that move cached blocks between device, host and disk, beside the steps: one copies to the host, and from
there to the device for peers, one reads and writes files. No step ever waits for either.

Both ask the scheduler under its lock what to do, do it without, and tell how it went. Copies to the host take a bounded
share of the time; so do writes. Reads, and copies for peers, go first: somebody waits for them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import numpy as np

from headrace.clock import Clock, monotonic
from headrace.errors import StartupError
from headrace.process import EXIT_BROKEN
from workers.core.scheduler import Scheduler
from workers.core.staging import StageCopy
from workers.core.tier_actions import Forget, Offload, Promote, Spill
from workers.disk_store import DiskStore
from workers.runner.base import Runner

log = logging.getLogger("headrace.workers.movers")

LOOK_S = 0.05
"""How often the threads look for work of their own."""
COPY_BYTES = 32 << 20
"""In one look, so at most so much is under way."""
LOOK_SHARE = 0.02
"""Of the time, at most, that a look for what to copy keeps the lock."""
STAGED = 8
"""Blocks that are copied for a peer before it hears of them."""
WRITES = 2
READS = 8
COPY_SHARE = 0.2
WRITE_SHARE = 0.3
"""Of the time, at most."""


class Movers:
    """start -> stop. Broken invariants end the process, as in the engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        lock: threading.RLock,
        runner: Runner,
        store: DiskStore | None,
        clock: Clock = monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._tiering = scheduler.tiering
        self._lock = lock
        self._store = store
        self._clock = clock
        size = runner.layout.block_bytes
        self._device = runner.kv_pool.reshape(runner.num_blocks, size)
        self._host = runner.host_pool.reshape(runner.host_blocks, size)
        self._stopping = threading.Event()
        self._wanted = threading.Event()
        """Reads wait."""
        self._tiering.on_reads = self._wanted.set
        self._staging = scheduler.staging
        self._asked = threading.Event()
        """Something may have to be copied for a peer."""
        self._staging.on_wanted = self._asked.set
        self._threads = []
        if runner.host_blocks:
            self._threads.append(threading.Thread(target=self._guarded, args=(self._copy,), name="copier", daemon=True))
        if store is not None:
            self._threads.append(threading.Thread(target=self._guarded, args=(self._disk,), name="disk", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """After what is under way."""
        self._stopping.set()
        self._wanted.set()
        self._asked.set()
        for thread in self._threads:
            thread.join()

    # ---- device -> host

    def _copy(self) -> None:
        most = max(1, COPY_BYTES // self._host.shape[1])
        look_at = self._clock() + LOOK_S
        while not self._stopping.is_set():
            staged = self._stage()
            if (now := self._clock()) >= look_at:
                look_at = self._offload(most)
            elif not staged:
                self._asked.wait(look_at - now)

    def _offload(self, most: int) -> float:
        """Returns when to look again."""
        with self._lock:
            looked = self._clock()
            offloads = self._tiering.offloads(most)
            began = self._clock()
        for offload in offloads:
            self._copy_one(offload)
        ended = self._clock()
        copy_rest_s = (ended - began) * (1.0 / COPY_SHARE - 1.0) if offloads else LOOK_S
        return ended + max(copy_rest_s, (began - looked) / LOOK_SHARE)

    def _copy_one(self, offload: Offload) -> None:
        self._host[offload.host_block] = self._device[offload.device_block]
        with self._lock:
            self._tiering.offloaded(offload.ticket)

    # ---- host -> device, for peers

    def _stage(self) -> bool:
        """The next blocks that a peer waits for; False: there are none now."""
        self._asked.clear()
        if self._stopping.is_set():
            return False
        with self._lock:
            copy = self._staging.next_copy(STAGED)
        if copy is None:
            return False
        self._copy_up(copy)
        return True

    def _copy_up(self, copy: StageCopy) -> None:
        for host_block, device_block in copy.pairs:
            self._device[device_block] = self._host[host_block]
        with self._lock:
            self._staging.copied(copy.ticket)

    # ---- host <-> disk

    def _disk(self) -> None:
        assert self._store is not None
        try:
            self._store.open()
            self._scan(self._store)
        except (StartupError, OSError) as error:
            log.error("disk_cache_off %s", error)
            with self._lock:
                self._tiering.disk_is_off()
            self._store.close()
            return
        try:
            while not self._stopping.is_set():
                rest_s = 0.0 if self._read(self._store) else self._write(self._store)
                self._wanted.wait(rest_s)
        finally:
            self._store.close()

    def _scan(self, store: DiskStore) -> None:
        for block, _ in store.scan():
            if self._stopping.is_set():
                return
            with self._lock:
                self._tiering.found(block)
        with self._lock:
            self._tiering.scanned()

    def _read(self, store: DiskStore) -> bool:
        """The reads that wait; False: there were none."""
        self._wanted.clear()
        with self._lock:
            reads: list[Promote] = self._tiering.take_reads(READS)
        for read in reads:
            began = self._clock()
            outcome = store.read(read.block, memoryview(self._host[read.host_block]))
            ended = self._clock()
            with self._lock:
                self._tiering.promoted(read.ticket, outcome, ended - began, ended)
                if len(self._staging):
                    self._asked.set()
        return bool(reads)

    def _write(self, store: DiskStore) -> float:
        """A few writes and what must go for them; returns the seconds to rest."""
        with self._lock:
            actions: list[Spill | Forget] = self._tiering.writes(WRITES, self._clock())
        began = self._clock()
        for action in actions:
            if isinstance(action, Forget):
                store.remove(action.hash)
                continue
            outcome = store.write(action.block, memoryview(np.ascontiguousarray(self._host[action.host_block])))
            with self._lock:
                self._tiering.spilled(action.ticket, outcome, self._clock())
        took_s = self._clock() - began
        return took_s * (1.0 / WRITE_SHARE - 1.0) if actions else LOOK_S

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("movers_broken")
            os._exit(EXIT_BROKEN)

"""The journal on disk: JSON lines, one file a worker, rotated by size. A thread of its own writes; the engine only
leaves records in a bounded queue.

    FOLDER/prefill-0.jsonl      being written, by every incarnation of that worker
    FOLDER/prefill-0.jsonl.1    the one before, and so on up to max_files in all

Each line is a `workers.core.journal.Record` with three more fields: `wall_time_s` (seconds since 1970, by this
machine's clock at the worker's start and its monotonic clock since), `worker` and `incarnation`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path

import orjson

from headrace.clock import Clock, monotonic
from headrace.errors import StartupError
from workers.core.journal import Record, Tracing
from workers.spec import WorkerSpec

log = logging.getLogger("headrace.workers.journal_file")

QUEUE_RECORDS = 16_384
FLUSH_S = 0.25
"""Longest time that a record waits in memory; what a crash may lose."""


class JournalFile:
    """start -> record.. -> stop. Raises StartupError, one line, when the file cannot be written."""

    def __init__(self, spec: WorkerSpec, clock: Clock = monotonic, wall_clock: Clock = time.time) -> None:
        self.written = 0
        self.dropped = 0
        """Records that found the queue full."""
        self.failed = 0
        """Records that the disk did not take."""
        self._spec = spec
        self._path = Path(spec.event_log_path) / f"{spec.worker_id}.jsonl"
        self._queue: deque[Record] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="journal", daemon=True)
        self._file = -1
        self._size = 0
        self._broken = False
        started_at = clock()
        self._wall_offset_s = wall_clock()
        self.tracing = Tracing(self.record, spec.event_log_sample_rate, started_at)
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._forget_old()
            self._open()
        except OSError as error:
            raise StartupError(f"events.path: cannot write {self._path}: {error.strerror}") from error

    def start(self) -> None:
        self._thread.start()

    def record(self, record: Record) -> None:
        """Never waits. One thread at a time (the scheduler's lock sees to it)."""
        if len(self._queue) >= QUEUE_RECORDS:
            self.dropped += 1
        else:
            self._queue.append(record)

    def stop(self) -> None:
        """Writes what is left."""
        self._stopping.set()
        self._thread.join()
        self._close()

    @property
    def counters(self) -> dict[str, float]:
        return {"events_written": self.written, "events_dropped": self.dropped, "events_failed": self.failed}

    def _main(self) -> None:
        while not self._stopping.wait(FLUSH_S):
            self._drain()
        self._drain()

    def _drain(self) -> None:
        """Writes what is in the queue now; more may come meanwhile."""
        batch: list[bytes] = []
        size = self._size
        for _ in range(len(self._queue)):
            line = self._line(self._queue.popleft())
            if batch and size + len(line) > self._spec.event_log_max_bytes:
                self._write(batch)
                batch, size = [], self._size
            batch.append(line)
            size += len(line)
        if batch:
            self._write(batch)

    def _line(self, record: Record) -> bytes:
        head = {
            "wall_time_s": round(self._wall_offset_s + record.time_s, 6),
            "worker": self._spec.worker_id,
            "incarnation": self._spec.incarnation,
        }
        return orjson.dumps(head | record._asdict() | {"time_s": round(record.time_s, 6)}) + b"\n"

    def _write(self, lines: list[bytes]) -> None:
        """All lines in one file; a disk that takes none costs these lines, not the worker."""
        data = b"".join(lines)
        try:
            if self._file < 0:
                self._open()
            if self._size and self._size + len(data) > self._spec.event_log_max_bytes:
                self._rotate()
            if self._broken and self._size:
                os.write(self._file, b"\n")  # what was written last may lack its end
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self.failed += len(lines)
            if not self._broken:
                log.error("events_not_written worker=%s path=%s: %s", self._spec.worker_id, self._path, error.strerror)
            self._broken = True
            self._close()
        else:
            self.written += len(lines)
            self._size += len(data)
            self._broken = False

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size

    def _close(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _rotate(self) -> None:
        self._close()
        for number in reversed(range(1, self._spec.event_log_max_files)):
            before = self._numbered(number - 1) if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                before.replace(self._numbered(number))
        if self._spec.event_log_max_files == 1:
            self._path.unlink(missing_ok=True)
        self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _forget_old(self) -> None:
        """Files of an earlier start that was allowed more of them."""
        for path in self._path.parent.glob(f"{self._path.name}.*"):
            number = path.name.rpartition(".")[2]
            if number.isdecimal() and int(number) >= self._spec.event_log_max_files:
                path.unlink(missing_ok=True)


def open_journal(spec: WorkerSpec) -> JournalFile | None:
    """None: the spec wants no events."""
    wanted = spec.event_log_path and spec.event_log_sample_rate > 0
    return JournalFile(spec) if wanted else None

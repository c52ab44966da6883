"""How often each tenant's cache was invalidated: a part of the names of its blocks (SPEC C5).

What is cached under an earlier generation has no name any more, wherever it lies and whenever its worker comes back.
Gateways of one deployment keep one file. Each looks at it before it names blocks, so that a new generation holds for
all of them, and for those that start later, from the instant at which its file is in place.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from io import TextIOWrapper
from pathlib import Path

log = logging.getLogger("headrace.router.generations")

EVERYBODY = "*"
"""No tenant's name: those have letters, digits, `_`, `.` and `-`."""


class Generations:
    """`path`: None keeps them in memory, for a gateway alone whose caches do not outlive it."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        self._read: TextIOWrapper | None = None
        """The file whose counts are known. It stays open: no later file gets its inode number."""
        self._is_unreadable = False
        self._refresh()

    def of(self, tenant: str) -> int:
        self._refresh()
        return self._counts[tenant] + self._counts[EVERYBODY]

    def next(self, tenant: str | None) -> None:
        """The tenant's (None: everybody's) next generation. On disk when it returns. Raises OSError when that fails,
        BlockingIOError while another gateway is at it: then nothing has changed."""
        name = EVERYBODY if tenant is None else tenant
        if self._path is None:
            self._counts[name] += 1
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(self._path.with_suffix(".lock")):
            self._refresh()
            counts = self._counts.copy()
            counts[name] += 1
            draft = self._path.with_suffix(".draft")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(counts, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        self._counts = counts

    def _refresh(self) -> None:
        """Reads the file again if it is another one than the last. Of one that is not there: what is known holds. While
        one cannot be read, others may have cleared: each look makes a generation that nobody has had."""
        if self._path is None:
            return
        try:
            if self._read is not None and os.path.samestat(os.stat(self._path), os.fstat(self._read.fileno())):
                return
            file = self._path.open()
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._is_unreadable:
                log.error("generations_unreadable path=%s error=%s", self._path, type(error).__name__)
            self._known_of(None)
            self._is_unreadable = True
            self._counts = Counter({EVERYBODY: int.from_bytes(os.urandom(4), "little")})
            return
        self._known_of(file)
        self._is_unreadable = False
        self._counts = Counter(_parse(file))

    def _known_of(self, file: TextIOWrapper | None) -> None:
        if self._read is not None:
            self._read.close()
        self._read = file


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One gateway at a time, never waiting: a gateway that hangs must not take others with it. The file stays; the lock
    ends with whoever holds it."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _parse(file: TextIOWrapper) -> dict[str, int]:
    """A broken file counts as generations that nobody has had, the same ones for everybody who reads it."""
    try:
        data = json.load(file)
        return {str(tenant): int(count) for tenant, count in data.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        log.error("generations_broken path=%s error=%s", file.name, type(error).__name__)
        state = os.fstat(file.fileno())
        seed = f"{state.st_ino} {state.st_mtime_ns}".encode()
        return {EVERYBODY: int.from_bytes(blake2b(seed, digest_size=4).digest(), "little")}

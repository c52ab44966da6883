"""How often each tenant's cache was invalidated: a part of the names of its blocks (SPEC C5). On disk where blocks are.

What is cached under an earlier generation has no name any more, wherever it lies and whenever its worker comes back.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from pathlib import Path

log = logging.getLogger("headrace.router.generations")

EVERYBODY = "*"
"""No tenant's name: those have letters, digits, `_`, `.` and `-`."""


class Generations:
    """`path`: None keeps them in memory, for caches that do not outlive the gateway."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        if path is not None:
            self._counts.update(_read(path))

    def of(self, tenant: str) -> int:
        return self._counts[tenant] + self._counts[EVERYBODY]

    def next(self, tenant: str | None) -> None:
        """The tenant's (None: everybody's) next generation. On disk when it returns; raises OSError when that fails:
        then nothing has changed."""
        counts = self._counts.copy()
        counts[EVERYBODY if tenant is None else tenant] += 1
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(counts, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        self._counts = counts


def _read(path: Path) -> dict[str, int]:
    """Of a file that is not there: nothing. A broken one counts as one more generation of everybody."""
    try:
        data = json.loads(path.read_text())
        return {str(tenant): int(count) for tenant, count in data.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.error("generations_unreadable path=%s error=%s", path, type(error).__name__)
        return {EVERYBODY: int.from_bytes(os.urandom(4), "little")}

"""Names of things. Ids are made by a factory that the shell injects, so that a replay prints the same ones."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NewType

RequestId = NewType("RequestId", str)
"""The gateway's own id of a request; never the client's label."""
WorkerId = NewType("WorkerId", str)
"""Stable name of a worker slot, e.g. `prefill-0`."""
Incarnation = NewType("Incarnation", str)
"""One process under a worker's name; a restart is a new incarnation."""
LeaseId = NewType("LeaseId", str)
RequestKey = NewType("RequestKey", int)
"""A worker's own name of one attempt of a request; unique within the process."""

IdFactory = Callable[[str], str]
"""Maps a prefix (`req`, `lease`, `inc`) to a fresh id."""


def random_ids(prefix: str) -> str:
    """Production ids: the prefix and 64 random bits."""
    return f"{prefix}-{secrets.token_hex(8)}"


def counting_ids() -> IdFactory:
    """Ids for tests and replays: `req-1`, `req-2`, ..."""
    counts: dict[str, int] = {}

    def make(prefix: str) -> str:
        counts[prefix] = counts.get(prefix, 0) + 1
        return f"{prefix}-{counts[prefix]}"

    return make

"""Names that everything which places requests shares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    AUTO = "auto"
    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """A worker's process: a restart under the same name is another key."""

    worker_id: str
    incarnation: str

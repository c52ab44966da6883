"""From the memory that is left to what a worker does about it: a level, and how much of its pool it gives back.

            below low                  below critical
    OPEN -------------> CLOSED -----------------------> SHED
     ^                   |  ^                            |
     +-------------------+  +----------------------------+
      above reopen for CALM_S          above low

    OPEN     as ever; what was given back is taken again in small parts, once the level has been OPEN for CALM_S
    CLOSED   nobody new; blocks that nobody uses go back to the system
    SHED     as CLOSED, and requests give their blocks up for it

Memory that is given back counts as available, so that a worker whose memory stays taken goes on with a smaller pool
instead of staying closed. It never takes back what would bring it below `reopen_bytes` again.

Does not: read clocks or memory, or choose blocks and victims (`workers.core.shedding` does).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CALM_S = 5.0
_RESTORED_SHARE = 32
"""One over the part of the pool that one look takes back at most."""


class Level(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    SHED = "shed"


@dataclass(frozen=True, slots=True)
class Marks:
    """Bytes available to the process. low 0: no marks, the level is always OPEN."""

    low_bytes: int
    critical_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.critical_bytes <= self.low_bytes:
            raise ValueError("critical_bytes must be from 0 to low_bytes")

    @property
    def reopen_bytes(self) -> int:
        """A quarter above the low mark, so that a worker at the mark does not open and close with every look."""
        return self.low_bytes + self.low_bytes // 4


class Watermarks:
    """Ask `look` about once a second, and `missing_blocks` after it."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.level = Level.OPEN
        self._calm_since: float | None = None
        """Since when available memory has been above `reopen_bytes` without a break."""

    def look(self, available_bytes: int, now: float) -> Level:
        """The level now."""
        marks, level = self.marks, self.level
        if available_bytes < marks.reopen_bytes:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        if available_bytes < marks.critical_bytes:
            self.level = Level.SHED
        elif available_bytes < marks.low_bytes:
            self.level = Level.SHED if level is Level.SHED else Level.CLOSED
        elif level is Level.SHED:
            self.level = Level.CLOSED
        elif level is Level.CLOSED and self._calm_s(now) >= CALM_S:
            self.level = Level.OPEN
        return self.level

    def missing_blocks(
        self, available_bytes: int, block_bytes: int, num_blocks: int, retired_blocks: int, now: float
    ) -> int:
        """Blocks to take out of use so that available memory is above `reopen_bytes` again; negative: to take back.

        Of a pool of `num_blocks`, of which `retired_blocks` are out of use and not part of what the process holds.
        """
        spare = available_bytes - self.marks.reopen_bytes
        if self.level is not Level.OPEN:
            return max(0, -(spare // block_bytes))
        # The level may have become OPEN after CALM_S; what is taken back waits for as long again.
        if not retired_blocks or self._calm_s(now) < 2 * CALM_S:
            return 0
        return -min(retired_blocks, spare // block_bytes, max(1, num_blocks // _RESTORED_SHARE))

    def _calm_s(self, now: float) -> float:
        return 0.0 if self._calm_since is None else now - self._calm_since

"""How long a block takes from worker to worker, learned from finished transfers: an average a lane."""

from __future__ import annotations

_NEW = 0.1


class Lanes:
    """Lanes are the small numbers of `router.core.fleet_table`."""

    def __init__(self, default_block_ms: float) -> None:
        self._default_ms = default_block_ms
        self._block_ms: dict[int, float] = {}

    def block_ms(self, lane: int) -> float:
        """Milliseconds a block."""
        return self._block_ms.get(lane, self._default_ms)

    def observe(self, lane: int, num_blocks: int, took_ms: float) -> None:
        """Takes a transfer of at least one block."""
        if num_blocks <= 0 or took_ms < 0.0:
            return
        each = took_ms / num_blocks
        old = self._block_ms.get(lane, each)
        self._block_ms[lane] = old + _NEW * (each - old)

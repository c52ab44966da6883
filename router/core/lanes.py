"""How long a block takes from worker to worker, learned from finished transfers: an average a lane."""

from __future__ import annotations

import numpy as np

from router.core.arrays import Floats, Ints

_NEW = 0.1


class Lanes:
    """Lanes are the small numbers of `router.core.fleet_table`."""

    def __init__(self, default_block_ms: float) -> None:
        """default_block_ms: of a lane that was never measured."""
        self._default_ms = default_block_ms
        self._known: dict[int, float] = {}

    def block_ms(self, lanes: Ints, num_lanes: int) -> Floats:
        """Milliseconds a block, of each entry of `lanes`."""
        if num_lanes <= 1:
            return np.full(len(lanes), self._known.get(0, self._default_ms))
        each = np.full(num_lanes, self._default_ms)
        for lane, block_ms in self._known.items():
            each[lane] = block_ms
        return each[lanes]

    def observe(self, lane: int, num_blocks: int, took_ms: float) -> None:
        """Takes a finished transfer; one without blocks tells nothing."""
        if num_blocks > 0 and took_ms >= 0.0:
            each = took_ms / num_blocks
            old = self._known.get(lane, each)
            self._known[lane] = old + _NEW * (each - old)

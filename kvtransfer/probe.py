"""Blocks behind a worker's pool that no request uses: peers read the first of them when they pair, the others are what
this worker reads into. What peers read follows from the worker's name alone, so a reader knows what must arrive.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from kvtransfer.transports.base import PoolBytes

PROBE_BYTES = 4 << 20
"""A lane's speed is measured over so much, and over at least one block."""
MAX_BLOCKS = 256
NUM_SETS = 3
"""Of blocks to read into: a lane whose read does not end keeps one for itself."""
_PERIOD = 4096


@dataclass(frozen=True, slots=True)
class ProbeArea:
    first: int
    """The pool's own blocks are those before it."""
    num_blocks: int
    """Of the pattern, and of each set."""
    num_sets: int = NUM_SETS

    @property
    def pattern(self) -> range:
        return range(self.first, self.first + self.num_blocks)

    def scratch(self, number: int) -> range:
        """A set of blocks to read into."""
        first = self.first + (1 + number) * self.num_blocks
        return range(first, first + self.num_blocks)

    @property
    def end(self) -> int:
        """Blocks of pool and probe together."""
        return self.first + (1 + self.num_sets) * self.num_blocks


def probe_area(num_blocks: int, block_bytes: int) -> ProbeArea:
    """Behind a pool of `num_blocks`."""
    return ProbeArea(num_blocks, min(max(1, PROBE_BYTES // block_bytes), MAX_BLOCKS))


def rank_name(name: str, rank: int) -> str:
    """How transports call a rank of the worker `name`."""
    return f"{name}#{rank}" if rank else name


def fill_pattern(memory: PoolBytes, area: ProbeArea, block_bytes: int, name: str) -> None:
    """Writes what readers of the worker `name` expect."""
    for number, block in enumerate(area.pattern):
        memory[block * block_bytes : (block + 1) * block_bytes] = pattern_of(name, number, block_bytes)


def pattern_of(name: str, number: int, num_bytes: int) -> PoolBytes:
    """The first bytes of the probe's block of that number at the worker `name`; uint8 [num_bytes]."""
    seed = hashlib.blake2b(f"{name}/{number}".encode(), digest_size=8).digest()
    period = np.random.default_rng(int.from_bytes(seed, "big")).integers(0, 256, _PERIOD, dtype=np.uint8)
    return np.resize(period, num_bytes)

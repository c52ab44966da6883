"""The look for blocks to copy down ahead of their eviction: a bounded part of the work at a time, and none left out."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from tests.core_world import make_settings
from tests.line_count import lines_of
from workers.core import tiering as module
from workers.core.blocks import BlockPool
from workers.core.prefix_cache import PrefixCache
from workers.core.scheduler import Scheduler
from workers.core.tiering import Tiering


class Cache:
    """A device full of idle chains of `length` blocks."""

    def __init__(self, num_blocks: int, length: int, host_blocks: int) -> None:
        self.rng = Random(1)
        self.pool = BlockPool(num_blocks, 4)
        self.prefixes = PrefixCache(self.pool)
        settings = make_settings(host_blocks=host_blocks)
        self.tiering: Tiering = Scheduler(settings, self.pool, self.prefixes).tiering
        self.length = length
        for _ in range(num_blocks // length):
            self.come()

    def come(self) -> None:
        """A new chain, for which others are evicted."""
        blocks, parent = self.pool.alloc(self.length), b""
        assert blocks is not None
        for index, block in enumerate(blocks):
            block_hash = self.rng.randbytes(16)
            self.prefixes.insert(block_hash, block, parent, index)
            parent = block_hash
        self.pool.decref(reversed(blocks))

    def look(self, most: int = 1000) -> int:
        offloads = self.tiering.offloads(most)
        for offload in offloads:
            self.tiering.offloaded(offload.ticket)
        return len(offloads)

    def copied_next(self, num_blocks: int) -> list[bool]:
        """Of the blocks that are evicted next: is it in the host?"""
        idle = self.pool.idle
        assert idle.look_ahead(num_blocks, 10**6)
        hashes = [self.prefixes.content(block)[0] for block in idle.coming(num_blocks)]
        return [self.tiering.tiers.in_host(block_hash) for block_hash in hashes]


@pytest.mark.parametrize("length", [1, 10, 200])
@pytest.mark.parametrize("most", [7, 1000])
def test_all_blocks_that_are_evicted_soon_are_copied_in_some_looks_each_of_which_sees_a_part(
    length: int, most: int
) -> None:
    c = Cache(1000, length, host_blocks=1000)
    while num_copied := c.look(most):
        assert num_copied <= min(most, module._LOOK_BLOCKS)
    assert c.copied_next(500) == [True] * 500
    assert c.tiering.tiers.counters["offloads"] == 500
    # It has been seen that nothing is to be done.
    assert lines_of(c.look) < 40


@pytest.mark.parametrize("length", [1, 10, 200])
def test_what_goes_next_is_copied_in_time_while_others_come(length: int) -> None:
    c = Cache(1000, length, host_blocks=1000)
    while c.look():
        pass
    for _ in range(200 // length):
        c.come()
        before = c.tiering.tiers.counters["offloads"]
        for _ in range(1 + 600 // module._LOOK_BLOCKS):
            c.look()
        assert c.tiering.tiers.counters["offloads"] == before + length
        assert all(c.copied_next(500))
    assert c.tiering.tiers.counters["spoiled_offloads"] == 0


def test_none_is_passed_over_when_blocks_are_evicted_between_two_looks() -> None:
    c = Cache(1000, 10, host_blocks=1000)
    for _ in range(40):
        c.look(25)
        c.come()
        copied = c.copied_next(400)
        assert copied == sorted(copied, reverse=True)
    assert c.pool.evictions > module._LOOK_BLOCKS


@pytest.mark.parametrize("length", [1, 10])
def test_a_look_is_no_more_work_in_a_large_cache(length: int) -> None:
    works = []
    for num_blocks in (1000, 10_000):
        c = Cache(num_blocks, length, host_blocks=2000)
        looks = []
        for _ in range(30):
            looks.append(lines_of(partial(c.tiering.offloads, 16)))
            for copy in list(c.tiering.tiers._copying):
                c.tiering.offloaded(copy)
            c.come()
        works.append(max(looks))
    assert works[1] < 1.5 * works[0]

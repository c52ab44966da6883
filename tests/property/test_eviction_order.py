"""Which idle block goes first, against a model that looks at all of them; and that finding it takes no such look."""

from __future__ import annotations

from random import Random

import pytest

from tests.line_count import lines_of
from workers.core import eviction_order
from workers.core.eviction import FRESH_HITS, IdleBlocks

N = 40


class Model:
    """The rule of `workers.core.eviction` word for word, beside the real one. The shape of the forest is the test's."""

    def __init__(self, num_blocks: int = N) -> None:
        self.idle = IdleBlocks(num_blocks)
        self.free = list(range(num_blocks))
        self.parent: dict[int, int] = {}
        self.key: dict[int, tuple[float, int]] = {}
        """(worth, turn) of idle ones."""
        self.saved: dict[int, float] = {}
        self.hits: dict[int, int] = {}
        self.level, self.turn = 0.0, 0

    def used(self) -> list[int]:
        return [block for block in self.parent if block not in self.key]

    def followers(self, block: int) -> list[int]:
        return [kid for kid, parent in self.parent.items() if parent == block]

    def depth(self, block: int) -> int:
        return -1 if block < 0 else 1 + self.depth(self.parent[block])

    def link(self, parent: int, saved_ms: float) -> int:
        block = self.free.pop()
        self.parent[block], self.saved[block], self.hits[block] = parent, saved_ms, 0
        self.idle.link(block, parent, saved_ms, "", None)
        return block

    def leave(self, block: int) -> None:
        self.turn += 1
        self.key[block] = (self.level + self.saved[block] * (FRESH_HITS + self.hits[block]), self.turn)
        self.idle.add(block)

    def share(self, block: int) -> None:
        self.hits[block] += 1
        self.idle.hit(block)
        if self.key.pop(block, None) is not None:
            self.idle.remove(block)

    def drop(self, block: int) -> None:
        """It loses its place, after all that is below it."""
        for kid in self.followers(block):
            self.drop(kid)
        self.idle.unlink(block, None)
        if self.key.pop(block, None) is not None:
            self.idle.remove(block)
        del self.parent[block]
        self.free.append(block)

    def first(self) -> int:
        leaves = [block for block in self.key if not self.followers(block)]
        return min(leaves, key=self.key.__getitem__, default=-1)

    def evict(self) -> None:
        leaf, deepest = self.first(), max(map(self.depth, self.key))
        block = self.idle.pop()
        if leaf >= 0:
            assert block == leaf
        else:
            assert self.depth(block) == deepest
        self.level = max(self.level, self.key.pop(block)[0])
        self.drop(block)

    def coming(self) -> list[int]:
        """By taking leaf after leaf away."""
        parent, key = dict(self.parent), dict(self.key)
        order: list[int] = []
        while (found := self.first()) >= 0:
            order.append(found)
            del self.key[found], self.parent[found]
        self.parent, self.key = parent, key
        return order


@pytest.mark.parametrize("seed", range(30))
def test_the_least_worthy_leaf_goes_first_and_without_one_the_deepest_block(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction_order, "_FRONT", 8)
    rng, m = Random(seed), Model()
    evictions = 0
    for _ in range(400):
        what = rng.random()
        if what < 0.4 and m.free:
            parent = rng.choice([-1, *m.parent])
            m.link(parent, rng.choice([1.0, 1.0, 2.0, 40.0]))
        elif what < 0.65 and m.used():
            with_followers = [block for block in m.used() if m.followers(block)]
            m.leave(rng.choice(with_followers if with_followers and seed % 2 else m.used()))
        elif what < 0.8 and m.parent:
            m.share(rng.choice(list(m.parent)))
        elif what < 0.85 and m.parent:
            m.drop(rng.choice(list(m.parent)))
        elif what < 0.95 and m.key:
            m.evict()
            evictions += 1
        elif m.idle.look_ahead(N, rng.choice([3, 4 * N])):
            # It tells of what it has come to, and then of everything.
            assert list(m.idle.coming(N)) == m.coming()
        else:
            told = list(m.idle.coming(N))
            assert told == m.coming()[: len(told)]
        m.idle.check_integrity(m.parent)
    assert evictions > 10


def crowd(num_blocks: int) -> Model:
    """Half of the blocks are idle heads, each with one follower in use: there is no leaf."""
    m = Model(num_blocks)
    heads = [m.link(-1, 1.0) for _ in range(num_blocks // 2)]
    for head in heads:
        m.link(head, 1.0)
    for head in heads:
        m.leave(head)
    return m


def test_an_eviction_is_no_more_work_in_a_large_cache_although_there_is_no_leaf() -> None:
    """All followers are in use: whoever looks for the deepest block by looking at all pays for each of them."""
    works = []
    for num_blocks in (200, 4000):
        m = crowd(num_blocks)
        m.idle.pop()  # the first one makes the index
        works.append(max(lines_of(m.idle.pop) for _ in range(50)))
    assert works[0] == works[1] < 50


def test_idle_blocks_that_come_after_the_first_such_eviction_are_found_too() -> None:
    m = crowd(20)
    for _ in range(3):
        m.evict()
    deep = m.used()[0]
    for _ in range(3):
        deep = m.link(deep, 1.0)
    m.leave(m.parent[deep])
    assert m.depth(m.parent[deep]) > 1
    m.evict()
    m.idle.check_integrity(m.parent)

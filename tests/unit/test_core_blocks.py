"""Blocks and the prefix cache by themselves."""

import pytest

from headrace.errors import InvariantError
from workers.core.blocks import BlockPool, BlockState
from workers.core.prefix_cache import PrefixCache


def make(num_blocks: int = 4) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks, 4)
    return pool, PrefixCache(pool)


def take(pool: BlockPool, n: int) -> list[int]:
    blocks = pool.alloc(n)
    assert blocks is not None
    return blocks


def test_alloc_gives_all_or_nothing() -> None:
    pool, _ = make(4)
    blocks = take(pool, 3)
    assert pool.alloc(2) is None
    assert (pool.free_blocks, pool.used_blocks) == (1, 3)
    pool.decref(blocks)
    assert (pool.free_blocks, pool.used_blocks) == (4, 0)
    pool.check_integrity()


def test_a_labelled_block_outlives_its_last_reference_and_is_found_again() -> None:
    pool, cache = make()
    (block,) = take(pool, 1)
    assert cache.insert(b"a", block)
    pool.decref([block])
    assert pool.state(block) is BlockState.CACHED
    assert cache.match([b"a", b"b"]) == [block]
    pool.incref([block])
    assert pool.state(block) is BlockState.USED
    pool.decref([block])
    pool.check_integrity()
    cache.check_integrity()


def test_eviction_takes_the_least_recently_used_and_forgets_its_hash() -> None:
    pool, cache = make(3)
    blocks = take(pool, 3)
    for name, block in zip((b"a", b"b", b"c"), blocks, strict=True):
        cache.insert(name, block)
    pool.decref(blocks)  # oldest first: a, b, c
    pool.incref(cache.match([b"a"]))
    pool.decref(cache.match([b"a"]))  # now b is the oldest
    taken = take(pool, 2)
    assert taken == [blocks[1], blocks[2]]
    assert cache.match([b"a"]) == [blocks[0]]
    assert cache.match([b"b"]) == []
    assert (pool.evictions, len(cache)) == (2, 1)
    pool.decref(taken)
    assert (pool.free_blocks, pool.evictable_blocks) == (2, 1)


def test_a_block_in_use_is_never_evicted() -> None:
    pool, cache = make(2)
    kept, other = take(pool, 2)
    cache.insert(b"a", kept)
    pool.decref([other])
    assert pool.alloc(2) is None
    assert take(pool, 1) == [other]
    assert cache.match([b"a"]) == [kept]


def test_the_first_block_with_a_hash_stays_its_block() -> None:
    pool, cache = make()
    first, second = take(pool, 2)
    assert cache.insert(b"a", first)
    assert not cache.insert(b"a", second)
    assert cache.match([b"a"]) == [first]
    pool.decref([first, second])
    assert pool.state(second) is BlockState.FREE


def test_a_match_stops_at_the_first_gap() -> None:
    pool, cache = make()
    blocks = take(pool, 2)
    cache.insert(b"a", blocks[0])
    cache.insert(b"c", blocks[1])
    assert cache.match([b"a", b"b", b"c"]) == [blocks[0]]


def test_quarantined_blocks_come_back_only_by_their_holder() -> None:
    pool, _ = make(3)
    blocks = take(pool, 3)
    pool.quarantine(blocks[:2], "read 1")
    pool.decref(blocks[2:])
    assert pool.alloc(2) is None
    assert pool.quarantine_holders() == {"read 1": 2}
    assert (pool.used_blocks, pool.quarantined_blocks, pool.state(blocks[0])) == (0, 2, BlockState.QUARANTINED)
    pool.check_integrity()
    assert pool.release_quarantine("read 2") == 0
    assert pool.release_quarantine("read 1") == 2
    assert pool.release_quarantine("read 1") == 0
    assert len(take(pool, 3)) == 3


def test_a_shared_or_cached_block_cannot_be_quarantined() -> None:
    pool, cache = make()
    shared, cached = take(pool, 2)
    pool.incref([shared])
    cache.insert(b"a", cached)
    for block in (shared, cached):
        with pytest.raises(InvariantError):
            pool.quarantine([block], "read 1")


def test_broken_rules_are_errors_and_planted_faults_are_found() -> None:
    pool, cache = make()
    (block,) = take(pool, 1)
    with pytest.raises(InvariantError):
        pool.incref([3])  # a free block
    pool.decref([block])
    with pytest.raises(InvariantError):
        pool.decref([block])
    with pytest.raises(InvariantError):
        pool.label(block, b"a")  # not in use

    leaking, leaking_cache = make()
    leaking._free.pop()
    with pytest.raises(InvariantError):
        leaking.check_integrity()
    leaking_cache._block_of[b"x"] = 0
    with pytest.raises(InvariantError):
        leaking_cache.check_integrity()
    assert len(cache) == 0

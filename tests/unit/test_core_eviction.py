"""Which cached block goes first, whose it is, and what is left when a cache is cleared."""

from random import Random

import pytest

from tests.core_world import World, make_settings
from workers.core.blocks import BlockPool
from workers.core.prefix_cache import PrefixCache

B = 4


def make(num_blocks: int) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks, B)
    return pool, PrefixCache(pool)


def name(*path: int) -> bytes:
    return bytes(path).ljust(16, b".")


def use(pool: BlockPool, cache: PrefixCache, *path: int, tenant: str = "") -> int:
    """A request over the chain path[:1], path[:2], ... comes and goes. Returns the blocks that it hit."""
    hashes = [name(*path[: i + 1]) for i in range(len(path))]
    matched = cache.match(hashes)
    cache.take(matched)
    blocks = pool.alloc(len(hashes) - len(matched))
    assert blocks is not None
    table = matched + blocks
    for i in range(len(matched), len(hashes)):
        cache.insert(hashes[i], table[i], hashes[i - 1] if i else b"", i, tenant=tenant)
    pool.decref(reversed(table))
    pool.check_integrity()
    cache.check_integrity()
    return len(matched)


def test_a_chain_loses_its_tail_before_its_head() -> None:
    pool, cache = make(6)
    use(pool, cache, 1, 2, 3, 4)
    for left in (5, 4, 3):
        taken = pool.alloc(1 if pool.free_blocks == 0 else pool.free_blocks + 1)
        assert taken is not None
        assert len(cache.match([name(*(1, 2, 3, 4)[: i + 1]) for i in range(4)])) == left - 2
        cache.check_integrity()


def test_prompts_that_come_once_do_not_flush_one_that_comes_again() -> None:
    pool, cache = make(10)
    use(pool, cache, 1, 2)
    assert use(pool, cache, 1, 2) == 2
    for once in range(10, 18):
        use(pool, cache, once, once, once)
    assert use(pool, cache, 1, 2) == 2


def test_what_is_not_hit_any_more_ages_and_goes() -> None:
    pool, cache = make(10)
    for _ in range(4):
        use(pool, cache, 1, 2)
    for once in range(2000):
        use(pool, cache, 3 + once % 250, once // 250)
    assert use(pool, cache, 1, 2) == 0


def test_a_block_that_was_evicted_too_early_is_kept_longer_the_next_time() -> None:
    pool, cache = make(4)
    use(pool, cache, 1)
    for once in range(10, 14):
        use(pool, cache, once)
    assert use(pool, cache, 1) == 0  # missed
    for once in range(20, 24):
        use(pool, cache, once)
    assert use(pool, cache, 1) == 1


def test_a_block_goes_before_one_that_saves_more_time() -> None:
    pool, cache = make(2)
    cache.saved_ms = lambda index: 1.0
    use(pool, cache, 1)
    cache.saved_ms = lambda index: 50.0
    use(pool, cache, 2)
    assert pool.idle.next_ms() == pytest.approx(0.3)  # nobody has asked for it twice yet
    cache.saved_ms = lambda index: 1.0
    use(pool, cache, 3)
    assert (cache.match([name(1)]), len(cache.match([name(2)]))) == ([], 1)


def test_a_block_whose_predecessor_is_idle_but_for_followers_in_use_takes_them_out_of_the_cache() -> None:
    # One request computed block 1 for itself, since another had published it meanwhile, and published 2 behind it.
    pool, cache = make(3)
    (head,) = pool.alloc(1) or []
    cache.insert(name(1), head)
    own = pool.alloc(2) or []
    assert not cache.insert(name(1), own[0])
    assert cache.insert(name(1, 2), own[1], name(1), 1)
    pool.decref([head])
    assert pool.alloc(1) == [head]
    assert pool.label_of(own[1]) is None
    cache.check_integrity()
    pool.decref(own)
    assert pool.free_blocks == 2


def test_a_head_takes_any_number_of_followers_with_it_each_before_its_predecessor() -> None:
    pool, cache = make(5000)
    (head,) = pool.alloc(1) or []
    cache.insert(name(1), head)
    followers = pool.alloc(4999) or []
    hashes = [name(1), *(i.to_bytes(4, "big").ljust(16, b".") for i in range(4999))]
    for i, block in enumerate(followers):
        # Every second one begins a branch of one block, the others go on.
        cache.insert(hashes[i + 1], block, hashes[i - i % 2], i // 2 + 1)
    cache.check_integrity()
    left: list[bytes] = []

    class Below:
        def left(self, block_hash: bytes) -> None:
            left.append(block_hash)

    cache.below = Below()
    pool.decref([head])
    assert pool.alloc(1) == [head]
    place = {block_hash: i for i, block_hash in enumerate(left)}
    assert left[-1] == name(1) and len(left) == 5000
    assert all(place[hashes[i + 1]] < place[hashes[i - i % 2]] for i in range(4999))
    assert not any(hash_ in cache for hash_ in hashes) and not len(cache.log)
    cache.check_integrity()
    pool.decref(followers)
    assert pool.free_blocks == 4999


@pytest.mark.parametrize("seed", range(10))
def test_used_blocks_are_never_evicted_and_what_is_cached_can_be_hit(seed: int) -> None:
    rng = Random(seed)
    pool, cache = make(12)
    held: list[list[int]] = []
    for _ in range(300):
        if held and rng.random() < 0.5:
            pool.decref(reversed(held.pop(rng.randrange(len(held)))))
        path = [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
        hashes = [name(*path[: i + 1]) for i in range(len(path))]
        before = [list(blocks) for blocks in held]
        matched = cache.match(hashes)
        cache.take(matched)
        blocks = pool.alloc(len(hashes) - len(matched))
        if blocks is None:
            pool.decref(reversed(matched))
            continue
        assert not set(blocks) & {block for table in before for block in table}
        for i, block in enumerate(blocks, len(matched)):
            cache.insert(hashes[i], block, hashes[i - 1] if i else b"", i)
        held.append(matched + blocks)
        pool.check_integrity()
        cache.check_integrity()


def test_over_its_quota_a_tenant_loses_its_own_blocks_first() -> None:
    pool, cache = make(10)
    pool.idle.quota = 3
    use(pool, cache, 1, 1, tenant="modest")
    for once in range(10, 18):
        use(pool, cache, once, tenant="greedy")
    for once in range(30, 36):
        use(pool, cache, once, tenant="greedy")
    assert use(pool, cache, 1, 1, tenant="modest") == 2
    assert sum(cache.content(block)[2] == "greedy" for block in pool.idle) == 8


def test_clearing_a_tenant_frees_its_idle_blocks_and_forgets_those_in_use() -> None:
    world = World()
    prompt = list(range(100, 110))
    for tenant, root in (("a", b"a" * 16), ("b", b"b" * 16)):
        world.submit(prompt, max_tokens=2, tenant=tenant, root=root)
    world.run()
    running = world.submit(prompt, max_tokens=12, tenant="a", root=b"a" * 16)
    world.step()
    log, before = world.cache.log, len(world.cache.log)
    assert world.scheduler.clear_cache("a") == 3
    world.scheduler.check_integrity()
    assert world.cache.tenants["a"] == 0
    assert len(log) == before - 2
    world.run()
    world.assert_output_as_alone(running)
    assert world.cache.tenants["a"] == 0  # what it went on to compute came after the same beginning
    again = [world.submit(prompt, max_tokens=1, tenant=t, root=t.encode() * 16) for t in "ab"]
    world.run()
    assert [request.ledger.cached_tokens for request in again] == [0, 9]
    world.assert_drained()


def test_clearing_everything_begins_a_new_epoch_of_the_log() -> None:
    world = World()
    world.submit(10, max_tokens=2)
    world.run()
    epoch = world.cache.log.epoch
    world.scheduler.clear_cache(None)
    change = world.scheduler.cache_changes(epoch, world.cache.log.seq)
    assert (change.epoch, change.is_snapshot, change.stored) == (epoch + 1, True, ())
    assert world.pool.free_blocks == world.num_blocks


def test_two_tenants_with_equal_prompts_never_hit_each_other() -> None:
    world = World()
    for tenant in ("a", "b", "c"):
        world.submit(list(range(100, 117)), max_tokens=3, tenant=tenant, root=tenant.encode() * 16)
        world.run()
    stats = world.scheduler.stats()
    assert (stats["cached_tokens_hit"], stats["partial_tokens_hit"], stats["followed"]) == (0, 0, 0)


def test_the_log_tells_what_the_cache_has() -> None:
    world = World(make_settings(max_num_seqs=4), num_blocks=16)
    for number in range(30):
        world.submit([number % 7] * 3 + [number % 3] * 6, max_tokens=4)
        world.run()
    change = world.scheduler.cache_changes(0, 0)
    load = world.scheduler.load(0, world.now)
    assert change.is_snapshot
    assert (change.epoch, change.to_seq) == (load.cache_epoch, load.cache_seq)
    assert len(change.stored) == len(world.cache) > 0


def test_the_load_tells_of_decodes_prefills_and_what_an_eviction_costs() -> None:
    world = World(make_settings(long_prefill_token_threshold=8), num_blocks=16)
    world.submit(5, max_tokens=6)
    world.step()
    waiting = world.submit(24, max_tokens=1)
    world.step()
    load = world.scheduler.load(0, world.now)
    assert (load.decode_rows, load.decode_context, load.expected_output_tokens) == (1, 7, 4)
    assert load.queue_s == pytest.approx(0.001 * waiting.uncomputed_tokens)
    assert load.eviction_ms_per_block == 0.0
    world.run()
    assert world.scheduler.load(0, world.now).eviction_ms_per_block > 0.0
    assert world.scheduler.fragmentation() == 0.0


def test_the_tier_below_hears_of_a_block_before_it_is_reused() -> None:
    class Tier:
        def __init__(self) -> None:
            self.gone: list[bytes] = []

        def left(self, block_hash: bytes) -> None:
            assert block_hash not in cache
            self.gone.append(block_hash)

    pool, cache = make(3)
    tier = cache.below = Tier()
    use(pool, cache, 1, 2)
    cache.log.stored(name(1))  # the tier has a copy
    seq = cache.log.seq
    use(pool, cache, 3, 4, 5)
    assert tier.gone == [name(1, 2), name(1)]
    assert cache.log.seq == seq + 4  # what is below is still cached
    cache.clear()
    assert set(tier.gone) >= {name(3), name(3, 4), name(3, 4, 5)}


def test_what_is_evicted_next_can_be_told() -> None:
    pool, cache = make(12)
    use(pool, cache, 1, 2, 3)
    use(pool, cache, 4, 5)
    use(pool, cache, 1, 2, 6)
    use(pool, cache, 7)
    assert pool.idle.look_ahead(99, 99)
    told = [cache.content(block)[0] for block in pool.idle.coming(99)]
    gone: list[bytes] = []

    class Tier:
        def left(self, block_hash: bytes) -> None:
            gone.append(block_hash)

    cache.below = Tier()
    assert list(pool.idle.coming(2)) == list(pool.idle.coming(99))[:2]
    pool.alloc(12)
    assert told == gone and len(gone) == 7


def test_a_tenant_over_its_quota_whose_blocks_all_have_followers_in_use_costs_another_one() -> None:
    pool, cache = make(4)
    pool.idle.quota = 0
    head, tail, other = pool.alloc(3) or []
    cache.insert(name(1), head, tenant="a")
    cache.insert(name(1, 2), tail, name(1), 1, tenant="a")
    cache.insert(name(3), other, tenant="b")
    pool.decref([head, other])  # the tail is in use: the head is idle, and no leaf
    assert pool.alloc(2) is not None
    assert (cache.match([name(1)]), cache.match([name(3)])) == ([head], [])
    pool.check_integrity()
    cache.check_integrity()

"""Prefixes on their way from a peer: what they take, what they give, and that a request loses nothing by waiting."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.records import FinishReason
from headrace.ids import RequestKey
from kvtransfer.core.identity import block_hashes
from tests.core_world import ROOT, World, chain, linear_predictor, make_settings
from workers.core.blocks import BlockPool
from workers.core.fetch_pins import FetchPins
from workers.core.fetches import LEAST_PATIENCE_S, PATIENCE, Fetch
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request, State
from workers.core.staging import FetchSource

PEER = RequestKey(99)


def started_fetch(world: World, request: Request) -> Fetch:
    fetch = world.scheduler.fetches.get(request.key)
    assert fetch is not None and fetch.reading
    return fetch


def land(world: World, request: Request, num_blocks: int | None = None) -> int:
    """The read brings so many blocks, by default all."""
    fetch, size = started_fetch(world, request), world.settings.block_size
    targets = fetch.targets[:num_blocks]
    content = chain(world.truth[request.key])[len(fetch.shared) * size :]
    for index, block in enumerate(targets):
        world.runner.kv[block] = content[index * size : (index + 1) * size]
    return world.scheduler.fetch_arrived(request.key, len(targets), world.now)


def test_a_fetched_prefix_is_cached_when_the_request_starts() -> None:
    world = World()
    # 1. four full blocks and a bit; the fourth and the bit are computed
    request = world.submit(18, fetch_blocks=3)
    assert world.step() is None and request.state is State.WAITING
    assert world.scheduler.holders() == {"fetch req-1/0": 3}
    # 2. arrived
    assert land(world, request) == 3
    world.run()
    assert (request.ledger.cached_tokens, request.ledger.computed_tokens) == (12, 18 - 12 + 3)
    world.assert_output_as_alone(request)
    world.assert_drained()


def test_the_block_of_the_last_token_is_never_asked_for_and_without_a_cache_none_is() -> None:
    world = World()
    whole, private = world.submit(16, fetch_blocks=4), world.submit(16, fetch_blocks=4, no_cache=True)
    assert len(started_fetch(world, whole).targets) == 3
    assert world.scheduler.fetches.get(private.key) is None and not private.fetching
    land(world, whole)
    world.run()
    world.assert_drained()


def test_what_the_cache_has_is_not_read_and_is_kept_until_the_request_starts() -> None:
    world = World(num_blocks=12)
    prompt = list(range(1, 26))
    world.submit(prompt[:9])
    world.run()
    # 1. two of six blocks are here
    request = world.submit(prompt, fetch_blocks=6)
    fetch = started_fetch(world, request)
    assert (len(fetch.shared), len(fetch.targets)) == (2, 4)
    assert list(fetch.hashes) == block_hashes(ROOT, prompt, 4)[2:]
    # 2. others come and use what memory there is: none of the six is evicted
    world.submit(20)
    world.run()
    land(world, request)
    world.submit(20, 1)
    world.step()
    assert request.ledger.cached_tokens == 24
    world.run()
    world.assert_drained()


def test_a_request_that_waited_for_a_read_starts_before_those_that_came_later() -> None:
    for policy in ("fcfs", "decode_first", "slo_fair"):
        world = World(make_settings(max_num_seqs=1, max_num_batched_tokens=8, policy=policy))
        world.submit(4, 6)
        world.step()
        early = world.submit(18, fetch_blocks=4)
        late = [world.submit(18) for _ in range(3)]
        land(world, early)
        world.run()
        assert early.first_token_at is not None
        assert all(r.first_token_at is not None and r.first_token_at > early.first_token_at for r in late)
        world.assert_drained()


def test_a_failed_read_is_a_cache_miss_and_what_may_still_be_written_stays_aside() -> None:
    world = World()
    request = world.submit(18, fetch_blocks=4)
    targets = started_fetch(world, request).targets
    world.scheduler.fetch_failed(request.key, targets[2:], world.now)
    world.run()
    assert request.ledger.cached_tokens == 0
    world.assert_output_as_alone(request)
    assert world.pool.quarantined_blocks == 2
    assert world.scheduler.release_quarantine(request.key) == 2
    world.assert_drained()


def test_a_fetch_takes_only_what_leaves_room_for_those_who_compute() -> None:
    world = World(make_settings(watermark_blocks=3), num_blocks=12)
    world.submit(8, 8)
    world.step()
    spare = world.scheduler._spare_blocks()
    # 1. as many leading blocks as fit
    request = world.submit(30, fetch_blocks=7)
    fetch = started_fetch(world, request)
    assert 0 < len(fetch.targets) < 7 and world.pool.available_blocks == spare
    # 2. or none: it waits in line at once
    other = world.submit(10, fetch_blocks=2)
    assert world.scheduler.fetches.get(other.key) is None and other in world.scheduler._queues.line.requests.values()
    land(world, request)
    world.run()
    for one in (request, other):
        world.assert_output_as_alone(one)
    world.assert_drained()


def test_requests_that_hold_fetched_blocks_never_block_each_other() -> None:
    """Three prefixes fill the pool; none of the requests could start if each kept what it has."""
    world = World(num_blocks=12)
    requests = [world.submit(33, 3, fetch_blocks=4) for _ in range(3)]
    for request in requests:
        land(world, request)
    assert world.pool.available_blocks == 0
    world.run()
    for request in requests:
        world.assert_output_as_alone(request)
    world.assert_drained()


def test_a_decode_that_grows_takes_held_blocks_before_anybody_is_preempted() -> None:
    world = World(make_settings(max_num_seqs=1), num_blocks=8)
    running = world.submit(8, 12)
    world.step()
    waiting = world.submit(14, fetch_blocks=3)
    land(world, waiting)
    world.run()
    assert world.scheduler.stats()["preemptions"] == 0
    for request in (running, waiting):
        world.assert_output_as_alone(request)
    world.assert_drained()


def test_what_somebody_computed_meanwhile_is_shared_and_the_second_copy_is_free() -> None:
    world = World()
    prompt = list(range(1, 19))
    request = world.submit(prompt, fetch_blocks=4)
    world.submit(prompt, 2)
    world.run()
    assert land(world, request) == 0
    assert world.pool.used_blocks == 4
    world.run()
    assert request.ledger.cached_tokens // world.pool.block_size == 4
    world.assert_drained()


def test_a_read_may_outlive_its_request_and_what_it_brings_is_cached() -> None:
    world = World()
    for how in ("arrives", "fails"):
        request = world.submit(18, fetch_blocks=4)
        started_fetch(world, request)
        assert world.scheduler.finish(request.key, FinishReason.CANCELLED, world.now)
        assert world.pool.used_blocks == 4
        if how == "arrives":
            assert land(world, request) == 4
        else:
            world.scheduler.fetch_failed(request.key, [], world.now)
        assert world.pool.used_blocks == 0 and len(world.cache) == 4
        world.assert_drained()


def test_nothing_enters_a_cache_that_was_cleared_while_it_was_read() -> None:
    world = World()
    request = world.submit(18, fetch_blocks=4, tenant="a")
    other = world.submit(18, fetch_blocks=4, tenant="b")
    assert world.scheduler.fetches.clear("a") == [request.key]
    assert (land(world, request), land(world, other)) == (0, 4)
    world.run()
    assert (request.ledger.cached_tokens, other.ledger.cached_tokens) == (0, 16)
    world.assert_drained()


def test_a_cleared_tenant_loses_what_has_arrived_for_it_too() -> None:
    world = World(make_settings(max_num_seqs=1))
    world.submit(4, 4)
    world.step()
    request = world.submit(18, fetch_blocks=4)
    land(world, request)
    assert world.scheduler.fetches.clear(None) == [] and len(world.scheduler.fetches) == 0
    world.run()
    world.assert_drained()


def test_a_read_is_given_up_when_it_takes_a_multiple_of_the_time_to_compute() -> None:
    token_s = 0.5
    world = World(predictor=linear_predictor(token_s), cost=lambda shape: token_s * shape.rows)
    world.submit(4, 4)
    world.run()
    request = world.submit(18, fetch_blocks=4)
    fetch = started_fetch(world, request)
    assert fetch.give_up_at - world.now >= max(LEAST_PATIENCE_S, 0.9 * PATIENCE * 16 * token_s)
    assert world.scheduler.fetches.overdue(fetch.give_up_at - 0.01) == []
    assert world.scheduler.fetches.overdue(fetch.give_up_at) == [request.key]
    world.scheduler.fetch_failed(request.key, [], world.now)
    assert world.scheduler.fetches.overdue(1e9) == []
    world.run()
    world.assert_drained()


def test_a_fetching_request_waits_in_every_account() -> None:
    world = World(make_settings(max_waiting_requests=2))
    first, second = (world.submit(18, fetch_blocks=4, deadline=5.0) for _ in range(2))
    load = world.scheduler.load(0, world.now)
    assert (load.waiting_requests, load.waiting_tokens, load.running_requests) == (2, 36, 0)
    rejected = world.scheduler.submit(world.make(8), world.now)
    assert rejected is not None and rejected.reason == "queue_full"
    land(world, first)
    assert world.scheduler.expire(5.0) == [first.key, second.key]
    world.scheduler.fetch_failed(second.key, [], world.now)
    world.scheduler.check_integrity()
    assert world.pool.used_blocks == 0 and world.scheduler.holders() == {}


# ---- the holder


def test_a_peer_gets_the_leading_run_that_is_here_and_nobody_takes_it_away() -> None:
    world = World(make_settings(), num_blocks=8)
    prompt = list(range(1, 14))
    world.submit(prompt, 1)
    world.run()
    hashes = block_hashes(ROOT, [*prompt, 50, 51, 52, 53, 54, 55, 56], 4)
    # 1. three of five
    source = world.scheduler.open_fetch(PEER, "req-9/1", hashes, world.now)
    assert isinstance(source, FetchSource) and source.is_over
    blocks = source.blocks
    assert len(blocks) == 3 and world.scheduler.holders() == {"lease fetch req-9/1": 3}
    assert world.scheduler.revocable_fetches() == []
    # 2. somebody else needs all blocks: it waits, and the pin may be revoked
    big = world.submit(28, 1)
    assert world.step() is None
    assert world.scheduler.revocable_fetches() == [PEER]
    assert [world.pool.label_of(block) for block in blocks] == hashes[:3]
    # 3. over, once
    assert world.scheduler.close_fetch(PEER) and not world.scheduler.close_fetch(PEER)
    world.run()
    world.assert_output_as_alone(big)
    world.assert_drained()


@settings(max_examples=200, deadline=None)
@given(cached=st.sets(st.integers(0, 9)), used=st.sets(st.integers(0, 9)), spare=st.integers(0, 12))
def test_a_pin_leaves_the_spare_blocks_available(cached: set[int], used: set[int], spare: int) -> None:
    pool = BlockPool(12, 4)
    cache, pins = PrefixCache(pool), None
    pins = FetchPins(pool, cache)
    hashes = block_hashes(ROOT, range(40), 4)
    blocks = {i: pool.alloc(1) for i in range(10)}
    for i, block in blocks.items():
        assert block is not None
        if i in cached:
            cache.insert(hashes[i], block[0])
        if i not in used:
            pool.decref(block)
    before = pool.available_blocks
    run = next((i for i in range(10) if i not in cached), 10)
    pinned = pins.pin(PEER, "r", hashes, spare)
    assert [pool.label_of(block) for block in pinned] == hashes[: len(pinned)]
    assert len(pinned) <= run
    assert pool.available_blocks >= min(before, spare)
    # Everything is given that can be: the next one would be missing, or too much.
    assert len(pinned) == run or (len(pinned) not in used and pool.available_blocks <= spare)
    assert (PEER in pins) == bool(pinned)
    pins.unpin(PEER)
    assert pool.available_blocks == before and list(pins.blocks()) == []

"""Memory that becomes short: levels and how much to give back, and a pool that shrinks under its requests."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import Rejected
from tests.core_world import World, make_settings
from workers.core.blocks import BlockPool, BlockState
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Keep, State
from workers.core.watermarks import CALM_S, Level, Marks, Watermarks

MARKS = Marks(low_bytes=400, critical_bytes=200)


# ---- levels


def test_each_mark_has_its_level_and_the_way_back_is_longer() -> None:
    watermarks = Watermarks(MARKS)
    assert watermarks.look(400, 0.0) is Level.OPEN
    assert watermarks.look(399, 1.0) is Level.CLOSED
    assert watermarks.look(200, 2.0) is Level.CLOSED
    assert watermarks.look(199, 3.0) is Level.SHED
    assert watermarks.look(399, 4.0) is Level.SHED
    assert watermarks.look(400, 5.0) is Level.CLOSED
    assert watermarks.look(499, 60.0) is Level.CLOSED
    assert watermarks.look(500, 61.0) is Level.CLOSED
    assert watermarks.look(499, 64.0) is Level.CLOSED  # not for long enough
    assert watermarks.look(500, 65.0) is Level.CLOSED
    assert watermarks.look(500, 65.0 + CALM_S) is Level.OPEN


def test_without_marks_every_level_is_open() -> None:
    watermarks = Watermarks(Marks(0, 0))
    assert watermarks.look(0, 0.0) is Level.OPEN
    assert watermarks.missing_blocks(0, 10, 100, 0, 0.0) == 0
    with pytest.raises(ValueError, match="critical_bytes"):
        Marks(low_bytes=1, critical_bytes=2)


def test_what_is_given_back_brings_memory_above_the_mark_where_the_worker_opens() -> None:
    watermarks = Watermarks(MARKS)
    watermarks.look(150, 0.0)
    blocks = watermarks.missing_blocks(150, 30, 100, 0, 0.0)
    assert 150 + 30 * blocks >= MARKS.reopen_bytes > 150 + 30 * (blocks - 1)
    watermarks.look(510, 1.0)
    assert watermarks.missing_blocks(510, 30, 100, blocks, 1.0) == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    taken=st.lists(st.integers(0, 3000), min_size=1, max_size=20),
    held=st.integers(0, 64),
    block_bytes=st.integers(1, 40),
)
def test_whatever_others_take_a_worker_opens_again_with_all_its_blocks_once_they_leave(
    taken: list[int], held: int, block_bytes: int
) -> None:
    """A machine of 4,000 bytes, a pool of 64 blocks of which `held` can never be given back."""
    watermarks, retired, now = Watermarks(MARKS), 0, 0.0
    for others in [*(amount for amount in taken for _ in range(5)), *[0] * 100]:
        now += 1.0
        available = 4000 - 64 * block_bytes - others + retired * block_bytes
        level = watermarks.look(available, now)
        more = watermarks.missing_blocks(available, block_bytes, 64, retired, now)
        assert more <= 0 if level is Level.OPEN else more >= 0
        assert more >= 0 or available + more * block_bytes >= MARKS.reopen_bytes
        retired = min(retired + more, max(retired, 64 - held))
        assert 0 <= retired <= 64
    assert (watermarks.level, retired) == (Level.OPEN, 0)


@pytest.mark.parametrize("others", range(700, 4000, 300))
def test_memory_that_stays_taken_leaves_a_smaller_pool_and_no_to_and_fro(others: int) -> None:
    watermarks, retired, changes, was = Watermarks(MARKS), 0, [], Level.OPEN
    for second in range(200):
        available = 1000 - others + 40 * retired
        level = watermarks.look(available, float(second))
        if level is not was:
            changes.append((was, level))
        was = level
        retired += watermarks.missing_blocks(available, 40, 100, retired, float(second))
    assert watermarks.level is Level.OPEN
    assert 1000 - others + 40 * retired >= MARKS.reopen_bytes
    assert len(changes) <= 3


# ---- blocks


def test_free_blocks_retire_before_cached_ones_and_used_ones_never() -> None:
    pool = BlockPool(8, 4)
    cache = PrefixCache(pool)
    used = pool.alloc(3)
    cached = pool.alloc(2)
    assert used is not None and cached is not None
    for name, block in zip((b"a", b"b"), cached, strict=True):
        cache.insert(name, block)
    pool.decref(cached)
    assert sorted(pool.retire(3)) == [5, 6, 7]
    assert len(cache) == 2
    pool.check_integrity()
    assert len(pool.retire(9)) == 2
    assert len(cache) == 0
    assert (pool.retired_blocks, pool.usable_blocks, pool.used_blocks, pool.available_blocks) == (5, 3, 3, 0)
    assert pool.state(used[0]) is BlockState.USED
    assert pool.state(7) is BlockState.RETIRED
    pool.check_integrity()
    cache.check_integrity()
    assert pool.alloc(1) is None
    assert len(pool.restore(2)) == 2
    assert pool.alloc(2) is not None
    pool.restore(99)
    pool.check_integrity()
    assert (pool.retired_blocks, pool.used_blocks) == (0, 5)


# ---- the worker


def test_a_closed_worker_refuses_whoever_is_new_and_serves_whoever_is_there() -> None:
    world = World(make_settings(max_num_seqs=1))
    running, waiting = world.submit(5), world.submit(6)
    world.step()
    world.scheduler.close("memory_pressure", 5.0)
    assert world.scheduler.load(0, world.now).closed == "memory_pressure"
    for accept, adopted in ((world.scheduler.submit, False), (world.scheduler.adopt, True)):
        late = world.make(7, adopted=adopted)
        assert accept(late, world.now) == Rejected("memory_pressure", 5.0)
        del world.seen[late.key]
    world.run()
    for request in (running, waiting):
        world.assert_output_as_alone(request)
    world.scheduler.open()
    assert world.scheduler.load(0, world.now).closed == ""
    world.submit(7)
    world.run()
    world.assert_drained()


def test_the_lowest_class_and_of_it_the_latest_gives_its_blocks_up_first() -> None:
    world = World(num_blocks=40)
    first, second, urgent, late = (world.submit(10, 20, priority=priority) for priority in (1, 1, 0, 1))
    while not all(r.state is State.DECODING for r in (first, second, urgent, late)):
        world.step()
    held = len(late.block_ids)
    world.scheduler.resize(world.pool.available_blocks + held, shed=True)
    world.step()
    assert [r.preemptions for r in (first, second, urgent, late)] == [0, 0, 0, 1]
    world.scheduler.resize(world.pool.retired_blocks + world.pool.available_blocks + 1, shed=True)
    world.step()
    assert [r.preemptions for r in (first, second, urgent)] == [0, 1, 0]
    assert world.scheduler.stats()["memory_shed"] == 2
    world.run()
    for request in (first, second, urgent, late):
        world.assert_output_as_alone(request)
    world.scheduler.resize(0)
    world.step()
    world.assert_drained()


def test_without_shedding_only_what_nobody_uses_is_given_back() -> None:
    world = World(num_blocks=40)
    request = world.submit(10, 20)
    world.step()
    used = world.pool.used_blocks
    world.scheduler.resize(40)
    world.step()
    assert request.preemptions == 0
    assert world.pool.retired_blocks > 0
    assert world.pool.used_blocks >= used
    world.run()
    world.assert_output_as_alone(request)


def test_the_largest_request_keeps_its_room_and_everybody_ends_exactly() -> None:
    world = World(num_blocks=40)
    requests = [world.submit(30, 50), *(world.submit(8, 12) for _ in range(6))]
    for _ in range(4):
        world.step()
    world.scheduler.resize(40, shed=True)
    world.step()
    assert world.pool.usable_blocks == world.pool.blocks_for(80)
    world.run()
    for request in requests:
        world.assert_output_as_alone(request)
    world.scheduler.resize(40, shed=True)
    world.step()
    assert world.pool.usable_blocks == 5


def test_nothing_is_copied_to_the_host_while_memory_is_short() -> None:
    world = World(make_settings(host_blocks=40, host_copy_block_s=0.0), num_blocks=40)
    request = world.submit(10, 20)
    while request.state is not State.DECODING:
        world.step()
    paused = world.submit(30, 4)
    while paused.state is not State.DECODING:
        world.step()
    assert world.scheduler.pause(paused.key, Keep.KEEP, world.now)
    world.scheduler.resize(40, 40, shed=True)
    world.step()
    assert not paused.block_ids
    assert request.preemptions == 0
    assert world.scheduler.stats()["swapped_out"] == 0
    assert (world.scheduler.free_host_blocks, world.scheduler.host_blocks.retired_blocks) == (0, 40)
    world.scheduler.resize(0)
    world.step()
    assert world.scheduler.free_host_blocks == 40


def test_a_tools_long_answer_brings_blocks_back_into_use() -> None:
    world = World(num_blocks=40)
    request = world.submit(8, 8)
    while request.state is not State.DECODING:
        world.step()
    assert world.scheduler.pause(request.key, Keep.KEEP, world.now)
    world.scheduler.resize(40, shed=True)
    world.step()
    assert world.pool.usable_blocks < 25
    answer = list(range(1, 101))
    assert world.scheduler.resume(request.key, answer, world.now)
    world.truth[request.key] += answer
    world.run()
    assert request.num_output == 8
    assert world.pool.usable_blocks >= world.pool.blocks_for(116)


def test_who_is_too_large_for_what_is_in_use_is_told_to_come_again_and_is_then_let_in() -> None:
    world = World(num_blocks=40)
    world.scheduler.resize(20)
    assert world.step() is not None
    large = world.make(100, 20)
    refused = world.scheduler.submit(large, world.now)
    assert refused is not None and refused.reason == "memory_pressure" and 0.0 < refused.retry_after_s < inf
    world.scheduler.resize(0)
    world.step()
    assert world.scheduler.submit(large, world.now) is None
    world.run()
    world.assert_output_as_alone(large)
    world.assert_drained()


def test_blocks_that_a_step_takes_back_into_use_are_nobodys_before_it_is_over() -> None:
    """Their pages are touched while it runs: a pull or a copy that got one meanwhile would be written over."""
    world = World(make_settings(host_blocks=16), num_blocks=32)
    world.scheduler.resize(24, 16)
    world.step()
    running = world.submit(12, max_tokens=8)
    while running.state is not State.DECODING:
        world.step()
    world.scheduler.resize(0)
    adopted = world.adopt(22, max_tokens=2)
    plan = world.schedule()
    assert plan is not None and len(plan.memory.restored) == 24 and len(plan.memory.host_restored) == 16
    assert world.scheduler.reserve_adoptions(world.now) == []
    assert world.scheduler.free_host_blocks == 0
    assert world.scheduler.host_blocks.take_one() is None
    world.apply(plan)
    assert world.scheduler.reserve_adoptions(world.now) == [adopted.key]
    assert world.scheduler.free_host_blocks == 16
    world.pull(adopted)
    world.activate(adopted)
    world.run()
    for request in (running, adopted):
        world.assert_output_as_alone(request)
    world.assert_drained()

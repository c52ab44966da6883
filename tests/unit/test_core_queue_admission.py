"""A worker's own bounds: what a refusal says, when it says to come back, and who is refused for a lost deadline."""

from __future__ import annotations

import pytest

from headrace.core.predictor import StepPredictor
from headrace.core.records import FinishReason
from headrace.core.step_shape import StepShape
from headrace.errors import InvariantError, Rejected
from tests.core_world import World, make_settings
from workers.core.admission import QueueAdmission
from workers.core.blocks import BlockPool
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request
from workers.core.scheduler import Scheduler

STEP_S = 0.05


def refused(world: World, request: Request) -> Rejected:
    rejected = world.scheduler.submit(request, world.now)
    assert rejected is not None
    return rejected


def test_reserved_kv_counts_what_runs_and_the_output_that_is_expected() -> None:
    world = World(make_settings(max_reserved_kv_tokens=40))
    # 1. 10 tokens of prompt and 20 of output; then 5 and, by the gateway's word, 4 of 30.
    running = world.submit(10, max_tokens=20)
    world.step()
    short = world.submit(5, max_tokens=30, predicted_output_tokens=4)
    # 2. 39 are reserved: 2 more do not fit, though nobody waits but one.
    assert refused(world, world.make(1, max_tokens=1)).reason == "reserved_kv"
    assert world.scheduler.adopt(world.make(1, max_tokens=1, adopted=True), world.now) == Rejected("reserved_kv", 1.0)
    world.run()
    assert running.finish_reason is short.finish_reason is FinishReason.LENGTH
    # 3. One alone may be larger than the bound.
    world.submit(30, max_tokens=30)
    world.run()
    world.assert_drained()


def test_the_time_to_wait_is_the_excess_by_the_pace_at_which_requests_start() -> None:
    admission = QueueAdmission(make_settings(max_waiting_requests=4))
    world = World()
    # 1. Ten requests, one started each half second.
    line = [world.make(2) for _ in range(10)]
    for request in line[:4]:
        admission.enter(request, 0.0, 0.0)
    for number in range(60):
        now = 0.5 * (number + 1)
        admission.started(line[0].key, now)
        admission.left(line[0].key, now)
        line.append(world.make(2))
        line.pop(0)
        admission.enter(line[3], 0.0, now)
    # 2. One place is missing: half a second.
    rejected = admission.refusal(world.make(2), 0.0, 30.0)
    assert rejected is not None and rejected.reason == "queue_full"
    assert rejected.retry_after_s == pytest.approx(0.5, rel=0.2)


def test_each_bound_has_its_reason_and_the_longest_wait_is_told() -> None:
    settings = make_settings(max_waiting_tokens=10, max_queue_s=1.0, max_reserved_kv_tokens=100)
    admission, world = QueueAdmission(settings), World()
    # A single request may be above every bound.
    huge = world.make(200)
    assert admission.refusal(huge, 30.0, 0.0) is None
    admission.enter(huge, 30.0, 0.0)
    small = world.make(1, max_tokens=1)
    rejected = admission.refusal(small, 0.1, 0.0)
    assert rejected is not None and rejected.reason == "queue_full"
    # It has started: its KV is still spoken for.
    admission.started(huge.key, 2.0)
    rejected = admission.refusal(small, 0.1, 2.0)
    assert rejected is not None and rejected.reason == "reserved_kv"
    admission.left(huge.key, 3.0)
    admission.left(huge.key, 4.0)
    assert admission.refusal(small, 0.1, 4.0) is None
    # Seconds that wait.
    admission.enter(small, 0.8, 5.0)
    rejected = admission.refusal(world.make(1, max_tokens=1), 0.3, 5.0)
    assert rejected is not None and rejected.reason == "queue_seconds"
    assert admission.queue_s == pytest.approx(0.8)


def test_a_planted_difference_is_found() -> None:
    world = World()
    request = world.submit(3)
    world.scheduler.admission.left(request.key, 0.0)
    with pytest.raises(InvariantError, match="admission"):
        world.scheduler.check_integrity()


def slow_worker() -> World:
    """Every step takes STEP_S, and the worker knows it."""
    predictor = StepPredictor()
    for rows in [1, 2, 4, 8] * 20:
        predictor.observe(StepShape(rows, 20 * rows, 0, 0, 0, rows), STEP_S)
    world = World()
    world.pool = BlockPool(world.num_blocks, world.settings.block_size)
    world.cache = PrefixCache(world.pool)
    world.scheduler = Scheduler(world.settings, world.pool, world.cache, predictor)
    world.submit(2, max_tokens=60)
    world.step()
    world.scheduler._learn_pace()
    return world


def test_an_output_that_may_end_early_is_not_lost_because_it_may_be_long() -> None:
    """Every request has a deadline and most have room for hundreds of tokens; nearly all end far before."""
    world = slow_worker()
    left = world.now + 2.0
    may_stop = world.submit(2, max_tokens=200, ignore_eos=False, deadline=left)
    will_not = world.submit(2, max_tokens=200, ignore_eos=True, deadline=left)
    at_least = world.submit(2, max_tokens=200, ignore_eos=False, min_tokens=100, deadline=left)
    world.now += 0.01
    world.schedule()
    assert {key for key, _ in world.scheduler.refused} == {will_not.key, at_least.key}
    assert may_stop.finish_reason is None


def test_a_request_that_is_alone_is_not_refused_by_the_pace_of_worse_times() -> None:
    """Only steps mend the pace: a worker that refuses everybody would never learn that it is fast again."""
    world = slow_worker()
    world.run()
    world.scheduler._pace.decode_token_s = 10.0
    alone = world.submit(2, max_tokens=3, deadline=world.now + 5.0)
    world.now += 0.01
    world.run()
    assert world.scheduler.refused == []
    assert alone.finish_reason is FinishReason.LENGTH
    world.assert_drained()

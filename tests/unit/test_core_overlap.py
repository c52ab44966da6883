"""A step planned behind the one that runs: whose rows it has, what its tokens are, and what waits for the last plan
that names a request. Steps are numbered from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from headrace.core.records import FinishReason
from headrace.errors import InvariantError
from tests.core_world import EOS, World, make_settings, toy_token
from workers.core.blocks import BlockState
from workers.core.plan import StepPlan
from workers.core.request import Keep, Request, State


def planned(world: World) -> StepPlan:
    plan = world.schedule()
    assert plan is not None
    return plan


def decoding(world: World, *prompts: int | Sequence[int], max_tokens: int = 8, **options: object) -> list[Request]:
    """After step 1, which has sampled their first tokens."""
    requests = [world.submit(prompt, max_tokens, **options) for prompt in prompts]
    world.apply(planned(world))
    assert all(request.state is State.DECODING for request in requests)
    return requests


def test_a_decode_is_planned_again_with_the_token_that_the_running_step_samples() -> None:
    world = World()
    a, b = decoding(world, 5, 6)
    two = planned(world)
    assert two.token_ids == [a.token_ids[-1], b.token_ids[-1]]
    three = planned(world)
    assert (three.keys, three.start_pos, three.token_ids) == ([a.key, b.key], [6, 7], [-1, -2])
    assert world.apply(two).token_offsets == [1, 1]
    four = planned(world)
    assert (four.start_pos, four.token_ids) == ([7, 8], [-1, -2])
    world.apply(three)
    world.apply(four)
    world.run()
    world.assert_output_as_alone(a)
    world.assert_output_as_alone(b)
    world.assert_drained()


def test_two_steps_are_on_their_way_at_most_and_the_older_one_is_applied_first() -> None:
    world = World()
    decoding(world, 5)
    two, three = planned(world), planned(world)
    with pytest.raises(InvariantError):
        world.scheduler.schedule(world.now)
    world.compute(two)
    with pytest.raises(InvariantError):
        world.apply(three)


def test_a_token_is_found_at_the_place_that_its_row_had_in_the_step_before() -> None:
    """Turns are taken two by two, a row is new, and others have moved into places that were left."""
    world = World(make_settings(max_decode_rows=2, next_token_deadline_s=0.0))
    first = decoding(world, 5, 6, 7, max_tokens=6)
    late = world.submit(4, 7)
    plans = [planned(world)]
    for _ in range(30):
        if (plan := world.schedule()) is not None:
            fed = [key for key, token in zip(plan.keys, plan.token_ids, strict=False) if token < 0]
            assert set(fed) <= set(plans[-1].keys if plans else [])
            plans.append(plan)
        if plans:
            world.apply(plans.pop(0))
    for request in (*first, late):
        world.assert_output_as_alone(request)
    world.assert_drained()


def test_a_row_that_ends_by_length_with_the_running_step_is_not_planned_again() -> None:
    world = World()
    a, b = decoding(world, 5, 6, max_tokens=2)
    two = planned(world)
    assert two.keys == [a.key, b.key]
    assert world.schedule() is None
    assert [reason for _, reason in world.apply(two).finished] == [FinishReason.LENGTH] * 2
    world.assert_drained()


def test_a_row_that_turns_out_to_have_ended_is_void_and_its_blocks_wait_for_it() -> None:
    world = World()
    [request] = decoding(world, ending_second(world.vocab), max_tokens=9, ignore_eos=False)
    two, three = planned(world), planned(world)
    blocks = list(request.block_ids)
    assert world.apply(two).finished == [(request.key, FinishReason.EOS)]
    assert request.state is State.FINISHED and world.delivered[request.key][-1] == EOS
    assert all(world.pool.state(block) is BlockState.USED for block in blocks)
    # Nobody gets them meanwhile.
    other = world.submit(4, 1)
    four = planned(world)
    assert not set(other.block_ids) & set(blocks)
    events = world.apply(three)
    assert (events.token_keys, events.finished) == ([], [])
    assert request.block_ids == [] and request.key not in world.scheduler.requests
    world.apply(four)
    world.assert_drained()


def ending_second(vocab: int) -> list[int]:
    """A prompt whose second output token is the end."""
    prompts = ([number] * 7 for number in count(1))
    return next(p for p in prompts if (first := toy_token(p, vocab)) and toy_token([*p, first], vocab) == EOS)


def test_a_cancelled_request_keeps_its_blocks_until_the_last_plan_that_names_it() -> None:
    world = World()
    a, b = decoding(world, 5, 6)
    two, three = planned(world), planned(world)
    assert world.scheduler.finish(a.key, FinishReason.CANCELLED, world.now)
    assert world.apply(two).token_keys == [b.key]
    assert a.block_ids
    four = planned(world)
    assert four.keys == [b.key] and four.token_ids == [-2]
    world.apply(three)
    assert not a.block_ids
    world.apply(four)
    world.run()
    world.assert_output_as_alone(b)
    world.assert_drained()


def test_a_prompt_goes_on_behind_its_running_chunk_and_is_published_chunk_by_chunk() -> None:
    world = World(make_settings(long_prefill_token_threshold=8, max_num_batched_tokens=8))
    request = world.submit(20, 2)
    one, two = planned(world), planned(world)
    assert (one.start_pos, two.start_pos) == ([0], [8])
    assert len(world.cache) == 0 and world.scheduler.complete_tokens(request) == 0
    world.apply(one)
    assert len(world.cache) == 2 and world.scheduler.complete_tokens(request) == 8
    three = planned(world)
    assert (three.start_pos, three.num_tokens, three.samples) == ([16], [4], [True])
    world.apply(two)
    # Its first token is not there yet: it sits out one step.
    assert world.schedule() is None
    world.apply(three)
    world.run()
    world.assert_output_as_alone(request)
    world.assert_drained()


def test_a_pause_waits_for_all_plans_that_name_the_request_and_no_further_one_does() -> None:
    world = World()
    a, b = decoding(world, 5, 6)
    two, three = planned(world), planned(world)
    assert world.scheduler.pause(a.key, Keep.DROP, world.now)
    world.apply(two)
    assert a.state is State.DECODING
    four = planned(world)
    assert four.keys == [b.key]
    world.apply(three)
    assert a.state is State.TOOL_WAIT and a.num_output == 3
    world.apply(four)
    world.answer(a, [3, 4])
    world.run()
    world.assert_output_as_alone(b)
    world.assert_drained()


def test_blocks_that_a_plan_behind_another_copies_out_go_to_nobody_else_before_it_is_over() -> None:
    world = World(make_settings(host_blocks=8))
    a, b = decoding(world, 5, 6)
    two, three = planned(world), planned(world)
    assert world.scheduler.pause(b.key, Keep.OFFLOAD, world.now)
    world.apply(two)
    four = planned(world)
    world.apply(three)
    five = planned(world)
    assert not four.swap_out and five.swap_out and five.keys == [a.key]
    late = world.adopt(5)
    assert world.scheduler.reserve_adoptions(world.now) == []
    # The copy of somebody who has left is still to be written.
    free = world.scheduler.free_host_blocks
    assert world.scheduler.finish(b.key, FinishReason.CANCELLED, world.now)
    assert world.scheduler.free_host_blocks == free < 8
    world.apply(four)
    assert world.scheduler.reserve_adoptions(world.now) == []
    world.apply(five)
    assert world.scheduler.free_host_blocks == 8
    assert world.scheduler.reserve_adoptions(world.now) == [late.key]
    assert world.scheduler.finish(late.key, FinishReason.CANCELLED, world.now)
    assert world.scheduler.release_quarantine(late.key)
    world.run()
    world.assert_output_as_alone(a)
    world.assert_drained()


def test_a_higher_class_waits_for_the_running_step_before_it_takes_a_row() -> None:
    world = World(make_settings(policy="slo_fair", ttft_target_s=0.0, max_num_seqs=1))
    [low] = decoding(world, 8, max_tokens=6, priority=1)
    two = planned(world)
    high = world.submit(4, 1)
    assert world.schedule() is None and low.state is State.DECODING
    world.apply(two)
    three = planned(world)
    assert three.keys == [high.key] and low.state is State.PREEMPTED
    world.apply(three)
    world.run()
    world.assert_output_as_alone(low)
    world.assert_output_as_alone(high)
    world.assert_drained()


def test_nobody_is_preempted_while_a_step_is_on_its_way() -> None:
    world = World(make_settings(block_size=2), num_blocks=7)
    a, b = decoding(world, 4, 4, max_tokens=6)
    two = planned(world)
    three = planned(world)  # takes the last block
    world.apply(two)
    assert world.schedule() is None and world.scheduler.stats()["preemptions"] == 0
    world.apply(three)
    four = planned(world)
    assert four.keys == [a.key] and b.state is State.PREEMPTED
    world.apply(four)
    world.run()
    world.assert_output_as_alone(a)
    world.assert_output_as_alone(b)
    world.assert_drained()


def test_memory_changes_with_no_other_step_on_its_way() -> None:
    world = World(num_blocks=16)
    decoding(world, 5)
    two = planned(world)
    world.scheduler.resize(4)
    assert world.schedule() is None
    world.apply(two)
    three = planned(world)
    assert len(three.memory.retired) == 4
    assert world.schedule() is None
    world.apply(three)
    world.scheduler.resize(0)
    world.run()
    world.assert_drained()


def test_a_step_counts_from_the_end_of_the_one_before_it() -> None:
    world = World(cost=lambda shape: 3.0)
    request = world.submit(5, 8)
    one = planned(world)
    world.apply(one)
    late = world.submit(4, 4)
    two = planned(world)
    world.now += 1.0
    other = world.submit(4, 1)
    three = planned(world)
    assert world.scheduler.started == [late.key] and other.first_scheduled_at is None
    world.now += 0.5
    world.apply(two)
    load = world.scheduler.load(0, world.now)
    assert load.step_s == 4.5 and load.step_age_s == 0.0
    assert world.scheduler.started == [other.key] and other.first_scheduled_at == world.now
    assert other.ledger.queue_s == 3.5
    world.apply(three)
    assert world.scheduler.load(0, world.now).step_s == 3.0
    world.run()
    for each in (request, late, other):
        world.assert_output_as_alone(each)
    world.assert_drained()

"""Old faults of classes, deadlines and paused requests: each test says what went wrong before."""

from __future__ import annotations

import pytest

from headrace.core.records import FinishReason
from tests.core_world import World, linear_cost, linear_predictor, make_settings
from workers.core.request import Keep, Request, State

EASY: dict[str, object] = {"policy": "slo_fair", "ttft_target_s": 0.0}
STEP_S = 0.1


def busy(settings: dict[str, object], num_blocks: int = 400) -> World:
    """A worker with a known pace, 10 ms a token, and one long decode."""
    world = World(
        make_settings(**(EASY | settings)),
        num_blocks=num_blocks,
        predictor=linear_predictor(0.01),
        cost=linear_cost(0.01),
    )
    world.submit(4, max_tokens=500)
    for _ in range(40):
        world.step()
    assert world.scheduler._pace.known
    return world


@pytest.mark.parametrize("priority", [-(2**31 - 1), 0, 2**31 - 1])
def test_a_late_request_of_any_class_goes_last_and_stops_nobody(priority: int) -> None:
    # Was: a late entry with a very high class was put back at the head of its heap for ever, under the engine's lock.
    world = busy({"lost_deadline": "best_effort", "max_num_seqs": 2})
    late = world.submit(100, max_tokens=4, deadline=world.now + 0.05, priority=priority)
    world.step()
    assert late.late
    on_time = world.submit(8, max_tokens=2)
    world.step()
    assert (late.state, on_time.state) == (State.WAITING, State.DECODING) or late.first_scheduled_at is not None
    world.scheduler.finish(late.key, FinishReason.CANCELLED, world.now)
    world.run()
    world.assert_drained()


@pytest.mark.parametrize("was_started", [False, True])
def test_a_lower_class_is_served_in_the_end_also_after_a_preemption(was_started: bool) -> None:
    # Was: a preempted request of a lower class stood behind every later arrival of a higher one, whatever its age.
    world = World(make_settings(max_num_seqs=2, **EASY), cost=lambda _: STEP_S)
    low = world.submit(8, max_tokens=6, priority=1) if was_started else None
    for step in range(300):
        while len(world.scheduler._queues.line) < 2:
            world.submit(8, max_tokens=4)
        if low is None and step == 3:
            low = world.submit(8, max_tokens=6, priority=1)
        world.step()
        if low is not None and low.state is State.FINISHED:
            break
    assert low is not None and low.state is State.FINISHED
    assert low.preemptions <= 1
    assert world.now < 10.0, "a second of waiting is worth a class"


def test_between_two_preemptions_by_a_higher_class_lies_progress() -> None:
    # Was: 150 preemptions and not one token of output in a minute.
    settings = make_settings(
        max_num_seqs=1, max_num_batched_tokens=16, long_prefill_token_threshold=16, min_progress_tokens=16, **EASY
    )
    world = World(settings, cost=lambda _: STEP_S)
    low = world.submit(64, max_tokens=6, priority=1, no_cache=True)
    for step in range(200):
        if step % 4 == 2:
            world.submit(4, max_tokens=1)
        world.step()
    assert low.state is State.FINISHED
    assert low.preemptions <= 1 + 6 // 16


def test_a_prompt_that_the_cache_has_is_not_lost() -> None:
    # Was: its whole prefill was counted although next to nothing was to be computed.
    world = busy({"max_num_seqs": 3, "max_num_batched_tokens": 512, "long_prefill_token_threshold": 512})
    prompt = list(range(9_000, 9_400))
    world.submit(prompt, max_tokens=1)
    world.step()
    again = world.submit(prompt, max_tokens=2, deadline=world.now + 1.0)
    fresh = world.submit(400, max_tokens=2, deadline=world.now + 1.0)
    for _ in range(3):
        world.step()
    assert again.finish_reason is FinishReason.LENGTH
    assert fresh.finish_reason is FinishReason.DEADLINE
    assert [(key, why) for key, why in world.scheduler.refused] == [(fresh.key, "deadline_lost")]


def test_doubtful_deadlines_do_not_hide_the_urgent_one_behind_them() -> None:
    # Was: a doubtful request that was to be looked at again soon stood at the head of the urgent ones.
    world = busy({"max_num_seqs": 2, "max_num_batched_tokens": 8, "long_prefill_token_threshold": 8})
    for _ in range(3):
        world.submit(10, max_tokens=60, deadline=world.now + 0.6, ignore_eos=False)
    world.scheduler._queues.line.lost(world.now, lambda _: 0)
    urgent = world.submit(20, max_tokens=1, deadline=world.now + 0.75)
    assert world.scheduler._queues.line.best(world.now) is urgent


def test_only_as_many_readers_are_revoked_for_a_class_as_its_request_lacks() -> None:
    # Was: one more at each look, until the step that was on its way had ended.
    world = World(make_settings(**EASY), num_blocks=9)
    held = [world.submit(8, max_tokens=4, hand_off=True, priority=5) for _ in range(4)]
    world.step()
    world.submit(2, max_tokens=30, priority=5)
    world.step()
    world.submit(7, max_tokens=2)
    assert world.schedule() is not None
    revoked = 0
    while (key := world.scheduler.revocable(world.now)) is not None:
        revoked += 1
        world.scheduler.finish(key, FinishReason.ERROR, world.now)
    assert revoked == 1 < len(held)


def test_blocks_with_a_copy_to_be_made_are_nobodys_before_it_is_made() -> None:
    # Was: a paused request whose table is a block longer than what is computed gave its blocks to an adoption at once;
    # the adoption's read overwrote them before the step that copies.
    world = World(make_settings(host_blocks=2), num_blocks=6)
    paused = world.submit(8, max_tokens=10)
    world.step()
    world.scheduler.pause(paused.key, Keep.KEEP, world.now)
    adopted = world.adopt(list(range(9_000, 9_022)), max_tokens=2)
    reserved = world.scheduler.reserve_adoptions(world.now)
    while not reserved:
        plan = world.schedule()
        assert plan is not None
        world.apply(plan)
        reserved = world.scheduler.reserve_adoptions(world.now)
    world.pull(adopted)
    world.activate(adopted)
    world.run()
    assert world.scheduler.resume(paused.key, [7, 7], world.now)
    world.truth[paused.key] += [7, 7]
    world.run()
    world.assert_drained()


def test_a_tools_answer_that_can_never_fit_is_refused_and_nobody_waits_for_it() -> None:
    # Was: the request waited for blocks that the pool does not have, and everybody behind it.
    world = World(make_settings(), num_blocks=8)
    paused = world.submit(8, max_tokens=10)
    world.step()
    world.scheduler.pause(paused.key, Keep.KEEP, world.now)
    refused = world.scheduler.resume_refusal(paused.key, 40)
    assert refused is not None and refused.reason == "too_large"
    assert not world.scheduler.resume(paused.key, [1] * 40, world.now)
    other = world.submit(20, max_tokens=2)
    world.run()
    assert (paused.state, other.state) == (State.TOOL_WAIT, State.FINISHED)
    assert world.scheduler.resume(paused.key, [], world.now), "an answer may be empty"
    world.run()
    world.assert_drained()


def test_a_place_in_a_batch_is_not_kept_for_a_later_one() -> None:
    # Was: who joined and was cancelled left room for a newcomer in the middle of a fixed batch.
    settings = {"batching": "window", "batch_window_s": 5.0, "max_num_batched_tokens": 8}
    world = World(make_settings(long_prefill_token_threshold=8, **settings), cost=lambda _: STEP_S)
    first, second = world.submit(8, max_tokens=20), world.submit(8, max_tokens=20)
    world.now = 6.0
    world.step()
    world.scheduler.finish(second.key, FinishReason.CANCELLED, world.now)
    world.step()
    world.step()
    newcomer: Request = world.submit(4, max_tokens=4)
    world.step()
    assert (first.state, newcomer.state) == (State.DECODING, State.WAITING)


def test_a_look_at_lower_classes_that_is_in_vain_is_not_repeated_in_every_step() -> None:
    # Was: every step walked over all blocks of all lower rows, several times, as long as preempting did not pay.
    world = World(make_settings(max_num_seqs=30, class_weight_ms=1.0, age_boost_ms_per_s=0.0, **EASY), num_blocks=2_000)
    for _ in range(30):
        world.submit(36, max_tokens=100, priority=1, no_cache=True)
    while world.scheduler.load(0, world.now).running_requests < 30 or world.scheduler._queues.prefilling:
        world.step()
    waits = world.submit(8)
    looks = []
    choose = world.scheduler._preemption.choose_victim
    world.scheduler._preemption.choose_victim = lambda *args: looks.append(world.now) or choose(*args)  # type: ignore
    for _ in range(36):
        world.step()
    assert waits.state is State.WAITING
    assert 1 <= len(looks) <= 36 // 9

"""A request whose client runs a tool: it computes nothing, may lose its blocks, and goes on with the tool's tokens."""

import pytest

from headrace.core.records import FinishReason
from tests.core_world import World, make_settings
from workers.core.request import Keep, Request, State


def answered(world: World, request: Request, answer: list[int]) -> None:
    assert world.scheduler.resume(request.key, answer, world.now)
    world.truth[request.key] += answer


@pytest.mark.parametrize("host_blocks", [0, 40])
@pytest.mark.parametrize("keep", Keep)
def test_a_paused_request_goes_on_with_the_tools_tokens(keep: Keep, host_blocks: int) -> None:
    world = World(make_settings(host_blocks=host_blocks))
    request, mate = world.submit(9, max_tokens=12), world.submit(5, max_tokens=30)
    for _ in range(4):
        world.step()
    # 1. Paused: no step names it, and it is no running request.
    before = list(world.delivered[request.key])
    assert world.scheduler.pause(request.key, keep, world.now)
    for _ in range(3):
        plan = world.schedule()
        assert plan is not None and plan.keys == [mate.key]
        world.apply(plan)
    assert request.state is State.TOOL_WAIT
    assert world.scheduler.load(0, world.now).running_requests == 1
    assert bool(request.block_ids) == (keep is Keep.KEEP)
    assert (request.host is not None) == (keep is Keep.OFFLOAD and host_blocks > 0)
    # 2. The toy runner checks that its next row sees prompt, output and the tool's answer.
    answered(world, request, [7, 7, 7, 7, 7])
    world.run()
    assert world.delivered[request.key][: len(before)] == before
    assert len(world.delivered[request.key]) == 12, "the tool's tokens are no output"
    assert request.ledger.tool_wait_s == 3.0
    ledger = request.ledger
    life = ledger.queue_s + ledger.prefill_s + ledger.sampling_s + ledger.decode_s + ledger.tool_wait_s
    assert request.finished_at is not None and life == request.finished_at - request.accepted_at
    world.assert_drained()


def test_a_pause_during_a_step_begins_when_the_step_is_over() -> None:
    world = World()
    request = world.submit(5, max_tokens=9)
    world.step()
    plan = world.schedule()
    assert plan is not None
    assert world.scheduler.pause(request.key, Keep.DROP, world.now)
    assert request.state is State.DECODING
    assert world.apply(plan).token_keys == [request.key]
    assert request.state is State.TOOL_WAIT and request.block_ids == []
    answered(world, request, [3])
    world.run()
    world.assert_drained()


def test_a_resume_that_overtakes_its_pause_undoes_it() -> None:
    world = World()
    request = world.submit(5, max_tokens=9)
    world.step()
    plan = world.schedule()
    assert plan is not None
    world.scheduler.pause(request.key, Keep.KEEP, world.now)
    assert not world.scheduler.resume(request.key, [3], world.now), "it has not paused: the caller tries again"
    world.apply(plan)
    assert request.state is State.DECODING
    world.run()
    world.assert_output_as_alone(request)
    world.assert_drained()


def test_blocks_of_a_paused_request_go_before_those_of_a_running_one() -> None:
    world = World(num_blocks=8)
    paused, running = world.submit(7, max_tokens=20), world.submit(7, max_tokens=20)
    world.step()
    world.scheduler.pause(paused.key, Keep.KEEP, world.now)
    while running.state is not State.FINISHED:
        world.step()
    assert (running.preemptions, paused.state, paused.block_ids) == (0, State.TOOL_WAIT, [])
    answered(world, paused, [1, 2])
    world.run()
    world.assert_drained()


@pytest.mark.parametrize("host_blocks", [0, 8])
@pytest.mark.parametrize("adopted", [False, True])
def test_blocks_of_a_paused_request_let_others_in(adopted: bool, host_blocks: int) -> None:
    """A tool may never answer: whoever came meanwhile would have waited for it, with nothing else to run."""
    world = World(make_settings(host_blocks=host_blocks), num_blocks=8)
    paused = world.submit(17, max_tokens=12)
    world.step()
    world.step()
    world.scheduler.pause(paused.key, Keep.KEEP, world.now)
    other = world.adopt(15, max_tokens=8) if adopted else world.submit(15, max_tokens=8)
    for _ in range(3):
        world.step()
    if adopted:
        assert other.state is State.TRANSFERRING
        world.pull(other)
        world.activate(other)
    world.run()
    assert other.state is State.FINISHED
    assert (paused.state, paused.block_ids) == (State.TOOL_WAIT, [])
    assert (paused.host is not None) == bool(host_blocks)
    answered(world, paused, [1, 2])
    world.run()
    world.assert_drained()


def test_a_higher_class_takes_a_row_beside_a_paused_request() -> None:
    """Old fault: the paused request was chosen for a row, which it does not have, and the engine ended."""
    world = World(make_settings(policy="slo_fair", max_num_seqs=2))
    paused, *running = [world.submit(8, max_tokens=20) for _ in range(3)]
    world.step()
    world.step()
    world.scheduler.pause(paused.key, Keep.KEEP, world.now)
    world.step()
    assert [r.state for r in running] == [State.DECODING, State.DECODING]
    first = world.make(8, max_tokens=5)
    first.priority = -1
    assert world.scheduler.submit(first, world.now) is None
    world.step()
    assert first.state is State.DECODING
    assert sorted(r.state for r in running) == [State.DECODING, State.PREEMPTED]
    assert paused.block_ids, "no block was lacking"
    answered(world, paused, [1])
    world.run()
    world.assert_drained()


@pytest.mark.parametrize("keep", Keep)
def test_a_paused_request_can_be_cancelled_or_expire(keep: Keep) -> None:
    world = World(make_settings(host_blocks=8))
    cancelled, expired = world.submit(5, max_tokens=9), world.submit(5, max_tokens=9, deadline=world.now + 5)
    world.step()
    for request in (cancelled, expired):
        world.scheduler.pause(request.key, keep, world.now)
    world.step()
    assert world.scheduler.finish(cancelled.key, FinishReason.CANCELLED, world.now)
    assert world.scheduler.expire(world.now + 9) == [expired.key]
    assert not world.scheduler.resume(expired.key, [1], world.now)
    world.assert_drained()


def test_only_a_decode_pauses() -> None:
    world = World()
    waiting = world.submit(5)
    assert not world.scheduler.pause(waiting.key, Keep.KEEP, world.now)
    world.scheduler.finish(waiting.key, FinishReason.CANCELLED, world.now)
    world.assert_drained()

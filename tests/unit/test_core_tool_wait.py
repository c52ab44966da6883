"""A request whose client runs a tool: it computes nothing, may lose its blocks, and goes on with the tool's tokens."""

import pytest

from headrace.core.records import FinishReason
from headrace.errors import InvariantError
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from tests.core_world import World, make_settings
from workers.core.request import HostCopy, Keep, Request, State


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


@pytest.mark.parametrize("adopted", [False, True])
def test_paused_requests_that_share_their_blocks_give_them_up_together(adopted: bool) -> None:
    world = World(num_blocks=40)
    stem = [7_000_000 + i for i in range(100)]
    paused = []
    for last in range(4):
        paused.append(world.submit([*stem, last], max_tokens=30))
        world.step()
        world.step()
    for request in paused:
        assert world.scheduler.pause(request.key, Keep.KEEP, world.now)
    other = world.adopt(110, max_tokens=8) if adopted else world.submit(110, max_tokens=8)
    world.step()
    if adopted:
        assert other.state is State.TRANSFERRING
        world.pull(other)
        world.activate(other)
    world.run()
    assert other.state is State.FINISHED
    for request in paused:
        answered(world, request, [1, 2])
    world.run()
    world.assert_drained()


def test_blocks_that_somebody_else_uses_too_are_not_taken_in_vain() -> None:
    world = World(num_blocks=40)
    stem = [7_000_000 + i for i in range(100)]
    requests = []
    for last in range(3):
        requests.append(world.submit([*stem, last], max_tokens=30))
        world.step()
        world.step()
    for request in requests[1:]:
        assert world.scheduler.pause(request.key, Keep.KEEP, world.now)
    world.submit(110, max_tokens=8)
    world.step()
    assert all(request.block_ids for request in requests)


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


# ---- calls that ended some tokens ago


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("dropped", [0, 1, 4, 9])
def test_what_was_sampled_behind_a_call_is_forgotten(dropped: int, is_running: bool) -> None:
    """The toy runner checks that the next row sees prompt, call and answer, and nothing of what came between."""
    world = World()
    request = world.submit(6, max_tokens=30)
    while request.num_output < 12:
        world.step()
    if is_running:
        plan = world.schedule()
        assert plan is not None
        world.call(request, 12 - dropped)
        assert request.state is State.DECODING
        world.apply(plan)
    else:
        world.call(request, 12 - dropped)
    assert (request.state, request.num_output) == (State.TOOL_WAIT, 12 - dropped)
    world.answer(request, [7, 8, 9])
    world.run()
    assert len(world.delivered[request.key]) == 30
    world.assert_drained()


@pytest.mark.parametrize("dropped", range(1, 10))
def test_nothing_of_what_was_dropped_is_ever_in_the_cache(dropped: int) -> None:
    world = World()
    request = world.submit(6, max_tokens=30)
    while request.num_output < 12:
        world.step()
    world.scheduler.catch_up()  # names blocks that are full by then
    gone = list(request.block_hashes[(18 - dropped) // 4 :])
    world.call(request, 12 - dropped)
    world.scheduler.finish(request.key, FinishReason.CANCELLED, world.now)
    assert world.cache.match(gone[:1]) == []
    assert len(world.cache) == (18 - dropped - 1) // 4
    world.assert_drained()


@pytest.mark.parametrize("host_blocks", [0, 40])
def test_a_call_of_a_request_that_was_preempted_since_waits_without_a_return(host_blocks: int) -> None:
    world = World(make_settings(host_blocks=host_blocks), num_blocks=9)
    first, second = world.submit(7, max_tokens=24), world.submit(7, max_tokens=24)
    while not second.preemptions:
        world.step()
    assert second.state is State.PREEMPTED
    world.call(second, second.num_output - 2)
    assert (second.state, second.block_ids) == (State.TOOL_WAIT, [])
    assert world.scheduler.load(0, world.now).waiting_requests == 0
    world.run()
    assert (first.state, second.state) == (State.FINISHED, State.TOOL_WAIT)
    world.answer(second, [3, 4])
    world.run()
    assert len(world.delivered[second.key]) == 24
    world.assert_drained()


def test_blocks_that_others_may_share_are_not_written_again() -> None:
    """A request that was preempted behind the call's end has published blocks of what is dropped now."""
    world = World(num_blocks=9)
    first, second = world.submit(7, max_tokens=24), world.submit(7, max_tokens=24)
    while not second.preemptions:
        world.step()
    num_output = second.num_output - 6
    world.scheduler.finish(first.key, FinishReason.CANCELLED, world.now)
    while second.state is not State.DECODING:
        world.step()
    assert second.stored_blocks * 4 > 7 + num_output, "it shares what it had published"
    world.call(second, num_output, wait_s=(0.0,))
    assert second.block_ids == []
    world.answer(second, [3])
    world.run()
    world.assert_drained()


def test_a_call_under_no_pressure_keeps_and_one_of_a_long_tool_under_pressure_does_not() -> None:
    world = World(num_blocks=40)
    for wait_s, keep in ((0.5, "keep"), (1e5, "drop")):
        before = world.scheduler.counters[f"tool_{keep}"]
        request = world.submit(9, max_tokens=8)
        world.step()
        world.step()
        world.call(request, request.num_output, wait_s=(wait_s,))
        assert world.scheduler.counters[f"tool_{keep}"] == before + 1
        world.answer(request, [1])
        world.run()
        shared = [5] * 40
        for _ in range(60):  # others come and go, and come back for what they had
            world.submit(shared, max_tokens=2)
            world.submit(30, max_tokens=2)
            world.run()
    world.assert_drained()


def test_memory_that_a_paused_request_does_not_keep_is_not_reserved() -> None:
    world = World()
    request = world.submit(9, max_tokens=12)
    world.step()
    reserved = world.scheduler.admission.reserved_kv_tokens
    world.scheduler.pause(request.key, Keep.KEEP, world.now)
    assert world.scheduler.admission.reserved_kv_tokens == reserved
    world.answer(request, [1, 2])
    assert world.scheduler.admission.reserved_kv_tokens == reserved + 2
    world.step()
    world.step()
    world.scheduler.pause(request.key, Keep.DROP, world.now)
    assert world.scheduler.admission.reserved_kv_tokens == 0
    world.answer(request, [])
    assert world.scheduler.admission.reserved_kv_tokens == reserved + 2
    world.run()
    world.assert_drained()


@pytest.mark.parametrize("host_blocks", [0, 8])
@pytest.mark.parametrize("adopted", [False, True])
def test_memory_that_others_take_from_a_paused_request_is_reserved_for_them_alone(
    adopted: bool, host_blocks: int
) -> None:
    world = World(make_settings(host_blocks=host_blocks), num_blocks=8)
    paused = world.submit(17, max_tokens=12)
    world.step()
    world.step()
    reserved = world.scheduler.admission.reserved_kv_tokens
    world.scheduler.pause(paused.key, Keep.KEEP, world.now)
    other = world.adopt(15, max_tokens=8) if adopted else world.submit(15, max_tokens=8)
    theirs = world.scheduler.admission.reserved_kv_tokens - reserved
    world.step()
    assert paused.block_ids == []
    assert world.scheduler.admission.reserved_kv_tokens == theirs
    world.scheduler.finish(other.key, FinishReason.CANCELLED, world.now)
    answered(world, paused, [1, 2])
    assert world.scheduler.admission.reserved_kv_tokens == reserved + 2
    world.run()
    world.scheduler.check_integrity()


@pytest.mark.parametrize("kind", ["submit", "adopt"])
def test_a_request_with_answers_of_earlier_attempts_is_as_it_was(kind: str) -> None:
    world = World()
    output, inserts = [11, 12, 13, 14], [(2, [21, 22, 23]), (2, [24]), (4, [25, 26])]
    tokens = [5, 6, 11, 12, 21, 22, 23, 24, 13, 14, 25, 26]
    request = world.make([5, 6], 9, output=output, adopted=kind == "adopt", resumed_inserts=inserts)
    world.truth[request.key] = list(tokens)
    assert request.token_ids == tokens
    assert (request.num_output, request.num_input, request.emitted) == (4, 8, 4)
    assert request.output_ids == output
    assert sorted(request.history[:8]) == sorted([5, 6, 21, 22, 23, 24, 25, 26])
    if kind == "submit":
        assert world.scheduler.submit(request, world.now) is None
    else:
        assert world.scheduler.adopt(request, world.now) is None
        assert world.scheduler.reserve_adoptions(world.now) == [request.key]
        world.pull(request)
        world.activate(request)
    world.run()
    assert len(world.delivered[request.key]) == 9
    world.assert_drained()


def test_an_answer_that_is_not_among_the_output_is_refused() -> None:
    for inserts in ([(5, [1])], [(3, [1]), (2, [1])], [(-1, [1])]):
        with pytest.raises(ValueError, match="answer"):
            Request(RequestKey(1), RequestId("r"), 0, [1], SamplingParams(9), b"", [2, 3, 4], resumed_inserts=inserts)


def test_a_call_cannot_end_before_the_last_answer_and_a_copy_shrinks_with_it() -> None:
    request = World().make([1, 2], 9, output=[3, 4, 5, 6])
    request.host = HostCopy((0, 1), 5, 0)
    request.cut(3)
    assert (request.token_ids, request.host.num_tokens) == ([1, 2, 3, 4, 5], 4)
    request.insert([7])
    request.append(8)
    request.cut(4)
    with pytest.raises(InvariantError):
        request.cut(2)

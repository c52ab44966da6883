"""The scheduler step by step: packing, admission, the ends of requests, limits, and the ledger on a virtual clock.

Over 400 lines: one scenario a rule of the scheduler, all on one small world.
"""

import pytest

from headrace.core.records import FinishReason, WorkerLedger
from headrace.errors import InvariantError, Rejected
from headrace.ids import RequestKey
from tests.core_world import EOS, World, make_settings, toy_token
from workers.core.plan import StepPlan, StepResult
from workers.core.request import Request, State


def planned(world: World) -> StepPlan:
    plan = world.schedule()
    assert plan is not None
    return plan


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(key, start, tokens) of each row."""
    return list(zip(plan.keys, plan.start_pos, plan.num_tokens, strict=True))


def latency(ledger: WorkerLedger) -> float:
    return ledger.queue_s + ledger.prefill_s + ledger.sampling_s + ledger.decode_s + ledger.preempted_s


def test_one_request_from_prompt_to_last_token() -> None:
    world = World()
    # 1. The prompt is computed in one step and yields the first token.
    request = world.submit(6, max_tokens=3)
    plan = planned(world)
    assert rows(plan) == [(1, 0, 6)]
    assert (plan.samples, plan.num_decode_rows, plan.num_prefill_tokens) == ([True], 0, 6)
    assert world.scheduler.started == [1]
    events = world.apply(plan)
    assert (events.started, events.token_offsets, events.computed, events.prefilled) == ([1], [0], [1], [])
    assert request.state is State.DECODING
    # 2. Each further step computes one token.
    plan = planned(world)
    assert rows(plan) == [(1, 6, 1)]
    assert plan.num_decode_rows == 1
    assert world.apply(plan).started == []
    # 3. The last token ends it.
    events = world.apply(planned(world))
    assert events.finished == [(1, FinishReason.LENGTH)]
    assert (request.state, request.finish_reason) == (State.FINISHED, FinishReason.LENGTH)
    assert world.schedule() is None
    world.assert_output_as_alone(request)
    world.assert_drained()


def test_decodes_come_first_then_started_prefills_then_new_ones() -> None:
    world = World(make_settings(max_num_batched_tokens=16, long_prefill_token_threshold=10))
    # 1. A decodes, B's long prefill is under way.
    a = world.submit(3, max_tokens=50)
    world.step()
    b = world.submit(25)
    assert rows(planned_and_applied(world)) == [(a.key, 3, 1), (b.key, 0, 10)]
    # 2. C waits until B's chunk leaves tokens in the step.
    c = world.submit(9)
    plan = planned_and_applied(world)
    assert rows(plan) == [(a.key, 4, 1), (b.key, 10, 10), (c.key, 0, 5)]
    assert plan.samples == [True, False, False]
    # 3. Both catch up.
    plan = planned_and_applied(world)
    assert rows(plan) == [(a.key, 5, 1), (b.key, 20, 5), (c.key, 5, 4)]
    assert plan.samples == [True, True, True]
    world.run()
    for request in (a, b, c):
        world.assert_output_as_alone(request)
    world.assert_drained()


@pytest.mark.parametrize(("threshold", "budget"), [(10, 16), (16, 10), (12, 12)])
def test_a_worker_without_decodes_takes_the_chunk_that_it_tells(threshold: int, budget: int) -> None:
    settings = make_settings(max_num_batched_tokens=budget, long_prefill_token_threshold=threshold)
    world = World(settings)
    request = world.submit(40)
    assert rows(planned_and_applied(world)) == [(request.key, 0, settings.chunk_tokens)]
    world.run()
    world.assert_drained()


def planned_and_applied(world: World) -> StepPlan:
    plan = planned(world)
    world.apply(plan)
    return plan


def test_rows_of_a_step_are_limited_and_the_rest_waits_in_order() -> None:
    world = World(make_settings(max_num_seqs=2))
    first, second, third = (world.submit(3, max_tokens=2) for _ in range(3))
    assert planned_and_applied(world).keys == [first.key, second.key]
    assert planned_and_applied(world).keys == [first.key, second.key]
    assert planned_and_applied(world).keys == [third.key]
    world.run()
    world.assert_drained()


def test_a_started_prefill_keeps_its_row_when_more_decodes_arrive_than_rows() -> None:
    world = World(make_settings(max_num_seqs=2, max_num_batched_tokens=8, long_prefill_token_threshold=4))
    long_one = world.submit(20, max_tokens=1)
    world.step()
    adopted = [world.adopt(3, max_tokens=40) for _ in range(3)]
    world.scheduler.reserve_adoptions(world.now)
    for request in adopted:
        world.pull(request)
        world.activate(request)
    steps = 0
    while long_one.state is not State.FINISHED:
        assert long_one.key in planned_and_applied(world).keys
        steps += 1
    assert steps == 4
    world.run()
    for request in adopted:
        world.assert_output_as_alone(request)
    world.assert_drained()


def test_admission_leaves_the_watermark_only_while_others_run() -> None:
    world = World(make_settings(watermark_blocks=2), num_blocks=6)
    # 1. Alone, a request may take everything: 5 blocks of prompt and one for growth.
    alone_one = world.submit(20, max_tokens=1)
    world.step()
    assert alone_one.state is State.FINISHED
    # 2. With another running (2 blocks), 2 must stay available: 3 blocks are too many.
    running = world.submit(7, max_tokens=5)
    large = world.submit(8, max_tokens=1)
    assert planned_and_applied(world).keys == [running.key]
    # 3. It comes in when the other is gone.
    world.run()
    world.assert_output_as_alone(large)
    world.assert_drained()


def test_refusals_come_at_once_and_leave_nothing() -> None:
    settings = make_settings(max_waiting_requests=2, max_waiting_tokens=30, max_model_len=60)
    world = World(settings, num_blocks=10)
    assert world.scheduler.submit(world.make(30, max_tokens=20), 0.0) == Rejected("too_large", 0.0)
    assert world.scheduler.submit(world.make([], max_tokens=2), 0.0) == Rejected("empty_prompt", 0.0)
    assert world.scheduler.submit(world.make(60, max_tokens=2), 0.0) == Rejected("too_long", 0.0)
    first = world.submit(29, max_tokens=2)
    assert world.scheduler.submit(world.make(2), 0.0) == Rejected("queue_full")  # tokens
    second = world.submit(1, max_tokens=2)
    assert world.scheduler.submit(world.make(1), 0.0) == Rejected("queue_full")  # requests
    world.run()
    assert world.ended == {first.key: FinishReason.LENGTH, second.key: FinishReason.LENGTH}
    world.assert_drained()


def test_a_single_request_may_be_longer_than_the_queue_bound() -> None:
    world = World(make_settings(max_waiting_tokens=10))
    world.submit(30)
    world.run()
    world.assert_drained()


def test_adoptions_have_a_bounded_queue_of_their_own() -> None:
    world = World(make_settings(max_waiting_requests=1))
    first = world.adopt(5)
    assert world.scheduler.adopt(world.make(5, adopted=True), 0.0) == Rejected("queue_full")
    world.scheduler.finish(first.key, FinishReason.CANCELLED, 0.0)
    world.assert_drained()


@pytest.mark.parametrize(
    "state", [State.WAITING, State.PREFILLING, State.DECODING, State.PREEMPTED, State.TRANSFERRING]
)
@pytest.mark.parametrize("how", ["finish", "expire"])
def test_every_state_can_be_left_at_once(state: State, how: str) -> None:
    world = World(make_settings(long_prefill_token_threshold=8), num_blocks=8)
    request, world = in_state(world, state)
    if how == "finish":
        assert world.scheduler.finish(request.key, FinishReason.CANCELLED, world.now)
        assert not world.scheduler.finish(request.key, FinishReason.STOP, world.now)
        assert request.finish_reason is FinishReason.CANCELLED
    else:
        assert world.scheduler.expire(99.0) == []
        assert world.scheduler.expire(100.0) == [request.key]
        assert world.scheduler.expire(200.0) == []
        assert request.finish_reason is FinishReason.DEADLINE
    world.run()
    world.assert_drained()


def in_state(world: World, state: State) -> tuple[Request, World]:
    """A request with deadline 100 in a state, between two steps."""
    if state is State.PREEMPTED:
        world.submit(15, max_tokens=12)
        request = world.submit(15, max_tokens=12, deadline=100.0)
        while request.state is not State.PREEMPTED:
            assert world.step() is not None
        return request, world
    request = world.submit(9, max_tokens=12, deadline=100.0, hand_off=state is State.TRANSFERRING)
    for _ in range({State.WAITING: 0, State.PREFILLING: 1}.get(state, 2)):
        world.step()
    assert request.state is state
    return request, world


def test_a_request_that_ends_during_a_step_keeps_its_blocks_until_the_step_is_applied() -> None:
    world = World()
    gone, stays = world.submit(6, max_tokens=9), world.submit(6, max_tokens=2)
    world.step()
    # 1. Cancelled while the runner reads its block table.
    plan = planned(world)
    table = list(gone.block_ids)
    assert world.scheduler.finish(gone.key, FinishReason.CANCELLED, world.now)
    world.scheduler.check_integrity()
    assert gone.state is State.FINISHED
    assert list(plan.block_tables[0]) == table
    assert all(world.pool.refs(block) == 1 for block in table)
    # 2. Its token is dropped, the other's is not.
    events = world.apply(plan)
    assert events.token_keys == [stays.key]
    assert len(world.delivered[gone.key]) == 1
    world.assert_drained()


def test_a_request_that_ends_in_its_first_step_was_never_started() -> None:
    world = World()
    request = world.submit(6)
    plan = planned(world)
    world.scheduler.finish(request.key, FinishReason.CANCELLED, world.now)
    events = world.apply(plan)
    assert (events.started, events.token_keys, events.finished, events.prefilled) == ([], [], [], [])
    world.assert_drained()


def test_steps_and_results_must_match() -> None:
    world = World()
    world.submit(6)
    plan = planned(world)
    with pytest.raises(InvariantError):
        world.scheduler.apply(plan, StepResult([1, 2]), world.now)
    with pytest.raises(InvariantError):
        world.scheduler.apply(StepPlan(plan.step_id), StepResult([1]), world.now)
    world.apply(plan)
    with pytest.raises(InvariantError):
        world.scheduler.apply(plan, StepResult([1]), world.now)


def test_a_key_is_used_once_at_a_time_and_each_kind_has_its_door() -> None:
    world = World()
    request = world.submit(3)
    with pytest.raises(InvariantError):
        world.scheduler.submit(request, world.now)
    with pytest.raises(InvariantError):
        world.scheduler.submit(world.make(3, adopted=True), world.now)
    with pytest.raises(InvariantError):
        world.scheduler.adopt(world.make(3), world.now)
    assert not world.scheduler.finish(RequestKey(999), FinishReason.CANCELLED, world.now)


def test_eos_ends_a_request_and_is_emitted() -> None:
    world = World()
    request = world.submit(5, max_tokens=10, ignore_eos=False)
    plan = planned(world)
    world.scheduler.apply(plan, StepResult([7]), 1.0)
    events = world.scheduler.apply(planned(world), StepResult([EOS]), 2.0)
    assert (events.token_ids, events.finished) == ([EOS], [(request.key, FinishReason.EOS)])
    world.assert_drained()


def test_bans_stand_in_the_plan_until_min_tokens() -> None:
    world = World()
    world.submit(5, max_tokens=10, min_tokens=2, ignore_eos=False, stop=(42,))
    banned = []
    for token in (1, 2, 3):
        plan = planned(world)
        banned.append(plan.banned[0])
        world.scheduler.apply(plan, StepResult([token]), 1.0)
    assert banned == [(EOS, 42), (EOS, 42), ()]


def test_the_ledger_of_a_whole_request_sums_to_its_life() -> None:
    world = World(make_settings(long_prefill_token_threshold=4))
    world.now = 5.0
    request = world.submit(10, max_tokens=3)
    world.now = 7.0
    world.run()
    ledger = request.ledger
    assert (ledger.queue_s, ledger.prefill_s, ledger.sampling_s, ledger.decode_s) == (2.0, 2.75, 0.25, 2.0)
    assert (ledger.computed_tokens, ledger.cached_tokens) == (12, 0)
    assert (request.first_scheduled_at, request.first_token_at, request.finished_at) == (7.0, 10.0, 12.0)
    assert latency(ledger) == 7.0


def test_the_ledger_of_a_hand_off_request_stops_at_its_first_token() -> None:
    world = World()
    request = world.submit(10, max_tokens=3, hand_off=True)
    world.step()
    world.now += 50.0
    assert world.scheduler.release_handed_off(request.key, world.now)
    assert (request.ledger.prefill_s, request.ledger.sampling_s, request.ledger.decode_s) == (0.75, 0.25, 0.0)
    assert latency(request.ledger) == 1.0
    world.assert_drained()


def test_the_ledger_of_a_preempted_request_counts_the_recomputation_as_preempted() -> None:
    world = World(num_blocks=8)
    first = world.submit(14, max_tokens=14)
    second = world.submit(14, max_tokens=14)
    world.run()
    for request in (first, second):
        assert request.finished_at is not None
        assert latency(request.ledger) == request.finished_at - request.accepted_at
        world.assert_output_as_alone(request)
    assert first.ledger.preempted_s == 0.0
    assert second.ledger.preempted_s > 0.0
    stats = world.scheduler.stats()
    assert stats["preemptions"] >= 1
    assert second.ledger.computed_tokens == 14 + 13 + stats["recomputed_tokens"]
    world.assert_drained()


def test_the_victim_is_the_latest_arrival() -> None:
    world = World(num_blocks=12)
    requests = [world.submit(14, max_tokens=14) for _ in range(3)]
    while world.scheduler.stats()["preemptions"] == 0:
        world.step()
    assert [r.state for r in requests] == [State.DECODING, State.DECODING, State.PREEMPTED]
    world.run()
    for request in requests:
        world.assert_output_as_alone(request)
    world.assert_drained()


def test_a_later_prefill_is_a_victim_before_an_earlier_decode() -> None:
    world = World(make_settings(long_prefill_token_threshold=2), num_blocks=8)
    first = world.submit(6, max_tokens=20)
    second = world.submit(6, max_tokens=9)
    while second.state is not State.DECODING:
        world.step()
    late = world.submit(11, max_tokens=9)
    while world.scheduler.stats()["preemptions"] == 0:
        assert world.step() is not None
    assert (first.state, second.state, late.state) == (State.DECODING, State.DECODING, State.PREEMPTED)
    assert late.first_token_at is None
    world.run()
    for request in (first, second, late):
        world.assert_output_as_alone(request)
    world.assert_drained()


def test_a_request_that_opted_out_neither_reads_nor_writes_the_cache() -> None:
    world = World()
    prompt = list(range(100, 112))
    world.submit(prompt, max_tokens=6, no_cache=True)
    world.run()
    assert (len(world.cache), world.pool.free_blocks) == (0, 64)
    world.submit(prompt, max_tokens=6)
    world.run()
    assert len(world.cache) == 4
    opted_out = world.submit(prompt, max_tokens=6, no_cache=True)
    adopted = world.adopt(prompt, max_tokens=6, no_cache=True)
    world.step()
    world.scheduler.reserve_adoptions(world.now)
    assert (opted_out.ledger.cached_tokens, adopted.computed_tokens) == (0, 0)
    world.pull(adopted)
    world.activate(adopted)
    world.run()
    assert opted_out.ledger.computed_tokens == 17
    assert world.scheduler.stats()["prefix_lookups"] == 1
    world.assert_output_as_alone(opted_out)
    world.assert_drained()


def test_a_request_pinned_for_a_reader_is_no_victim() -> None:
    world = World(make_settings(long_prefill_token_threshold=2), num_blocks=9)
    decoding = world.submit(6, max_tokens=20)
    while decoding.state is not State.DECODING:
        world.step()
    victim = world.submit(7, max_tokens=9)
    pinned = world.submit(16, hand_off=True)
    world.step()
    assert pinned.state is State.PREFILLING
    assert world.scheduler.pin(pinned.key)
    while world.scheduler.stats()["preemptions"] == 0:
        assert world.step() is not None
    assert victim.state is State.PREEMPTED
    while pinned.state is not State.TRANSFERRING:
        world.step()
    world.scheduler.unpin(pinned.key)
    world.scheduler.release_handed_off(pinned.key, world.now)
    world.run()
    for request in (decoding, victim):
        world.assert_output_as_alone(request)
    world.assert_drained()


def test_load_counts_what_waits_and_runs() -> None:
    world = World(make_settings(long_prefill_token_threshold=8, max_num_batched_tokens=8), num_blocks=16)
    world.submit(20)
    world.submit(7)
    world.adopt(5)
    world.scheduler.reserve_adoptions(world.now)
    plan = planned(world)
    load = world.scheduler.load(17, world.now + 0.5)
    assert (load.submit_seq, load.waiting_requests, load.waiting_tokens) == (17, 1, 27)
    assert (load.running_requests, load.adopting_requests, load.step_age_s) == (1, 1, 0.5)
    world.apply(plan)
    load = world.scheduler.load(17, world.now)
    assert (load.waiting_tokens, load.step_age_s, load.step_s) == (19, 0.0, 1.0)
    assert (load.free_blocks, load.total_blocks) == (8, 16)
    assert world.scheduler.holders() == {"request req-1/0": 6, "request req-3/0": 2}


def test_integrity_finds_planted_faults() -> None:
    def running() -> tuple[World, Request]:
        world = World()
        request = world.submit(6, max_tokens=9)
        world.step()
        return world, request

    world, request = running()
    request.block_ids.pop()  # a leak
    with pytest.raises(InvariantError):
        world.scheduler.check_integrity()
    world, request = running()
    del world.scheduler.requests[request.key]  # a forgotten request
    with pytest.raises(InvariantError):
        world.scheduler.check_integrity()
    world, request = running()
    request.state = State.PREEMPTED  # a state that nobody advanced to
    with pytest.raises(InvariantError):
        world.scheduler.check_integrity()


def test_the_toy_runner_finds_a_swapped_block() -> None:
    world = World()
    first, second = world.submit(6), world.submit(6)
    world.step()
    first.block_ids[0], second.block_ids[0] = second.block_ids[0], first.block_ids[0]
    with pytest.raises(AssertionError, match="not its own"):
        world.step()


def test_an_adoption_and_a_prefill_that_wait_for_blocks_keep_their_order() -> None:
    world = World(num_blocks=8)
    running = world.submit(14, max_tokens=3)
    world.step()
    # 1. An adoption that does not fit yet comes before a prefill that would.
    large = world.adopt(20, max_tokens=2)
    small = world.submit(3, max_tokens=1)
    assert world.scheduler.reserve_adoptions(world.now) == []
    assert planned_and_applied(world).keys == [running.key]
    # 2. The room goes to the adoption, then to the prefill.
    world.apply(planned(world))
    assert world.scheduler.reserve_adoptions(world.now) == [large.key]
    assert planned_and_applied(world).keys == [small.key]
    world.pull(large)
    world.activate(large)
    world.run()
    world.assert_output_as_alone(large)
    world.assert_drained()


def test_adopted_tokens_that_no_one_delivered_come_with_the_first_frame() -> None:
    world = World()
    request = world.adopt([5, 6, 7, 8, 9], max_tokens=4, output=[11, 12])
    assert world.scheduler.reserve_adoptions(world.now) == [request.key]
    assert (request.state, len(request.block_ids)) == (State.TRANSFERRING, 2)
    world.pull(request)
    world.activate(request)
    assert not world.scheduler.activate(request.key, request.output_ids, 7, world.now)
    token = toy_token([5, 6, 7, 8, 9, 11, 12], world.vocab)
    events = world.step()
    assert events is not None
    assert (events.token_offsets, events.token_ids[0]) == ([2, 3], token)
    assert events.finished == [(request.key, FinishReason.LENGTH)]
    assert request.ledger.computed_tokens == 1
    world.assert_drained()

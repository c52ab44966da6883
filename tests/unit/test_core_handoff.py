"""Blocks that wait for a reader, blocks that a reader fills, and what happens when either side gives up."""

import pytest

from headrace.core.records import FinishReason
from headrace.errors import InvariantError
from tests.core_world import World, toy_token
from workers.core.blocks import BlockState
from workers.core.request import Request, State

B = 4


def reserve(world: World) -> None:
    world.scheduler.reserve_adoptions(world.now)
    world.scheduler.check_integrity()


@pytest.mark.parametrize("length", [7, 8, 9])
def test_an_adopted_request_computes_nothing_but_its_decodes(length: int) -> None:
    # PDS-08: a decode worker that prefills again would show in computed_tokens.
    world = World()
    request = world.adopt(length, max_tokens=5)
    reserve(world)
    assert len(request.block_ids) == (length + 1 + B - 1) // B
    world.pull(request)
    world.activate(request)
    world.run()
    assert request.ledger.computed_tokens == 4
    assert world.scheduler.stats()["recomputed_tokens"] == 0
    world.assert_output_as_alone(request)
    world.assert_drained()


@pytest.mark.parametrize("length", [7, 8, 9])
def test_an_adopted_request_shares_every_full_block_that_is_cached(length: int) -> None:
    world = World()
    prompt = list(range(100, 100 + length))
    world.submit(prompt, max_tokens=2)
    world.run()
    request = world.adopt(prompt, max_tokens=5)
    reserve(world)
    assert request.computed_tokens == request.ledger.cached_tokens == length // B * B
    assert request.stored_blocks == length // B
    world.pull(request)
    world.activate(request)
    world.run()
    assert request.ledger.computed_tokens == 4
    world.assert_output_as_alone(request)
    world.assert_drained()


def test_pulled_blocks_enter_the_cache_only_once_the_request_is_active() -> None:
    world = World()
    request = world.adopt(list(range(100, 112)), max_tokens=3)
    reserve(world)
    world.pull(request)
    assert len(world.cache) == 0
    world.activate(request)
    assert len(world.cache) == 3
    sibling = world.submit(list(range(100, 112)), max_tokens=3)
    world.run()
    assert sibling.ledger.cached_tokens == 11
    world.assert_output_as_alone(sibling)
    world.assert_drained()


def test_adoptions_take_all_their_blocks_or_wait_with_none() -> None:
    world = World(num_blocks=6)
    first, second, third = world.adopt(11), world.adopt(15), world.adopt(3)
    reserve(world)
    assert [r.state for r in (first, second, third)] == [State.TRANSFERRING, State.WAITING, State.WAITING]
    assert (second.block_ids, world.scheduler.load(0, 0.0).adopting_requests) == ([], 3)
    world.scheduler.finish_adoption(first.key, FinishReason.ERROR, [], world.now)
    reserve(world)
    assert [r.state for r in (second, third)] == [State.TRANSFERRING, State.TRANSFERRING]
    for request in (second, third):
        assert world.scheduler.finish_adoption(request.key, FinishReason.CANCELLED, [], world.now)
    world.assert_drained()


def test_targets_of_an_unfinished_read_stay_aside_until_it_is_terminal() -> None:
    world = World(num_blocks=4)
    request = world.adopt(11, max_tokens=4)
    reserve(world)
    reading = request.block_ids[1:]
    assert world.scheduler.finish_adoption(request.key, FinishReason.ERROR, reading, world.now)
    assert not world.scheduler.finish_adoption(request.key, FinishReason.ERROR, [], world.now)
    assert world.scheduler.holders() == {f"quarantine read {request.key}": 2}
    # 1. What is left is too little for a new request, and the read lands in nobody's block.
    waiting = world.submit(9, max_tokens=3)
    assert world.step() is None
    for block in reading:
        assert world.pool.state(block) is BlockState.QUARANTINED
    # 2. The read is terminal.
    assert world.scheduler.release_quarantine(request.key) == 2
    assert world.scheduler.release_quarantine(request.key) == 0
    world.run()
    world.assert_output_as_alone(waiting)
    world.assert_drained()


@pytest.mark.parametrize("how", ["finish", "expire"])
def test_an_adoption_that_ends_from_outside_quarantines_every_target(how: str) -> None:
    # Nobody told the scheduler which reads are in flight, so all of them may be.
    world = World()
    prompt = list(range(100, 111))
    world.submit(prompt, max_tokens=1)
    world.run()
    request = world.adopt(prompt, max_tokens=4, deadline=50.0)
    reserve(world)
    assert request.stored_blocks == 2
    if how == "finish":
        assert world.scheduler.finish(request.key, FinishReason.CANCELLED, world.now)
    else:
        assert world.scheduler.expire(50.0) == [request.key]
    world.scheduler.check_integrity()
    assert world.pool.quarantined_blocks == 1
    assert world.scheduler.release_quarantine(request.key) == 1
    world.assert_drained()


def test_only_blocks_of_the_adoption_itself_can_be_quarantined() -> None:
    world = World()
    running = world.submit(6, max_tokens=9)
    world.step()
    request = world.adopt(5)
    reserve(world)
    with pytest.raises(InvariantError):
        world.scheduler.finish_adoption(request.key, FinishReason.ERROR, running.block_ids[:1], world.now)


def test_a_hand_off_record_that_contradicts_the_request_is_an_error() -> None:
    world = World()
    request = world.adopt([1, 2, 3, 4, 5], max_tokens=9, output=[6])
    reserve(world)
    for output_ids, num_tokens in (([7, 8], 6), ([], 4), ([6], 6), ([6, 7], 5), ([6, 7], 7)):
        with pytest.raises(InvariantError):
            world.scheduler.activate(request.key, output_ids, num_tokens, world.now)
    assert world.scheduler.activate(request.key, [6, 7], 6, world.now)


def test_the_gateway_may_know_the_handed_token_when_it_asks_to_adopt() -> None:
    # The first token is often with the client before the decode worker hears of the request. Nobody hands over its KV,
    # the first decode writes it: a cached block that contains it must not be shared.
    world = World()
    text = list(range(100, 107))
    token = toy_token(text, world.vocab)
    world.submit(text, max_tokens=6)
    world.run()
    request = world.adopt(text, max_tokens=6, output=[token])
    reserve(world)
    assert request.computed_tokens == 4
    world.pull(request, num_tokens=7)
    assert world.scheduler.activate(request.key, [token], 7, world.now)
    events = world.step()
    assert events is not None
    assert events.token_offsets == [1]
    world.run()
    world.assert_output_as_alone(request)
    world.assert_drained()


def test_an_active_adoption_is_preempted_and_recomputes_here() -> None:
    world = World(num_blocks=8)
    first = world.submit(14, max_tokens=14)
    world.step()
    second = world.adopt(14, max_tokens=14)
    reserve(world)
    adopted_at = world.now
    world.pull(second)
    world.activate(second)
    while second.state is not State.PREEMPTED:
        assert world.step() is not None
    # Reservations wait behind it: it has shown progress, they have not.
    late = world.adopt(2, max_tokens=2)
    reserve(world)
    assert late.state is State.WAITING
    while late.state is State.WAITING:
        assert world.step() is not None
    world.pull(late)
    world.activate(late)
    world.run()
    for request in (first, second, late):
        world.assert_output_as_alone(request)
    assert second.finished_at is not None
    ledger = second.ledger
    assert ledger.queue_s + ledger.preempted_s + ledger.decode_s == second.finished_at - adopted_at
    assert (ledger.prefill_s, ledger.sampling_s) == (0.0, 0.0)
    world.assert_drained()


def test_a_preempted_adoption_whose_whole_text_is_cached_still_computes_its_last_token() -> None:
    # A new adoption may match all its tokens, a returning one may not: its next logits come from here.
    world = World(num_blocks=5)
    prompt = list(range(100, 108))
    # 1. An older request with the same text runs ahead of the adopted one; its blocks are shared.
    older = world.submit(prompt, max_tokens=12)
    while older.num_tokens < 14:
        world.step()
    adopted = world.adopt(prompt, max_tokens=12)
    reserve(world)
    assert adopted.computed_tokens == 8
    world.activate(adopted)
    # 2. It is preempted when the older one's blocks hold all of its text.
    while adopted.state is not State.PREEMPTED:
        assert world.step() is not None
    assert adopted.num_tokens == 12
    world.run()
    for request in (older, adopted):
        world.assert_output_as_alone(request)
    world.assert_drained()


def circular(world: World, waiting: str) -> tuple[Request, Request]:
    """A handed-off request holds most blocks; another one of a kind waits for them."""
    held = world.submit(24, max_tokens=4, hand_off=True)
    world.step()
    assert held.state is State.TRANSFERRING
    other = world.adopt(15) if waiting == "adoption" else world.submit(15, hand_off=waiting == "hand_off")
    world.scheduler.reserve_adoptions(world.now)
    return held, other


@pytest.mark.parametrize("waiting", ["adoption", "whole"])
def test_a_reader_is_revoked_when_others_wait_for_its_blocks_and_nothing_runs(waiting: str) -> None:
    world = World(num_blocks=8)
    held, other = circular(world, waiting)
    assert world.schedule() is None
    assert world.scheduler.revocable(world.now) == held.key
    world.scheduler.finish(held.key, FinishReason.ERROR, world.now)
    assert world.scheduler.revocable(world.now) is None
    reserve(world)
    if other.adopted:
        world.pull(other)
        world.activate(other)
    world.run()
    world.assert_output_as_alone(other)
    world.assert_drained()


def test_a_queue_of_hand_offs_waits_for_its_readers() -> None:
    world = World(num_blocks=8)
    held, other = circular(world, "hand_off")
    assert world.schedule() is None
    assert world.scheduler.revocable(world.now) is None
    world.scheduler.release_handed_off(held.key, world.now)
    world.run()
    assert other.state is State.TRANSFERRING
    world.scheduler.release_handed_off(other.key, world.now)
    world.assert_drained()


def test_nobody_is_revoked_while_anything_can_run() -> None:
    world = World(num_blocks=12)
    held, other = circular(world, "whole")
    assert other.block_ids == []
    running = world.step()
    assert running is not None
    assert world.scheduler.revocable(world.now) is None
    world.run()
    world.scheduler.release_handed_off(held.key, world.now)
    world.assert_drained()


def test_the_revocable_request_is_the_cheapest_without_an_open_lease() -> None:
    world = World(num_blocks=12)
    large, pinned, small = (world.submit(n, max_tokens=4, hand_off=True) for n in (20, 4, 12))
    world.step()
    world.scheduler.pin(pinned.key)
    world.adopt(40)
    reserve(world)
    order = []
    while (key := world.scheduler.revocable(world.now)) is not None:
        order.append(key)
        world.scheduler.finish(key, FinishReason.ERROR, world.now)
    assert order == [small.key, large.key, pinned.key]


def test_a_released_prefill_leaves_plain_prefix_cache() -> None:
    world = World()
    prompt = list(range(100, 112))
    request = world.submit(prompt, hand_off=True)
    world.step()
    with pytest.raises(InvariantError):
        world.scheduler.pin(world.submit(3).key)
    world.scheduler.release_handed_off(request.key, world.now)
    assert world.pool.evictable_blocks == 3
    again = world.submit(prompt, max_tokens=2)
    world.run()
    assert again.ledger.cached_tokens == 11
    world.assert_drained()


def test_an_unfinished_prefill_cannot_be_released_by_a_reader() -> None:
    world = World()
    request = world.submit(6, hand_off=True)
    with pytest.raises(InvariantError):
        world.scheduler.release_handed_off(request.key, world.now)

"""What requests on one worker share: begun blocks by copy, and prefixes that another one computes just now."""

from collections import OrderedDict
from collections.abc import ValuesView

import pytest

from headrace.core.fairness import ServiceCounters
from headrace.core.records import FinishReason
from headrace.ids import RequestKey
from tests.core_world import World, make_settings
from workers.core.policies import POLICIES, Pace, Policy
from workers.core.request import Request, State
from workers.core.waiting import WaitingLine

B = 4


def burst(world: World, shared: int, siblings: int, own: int = 3) -> list[int]:
    prefix = list(range(100, 100 + shared))
    requests = [
        world.submit([*prefix, *(1000 * s + i for i in range(own))], max_tokens=2) for s in range(1, siblings + 1)
    ]
    return [int(request.key) for request in requests]


@pytest.mark.parametrize("length", [k * B + d for k in range(1, 5) for d in (-1, 0, 1)])
@pytest.mark.parametrize("chunk", [1, B - 1, B, B + 1, 512])
def test_equal_prompts_of_any_length_recompute_only_their_last_token(length: int, chunk: int) -> None:
    world = World(make_settings(long_prefill_token_threshold=chunk))
    prompt = list(range(100, 100 + length))
    first = world.submit(prompt, max_tokens=3)
    world.run()
    second, third = world.submit(prompt, max_tokens=5), world.submit(prompt, max_tokens=7)
    world.run()
    for request in (second, third):
        assert request.ledger.cached_tokens == length - 1
        world.assert_output_as_alone(request)
    assert world.delivered[second.key][:3] == world.delivered[first.key]
    world.assert_drained()


def test_branches_share_the_begun_block_of_a_request_that_still_decodes() -> None:
    world = World()
    prompt = list(range(100, 110))
    first = world.submit(prompt, max_tokens=8)
    world.step()
    world.step()
    assert first.state is State.DECODING
    branch = world.submit([*prompt, 7, 8], max_tokens=8)
    plan = world.schedule()
    assert plan is not None
    assert branch.ledger.cached_tokens == len(prompt)
    assert plan.copies == [(first.block_ids[2], branch.block_ids[2])]
    world.apply(plan)
    world.run()
    world.assert_output_as_alone(first)
    world.assert_output_as_alone(branch)
    world.assert_drained()


def test_a_copied_block_stays_until_the_copy_is_made_whatever_happens_meanwhile() -> None:
    world = World(num_blocks=8)
    prompt = list(range(100, 106))
    world.submit(prompt, max_tokens=2)
    world.run()
    copier = world.submit([*prompt, 1], max_tokens=2)
    plan = world.schedule()
    assert plan is not None
    ((source, _),) = plan.copies
    assert world.pool.refs(source) == 1
    world.scheduler.clear_cache(None)
    assert world.scheduler.finish(copier.key, FinishReason.CANCELLED, world.now)
    assert world.pool.refs(source) == 1
    world.apply(plan)
    world.assert_drained()
    assert world.pool.free_blocks == 8


def test_a_partial_hit_is_left_when_its_source_is_the_block_that_is_needed() -> None:
    world = World(num_blocks=3)
    world.submit(list(range(100, 110)), max_tokens=1)
    world.run()
    other = world.submit([*range(100, 103), *range(7)], max_tokens=1)
    world.run()
    world.assert_output_as_alone(other)
    world.assert_drained()


@pytest.mark.parametrize("policy", ["decode_first", "slo_fair", "fcfs", "mlfq", "fair"])
@pytest.mark.parametrize("chunk", [1, B, 512])
def test_a_burst_of_siblings_computes_the_shared_prefix_once(policy: str, chunk: int) -> None:
    settings = make_settings(
        policy=policy, long_prefill_token_threshold=chunk, max_num_batched_tokens=128, max_num_seqs=16
    )
    world = World(settings, num_blocks=400)
    keys = burst(world, 40, 64)
    world.run()
    computed = sum(world.seen[key].ledger.computed_tokens for key in keys)
    assert computed <= 40 + 64 * (3 + 2)
    assert world.scheduler.stats()["followed"] >= 63
    for request in world.seen.values():
        world.assert_output_as_alone(request)
    world.assert_drained()


def test_followers_are_not_in_the_way_of_others() -> None:
    world = World(make_settings(long_prefill_token_threshold=4, max_num_batched_tokens=64), num_blocks=200)
    leader, *followers = (world.seen[key] for key in burst(world, 40, 6))
    stranger = world.submit(8, max_tokens=1)
    world.step()
    assert leader.state is State.PREFILLING
    assert stranger.state is State.PREFILLING
    assert all(request.state is State.WAITING and request.follows for request in followers)
    world.run()
    world.assert_drained()


@pytest.mark.parametrize("how", ["cancelled", "preempted"])
def test_when_its_leader_goes_a_follower_computes_for_itself(how: str) -> None:
    world = World(make_settings(long_prefill_token_threshold=4), num_blocks=60)
    leader, follower, last = (world.seen[key] for key in burst(world, 40, 3))
    world.step()
    assert follower.follows
    if how == "cancelled":
        assert world.scheduler.finish(leader.key, FinishReason.CANCELLED, world.now)
        assert not follower.follows
    else:
        world.scheduler._preempt(leader, world.now)
    world.step()
    world.run()
    world.assert_output_as_alone(follower)
    world.assert_output_as_alone(last)
    world.assert_drained()


def test_a_follower_ends_at_its_deadline_and_by_a_cancel() -> None:
    world = World(make_settings(long_prefill_token_threshold=1, ttft_target_s=0.0), num_blocks=60)
    prefix = list(range(100, 140))
    world.submit([*prefix, 1], max_tokens=1)
    due = world.submit([*prefix, 2], max_tokens=1, deadline=5.0)
    unwanted = world.submit([*prefix, 3], max_tokens=1)
    world.step()
    assert due.follows
    assert unwanted.follows
    assert world.scheduler.finish(unwanted.key, FinishReason.CANCELLED, world.now)
    world.now = 6.0
    assert world.scheduler.expire(world.now) == [due.key]
    world.run()
    world.assert_drained()


def test_a_leader_without_progress_leads_no_more() -> None:
    world = World(make_settings(long_prefill_token_threshold=4), num_blocks=60)
    _, follower = (world.seen[key] for key in burst(world, 40, 2))
    world.step()
    assert follower.follows
    world.now += 100.0  # no step took it in for so long
    world.schedule()
    assert not follower.follows


def test_nobody_follows_a_request_that_does_not_share() -> None:
    world = World(make_settings(long_prefill_token_threshold=4))
    prompt = list(range(100, 120))
    world.submit(prompt, max_tokens=1, no_cache=True)
    world.submit(prompt, max_tokens=1, root=b"other tenant's  ")
    third = world.submit(prompt, max_tokens=1)
    world.step()
    assert not third.follows
    world.run()
    assert third.ledger.cached_tokens == 0
    world.assert_drained()


def line_of(policy: str) -> tuple[WaitingLine, list[Request]]:
    """A thousand requests with deadlines in a line of their own, in order of arrival."""
    world, service = World(), ServiceCounters()
    line, tenant = WaitingLine(Policy(make_settings(policy=policy), Pace(), service), service), service.enter("a")
    requests = [world.make(4, deadline=1000.0 + i) for i in range(1000)]
    for arrival, request in enumerate(requests):
        request.arrival, request.tenant_index = arrival, tenant
        line.add(request)
    return line, requests


def repark(line: WaitingLine, requests: list[Request]) -> None:
    for request in requests:
        line.park(request)
    assert line.best(0.0) is None
    for request in requests:
        request.follows = False
        line.unpark(request)


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_parked_and_woken_many_times_costs_a_line_no_more_than_one_who_came_once(policy: str) -> None:
    line, requests = line_of(policy)
    for _ in range(20):
        repark(line, requests)
        held = [line._due, line._looks, *line._lines.values()]
        assert max(map(len, held)) <= 2 * len(line) + 64
    for request in requests:
        best = line.best(0.0)
        assert best is request
        line.discard(best)
    assert line.best(0.0) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_line_names_a_lost_request_once_however_often_it_is_parked(policy: str) -> None:
    line, requests = line_of(policy)
    repark(line, requests)
    line.park(requests[1])
    assert line.lost(1001.5, lambda _: 0) == requests[:2]
    requests[1].follows = False
    line.unpark(requests[1])
    repark(line, requests)
    assert line.lost(1001.6, lambda _: 0) == []


@pytest.mark.parametrize("policy", ["fcfs", "decode_first"])
def test_the_first_who_may_start_is_found_without_a_walk_past_those_who_are_parked(policy: str) -> None:
    class Unwalked(OrderedDict[RequestKey, Request]):
        def values(self) -> ValuesView[Request]:
            raise AssertionError("the line was walked")

    line, requests = line_of(policy)
    for request in requests[:-1]:
        line.park(request)
    line.requests = Unwalked(line.requests)
    assert line.best(0.0) is requests[-1]

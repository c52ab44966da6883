"""Preemption (SPEC B9): who gives way to whom, by which cost, the way back, and why it cannot storm."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from headrace.core.fairness import ServiceCounters
from headrace.core.records import FinishReason
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from tests.core_world import ROOT, World, make_settings
from workers.core.blocks import BlockPool
from workers.core.policies import Pace, Policy
from workers.core.preemption import Preemption, Way
from workers.core.request import HostCopy, Request, State, advance
from workers.core.settings import SchedulerSettings

B = 4
EASY: dict[str, object] = {"policy": "slo_fair", "ttft_target_s": 0.0}

# ---- by class, never the reverse, never a pinned one


def test_a_higher_class_takes_the_row_of_a_lower_one_and_both_say_what_they_would_have_said() -> None:
    world = World(make_settings(max_num_seqs=1, **EASY))
    low = world.submit(6, max_tokens=30, priority=1)
    for _ in range(5):
        world.step()
    high = world.submit(6, max_tokens=10)
    world.step()
    assert (low.state, high.state) == (State.PREEMPTED, State.DECODING)
    world.run()
    assert (low.preemptions, high.preemptions) == (1, 0)
    for request in (low, high):
        world.assert_output_as_alone(request)
    world.assert_drained()


def test_a_higher_class_takes_the_blocks_of_a_lower_one() -> None:
    world = World(make_settings(**EASY), num_blocks=12)
    low = world.submit(40, max_tokens=5, priority=1)
    world.step()
    high = world.submit(20, max_tokens=10)
    world.step()
    assert (low.state, high.state) == (State.PREEMPTED, State.DECODING)
    world.run()
    for request in (low, high):
        world.assert_output_as_alone(request)
    world.assert_drained()


def test_a_higher_class_takes_the_blocks_that_lower_ones_share() -> None:
    world = World(make_settings(**EASY), num_blocks=14)
    stem = [7_000_000 + i for i in range(32)]
    low = []
    for last in range(2):
        low.append(world.submit([*stem, last], max_tokens=9, priority=1))
        world.step()
        world.step()
    high = world.submit(40, max_tokens=3)
    world.step()
    assert ([r.state for r in low], high.state) == ([State.PREEMPTED] * 2, State.DECODING)
    world.run()
    for request in (*low, high):
        world.assert_output_as_alone(request)
    world.assert_drained()


@pytest.mark.parametrize("scarce", [{"max_num_seqs": 1}, {}])
@pytest.mark.parametrize("priority", [0, 1])
def test_nobody_is_preempted_for_a_waiter_of_its_own_class_or_a_lower_one(
    scarce: dict[str, object], priority: int
) -> None:
    world = World(make_settings(**EASY, **scarce), num_blocks=12)
    running = world.submit(30, max_tokens=12)
    world.step()
    waiting = world.submit(20, max_tokens=4, priority=priority)
    world.submit(20, max_tokens=1, priority=7)
    while running.state is State.DECODING:
        assert waiting.state is State.WAITING
        world.step()
    world.run()
    assert world.scheduler.stats()["preemptions"] == 0
    world.assert_drained()


def test_a_growing_low_class_gives_way_itself_before_a_high_one_does() -> None:
    # The low one asks for the block that is short: it may be its own victim, the high one may not.
    world = World(make_settings(**EASY), num_blocks=9)
    high = world.submit(15, max_tokens=14)
    low = world.submit(12, max_tokens=20, priority=1)
    world.run()
    assert high.preemptions == 0
    assert low.preemptions > 0
    world.assert_output_as_alone(low)
    world.assert_drained()


def test_a_pinned_request_is_preempted_for_nobody() -> None:
    world = World(make_settings(long_prefill_token_threshold=4, max_num_seqs=1, **EASY))
    pinned = world.submit(40, hand_off=True, priority=5)
    world.step()
    assert world.scheduler.pin(pinned.key)
    high = world.submit(6, max_tokens=2, priority=-5)
    world.step()
    assert (pinned.state, high.state) == (State.PREFILLING, State.WAITING)
    world.scheduler.unpin(pinned.key)
    world.step()
    assert (pinned.state, high.state) == (State.PREEMPTED, State.PREFILLING)
    world.run()
    world.scheduler.release_handed_off(pinned.key, world.now)
    world.assert_drained()


# ---- whom, by cost


@dataclass
class Stage:
    """Requests that hold blocks, as `Preemption` looks at them. A block of 4 tokens takes 40 ms to compute."""

    settings: SchedulerSettings
    pool: BlockPool = field(default_factory=lambda: BlockPool(500, B))
    service: ServiceCounters = field(default_factory=ServiceCounters)
    count: int = 0

    def __post_init__(self) -> None:
        pace = Pace(prefill_token_s=0.01, decode_token_s=0.01, known=True)
        self.preemption = Preemption(self.settings, self.pool, pace, Policy(self.settings, pace, self.service))

    def holder(self, tokens: int = 40, *, output: int = 0, max_tokens: int = 100, **fields: object) -> Request:
        """A decoding request that has computed `tokens` of prompt and `output`."""
        self.count += 1
        prompt = list(range(tokens - output))
        sampling = SamplingParams(max_tokens=max_tokens)
        key = RequestKey(self.count)
        request = Request(key, RequestId(f"r{key}"), 0, prompt, sampling, ROOT, **fields)  # type: ignore[arg-type]
        request.arrival = self.count
        request.tenant_index = self.service.enter(request.tenant)
        for to in (State.PREFILLING, State.DECODING):
            advance(request, to, 0.0)
        for _ in range(output + 1):
            request.append(7)
        request.block_ids = self.pool.alloc(self.pool.blocks_for(tokens)) or []
        return request

    def victim(self, *candidates: Request, host_blocks: int = 0) -> Request | None:
        return self.preemption.choose_victim(candidates, candidates[0], host_blocks, 0.0, 0.0)


def stage(**changes: object) -> Stage:
    return Stage(make_settings(**EASY, **changes))


def test_with_equal_costs_the_latest_arrival_goes_and_the_eldest_never() -> None:
    a = stage()
    eldest, middle, latest = (a.holder() for _ in range(3))
    assert a.victim(eldest, middle, latest) is latest
    # Not even when all costs speak for it.
    costly = [a.holder(deadline=1.6), a.holder(deadline=1.6)]
    assert a.victim(eldest, *costly) is not eldest


def test_the_more_memory_comes_free_the_sooner_a_victim() -> None:
    a = stage(host_copy_block_s=0.001)
    eldest, large, small = a.holder(), a.holder(200), a.holder(20)
    assert a.victim(eldest, large, small, host_blocks=500) is large


def test_a_shared_block_frees_nothing() -> None:
    a = stage(host_copy_block_s=0.001)
    eldest, sharing, alone = a.holder(), a.holder(80), a.holder(40)
    a.pool.incref(sharing.block_ids[:15])
    assert a.victim(eldest, sharing, alone, host_blocks=500) is alone


def test_what_is_dear_to_restore_stays() -> None:
    # Both free ten blocks; one has its KV computed, the other has only just begun.
    a = stage()
    eldest, begun, computed = a.holder(), a.holder(4), a.holder(40)
    begun.block_ids += a.pool.alloc(9) or []
    assert a.victim(eldest, begun, computed) is begun


def test_who_would_miss_its_deadline_stays() -> None:
    a = stage()
    eldest, free, due = a.holder(), a.holder(), a.holder(deadline=1.6)
    assert a.victim(eldest, free, due) is free


def test_who_has_received_less_than_its_share_stays() -> None:
    a = stage()
    eldest, ahead, behind = a.holder(tenant="ahead"), a.holder(tenant="ahead"), a.holder(tenant="behind")
    a.service.charge_input(ahead.tenant_index, 5_000)
    assert a.victim(eldest, ahead, behind) is ahead


def test_who_is_nearly_finished_stays() -> None:
    a = stage()
    eldest, long_way, nearly = a.holder(), a.holder(output=20), a.holder(output=20, max_tokens=22)
    assert a.victim(eldest, long_way, nearly) is long_way


def test_the_lowest_class_goes_whatever_the_costs() -> None:
    a = stage()
    eldest, low, equal = a.holder(), a.holder(priority=1, output=20, max_tokens=22, deadline=0.2), a.holder()
    assert a.victim(eldest, equal, low) is low
    high = a.holder(priority=-1)
    assert a.victim(eldest, high, eldest) is eldest
    assert a.preemption.choose_victim([high], eldest, 0, 0.0, 0.0) is None
    assert a.preemption.choose_victim([eldest], high, 0, 0.0, 0.0) is eldest


def test_who_has_a_reader_is_no_candidate() -> None:
    a = stage()
    eldest, free, read = a.holder(), a.holder(), a.holder()
    assert a.victim(eldest, free, read) is read
    read.pinned = True
    assert a.victim(eldest, free, read) is free
    assert a.preemption.choose_victim([read], eldest, 0, 0.0, 0.0) is None


def test_who_has_just_come_back_stays_until_it_has_made_progress() -> None:
    a = stage()
    eldest, other, back = a.holder(), a.holder(), a.holder()
    back.protected_tokens = back.computed_tokens + 1
    assert a.victim(eldest, other, back) is other
    back.protected_tokens = back.computed_tokens
    assert a.victim(eldest, other, back) is back


# ---- the way back


@pytest.mark.parametrize(
    ("way", "copy_block_s", "host_blocks", "may_route", "output", "pause_s", "shared"),
    [
        # 40 tokens are 400 ms of prefill; ten blocks there and back are 20 copies.
        (Way.RECOMPUTE, 0.0, 0, False, 5, 0.0, 0),  # no host memory
        (Way.RECOMPUTE, 0.0, 9, False, 5, 0.0, 0),  # not enough of it
        (Way.SWAP, 0.001, 10, False, 5, 0.0, 0),
        (Way.RECOMPUTE, 0.1, 10, False, 5, 0.0, 0),  # copies are slower than prefill
        (Way.RECOMPUTE, 0.01, 10, False, 5, 0.0, 7),  # others keep most of the prefix alive
        (Way.SWAP, 0.001, 10, True, 0, 0.0, 0),  # a copy is cheaper than to begin anew elsewhere
        (Way.ROUTE, 0.001, 10, True, 0, 1.0, 0),  # unless blocks stay short for long
        (Way.ROUTE, 0.0, 0, True, 0, 1.0, 0),
        (Way.RECOMPUTE, 0.0, 0, True, 5, 1.0, 0),  # its client has a stream already
        (Way.RECOMPUTE, 0.0, 0, True, 0, 0.0, 0),  # here it is the same work without the way
    ],
)
def test_the_cheapest_way_back_is_taken(
    way: Way, copy_block_s: float, host_blocks: int, may_route: bool, output: int, pause_s: float, shared: int
) -> None:
    a = stage(host_copy_block_s=copy_block_s, route_when_preempted=may_route)
    request = a.holder(output=output)
    if not output:
        request = a.holder(40)
        request.token_ids.pop()
    a.pool.incref(request.block_ids[:shared])
    assert a.preemption.restore(request, host_blocks, pause_s).way is way


@pytest.mark.parametrize("host_blocks", [0, 200])
def test_output_after_many_preemptions_is_that_of_an_undisturbed_run(host_blocks: int) -> None:
    world = World(make_settings(max_num_seqs=4, host_blocks=host_blocks, **EASY), num_blocks=24)
    victim = world.submit(9, max_tokens=80, priority=1, no_cache=True)
    others = []
    for _ in range(4):
        for _ in range(15):
            world.step()
        others.append(world.submit(70, max_tokens=8, no_cache=True))
    world.run()
    assert victim.preemptions >= 3
    for request in (victim, *others):
        world.assert_output_as_alone(request)
    stats = world.scheduler.stats()
    if host_blocks:
        assert stats["swapped_in"] == stats["swapped_out"] == victim.preemptions
        assert stats["recomputed_tokens"] == 0
    else:
        assert stats["recomputed_tokens"] > 0
    world.assert_drained()


def preempted_to_host() -> tuple[World, Request]:
    world = World(make_settings(max_num_seqs=1, host_blocks=50, **EASY))
    low = world.submit(9, max_tokens=20, priority=1, no_cache=True)
    for _ in range(3):
        world.step()
    world.submit(6, max_tokens=4)
    world.step()
    assert low.state is State.PREEMPTED
    assert low.host is not None
    return world, low


def test_a_host_copy_of_an_earlier_preemption_is_dropped_and_computed_again() -> None:
    world, low = preempted_to_host()
    stale = low.host
    assert stale is not None
    low.host = HostCopy(stale.blocks, stale.num_tokens, stale.preemption - 1)
    for block in stale.blocks:
        world.runner.host[block] = [-7] * B
    world.run()
    world.assert_output_as_alone(low)
    assert world.scheduler.stats()["swapped_in"] == 0
    world.assert_drained()


def test_the_same_copy_of_this_preemption_is_used() -> None:
    # What the test above would see if nothing told stale copies from fresh ones.
    world, low = preempted_to_host()
    assert low.host is not None
    for block in low.host.blocks:
        world.runner.host[block] = [-7] * B
    with pytest.raises(AssertionError, match="not its own"):
        world.run()


def test_a_copy_of_a_request_that_ends_meanwhile_leaves_the_host() -> None:
    world, low = preempted_to_host()
    assert world.scheduler.finish(low.key, FinishReason.CANCELLED, world.now)
    world.run()
    world.assert_drained()
    world.scheduler.check_integrity()


# ---- storms


def overload(**changes: object) -> tuple[World, list[Request]]:
    """Forty requests whose outputs nobody knows (eos comes after 50 tokens on the average, at most 120 are asked for),
    on blocks for five or six of them."""
    values: dict[str, object] = {"min_progress_tokens": 8, "max_num_batched_tokens": 128, **EASY}
    world = World(make_settings(**(values | changes)), num_blocks=90)
    requests = [world.submit(12, max_tokens=120, ignore_eos=False, no_cache=True) for _ in range(40)]
    world.run()
    for request in requests:
        world.assert_output_as_alone(request)
    world.assert_drained()
    return world, requests


@pytest.mark.parametrize("host_blocks", [0, 100])
def test_optimistic_admission_does_not_storm(host_blocks: int) -> None:
    # Between two preemptions a request computes at least min_progress_tokens that it never had: with n output tokens
    # it is preempted at most 1 + n / 8 times. The margin keeps the mean far below that.
    world, requests = overload(host_blocks=host_blocks)
    for request in requests:
        assert request.preemptions <= 1 + request.num_output / 8
    preempted = world.scheduler.stats()["preemptions"]
    assert 0 < preempted <= len(requests)


def steps_until_admitted(*, preempt: bool) -> int:
    """Of a request that leaves three blocks, after one of 40 blocks was preempted and left, or only left."""
    settings = make_settings(block_size=64, max_num_batched_tokens=4_096, max_model_len=5_000, max_num_seqs=2, **EASY)
    world = World(replace(settings, long_prefill_token_threshold=4_096), num_blocks=64)
    world.submit(4, max_tokens=50)
    low = world.submit(40 * 64 - 2, max_tokens=50, priority=9, no_cache=True)
    world.step()
    if preempt:
        world.submit(1, max_tokens=1)
        world.step()
        assert low.state is State.PREEMPTED
    world.scheduler.finish(low.key, FinishReason.CANCELLED, world.now)
    newcomer = world.submit((world.pool.available_blocks - 3) * 64 - 1, max_tokens=1, no_cache=True)
    for steps in range(40):
        if newcomer.first_scheduled_at is not None:
            return steps
        world.step()
    raise AssertionError("never admitted")


def test_preemptions_raise_the_margin_that_admissions_leave_for_a_while() -> None:
    assert steps_until_admitted(preempt=False) == 1
    assert 10 <= steps_until_admitted(preempt=True) <= 30


@pytest.mark.parametrize(
    ("priority", "token_ms", "pays"),
    [(-1, 1.0, True), (0, 1.0, False), (1, 1.0, False), (-1, 100.0, False), (-5, 100.0, True)],
)
def test_a_waiting_prefill_of_a_higher_class_takes_a_readers_blocks_where_that_pays(
    priority: int, token_ms: float, pays: bool
) -> None:
    world = World(make_settings(policy="slo_fair", class_weight_ms=1_000.0), num_blocks=20)
    held, runs = world.submit(40, hand_off=True), world.submit(4, max_tokens=50)
    world.step()
    assert held.state is State.TRANSFERRING
    world.scheduler._pace.prefill_token_s = token_ms / 1_000
    world.submit(60, priority=priority)
    world.step()
    assert runs.state is State.DECODING, "this worker is not stuck: only the class speaks for it"
    assert world.scheduler.revocable(world.now) == (held.key if pays else None)

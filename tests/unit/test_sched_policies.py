"""Policies by name (SPEC B6) and what becomes of a deadline (B7): each order against `fcfs`, with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from headrace.core.records import FinishReason
from tests.core_world import World, linear_cost, linear_predictor, make_settings
from workers.core.policies import POLICIES
from workers.core.request import Request, State

TOKEN_S = 0.01
"""A token of the linear machine below, prompt or output."""


@dataclass(frozen=True)
class Ask:
    prompt: int
    at: float = 0.0
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    max_tokens: int = 1


def one_at_a_time(policy: str, asks: Sequence[Ask], *, served: str = "", **changes: object) -> list[tuple[int, str]]:
    """(place in `asks`, reason) in the order in which they start on a worker with one row and a second a step.

    A first request holds the row until second 100, and all that have come by then wait. `served`: its tenant.
    """
    settings = make_settings(policy=policy, **{"max_num_seqs": 1, "ttft_target_s": 0.0, **changes})
    world = World(settings, num_blocks=1_000)
    world.submit(1, max_tokens=100, tenant=served)
    world.step()
    waiting = sorted(enumerate(asks), key=lambda item: item[1].at)
    made: dict[int, Request] = {}
    started: list[tuple[int, str]] = []
    while world.scheduler.requests or waiting:
        while waiting and waiting[0][1].at <= world.now:
            place, ask = waiting.pop(0)
            made[place] = world.submit(
                ask.prompt, ask.max_tokens, deadline=ask.deadline, tenant=ask.tenant, priority=ask.priority
            )
        assert world.step() is not None
        known = {place for place, _ in started}
        started += [
            (place, request.priority_reason)
            for place, request in made.items()
            if place not in known and request.first_scheduled_at is not None
        ]
    world.assert_drained()
    return started


def test_fcfs_is_the_order_of_arrival_whoever_asks() -> None:
    asks = [Ask(60, priority=5), Ask(2, tenant="b", priority=-5), Ask(30, deadline=150.0), Ask(1)]
    assert one_at_a_time("fcfs", asks) == [(place, "arrival") for place in range(4)]


# What each policy makes of requests that fcfs serves in the order of the list.
ORDERS = {
    "aging: a short prompt before a long one": (
        "aging", [Ask(200), Ask(2)], {}, [(1, "short_remaining"), (0, "arrival")],
    ),
    "aging: a higher class before a lower one": (
        "aging", [Ask(20, priority=1), Ask(20)], {}, [(1, "class"), (0, "arrival")],
    ),
    "aging: not any more once the long one is old": (
        "aging", [Ask(500), Ask(2, at=80.0)], {}, [(0, "aging_boost"), (1, "arrival")],
    ),
    "deadline: the least slack first": (
        "deadline", [Ask(20, deadline=900.0), Ask(20, deadline=500.0)], {},
        [(1, "deadline_urgency"), (0, "arrival")],
    ),
    "shortest_remaining: a short prompt before a long one": (
        "shortest_remaining", [Ask(200), Ask(20), Ask(100)], {},
        [(1, "short_remaining"), (2, "short_remaining"), (0, "arrival")],
    ),
    "mlfq: a long prompt joins a lower level": (
        "mlfq", [Ask(40), Ask(5), Ask(6)], {"mlfq_quantum_tokens": 8}, [(1, "level"), (2, "level"), (0, "arrival")],
    ),
    "fair: the tenant that has received less": (
        "fair", [Ask(20, tenant="greedy"), Ask(20, tenant="modest")], {},
        [(1, "fair_share"), (0, "arrival")],
    ),
    "slo_fair: a higher class": ("slo_fair", [Ask(20, priority=1), Ask(20)], {}, [(1, "class"), (0, "arrival")]),
    "slo_fair: a deadline within the horizon": (
        "slo_fair", [Ask(20), Ask(20, deadline=100.5)], {"urgency_horizon_s": 1.0, "lost_deadline": "best_effort"},
        [(1, "deadline_urgency"), (0, "arrival")],
    ),
    "slo_fair: a short prompt": ("slo_fair", [Ask(200), Ask(2)], {}, [(1, "short_remaining"), (0, "arrival")]),
    "slo_fair: the tenant that has received less": (
        "slo_fair", [Ask(20, tenant="greedy"), Ask(20, tenant="modest")], {},
        [(1, "fair_share"), (0, "arrival")],
    ),
    "slo_fair: not any more once the long one is old": (
        "slo_fair", [Ask(500), Ask(2, at=80.0)], {}, [(0, "aging_boost"), (1, "arrival")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ORDERS)
def test_each_policy_departs_from_fcfs_as_it_says_and_tells_why(case: str) -> None:
    policy, asks, changes, expected = ORDERS[case]
    served = "greedy" if asks[0].tenant else ""
    assert one_at_a_time(policy, asks, served=served, **changes) == expected
    fcfs = [(place, "arrival") for place in range(len(asks))]
    assert one_at_a_time("fcfs", asks, served=served, **changes) == fcfs


def test_every_policy_has_a_case_here() -> None:
    assert {policy for policy, *_ in ORDERS.values()} | {"fcfs", "decode_first"} == set(POLICIES)


def two_decodes_beside_a_prefill(policy: str, prefill_first: bool) -> tuple[World, list[Request], Request]:
    """Two requests that decode and one whose prompt fills every step, in either order of arrival."""
    settings = make_settings(
        policy=policy,
        max_num_batched_tokens=8,
        long_prefill_token_threshold=8,
        min_prefill_share=0.0,
        next_token_deadline_s=0.0,
    )
    world = World(settings)
    prompt = world.submit(80) if prefill_first else None
    adopted = [world.adopt(3, max_tokens=20) for _ in range(2)]
    world.step()
    for request in adopted:
        world.pull(request)
        world.activate(request)
    return world, adopted, prompt or world.submit(80)


def tokens_in_steps(world: World, requests: Sequence[Request], steps: int) -> list[int]:
    before = [request.num_tokens for request in requests]
    for _ in range(steps):
        world.step()
    return [request.num_tokens - num for request, num in zip(requests, before, strict=True)]


def test_decode_first_gives_a_step_to_decodes_before_an_older_prefill_and_fcfs_does_not() -> None:
    world, decodes, prompt = two_decodes_beside_a_prefill("decode_first", prefill_first=True)
    assert tokens_in_steps(world, decodes, 5) == [5, 5]
    assert prompt.state is State.PREFILLING
    world, decodes, prompt = two_decodes_beside_a_prefill("fcfs", prefill_first=True)
    assert sum(tokens_in_steps(world, decodes, 5)) <= 5
    assert prompt.state is State.PREFILLING


def test_fcfs_lets_decodes_that_came_before_a_prefill_go_before_it() -> None:
    # Old fault: a prefill that had started took its chunk before the decodes of requests that had come earlier.
    world, decodes, _ = two_decodes_beside_a_prefill("fcfs", prefill_first=False)
    assert tokens_in_steps(world, decodes, 5) == [5, 5]


def test_a_feedback_queue_lets_a_new_request_go_before_one_that_has_used_up_its_quantum() -> None:
    for policy, expected in (("mlfq", 2), ("decode_first", 4)):
        world = World(make_settings(policy=policy, max_decode_rows=1, mlfq_quantum_tokens=8, next_token_deadline_s=0.0))
        old = world.submit(4, max_tokens=40)
        for _ in range(10):
            world.step()
        new = world.submit(4, max_tokens=10)
        world.step()
        assert tokens_in_steps(world, [old, new], 7)[0] == expected


def test_a_nearly_complete_prefill_goes_before_an_earlier_one_and_says_so() -> None:
    settings = make_settings(
        policy="slo_fair", max_num_batched_tokens=16, long_prefill_token_threshold=8, ttft_target_s=0.0
    )
    world = World(settings, num_blocks=200)
    long, short = world.submit(200), world.submit(24)
    for _ in range(8):
        world.step()
        if short.uncomputed_tokens <= 8:
            break
    world.step()
    assert long.state is State.PREFILLING
    assert short.first_token_at is not None
    assert short.priority_reason == "nearly_complete"


# ---- B7: what becomes of a deadline


def row_is_taken(**changes: object) -> World:
    """A worker whose only row is free in 0.27 s. The machine's pace is known."""
    settings = make_settings(policy="slo_fair", max_num_seqs=1, ttft_target_s=0.0, **changes)
    world = World(settings, num_blocks=200, predictor=linear_predictor(TOKEN_S), cost=linear_cost(TOKEN_S))
    world.submit(10, max_tokens=30)
    for _ in range(3):
        world.step()
    return world


def deadlines(left_s: float, older_tokens: int = 50, **changes: object) -> tuple[World, Request, Request]:
    """In line: an older request without a deadline, and an equal younger one that has `left_s` for 1.1 s of work."""
    world = row_is_taken(**changes)
    older = world.submit(60, max_tokens=older_tokens)
    younger = world.submit(60, max_tokens=50, deadline=world.now + left_s)
    return world, older, younger


def finished_first(world: World, *requests: Request) -> Request:
    world.run()
    world.assert_drained()
    return min(requests, key=lambda r: r.first_scheduled_at if r.first_scheduled_at is not None else 1e9)


def test_an_attainable_deadline_is_boosted_and_met() -> None:
    world, older, younger = deadlines(2.0)
    assert finished_first(world, older, younger) is younger
    assert (younger.priority_reason, younger.finish_reason) == ("deadline_urgency", FinishReason.LENGTH)
    assert younger.deadline is not None and younger.finished_at is not None
    assert younger.finished_at <= younger.deadline


def test_a_doubtful_deadline_is_served_without_a_boost() -> None:
    # When the row is free 1.4 s are left for 1.1 s of work, 0.8 s when the older one has ended: predictions may err
    # by more.
    world, older, younger = deadlines(1.67, older_tokens=1)
    assert finished_first(world, older, younger) is older
    assert younger.finish_reason is FinishReason.LENGTH


def test_a_lost_deadline_is_refused_at_once_with_its_reason() -> None:
    world, older, younger = deadlines(0.5)
    world.schedule()
    assert world.scheduler.refused == [(younger.key, "deadline_lost")]
    assert (younger.finish_reason, younger.ledger.computed_tokens) == (FinishReason.DEADLINE, 0)
    assert world.scheduler.stats()["deadline_lost"] == 1
    assert older.state is State.WAITING


def test_by_setting_a_lost_deadline_is_served_after_everybody_else() -> None:
    world, older, lost = deadlines(0.5, lost_deadline="best_effort")
    latest = world.submit(60, max_tokens=50)
    world.run()
    assert world.scheduler.refused == []
    assert lost.finish_reason is FinishReason.LENGTH
    starts = [request.first_scheduled_at for request in (older, latest, lost)]
    assert starts == sorted(starts, key=lambda at: at or 0.0)
    world.assert_drained()


def test_a_lost_request_never_delays_one_that_will_be_in_time() -> None:
    for lost_deadline in ("reject", "best_effort"):
        world = row_is_taken(lost_deadline=lost_deadline)
        lost = [world.submit(60, max_tokens=50, deadline=world.now + 0.6, priority=-1) for _ in range(5)]
        in_time = world.submit(60, max_tokens=10, deadline=world.now + 1.4)
        world.run()
        assert in_time.finish_reason is FinishReason.LENGTH
        assert in_time.finished_at is not None and in_time.deadline is not None
        assert in_time.finished_at <= in_time.deadline
        assert in_time.preemptions == 0
        reasons = {request.finish_reason for request in lost}
        assert reasons == {FinishReason.DEADLINE if lost_deadline == "reject" else FinishReason.LENGTH}
        world.assert_drained()

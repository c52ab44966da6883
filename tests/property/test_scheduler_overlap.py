"""The machine of `tests.scheduler_machine` as a busy worker sees it: always somebody to compute, always a step planned
behind the one that runs, and in between everything that may happen to a request, at any of its plans.

Hypothesis draws too many idle lives to meet two plans of one request often; here chance alone chooses, from a seed.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from headrace.core.records import FinishReason
from tests.scheduler_machine import ROOTS, SchedulerMachine, Wish
from workers.core.policies import POLICIES
from workers.core.request import Keep

OPERATIONS = 120


class Pick:
    """Stands in for `st.data()`."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def draw(self, strategy: Any) -> Any:
        strategy = getattr(strategy, "wrapped_strategy", strategy)
        if hasattr(strategy, "elements"):
            return self._rng.choice(strategy.elements)
        return self._rng.randint(strategy.start, strategy.end)


def wish(rng: Random) -> Wish:
    return Wish(
        prompt=[*range(1, rng.randrange(2, 9)), *(rng.randrange(1, 3) for _ in range(rng.randrange(4)))],
        max_tokens=rng.randrange(1, 24),
        known=rng.choice((0, 0, 2)),
        min_tokens=rng.choice((0, 0, 3)),
        ignore_eos=rng.random() < 0.5,
        kind=rng.choice(("whole", "whole", "whole", "adopted", "hand_off")),
        no_cache=rng.random() < 0.2,
        root=ROOTS[0],
        patience=rng.choice((None, None, None, 40.0)),
        priority=rng.choice((0, 0, 1)),
        tenant=rng.choice("ab"),
        predicted=rng.choice((0, 4)),
        fetch=0,
    )


def busy_life(rng: Random) -> SchedulerMachine:
    machine, data = SchedulerMachine(), Pick(rng)
    machine.start(
        num_blocks=rng.randrange(8, 20),
        rows=rng.randrange(2, 6),
        spare_tokens=rng.randrange(9),
        chunk=rng.randrange(1, 10),
        watermark=rng.randrange(2),
        block_size=rng.choice((2, 3, 4)),
        predicts=rng.random() < 0.5,
        ahead=1,
        changes={
            "policy": rng.choice(sorted(POLICIES)),
            "max_decode_rows": rng.choice((0, 0, 2)),
            "host_blocks": rng.choice((0, 3, 20)),
            "host_copy_block_s": 1e-9,
            "min_progress_tokens": rng.choice((0, 4)),
            "route_when_preempted": rng.random() < 0.3,
        },
    )
    for _ in range(OPERATIONS):
        while len(machine.world.scheduler.requests) < rng.randrange(2, 6):
            machine.come_one(wish(rng))
        operate(machine, rng, data)
        machine.integrity()
    return machine


def operate(machine: SchedulerMachine, rng: Random, data: Any) -> None:
    ahead = rng.randrange(3)
    match rng.randrange(22):
        case 0:
            machine.finish(data, rng.choice((FinishReason.CANCELLED, FinishReason.STOP)), ahead)
        case 1 if machine.decoding():
            machine.pause(data, rng.choice([*Keep]), ahead)
        case 2 | 3 if machine.callers():
            machine.call(data, 5.0, 0.0, ahead)
        case 4 | 5 | 6 if machine.paused():
            machine.resume(data, [rng.randrange(1, 4)])
        case 7 if machine.held():
            machine.release_handed_off(data)
        case 8 if machine.pulling():
            machine.complete(data, rng.random() < 0.3)
        case 9:
            machine.expire(1)
        case 10 if rng.random() < 0.3:
            machine.clear_cache(rng.choice(("a", None)))
        case 11 if rng.random() < 0.3:
            machine.resize(rng.choice((0.0, 0.3)), rng.choice((0.0, 0.5)), rng.random() < 0.5)
        case 12 | 13 if machine.computed < len(machine.plans):
            machine.compute()
        case 14:
            machine.peer_pins(data)
        case 15 if machine.pins:
            machine.peer_is_done()
        case 16 | 17:
            machine.reserve()
        case _:
            machine.run_on(1, leave=ahead)


@pytest.mark.parametrize("seed", range(60))
def test_a_busy_worker_with_two_plans_on_their_way_keeps_all_laws(seed: int) -> None:
    machine = busy_life(Random(seed))
    stats = machine.world.scheduler.stats()
    machine.teardown()
    assert stats["steps"] > 10

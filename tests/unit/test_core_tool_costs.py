"""Keep, offload or drop: each where it costs least, by the formula's own terms and by a pool that is played through."""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

import pytest

from workers.core.request import Keep
from workers.core.tool_wait import UNKNOWN_WAIT_S, Call, Stand, TakeRate, costs

IDLE = Stand(
    kv_blocks=40,
    held_blocks=40,
    private_blocks=0,
    private_tokens=0,
    block_ms=16.0,
    token_ms=1.0,
    copy_ms=0.5,
    return_ms=5.0,
    blocks_per_s=0.0,
    free_blocks=200,
    available_blocks=500,
    saved_ms=8.0,
    free_host_blocks=400,
    host_blocks=400,
)
"""Nobody else takes blocks."""


def chosen(stand: Stand, wait_s: float, lost_share: float = 0.0) -> Keep:
    return costs(stand, Call(1, (wait_s,), lost_share)).cheapest


def test_each_choice_is_made_somewhere_and_only_where_nothing_costs_less() -> None:
    seen: Counter[Keep] = Counter()
    grid = itertools.product(
        (0.0, 1.0, 20.0, 400.0), (0.05, 1.0, 30.0, 600.0), (0.0, 0.3, 0.9), (0.01, 0.5, 20.0), (0, 400), (1.0, 16.0)
    )
    for blocks_per_s, wait_s, lost_share, copy_ms, free_host, saved_ms in grid:
        stand = replace(IDLE, blocks_per_s=blocks_per_s, copy_ms=copy_ms, free_host_blocks=free_host, saved_ms=saved_ms)
        found = costs(stand, Call(1, (wait_s,), lost_share))
        seen[found.cheapest] += 1
        assert found.of(found.cheapest) == min(found.of(keep) for keep in Keep)
        assert all(found.of(keep) >= 0.0 for keep in Keep)
    assert all(seen[keep] >= 20 for keep in Keep), seen


def test_a_pool_that_nobody_else_wants_keeps_for_any_time() -> None:
    assert chosen(IDLE, 1e6) is Keep.KEEP
    assert chosen(replace(IDLE, saved_ms=0.0, blocks_per_s=400.0), 30.0) is Keep.KEEP


def test_short_pauses_keep_and_long_ones_under_pressure_give_up() -> None:
    busy = replace(IDLE, blocks_per_s=400.0)
    assert chosen(busy, 0.1) is Keep.KEEP
    assert chosen(busy, 60.0) is Keep.OFFLOAD
    assert chosen(replace(busy, free_host_blocks=0), 60.0) is Keep.DROP
    assert chosen(replace(busy, host_blocks=0, free_host_blocks=0), 60.0) is Keep.DROP


def test_who_will_hardly_come_back_is_worth_no_copy() -> None:
    busy = replace(IDLE, blocks_per_s=400.0, time_left_s=60.0)
    assert chosen(busy, 60.0, lost_share=0.99) is Keep.DROP


def test_what_costs_more_than_prefill_to_copy_is_computed_again() -> None:
    assert chosen(replace(IDLE, blocks_per_s=400.0, copy_ms=20.0), 60.0) is Keep.DROP


def test_a_full_host_makes_offloading_dearer() -> None:
    call = Call(1, (60.0,))
    terms = [costs(replace(IDLE, blocks_per_s=400.0, free_host_blocks=free), call).host_ms for free in (400, 200, 40)]
    assert terms == sorted(terms) and terms[0] < terms[-1]


def test_an_answer_that_never_comes_is_waited_for_until_the_deadline() -> None:
    busy = replace(IDLE, blocks_per_s=400.0)
    short, long = (costs(replace(busy, time_left_s=left), Call(1, (0.1,), 0.5)).memory_ms for left in (1.0, 100.0))
    assert short < long < costs(busy, Call(1, (0.1,), 0.5)).memory_ms < inf


def test_a_call_without_points_is_judged_by_the_unknown_ones() -> None:
    busy = replace(IDLE, blocks_per_s=40.0)
    assert costs(busy, Call(1, ())) == costs(busy, Call(1, UNKNOWN_WAIT_S))


# ---- a pool that is played through


class Played:
    """An LRU pool, full, in which each block is wanted again with probability `REUSE`, after an exponential time.
    The paused request has given up `ours` more blocks just before. Equal seeds want equal blocks, whatever is cached.
    """

    def __init__(self, capacity: int, ours: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.capacity = capacity
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.wanted: list[tuple[float, int]] = []
        self.names = itertools.count()
        self.evicted_at: dict[int, float] = {}
        self.regretted = self.missed = self.touched = self.evictions = 0
        self.play(-WARM_S, 0.0)
        self.ours = {-1 - i for i in range(ours)}
        self.capacity += ours
        self.cached |= OrderedDict.fromkeys(self.ours)

    def use(self, name: int, now: float) -> None:
        self.touched += 1
        if name not in self.cached:
            self.missed += 1
            self.regretted += now - self.evicted_at.pop(name, -1e9) < TURNOVER_S
        self.cached[name] = None
        self.cached.move_to_end(name)
        if self.rng.random() < REUSE:
            heappush(self.wanted, (now + self.rng.expovariate(1.0 / TURNOVER_S), name))
        while len(self.cached) > self.capacity:
            self.evicted_at[self.cached.popitem(last=False)[0]] = now
            self.evictions += 1

    def play(self, start_s: float, end_s: float) -> None:
        for i in range(int((end_s - start_s) * NEW_PER_S)):
            now = start_s + i / NEW_PER_S
            while self.wanted and self.wanted[0][0] <= now:
                self.use(heappop(self.wanted)[1], now)
            self.use(next(self.names), now)
            self.missed -= 1  # nobody could have had it


REUSE, NEW_PER_S, TURNOVER_S, WARM_S = 0.5, 50.0, 2.0, 40.0


def played_ms(stand: Stand, keep: Keep, wait_s: float, seed: int) -> float:
    """What the pause costs everybody, more than if the request had just ended."""
    pool = Played(stand.available_blocks, stand.held_blocks - stand.private_blocks, seed)
    pool.play(0.0, wait_s)
    if keep is Keep.KEEP:
        without = Played(stand.available_blocks, 0, seed)
        without.play(0.0, wait_s)
        return (without.missed - pool.missed) * stand.block_ms
    gone = len(pool.ours - pool.cached.keys())
    if keep is Keep.OFFLOAD:
        return (stand.kv_blocks + gone + stand.private_blocks) * stand.copy_ms + stand.return_ms
    return gone * stand.block_ms + stand.private_tokens * stand.token_ms + stand.return_ms


@pytest.mark.parametrize("copy_ms", [0.5, 3.0, 12.0])
def test_in_a_pool_that_is_played_through_the_choice_is_better_than_any_one_for_all(copy_ms: float) -> None:
    seen = Played(200, 0, seed=99)
    per_s, worth = seen.touched / WARM_S, seen.regretted / seen.evictions
    stand = replace(IDLE, free_blocks=0, available_blocks=200, copy_ms=copy_ms, saved_ms=worth * IDLE.block_ms)
    stand = replace(stand, blocks_per_s=per_s)
    regret_ms, of_one = 0.0, dict.fromkeys(Keep, 0.0)
    for wait_s in (0.1, 1.0, 4.0, 8.0, 16.0, 30.0):
        played = {keep: sum(played_ms(stand, keep, wait_s, seed) for seed in range(6)) / 6 for keep in Keep}
        best = min(played.values())
        regret_ms += played[chosen(stand, wait_s)] - best
        of_one = {keep: of_one[keep] + played[keep] - best for keep in Keep}
    assert regret_ms < min(of_one.values())


def test_the_rate_of_taking_follows_what_the_pool_gives_out_and_forgets() -> None:
    rate = TakeRate()
    assert rate.see(0, 0.0) == 0.0
    for second in range(1, 200):
        now_per_s = rate.see(50 * second, float(second))
    assert now_per_s == pytest.approx(50.0, rel=0.01)
    assert rate.see(50 * 199, 199.0 + 300.0) < 1.0

"""What gateways expect of workers: equal to a plain count of tickets, and cheap however long prompts are."""

from __future__ import annotations

import random

import pytest

from headrace.core.records import CacheChange
from router.core.prefix_index import PrefixIndex


def key_of(path: tuple[int, ...]) -> int:
    return hash((7, *path)) & (2**64 - 1)


def chain(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(key_of(path[: i + 1]) for i in range(len(path)))


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("seed", range(100))
def test_a_worker_is_expected_to_have_what_the_longest_of_its_tickets_has_in_common(seed: int) -> None:
    rng = random.Random(seed)
    index, now, told = PrefixIndex(), 0.0, ((), (), ())
    live: dict[int, tuple[int, tuple[int, ...], float]] = {}
    for slot in range(3):
        told = (*told[:slot], tuple(rng.randrange(2) for _ in range(rng.randrange(6))), *told[slot + 1 :])
        index.apply(slot, CacheChange(1, 0, 1, chain(told[slot]), is_snapshot=True))
    for _ in range(80):
        path = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 12)))
        act = rng.random()
        if act < 0.5:
            slot, until = rng.randrange(3), now + rng.randrange(1, 30)
            live[index.expect(slot, chain(path), until, ready_at=until)] = slot, path, until
        elif act < 0.7 and live:
            ticket = rng.choice(sorted(live))
            index.withdraw(ticket)
            index.withdraw(ticket)
            del live[ticket]
        elif act < 0.73:
            gone = rng.randrange(3)
            index.forget(gone)
            told = tuple(() if slot == gone else path for slot, path in enumerate(told))
            live = {ticket: made for ticket, made in live.items() if made[0] != gone}
        else:
            now += rng.randrange(3)
            index.expire(now)
            live = {ticket: made for ticket, made in live.items() if made[2] > now}
        asked = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 14)))
        runs = [common(path, asked) for path in told]
        held = list(runs)
        for slot, path, _ in live.values():
            runs[slot] = max(runs[slot], common(path, asked))
        depths = index.lookup(chain(asked), 3)
        assert depths.tolist() == runs
        assert index.told(chain(asked), depths).tolist() == held
        for slot in range(3):
            if held[slot] < runs[slot]:
                first = min(t for t, made in live.items() if made[0] == slot and common(made[1], asked) == runs[slot])
                assert index.coming(slot, chain(asked)[runs[slot] - 1])[0] == live[first][2]
    index.expire(1e9)
    assert index.memory_bytes == 100 * index.num_blocks + 50 * index.entries
    assert not index._expected._spans


def test_a_booking_does_not_look_at_each_block() -> None:
    looks = 0

    class Key(int):
        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            return int.__hash__(self)

    index = PrefixIndex()
    prompts = [tuple(map(Key, [*range(2000), *range(s * 10_000, s * 10_000 + 2000)])) for s in range(1, 51)]
    for slot, prompt in enumerate(prompts):
        index.expect(slot, prompt, until=1.0)
        index.lookup(prompt, 64)
    index.expire(1.0)
    assert index.lookup(prompts[0], 64).max() == 0
    assert looks < 100 * len(prompts)


def test_expectations_have_a_cap_of_their_own_that_leaves_room_for_what_is_told() -> None:
    index = PrefixIndex(max_entries=10)
    first = index.expect(0, chain((1,) * 8), until=1.0)
    assert index.lookup(chain((1,) * 8), 1)[0] == 8
    index.expect(0, chain((2,) * 8), until=1.0)
    assert index.lookup(chain((2,) * 8), 1)[0] == 0
    index.apply(1, CacheChange(1, 0, 1, chain((3,) * 10), is_snapshot=True))
    assert index.lookup(chain((3,) * 10), 2)[1] == 10
    index.withdraw(first)
    index.expect(0, chain((2,) * 8), until=1.0)
    assert index.lookup(chain((2,) * 8), 1)[0] == 8


def test_a_worker_that_told_of_all_that_was_expected_and_dropped_it_is_not_expected_to_have_it() -> None:
    index, keys = PrefixIndex(), chain((1, 2, 3))
    index.apply(0, CacheChange(1, 0, 1, is_snapshot=True))
    index.expect(0, keys, until=9.0)
    index.apply(0, CacheChange(1, 1, 4, stored=keys))
    index.apply(0, CacheChange(1, 4, 6, removed=keys[1:]))
    assert index.lookup(keys, 1)[0] == 1

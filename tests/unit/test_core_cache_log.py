"""The log of cache changes: what a reader that applies it knows, whatever it missed."""

from random import Random

import pytest

from headrace.core.records import CacheChange, cache_key
from headrace.errors import InvariantError
from workers.core.cache_log import CacheLog


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Reader:
    def __init__(self) -> None:
        self.epoch = self.seq = 0
        self.keys: set[int] = set()

    def take(self, change: CacheChange) -> None:
        if change.is_snapshot:
            self.keys = set(change.stored)
        else:
            assert (change.epoch, change.from_seq) == (self.epoch, self.seq)
            assert not set(change.stored) & set(change.removed)
            assert not set(change.stored) & self.keys
            assert set(change.removed) <= self.keys
            self.keys = (self.keys | set(change.stored)) - set(change.removed)
        self.epoch, self.seq = change.epoch, change.to_seq


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_at_any_distance_ends_with_what_is_cached(seed: int) -> None:
    rng, log, held, readers = Random(seed), CacheLog(8), [set[int](), set[int]()], [Reader(), Reader()]
    for _ in range(300):
        tier, number = rng.choice(held), rng.randrange(1, 12)
        if number in tier:
            tier.remove(number)
            log.removed(name(number))
        else:
            tier.add(number)
            log.stored(name(number))
        if rng.random() < 0.02:
            for each in held:
                each.clear()
            log.cleared()
        reader = rng.choice(readers)
        if rng.random() < 0.3:
            reader.take(log.changes(reader.epoch, reader.seq, rng.randrange(1, 5)))
    for reader in readers:
        while (reader.epoch, reader.seq) != (log.epoch, log.seq):
            reader.take(log.changes(reader.epoch, reader.seq, 3))
        assert reader.keys == {cache_key(name(number)) for number in held[0] | held[1]}
        assert len(log) == len(reader.keys)


def test_what_came_and_went_in_between_is_not_told() -> None:
    log, reader = CacheLog(), Reader()
    log.stored(name(1))
    reader.take(log.changes(0, 0, 10))
    log.removed(name(1))
    log.stored(name(2))
    log.stored(name(1))
    log.removed(name(2))
    change = log.changes(reader.epoch, reader.seq, 10)
    assert (change.stored, change.removed, change.is_snapshot) == ((), (), False)
    assert change.to_seq == log.seq


def test_a_block_that_moves_to_another_tier_is_no_change() -> None:
    log = CacheLog()
    log.stored(name(1))
    seq = log.seq
    log.stored(name(1))
    log.removed(name(1))
    assert log.seq == seq
    log.removed(name(1))
    assert log.seq == seq + 1
    with pytest.raises(InvariantError):
        log.removed(name(1))

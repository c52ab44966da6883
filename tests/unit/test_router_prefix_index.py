"""The prefix index: it converges to the workers' caches whatever is lost, and expects what was sent."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from headrace.core.records import CacheChange, Role, WorkerLoad
from router.core.placement import WorkerKey
from router.core.prefix_index import PrefixIndex
from router.core.router import Router

CHAIN = tuple(range(101, 109))


def snapshot(keys: tuple[int, ...], epoch: int = 1, seq: int = 10) -> CacheChange:
    return CacheChange(epoch, 0, seq, stored=keys, is_snapshot=True)


def depths(index: PrefixIndex, keys: tuple[int, ...], num_slots: int = 4) -> list[int]:
    return index.lookup(keys, num_slots).tolist()


# ---- what workers tell


def test_a_lookup_gives_every_worker_its_leading_run() -> None:
    index = PrefixIndex()
    for slot, held in enumerate((0, 3, 8, 3)):
        index.apply(slot, snapshot(CHAIN[:held]))
    assert depths(index, CHAIN) == [0, 3, 8, 3]
    assert depths(index, CHAIN[:5]) == [0, 3, 5, 3]
    assert depths(index, (7, *CHAIN)) == [0, 0, 0, 0]
    assert depths(index, ()) == [0, 0, 0, 0]


def test_more_than_64_workers_have_room_in_a_mask() -> None:
    index = PrefixIndex()
    for slot in range(300):
        index.apply(slot, snapshot(CHAIN[: slot % 9]))
    assert depths(index, CHAIN, 300) == [slot % 9 for slot in range(300)]


def test_a_worker_that_has_told_nothing_yet_has_nothing_whatever_its_number() -> None:
    index, keys = PrefixIndex(), (1, 2, 3)
    for slot in range(8):
        index.apply(slot, CacheChange(1, 0, 0, keys, is_snapshot=True))
    for count in (64, 65, 129):
        assert index.lookup(keys, count).tolist() == [3] * 8 + [0] * (count - 8)


def test_changes_continue_only_the_position_that_is_known() -> None:
    index = PrefixIndex()
    assert not index.apply(0, CacheChange(1, 0, 4, stored=CHAIN[:4]))  # nothing was known: a gap
    assert index.apply(0, snapshot(CHAIN[:4], seq=4))
    assert index.apply(0, CacheChange(1, 4, 6, stored=CHAIN[4:6]))
    assert depths(index, CHAIN)[0] == 6
    assert index.apply(0, CacheChange(1, 4, 6, stored=CHAIN[4:6]))  # repeated
    assert index.apply(0, CacheChange(1, 0, 4, removed=CHAIN[:4]))  # older
    assert depths(index, CHAIN)[0] == 6
    assert not index.apply(0, CacheChange(1, 7, 8, stored=CHAIN[7:]))  # change 7 is missing
    assert index.behind(0, 1, 6)
    assert not index.apply(0, CacheChange(1, 8, 9, removed=CHAIN[:1]))
    assert index.apply(0, snapshot(CHAIN[:2], seq=9))
    assert depths(index, CHAIN)[0] == 2 and not index.behind(0, 1, 9)


def test_a_new_epoch_drops_what_the_old_one_told_and_needs_a_snapshot() -> None:
    index = PrefixIndex()
    index.apply(0, snapshot(CHAIN, epoch=1))
    assert not index.apply(0, CacheChange(2, 0, 1, stored=CHAIN[:1]))
    assert depths(index, CHAIN)[0] == 0 and index.entries == 0
    assert index.apply(0, snapshot(CHAIN[:1], epoch=2, seq=1))
    assert index.apply(0, snapshot(CHAIN, epoch=1, seq=99))  # of the old epoch: ignored
    assert depths(index, CHAIN)[0] == 1


def test_a_later_position_in_a_load_report_shows_that_changes_were_lost() -> None:
    index = PrefixIndex()
    index.apply(0, snapshot(CHAIN, seq=10))
    assert not index.behind(0, 1, 10)
    assert not index.behind(0, 1, 9)
    assert index.behind(0, 1, 11)
    assert index.behind(0, 2, 0)
    assert index.behind(3, 1, 0)  # never heard of


def test_forgetting_a_worker_leaves_nothing_of_it() -> None:
    index = PrefixIndex()
    index.apply(0, snapshot(CHAIN))
    index.apply(1, snapshot(CHAIN[:2]))
    index.expect(0, (*CHAIN, 999), until=5.0)
    index.forget(0)
    assert depths(index, CHAIN) == [0, 2, 0, 0]
    assert (index.entries, index.num_blocks) == (2, 2)
    index.expire(9.0)
    assert (index.entries, index.num_blocks) == (2, 2)


# ---- what is expected


def test_a_sent_requests_blocks_are_expected_until_their_time_is_over() -> None:
    index = PrefixIndex()
    index.apply(0, snapshot(CHAIN[:2]))
    index.expect(0, CHAIN, until=5.0)
    assert depths(index, CHAIN)[0] == 8 and index.entries == 2
    index.expire(4.9)
    assert depths(index, CHAIN)[0] == 8
    index.expire(5.0)
    assert depths(index, CHAIN)[0] == 2 and index.num_blocks == 2


def test_withdrawing_takes_back_only_what_nobody_else_expects_or_told() -> None:
    index = PrefixIndex()
    index.apply(0, snapshot(CHAIN[:1]))
    first = index.expect(0, CHAIN[:4], until=5.0)
    second = index.expect(0, CHAIN, until=5.0)
    index.withdraw(first)
    assert depths(index, CHAIN)[0] == 8
    index.withdraw(second)
    index.withdraw(second)
    assert depths(index, CHAIN)[0] == 1 and index.num_blocks == 1


def test_what_the_worker_tells_outlives_the_expectation() -> None:
    index = PrefixIndex()
    index.apply(0, snapshot((), seq=1))
    index.expect(0, CHAIN, until=5.0)
    index.apply(0, CacheChange(1, 1, 5, stored=CHAIN[:4]))
    index.expire(6.0)
    assert depths(index, CHAIN)[0] == 4
    index.expect(0, CHAIN[:6], until=9.0)
    index.apply(0, CacheChange(1, 5, 9, removed=CHAIN[2:4]))
    index.expire(9.0)
    assert depths(index, CHAIN)[0] == 2


# ---- bounds


def test_at_its_cap_the_index_refuses_and_heals_when_there_is_room() -> None:
    index = PrefixIndex(max_entries=10)
    index.apply(0, snapshot(CHAIN))
    index.apply(1, snapshot(CHAIN))
    assert depths(index, CHAIN)[:2] == [8, 2] and index.entries == 10 and index.refused_entries == 6
    assert not index.behind(1, 1, 10)  # a snapshot would not help now
    index.apply(1, CacheChange(1, 10, 12, removed=CHAIN[4:6]))  # refused ones go: nothing to drop
    index.apply(0, snapshot((), seq=11))
    assert index.behind(1, 1, 12)
    assert index.apply(1, snapshot(CHAIN[:4], seq=12))
    assert depths(index, CHAIN)[:2] == [0, 4] and not index.behind(1, 1, 12)


# ---- the reference model


@dataclass
class ModelWorker:
    """A worker's cache as a set of chains, with its change log."""

    key: WorkerKey
    epoch: int = 1
    states: list[set[tuple[int, ...]]] = field(default_factory=lambda: [set()])
    told: int = 0

    @property
    def cache(self) -> set[tuple[int, ...]]:
        return self.states[-1]

    def store(self, path: tuple[int, ...]) -> None:
        for end in range(1, len(path) + 1):
            if path[:end] not in self.cache:
                self.states.append(self.cache | {path[:end]})

    def evict(self, rng: random.Random) -> None:
        parents = {path[:-1] for path in self.cache}
        tails = sorted(self.cache - parents)
        if tails:
            self.states.append(self.cache - {rng.choice(tails)})

    def clear(self) -> None:
        self.epoch += 1
        self.states, self.told = [set()], 0

    def change(self) -> CacheChange:
        before, now = self.states[self.told], self.cache
        change = CacheChange(
            self.epoch,
            self.told,
            len(self.states) - 1,
            tuple(key_of(p) for p in sorted(now - before, key=len)),
            tuple(key_of(p) for p in before - now),
        )
        self.told = change.to_seq
        return change

    def snapshot(self) -> CacheChange:
        self.told = len(self.states) - 1
        stored = tuple(key_of(p) for p in sorted(self.cache, key=len))
        return CacheChange(self.epoch, 0, self.told, stored, is_snapshot=True)

    def load(self) -> WorkerLoad:
        return WorkerLoad(cache_epoch=self.epoch, cache_seq=len(self.states) - 1)


def key_of(path: tuple[int, ...]) -> int:
    return hash((7, *path)) & (2**64 - 1)


def world(seed: int, max_entries: int) -> tuple[Router, list[ModelWorker]]:
    """Workers that store, evict, clear and restart while their events are lost, doubled, held back and shuffled."""
    rng = random.Random(seed)
    router = Router(rng.random, index=PrefixIndex(max_entries))
    workers = [ModelWorker(WorkerKey(f"w{i}", "1")) for i in range(rng.randint(1, 4))]
    for worker in workers:
        router.worker_up(worker.key, Role.COLOCATED, 1000, 16)
    held: list[tuple[WorkerKey, CacheChange]] = []
    lossy = rng.random()
    for step in range(rng.randint(5, 40)):
        at = rng.randrange(len(workers))
        worker, act = workers[at], rng.random()
        if act < 0.55:
            worker.store(tuple(rng.randrange(3) for _ in range(rng.randint(1, 6))))
        elif act < 0.85:
            for _ in range(rng.randint(1, 4)):
                worker.evict(rng)
        elif act < 0.92:
            worker.clear()
        elif act < 0.96:
            router.worker_down(worker.key)
            workers[at] = worker = ModelWorker(WorkerKey(worker.key.worker_id, str(step + 2)))
            router.worker_up(worker.key, Role.COLOCATED, 1000, 16)
        else:
            slot = router.table.slot(worker.key)
            assert slot is not None
            path = [rng.randrange(3) for _ in range(5)]
            router.index.expect(slot, [key_of(tuple(path[: i + 1])) for i in range(5)], until=1.0)
        if rng.random() < 0.7:
            held.append((worker.key, worker.change()))
        if rng.random() < 0.3:
            held.append((worker.key, worker.snapshot()))
        if rng.random() < 0.2:
            router.report(worker.key, worker.load())
        rng.shuffle(held)
        while held and rng.random() < 0.6:
            message = held.pop()
            if rng.random() > lossy * 0.5:
                router.cache_changed(*message)
            if rng.random() < 0.2:
                held.append(message)
    for message in held:
        router.cache_changed(*message)
    router.index.expire(2.0)
    return router, workers


def settle(router: Router, workers: list[ModelWorker]) -> None:
    """Load reports come through, and the snapshots that they ask for."""
    for _ in range(3):
        for worker in workers:
            if not router.report(worker.key, worker.load()):
                router.cache_changed(worker.key, worker.snapshot())


def check_equal(router: Router, workers: list[ModelWorker]) -> None:
    index = router.index
    for worker in workers:
        slot = router.table.slot(worker.key)
        assert slot is not None
        assert index.keys_of(slot) == {key_of(path) for path in worker.cache}
        for path in worker.cache:
            longer = [*path, 0, 0]
            keys = [key_of(tuple(longer[: i + 1])) for i in range(len(longer))]
            run = max(i + 1 for i in range(len(longer)) if tuple(longer[: i + 1]) in worker.cache)
            assert index.lookup(keys, router.table.num_slots)[slot] == run
    assert index.entries == sum(len(worker.cache) for worker in workers)
    assert index.num_blocks == len(set().union(*(worker.cache for worker in workers)))


def converges(seed: int) -> None:
    router, workers = world(seed, max_entries=10_000)
    settle(router, workers)
    check_equal(router, workers)


def capped_stays_true(seed: int) -> None:
    router, workers = world(seed, max_entries=12)
    settle(router, workers)
    for worker in workers:
        slot = router.table.slot(worker.key)
        assert slot is not None
        assert router.index.keys_of(slot) <= {key_of(path) for path in worker.cache}
    assert router.index.entries <= 12
    for worker in workers:
        while len(worker.cache) > 2:
            worker.evict(random.Random(seed))
    settle(router, workers)
    check_equal(router, workers)


@pytest.mark.parametrize("block", range(4))
def test_the_index_equals_the_union_of_the_caches_after_any_loss(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        converges(seed)


def test_at_the_cap_it_claims_nothing_wrong_and_converges_when_there_is_room() -> None:
    for seed in range(200):
        capped_stays_true(seed)


@pytest.mark.chaos
def test_the_index_converges_for_ten_thousand_loss_patterns() -> None:
    for seed in range(10_000):
        converges(seed)
        capped_stays_true(seed)

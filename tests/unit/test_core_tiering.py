"""Scheduler and tiers together, over a KV that shows every wrong byte: what is copied down, comes back, and is dropped.

Copies and files are made by hand and late on purpose: a copy reads the device when it ends, so one that was accepted
although its block was reused meanwhile would be read, and noticed.

Over 400 lines: all of it plays on the one world at the top.
"""

from __future__ import annotations

from random import Random

import pytest

from headrace.core.records import FinishReason
from kvtransfer.core.identity import block_hashes
from tests.core_world import ROOT, World, chain, linear_predictor, make_settings
from workers.core.packing import Packing
from workers.core.request import Keep
from workers.core.tier_actions import Block, Forget, Offload, Outcome, Promote, Spill, tenant_tag

HOST, DISK = 32, 64


class Tiered(World):
    """A world with hands for its copies and files."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tiering = self.scheduler.tiering
        self.tiering.scanned()
        self.files: dict[bytes, list[int]] = {}

    def copy_down(self, most: int = 100) -> int:
        offloads = self.tiering.offloads(most)
        for offload in offloads:
            self.end_copy(offload)
        return len(offloads)

    def end_copy(self, offload: Offload) -> None:
        self.runner.host[offload.host_block] = list(self.runner.kv[offload.device_block])
        self.tiering.offloaded(offload.ticket)

    def write_down(self, most: int = 100) -> None:
        for action in self.tiering.writes(most, self.now):
            self.end_write(action)

    def end_write(self, action: Spill | Forget) -> None:
        if isinstance(action, Forget):
            self.files.pop(action.hash, None)
        else:
            self.files[action.block.hash] = list(self.runner.host[action.host_block])
            self.tiering.spilled(action.ticket, Outcome.DONE, self.now)

    def read_up(self, most: int = 100, took_s: float = 0.001, outcome: Outcome = Outcome.DONE) -> int:
        reads = self.tiering.take_reads(most)
        for read in reads:
            self.end_read(read, took_s, outcome)
        return len(reads)

    def end_read(self, read: Promote, took_s: float = 0.001, outcome: Outcome = Outcome.DONE) -> None:
        if read.block.hash not in self.files:
            outcome = Outcome.FAILED
        if outcome is Outcome.DONE:
            self.runner.host[read.host_block] = list(self.files[read.block.hash])
        self.tiering.promoted(read.ticket, outcome, took_s, self.now)

    def forget_device(self) -> None:
        """Somebody else's prompt takes every block of the device."""
        self.submit((self.num_blocks - 1) * self.settings.block_size, max_tokens=1)
        self.run()


def world(num_blocks: int = 16, **settings: object) -> Tiered:
    return Tiered(make_settings(**({"host_blocks": HOST, "disk_blocks": DISK} | settings)), num_blocks=num_blocks)


def prefix(length: int) -> list[int]:
    return [7_000_000 + i for i in range(length)]


def test_a_prefix_that_the_device_gave_up_comes_back_from_the_host() -> None:
    w = world()
    w.submit(prefix(33), max_tokens=1)
    w.run()
    while w.copy_down():
        pass
    w.forget_device()
    request = w.submit(prefix(33), max_tokens=4)
    w.run()
    w.assert_output_as_alone(request)
    restored = w.tiering.tiers.counters["restores"]
    assert restored > 0
    assert request.ledger.cached_tokens == w.tiering.host_hit_tokens == restored * 4
    assert request.ledger.computed_tokens == 33 + 3 - restored * 4
    w.assert_drained()


def test_only_what_goes_soon_is_copied_and_half_of_the_host_is_left_to_what_has_gone() -> None:
    w = world(host_blocks=16)
    w.submit(prefix(33), max_tokens=1)
    w.run()
    assert w.copy_down() == 0  # seven blocks are free
    w.submit(12, max_tokens=1)
    w.run()
    assert 0 < w.copy_down() <= 5


def hold_in_host(w: Tiered, length: int = 33) -> None:
    """A prefix that only the host has."""
    w.submit(prefix(length), max_tokens=1)
    w.run()
    w.submit(6 * w.settings.block_size, max_tokens=1)
    w.run()
    while w.copy_down():
        pass
    w.forget_device()


@pytest.mark.parametrize("length", [31, 32, 33, 34])
def test_lengths_around_a_block_come_back_right(length: int) -> None:
    w = world(num_blocks=12)
    hold_in_host(w, length)
    request = w.submit(prefix(length), max_tokens=5)
    w.run()
    w.assert_output_as_alone(request)
    assert w.tiering.tiers.counters["restores"] > 0
    w.assert_drained()


def test_what_the_host_does_not_have_is_computed_and_what_follows_shares_with_both() -> None:
    w = world(num_blocks=12)
    hold_in_host(w, 33)
    longer = w.submit([*prefix(30), 1, 2, 3, 4, 5, 6], max_tokens=3)
    w.run()
    again = w.submit([*prefix(30), 1, 2, 3, 4, 5, 6], max_tokens=3)
    w.run()
    for request in (longer, again):
        w.assert_output_as_alone(request)
    w.assert_drained()


def test_the_host_is_not_used_when_computing_is_sooner() -> None:
    w = Tiered(make_settings(host_blocks=HOST, host_copy_block_s=1.0), num_blocks=12, predictor=linear_predictor(0.001))
    w.submit(prefix(8), max_tokens=1)
    w.run()
    assert w.copy_down() == 0
    slow = world(num_blocks=12)
    hold_in_host(slow)
    slow.scheduler._pace.known, slow.scheduler._pace.prefill_token_s = True, 0.0
    request = slow.submit(prefix(33), max_tokens=1)
    slow.run()
    assert request.ledger.cached_tokens == 0


def on_disk(w: Tiered, length: int = 33) -> None:
    """A prefix that only the disk has: preempted requests have taken the host."""
    hold_in_host(w, length)
    w.write_down()
    host = w.scheduler._host
    copy = host.take(w.make(1), host.num_blocks, 1)
    assert copy is not None
    host.give_back(copy)


def test_blocks_on_disk_are_read_when_the_request_is_accepted_and_taken_when_it_starts() -> None:
    w = world(num_blocks=12)
    on_disk(w)
    request = w.submit(prefix(33), max_tokens=4)
    assert w.read_up() > 0
    w.run()
    w.assert_output_as_alone(request)
    assert request.ledger.cached_tokens == w.tiering.disk_hit_tokens + w.tiering.host_hit_tokens > 0
    assert w.tiering.disk_hit_tokens > 0
    w.assert_drained()


def test_blocks_that_come_from_disk_while_the_request_runs_are_taken_over() -> None:
    w = world(num_blocks=12)
    on_disk(w)
    w.tiering._read_block_s = 10.0
    request = w.submit(prefix(33), max_tokens=4)
    w.step()
    assert request.computed_tokens == w.settings.block_size  # a block while it waits
    w.read_up()
    w.run()
    w.assert_output_as_alone(request)
    assert request.ledger.cached_tokens == w.tiering.disk_hit_tokens > 8
    assert request.ledger.computed_tokens == 33 + 3 - request.ledger.cached_tokens
    w.assert_drained()


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.FAILED])
def test_a_read_that_fails_is_a_miss(outcome: Outcome) -> None:
    w = world(num_blocks=12)
    on_disk(w)
    request = w.submit(prefix(33), max_tokens=4)
    w.step()
    w.read_up(outcome=outcome)
    w.run()
    w.assert_output_as_alone(request)
    assert w.tiering.disk_hit_tokens == 0
    counter = "disk_corrupt" if outcome is Outcome.CORRUPT else "disk_errors"
    assert w.tiering.tiers.counters[counter] > 0
    w.assert_drained()


def test_a_read_that_never_ends_does_not_hold_the_request_up_for_long() -> None:
    w = world(num_blocks=12)
    on_disk(w)
    w.tiering._read_block_s = 0.1
    request = w.submit(prefix(33), max_tokens=4)
    steps = w.run()
    w.assert_output_as_alone(request)
    assert steps < 10


def test_the_log_says_that_a_block_is_cached_as_long_as_any_tier_has_it() -> None:
    w = world(num_blocks=12)
    hold_in_host(w)
    chain = w.scheduler._residency.chain(w.make(prefix(33)))
    held = [block_hash for block_hash in chain if w.tiering.tiers.has(block_hash)]
    from headrace.core.records import cache_key

    stored = set(w.cache.log.changes(0, 0, 0).stored)
    assert held and all(cache_key(block_hash) in stored for block_hash in held)
    w.tiering.clear("")
    assert not {cache_key(h) for h in held} & set(w.cache.log.changes(0, 0, 0).stored) - {
        cache_key(h) for h in w.cache._block_of
    }


def lost(w: Tiered) -> dict[str, int]:
    """Blocks of each tier that are in no account."""
    told = {a.name: a.capacity - a.cached - a.used - a.free for a in w.tiering.accounts()}
    return {name: blocks for name, blocks in told.items() if blocks}


def test_a_block_that_a_tier_has_lost_is_missing_in_its_account() -> None:
    w = world(num_blocks=12)
    hold_in_host(w)
    assert len(w.tiering.writes(3, w.now)) == 3
    assert lost(w) == {}
    w.pool._free.pop()
    w.scheduler.host_blocks.take_one()
    w.tiering.tiers._writing.popitem()
    assert lost(w) == {"device": 1, "host": 1, "disk": 1}


@pytest.mark.parametrize("seed", range(25))
def test_outputs_are_those_of_a_run_alone_whatever_moves_when(seed: int) -> None:
    rng = Random(seed)
    w = world(
        num_blocks=rng.randint(12, 20),
        host_blocks=rng.choice([4, 8, 24]),
        disk_blocks=rng.choice([0, 6, 60]),
        max_num_batched_tokens=rng.choice([8, 16, 64]),
    )
    stems = [[100_000 * s + i for i in range(20)] for s in range(4)]
    copies: list[Offload] = []
    writes: list[Spill | Forget] = []
    reads: list[Promote] = []
    requests = []
    for _ in range(150):
        if len(w.scheduler.requests) < 4 and rng.random() < 0.4:
            stem = rng.choice(stems)[: rng.randint(3, 20)]
            tail = [rng.randrange(3) for _ in range(rng.randint(1, 10))]
            requests.append(w.submit(stem + tail, max_tokens=rng.randint(1, 6)))
        copies += w.tiering.offloads(rng.randint(0, 3))
        writes += w.tiering.writes(rng.randint(0, 2), w.now)
        reads += w.tiering.take_reads(rng.randint(0, 3))
        plan = w.schedule()
        while copies and rng.random() < 0.6:
            w.end_copy(copies.pop(rng.randrange(len(copies))))
        while writes and rng.random() < 0.6:
            w.end_write(writes.pop(0))
        while reads and rng.random() < 0.5:
            outcome = rng.choice([Outcome.DONE] * 5 + [Outcome.CORRUPT, Outcome.FAILED])
            w.end_read(reads.pop(rng.randrange(len(reads))), rng.random(), outcome)
        if rng.random() < 0.02:
            w.tiering.clear(rng.choice([None, ""]))
        assert lost(w) == {}
        if plan is not None:
            w.apply(plan)
    w.run()
    for request in requests:
        w.assert_output_as_alone(request)
    w.assert_drained()


def test_a_disk_that_was_too_slow_is_tried_again_in_the_end() -> None:
    w = world(num_blocks=12)
    on_disk(w)
    pace = w.scheduler._pace
    pace.known, pace.prefill_token_s = True, 0.01
    w.tiering._read_block_s = 1.0
    tries = 0
    while not w.read_up():
        request = w.make(prefix(33))
        w.tiering.prefetch(request, w.scheduler._residency.chain(request), w.now)
        tries += 1
        assert tries < 200
    assert tries > 10


def test_blocks_that_a_step_brings_are_not_complete_before_it_is_over() -> None:
    w = world(num_blocks=12)
    hold_in_host(w)
    request = w.submit(prefix(33), max_tokens=2, hand_off=True)
    plan = w.schedule()
    assert plan is not None and plan.swap_in
    assert request.computed_tokens > 0 == w.scheduler.complete_tokens(request)  # a reader would read too early
    w.apply(plan)
    assert w.scheduler.complete_tokens(request) == request.computed_tokens == 33


def test_host_blocks_that_a_step_has_to_write_are_nobodys_before_it_is_over() -> None:
    """A paused request ends while the step that copies its blocks down is on its way."""
    w = world(num_blocks=8, host_blocks=16, disk_blocks=0)
    w.submit(prefix(9), max_tokens=1)
    w.run()
    paused = w.submit(9, max_tokens=20, no_cache=True)
    w.step()
    w.step()
    assert w.scheduler.pause(paused.key, Keep.OFFLOAD, w.now)
    plan = w.schedule()
    assert plan is not None and plan.swap_out
    assert w.scheduler.finish(paused.key, FinishReason.CANCELLED, w.now)
    offloads = w.tiering.offloads(100)
    assert offloads and not {o.host_block for o in offloads} & {target for _, target in plan.swap_out}
    for offload in offloads:
        w.end_copy(offload)
    w.scheduler.check_integrity()
    w.apply(plan)
    w.forget_device()
    request = w.submit(prefix(9), max_tokens=3)
    w.run()
    w.assert_output_as_alone(request)
    assert w.tiering.tiers.counters["restores"] > 0
    w.assert_drained()


def written_in_host(w: Tiered, tokens: list[int], indices: range) -> None:
    """The host has these blocks of the prefix, and all of them are being written to disk."""
    hashes = block_hashes(ROOT, tokens, 4)
    for i in indices:
        offload = w.tiering.tiers.offload(Block(hashes[i], hashes[i - 1], tenant_tag(""), 1.0), 0)
        assert offload is not None
        w.runner.host[offload.host_block] = chain(tokens)[4 * i : 4 * i + 4]
        w.tiering.offloaded(offload.ticket)
    assert len(w.tiering.writes(len(indices), w.now)) == len(indices)
    assert w.tiering.tiers.host_cached == 0


def test_blocks_that_are_being_written_to_disk_come_back_like_others() -> None:
    """The device has the first block and one that shares two tokens with the second: copied from, it came over the
    whole block from the host."""
    w = world(num_blocks=24, host_blocks=16, disk_blocks=16)
    w.submit([*prefix(6), 1, 2, 3], max_tokens=1)
    w.run()
    hashes = block_hashes(ROOT, prefix(17), 4)
    w.files[hashes[3]] = chain(prefix(17))[12:16]
    w.tiering.found(Block(hashes[3], hashes[2], tenant_tag(""), 1.0))
    written_in_host(w, prefix(17), range(1, 3))
    request = w.submit(prefix(17), max_tokens=3)
    assert request.known_cached == 16
    plan = w.schedule()
    assert plan is not None and len(plan.swap_in) == 2 and not plan.copies
    w.apply(plan)
    w.run()
    w.assert_output_as_alone(request)


def test_no_block_of_the_host_is_restored_where_a_copy_is_planned() -> None:
    w = world(num_blocks=24)
    written_in_host(w, prefix(17), range(1, 3))
    request = w.make(prefix(17))
    request.block_ids = [3, 4, 5, 6, 7]
    request.computed_tokens = 6
    packing = Packing(0, w.settings, None, 0)
    packing.plan.copies = [(9, 4)]
    w.scheduler._restore(packing, request)
    assert (packing.plan.swap_in, request.computed_tokens) == ([], 6)
    packing.plan.copies = []
    w.scheduler._restore(packing, request)
    assert ([block for _, block in packing.plan.swap_in], request.computed_tokens) == ([4, 5], 12)


def test_blocks_are_copied_as_they_come_near_their_turn_although_nobody_leaves_any() -> None:
    w = world(num_blocks=70, host_blocks=64, disk_blocks=0)
    w.submit(prefix(81), max_tokens=1)
    w.run()
    w.submit(20, max_tokens=255)
    w.step()
    assert w.copy_down() == 0
    for _ in range(245):
        w.step()
        w.copy_down()
    assert w.pool.evictions > 10
    assert w.tiering.tiers.counters["offloads"] >= w.pool.evictions


def test_a_look_that_found_no_room_in_the_host_is_made_again() -> None:
    w = world(num_blocks=8, host_blocks=8)
    w.submit(prefix(25), max_tokens=1)
    w.run()
    copy = w.scheduler._host.take(w.make(1), 8, 1)
    assert copy is not None
    assert w.copy_down() == 0
    w.scheduler._host.give_back(copy)
    assert w.copy_down() > 0

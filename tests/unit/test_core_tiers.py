"""The tiers below the device: what is kept, what goes first, and that late, failed and repeated facts change nothing.

The random machine holds the laws: host blocks and disk bound are conserved, what is found is what was copied, what was
dropped is never found again, and the log of what the tiers have is what they have.
"""

from __future__ import annotations

from random import Random

import pytest

from headrace.errors import InvariantError
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from workers.core.host_blocks import HostBlocks
from workers.core.request import HostCopy, Request
from workers.core.tail_first import TailFirst
from workers.core.tier_actions import Block, Forget, Offload, Outcome, Promote, Spill, tenant_tag
from workers.core.tiers import DISK_PAUSE_S, Tiers

ALICE, BOB = tenant_tag("alice"), tenant_tag("bob")


def block(name: str, parent: str = "root", tag: bytes = ALICE, value_ms: float = 1.0) -> Block:
    return Block(name.encode(), parent.encode(), tag, value_ms)


def chain(name: str, length: int, tag: bytes = ALICE, value_ms: float = 1.0) -> list[Block]:
    names = [f"{name}{i}" for i in range(length)]
    return [block(n, p, tag, value_ms) for p, n in zip(["root", *names], names, strict=False)]


def hashes(blocks: list[Block]) -> list[bytes]:
    return [b.hash for b in blocks]


class Bench:
    """Tiers with what was in which host block, and which files there are."""

    def __init__(self, host_blocks: int, disk_blocks: int = 0) -> None:
        self.host = HostBlocks(host_blocks)
        self.tiers = Tiers(self.host, disk_blocks)
        self.tiers.scanned()
        self.bytes: dict[int, bytes] = {}
        self.files: dict[bytes, bytes] = {}
        self.has: set[bytes] = set()
        self.tiers.on_kept = self.has.add
        self.tiers.on_gone = self.has.remove

    def hold(self, *blocks: Block) -> None:
        for b in blocks:
            action = self.tiers.offload(b, 0)
            assert action is not None
            self.bytes[action.host_block] = b.hash
            assert self.tiers.offloaded(action.ticket)

    def write(self, most: int = 100) -> None:
        for action in self.tiers.writes(most, 0.0, 0.0):
            if isinstance(action, Forget):
                self.files.pop(action.hash, None)
            else:
                self.files[action.block.hash] = self.bytes[action.host_block]
                self.tiers.spilled(action.ticket, Outcome.DONE, 0.0)

    def read(self, blocks: list[Block], outcome: Outcome = Outcome.DONE) -> int:
        actions = self.tiers.promote(hashes(blocks), blocks[0].tag)
        for action in actions:
            self.bytes[action.host_block] = self.files[action.block.hash]
            self.tiers.promoted(action.ticket, outcome, 0.0)
        return len(actions)

    def check(self, copies: list[HostCopy] | None = None) -> None:
        self.tiers.check_integrity()
        self.host.check_integrity(copies or [], self.tiers.host_blocks())


def test_a_chain_goes_from_its_tail_and_the_less_wanted_chain_first() -> None:
    order = TailFirst()
    for b in [*chain("a", 3), *chain("b", 3)]:
        order.add(b.hash, b.parent, 1.0)
    for b in chain("a", 3):
        order.touch(b.hash, 2.0)
    gone = []
    while (key := order.lowest(lambda _: True)) is not None:
        order.give_up(key)
        gone.append(key.decode())
    assert gone == ["b2", "b1", "b0", "a2", "a1", "a0"]


def test_what_was_worth_much_long_ago_gives_way_in_the_end() -> None:
    order = TailFirst()
    order.add(b"old", b"", 5.0)
    order.add(b"first", b"", 1.0)
    for rounds in range(20):
        order.add(str(rounds).encode(), b"", 1.0)
        key = order.lowest(lambda _: True)
        assert key is not None
        order.give_up(key)
        if key == b"old":
            break
    assert 3 <= rounds <= 12


def test_a_block_is_found_when_its_copy_is_over_and_only_then() -> None:
    b = Bench(4)
    blocks = chain("a", 2)
    first = b.tiers.offload(blocks[0], 7)
    assert first is not None and first.device_block == 7
    assert (b.tiers.host_run(hashes(blocks)), b.tiers.has(b"a0"), b.tiers.in_host(b"a0")) == (0, False, True)
    assert b.tiers.offload(blocks[0], 7) is None
    assert b.tiers.offloaded(first.ticket)
    assert not b.tiers.offloaded(first.ticket)
    b.hold(blocks[1])
    assert b.tiers.host_run(hashes(blocks)) == 2
    assert b.has == {b"a0", b"a1"}
    b.check()


def test_a_copy_of_a_device_block_that_was_given_up_meanwhile_is_worth_nothing() -> None:
    b = Bench(1)
    first = b.tiers.offload(block("a"), 7)
    b.tiers.device_evicted(b"a")
    assert first is not None
    assert b.tiers.offload(block("b"), 8) is None  # its host block is still being written
    assert not b.tiers.offloaded(first.ticket)
    assert not b.tiers.has(b"a")
    b.hold(block("a"))
    b.tiers.device_evicted(b"a")
    assert b.tiers.has(b"a")
    b.check()


def test_copies_of_preempted_requests_go_before_cached_blocks_but_not_before_those_in_use() -> None:
    b = Bench(4)
    blocks = chain("a", 4)
    b.hold(*blocks)
    request = Request(RequestKey(1), RequestId("r"), 0, [1], SamplingParams(max_tokens=1), b"root")
    pinned = b.tiers.pin(hashes(blocks[3:]))
    assert b.host.available_blocks == 3
    assert b.host.take(request, 4, 8) is None
    copy = b.host.take(request, 2, 8)
    assert copy is not None and pinned[0].host_block not in copy.blocks
    assert b.tiers.host_run(hashes(blocks)) == 1
    b.check([copy])
    b.tiers.unpin(pinned)
    with pytest.raises(InvariantError):
        b.tiers.unpin(pinned)
    b.host.give_back(copy)
    b.check()


def test_room_in_the_host_is_made_by_what_nobody_reads() -> None:
    b = Bench(2)
    b.hold(block("a"), block("b"))
    pinned = b.tiers.pin([b"a", b"b"])
    assert b.tiers.offload(block("c"), 0) is None
    b.tiers.unpin(pinned)
    b.hold(block("c"))
    assert sum(b.tiers.has(name) for name in (b"a", b"b", b"c")) == 2
    b.check()


def test_blocks_reach_the_disk_and_come_back() -> None:
    b = Bench(4, 8)
    blocks = chain("a", 4)
    b.hold(*blocks)
    b.write()
    assert set(b.files) == set(hashes(blocks))
    b.hold(*chain("b", 4))
    assert b.tiers.host_run(hashes(blocks)) == 0
    assert all(b.tiers.has(h) for h in hashes(blocks))
    assert b.read(blocks) == 4
    assert b.tiers.host_run(hashes(blocks)) == 4
    assert [b.bytes[copy.host_block] for copy in b.tiers.pin(hashes(blocks))] == hashes(blocks)
    b.check()


def test_the_disk_gives_up_a_file_before_it_takes_another() -> None:
    b = Bench(4, 2)
    b.hold(*chain("a", 4))
    for action in b.tiers.writes(100, 0.0, 0.0):
        if isinstance(action, Spill):
            b.files[action.block.hash] = b""
            b.tiers.spilled(action.ticket, Outcome.DONE, 0.0)
        assert len(b.files) <= 2
    b.hold(*chain("b", 2))
    b.write()
    assert len(b.files) == 2 == b.tiers.disk_cached
    b.check()


def test_what_is_not_worth_its_write_is_not_written() -> None:
    b = Bench(4, 4)
    b.hold(block("a", value_ms=1.0), block("b", value_ms=3.0))
    assert [a.block.hash for a in b.tiers.writes(9, 2.0, 0.0) if isinstance(a, Spill)] == [b"b"]


def test_a_corrupt_file_is_dropped_and_counted_and_what_follows_is_not_read_for_it() -> None:
    b = Bench(4, 8)
    blocks = chain("a", 2)
    b.hold(*blocks)
    b.write()
    b.hold(*chain("b", 4))
    first, second = b.tiers.promote(hashes(blocks), ALICE)
    assert not b.tiers.promoted(first.ticket, Outcome.CORRUPT, 0.0)
    assert b.tiers.promoted(second.ticket, Outcome.DONE, 0.0)
    assert b.tiers.host_run(hashes(blocks)) == 0
    assert not b.tiers.has(blocks[0].hash)
    assert b.tiers.counters["disk_corrupt"] == 1
    assert Forget(blocks[0].hash) in b.tiers.writes(0, 0.0, 0.0)
    b.check()


def test_another_tenant_reads_nothing() -> None:
    b = Bench(4, 8)
    b.hold(*chain("a", 2))
    b.write()
    b.hold(*chain("b", 4))
    assert b.tiers.promote(hashes(chain("a", 2)), BOB) == []


def test_a_full_disk_is_left_alone_for_a_while_and_its_blocks_are_tried_again() -> None:
    b = Bench(4, 8)
    b.hold(*chain("a", 2))
    first, second = b.tiers.writes(2, 0.0, 5.0)
    assert isinstance(first, Spill) and isinstance(second, Spill)
    b.tiers.spilled(first.ticket, Outcome.FAILED, 5.0)
    b.tiers.spilled(second.ticket, Outcome.DONE, 5.0)
    assert b.tiers.writes(9, 0.0, 5.0 + DISK_PAUSE_S / 2) == [Forget(b"a0")]
    (again,) = b.tiers.writes(9, 0.0, 5.0 + DISK_PAUSE_S)
    assert isinstance(again, Spill) and again.block.hash == b"a0"
    assert b.tiers.counters["disk_errors"] == 1
    b.check()


def test_clearing_a_tenant_takes_its_blocks_from_every_tier_whatever_is_under_way() -> None:
    b = Bench(8, 8)
    b.hold(*chain("a", 2), *chain("x", 1, BOB))
    b.write()
    held = b.tiers.pin([b"a0"])
    b.tiers.offload(block("late"), 3)
    b.hold(block("half"))
    spill = b.tiers.writes(1, 0.0, 0.0)[-1]
    assert isinstance(spill, Spill)
    b.tiers.clear(ALICE)
    assert b.has == {b"x0"}
    assert dict(b.tiers.by_tag) == {BOB: 2}
    b.tiers.spilled(spill.ticket, Outcome.DONE, 0.0)
    assert {a.hash for a in b.tiers.writes(9, 0.0, 0.0) if isinstance(a, Forget)} == {b"a0", b"a1", b"half"}
    b.tiers.unpin(held)
    b.check()
    b.tiers.clear(None)
    assert b.has == set()


def test_files_of_an_earlier_life_are_found_within_the_bound_and_not_after_they_were_cleared() -> None:
    host = HostBlocks(4)
    tiers = Tiers(host, 3)
    kept: list[bytes] = []
    tiers.on_kept = kept.append
    assert tiers.writes(9, 0.0, 0.0) == []
    tiers.clear(BOB)
    for b in [*chain("a", 2), *chain("x", 1, BOB), block("c"), block("d")]:
        tiers.found(b)
    tiers.found(block("c"))
    assert kept == [b"a0", b"a1", b"c"]
    assert tiers.writes(0, 0.0, 0.0) == [Forget(b"x0"), Forget(b"d")]
    tiers.scanned()
    assert len(tiers.promote([b"a0", b"a1"], ALICE)) == 2
    tiers.check_integrity()


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_or_wrongly_found_whatever_happens(seed: int) -> None:
    rng = Random(seed)
    b = Bench(rng.randint(1, 12), rng.choice([0, 3, 9]))
    chains = [chain(name, 5, rng.choice([ALICE, BOB]), rng.random()) for name in "abcd"]
    every = [x for c in chains for x in c]
    offloads: list[tuple[Offload, bytes]] = []
    writes: list[Spill | Forget] = []
    reads: list[Promote] = []
    pins: list[tuple[list[object], list[bytes]]] = []
    copies: list[HostCopy] = []
    done: list[int] = []
    request = Request(RequestKey(1), RequestId("r"), 0, [1], SamplingParams(max_tokens=1), b"root")
    for now in range(300):
        match rng.randrange(10):
            case 0 | 1:
                x = rng.choice(every)
                if (action := b.tiers.offload(x, 0)) is not None:
                    offloads.append((action, x.hash))
            case 2 if offloads:
                action, name = offloads.pop(rng.randrange(len(offloads)))
                b.bytes[action.host_block] = name
                b.tiers.offloaded(action.ticket)
                done.append(action.ticket)
            case 3:
                b.tiers.device_evicted(rng.choice(every).hash)
            case 4:
                writes += b.tiers.writes(rng.randrange(3), 0.2, float(now * 7))
            case 5 if writes:
                write = writes.pop(0)
                if isinstance(write, Forget):
                    b.files.pop(write.hash, None)
                else:
                    failed = rng.random() < 0.1
                    if not failed:
                        b.files[write.block.hash] = b.bytes[write.host_block]
                        assert len(b.files) <= b.tiers.disk_blocks
                    b.tiers.spilled(write.ticket, Outcome.FAILED if failed else Outcome.DONE, float(now * 7))
                    done.append(write.ticket)
            case 6:
                c = rng.choice(chains)
                reads += b.tiers.promote(hashes(c), c[0].tag)
            case 7 if reads:
                read = reads.pop(rng.randrange(len(reads)))
                outcome = rng.choice([Outcome.DONE, Outcome.DONE, Outcome.CORRUPT, Outcome.FAILED])
                if outcome is Outcome.DONE:
                    b.bytes[read.host_block] = b.files[read.block.hash]
                b.tiers.promoted(read.ticket, outcome, float(now * 7))
                done.append(read.ticket)
            case 8:
                c = rng.choice(chains)
                names = hashes(c)[: b.tiers.host_run(hashes(c))]
                if names and rng.random() < 0.5:
                    pins.append((list(b.tiers.pin(names)), names))
                elif pins:
                    entries, names = pins.pop()
                    assert [b.bytes[e.host_block] for e in entries] == names  # type: ignore[attr-defined]
                    b.tiers.unpin(entries)  # type: ignore[arg-type]
            case 9:
                if rng.random() < 0.1:
                    b.tiers.clear(rng.choice([ALICE, BOB, None]))
                elif copies:
                    b.host.give_back(copies.pop())
                elif (copy := b.host.take(request, rng.randint(1, 3), 4)) is not None:
                    copies.append(copy)
        for ticket in done[-3:]:
            b.tiers.offloaded(ticket)
            b.tiers.spilled(ticket, Outcome.DONE, 0.0)
            b.tiers.promoted(ticket, Outcome.DONE, 0.0)
        assert b.has == {x.hash for x in every if b.tiers.has(x.hash)}
        b.check(copies)
    for entries, _ in pins:
        b.tiers.unpin(entries)  # type: ignore[arg-type]
    for action, _ in offloads:
        b.tiers.offloaded(action.ticket)
    for read in reads:
        b.tiers.promoted(read.ticket, Outcome.FAILED, 0.0)
    for write in writes:
        if isinstance(write, Spill):
            b.tiers.spilled(write.ticket, Outcome.FAILED, 0.0)
    b.tiers.clear(None)
    for copy in copies:
        b.host.give_back(copy)
    assert (b.host.free_blocks, b.has, b.tiers.host_busy, b.tiers.disk_busy) == (b.host.num_blocks, set(), 0, 0)
    b.check()


def test_a_chains_head_is_written_before_its_tail_and_dropped_after_it() -> None:
    b = Bench(8, 3)
    b.hold(*reversed(chain("a", 4)))
    written = [a.block.hash for a in b.tiers.writes(3, 0.0, 0.0) if isinstance(a, Spill)]
    assert written == [b"a0", b"a1", b"a2"]

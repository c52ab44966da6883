"""Both ends of a lease, a network and a memory, in random order with faults at any step.

The world's memory is what the protocol protects: the holder overwrites its blocks as soon as they are unpinned, the
reader gives freed blocks to others at once, and an abandoned read may still write for a while. Over 400 lines: all
of it plays on that world.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvariantError
from headrace.ids import Incarnation, LeaseId, RequestKey
from kvtransfer.core import handoff as h
from kvtransfer.core import lease as ls

BLOCK_SIZE = 4
ENDS = {h.HandoffState.ACTIVE, h.HandoffState.CANCELLED, h.HandoffState.FAILED}
FAULTS = ("cancel", "revoke", "request_ended", "break", "pull_fails", "flip", "holder_crash", "reader_crash")
MAX_RETRIES = 2


def digest(content: str) -> int:
    return int.from_bytes(content.encode(), "big")


class World:
    """One hand-off of `num_blocks` blocks, of which the reader has the first `skip`; or a fetch, of as many blocks as
    the holder has, the first of them on its device.
    """

    def __init__(
        self,
        rng: random.Random,
        faults: set[str],
        holder: type[ls.Lease] = ls.Lease,
        is_fetch: bool = False,
        digests: bool = True,
    ) -> None:
        self.digests = digests
        self.rng, self.faults, self.holder_class, self.is_fetch = rng, faults, holder, is_fetch
        self.num_blocks, self.spare = rng.randint(1, 8), rng.randint(0, 2)
        self.skip = 0 if is_fetch else rng.randint(0, self.num_blocks - 1)
        self.num_tokens = (self.num_blocks - 1) * BLOCK_SIZE + rng.randint(1, BLOCK_SIZE)
        self.remote = [100 + i for i in range(self.num_blocks)]
        self.local = list(range(self.num_blocks + self.spare))
        self.computed = 0
        self.holder_memory = {block: "empty" for block in self.remote}
        self.reader_memory = {b: (f"kv{i}" if i < self.skip else "empty") for i, b in enumerate(self.local)}
        if is_fetch:
            self.computed = rng.choice([rng.randint(0, self.num_blocks), self.num_blocks])
            self.holder_memory |= {block: f"kv{i}" for i, block in enumerate(self.remote[: self.computed])}
        self.record = ls.HandOffRecord((7,), self.num_tokens)
        if is_fetch:
            self.record = ls.whole_blocks(self.num_blocks, BLOCK_SIZE)
        self.lease: ls.Lease | None = None
        self.reader = h.Handoff(BLOCK_SIZE, is_fetch=is_fetch, max_retries=MAX_RETRIES)
        self.retries = 0
        self.to_holder: deque[object] = deque()
        self.to_reader: deque[object] = deque()
        self.connected = True
        self.reads: dict[int, h.Pull] = {}
        self.abandoned: set[int] = set()
        self.owner = {block: "request" for block in self.local}
        self.releases: list[bool] = []
        self.ended: h.End | None = None
        self.activated = False
        self.reader_alive = True
        self.flipped = False

    # --- shells

    def holder_does(self, actions: list[ls.LeaseAction]) -> None:
        for action in actions:
            if isinstance(action, ls.Release):
                self.releases.append(action.completed)
                self.holder_memory = dict.fromkeys(self.remote, "foreign")
            elif self.connected:
                self.to_reader.append(action)

    def reader_does(self, actions: list[h.HandoffAction]) -> None:
        for action in actions:
            match action:
                case h.Pull(action_id=action_id):
                    assert not self.reads or set(self.reads) <= self.abandoned
                    self.reads[action_id] = action
                    self.retries += action.retry > 0
                    assert self.retries <= MAX_RETRIES
                case h.AbandonPull(action_id=action_id):
                    self.abandoned.add(action_id)
                case h.Activate():
                    assert not self.activated and self.ended is None
                    self.activated = True
                    got = [self.reader_memory[b] for b in self.local[: self.num_blocks]]
                    assert got == [f"kv{i}" for i in range(self.num_blocks)], got
                case h.End():
                    assert self.ended is None and not self.activated
                    self.ended = action
                    for block in self.local:
                        self.owner[block] = "quarantine" if block in action.quarantined else "other"
                case h.ReleaseQuarantine():
                    for block, owner in self.owner.items():
                        self.owner[block] = "other" if owner == "quarantine" else owner
                case _ if self.connected:
                    self.to_holder.append(action)
                case h.OpenLease():
                    self.reader_does(self.reader.broken())

    # --- events

    def events(self) -> list[str]:
        out = []
        if self.reader_alive and self.reader.state is h.HandoffState.QUEUED:
            out.append("reserve")
        if self.computed < self.num_blocks:
            out.append("compute")
        elif self.lease and self.lease.record is None and self.lease.state is ls.LeaseState.OPEN:
            out.append("hand_off")
        out += ["deliver_holder"] * bool(self.to_holder) + ["deliver_reader"] * bool(self.to_reader)
        out += ["copy", "finish_read"] * bool(self.reads)
        return out

    def run(self, event: str) -> None:
        lease = self.lease
        match event:
            case "reserve":
                self.reader_does(self.reader.reserved(self.local, self.skip))
            case "compute":
                if lease is None or lease.state is not ls.LeaseState.ENDED:
                    self.holder_memory[self.remote[self.computed]] = f"kv{self.computed}"
                self.computed += 1
                if lease:
                    self.holder_does(lease.computed(self.remote[: self.computed]))
            case "hand_off":
                assert lease
                self.holder_does(lease.handed_off(self.record))
            case "deliver_holder":
                self.deliver_holder(self.to_holder.popleft())
            case "deliver_reader":
                self.deliver_reader(self.to_reader.popleft())
            case "copy":
                self.copy(self.rng.choice(list(self.reads.values())))
            case "finish_read":
                action_id, pull = self.rng.choice(list(self.reads.items()))
                if action_id not in self.abandoned:
                    self.copy(pull)
                del self.reads[action_id]
                done = [] if action_id in self.abandoned else self.arrived(pull)
                over = self.reader.read_terminal(action_id)
                if self.reader_alive:
                    self.reader_does([*over, *done] if self.rng.random() < 0.5 else [*done, *over])
            case "cancel":
                self.reader_does(self.reader.cancel())
            case "revoke":
                if lease:
                    self.holder_does(lease.revoke("pressure"))
            case "request_ended":
                if lease:
                    self.holder_does(lease.request_ended("cancelled"))
            case "break":
                self.disconnect()
            case "holder_crash":
                self.holder_memory = dict.fromkeys(self.remote, "foreign")
                self.disconnect()
            case "reader_crash":
                self.reader_alive = False
                self.disconnect()
            case "flip":
                if self.reads:
                    self.reader_memory[self.rng.choice(list(self.reads.values())).local_blocks[-1]] = "flipped"
                    self.flipped = True
            case "pull_fails":
                for action_id in set(self.reads) - self.abandoned:
                    terminal = self.rng.random() < 0.5
                    if terminal:
                        del self.reads[action_id]
                    self.reader_does(self.reader.pull_failed(action_id, "timeout", terminal))
        self.check()

    def disconnect(self) -> None:
        """The stream is gone: what is on the wire is lost, both sides learn of it."""
        if not self.connected:
            return
        self.connected = False
        self.to_holder.clear()
        self.to_reader.clear()
        if self.lease:
            self.holder_does(self.lease.broken())
        if self.reader_alive and self.reader.state in h.LEASED:
            self.reader_does(self.reader.broken())

    def arrived(self, pull: h.Pull) -> list[h.HandoffAction]:
        """What the shell makes of a read that is done: the digests decide."""
        if self.flipped:  # the bit came after the last copy
            self.reader_memory[pull.local_blocks[-1]], self.flipped = "flipped", False
        found = tuple(digest(self.reader_memory[block]) for block in pull.local_blocks)
        if found == pull.digests or not self.digests:
            return self.reader.pull_done(pull.action_id)
        return self.reader.pull_failed(pull.action_id, "corrupt", True)

    def copy(self, pull: h.Pull) -> None:
        """A read moves bytes now; blocks that it writes may be nobody else's."""
        for remote, local in zip(pull.remote_blocks, pull.local_blocks, strict=True):
            if self.reader_alive:
                assert self.owner[local] in ("request", "quarantine"), "an abandoned read wrote a reused block"
                self.reader_memory[local] = self.holder_memory[remote]

    def deliver_holder(self, message: object) -> None:
        match message:
            case h.OpenLease():
                self.lease = self.holder_class(LeaseId("lease-1"), RequestKey(1), Incarnation("inc-1"))
                self.to_reader.append("opened")
                self.holder_does(self.lease.computed(self.remote[: self.computed]))
                if self.is_fetch and self.computed == self.num_blocks:
                    self.holder_does(self.lease.handed_off(self.record))
            case h.SendPulled(num_blocks=n):
                assert self.lease
                self.holder_does(self.lease.reader_pulled(n))
            case h.SendVerify(lease_id=lease_id):
                assert self.lease
                self.holder_does(self.lease.verify(lease_id, "inc-1"))
            case h.CloseLease(completed=completed):
                if self.lease:
                    self.holder_does(self.lease.close(completed))

    def deliver_reader(self, message: object) -> None:
        match message:
            case "opened":
                self.reader_does(self.reader.opened("lease-1"))
            case ls.Announce(first=first, blocks=blocks):
                digests = [digest(f"kv{first + i}") for i in range(len(blocks))] if self.digests else []
                self.reader_does(self.reader.announced(first, blocks, digests))
            case ls.SendHandOff(record=record):
                self.reader_does(self.reader.handed_off(record))
            case ls.SendHeld():
                self.reader_does(self.reader.held())
            case ls.SendRevoked(reason=reason):
                self.reader_does(self.reader.revoked(reason))

    def check(self) -> None:
        quarantined = {block for block, owner in self.owner.items() if owner == "quarantine"}
        assert quarantined == set(self.reader.quarantined) or not self.reader_alive
        assert len(self.releases) <= 1
        if self.reader_alive:
            assert (self.reader.state in ENDS) == (self.activated or self.ended is not None)


def drive(world: World, steps: int = 400) -> World:
    for _ in range(steps):
        events = world.events()
        possible = events + ([f for f in sorted(world.faults)] if world.rng.random() < 0.08 else [])
        if not possible:
            break
        world.run(world.rng.choice(possible))
    while world.events():
        world.run(world.rng.choice(world.events()))
    return world


def assert_settled(world: World) -> None:
    """Nothing is pending: one end, no pin, no quarantine, no read."""
    if world.reader_alive:
        if world.reader.state in h.LEASED:
            world.disconnect()
        assert world.reader.state in ENDS
        assert world.reader.quarantined == () and "quarantine" not in world.owner.values()
        if world.lease is not None and world.connected:
            world.run("break")
    assert world.reads == {}
    assert world.lease is None or world.lease.state is ls.LeaseState.ENDED


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), is_fetch=st.booleans())
def test_without_faults_every_hand_off_becomes_active_and_is_released_completed(seed: int, is_fetch: bool) -> None:
    world = drive(World(random.Random(seed), set(), is_fetch=is_fetch))
    assert world.reader.state is h.HandoffState.ACTIVE
    assert world.releases == [True]
    assert_settled(world)


@settings(max_examples=600, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    faults=st.sets(st.sampled_from(FAULTS), min_size=1),
    is_fetch=st.booleans(),
    digests=st.booleans(),
)
def test_whatever_fails_there_is_one_end_and_no_block_is_lost_or_wrong(
    seed: int, faults: set[str], is_fetch: bool, digests: bool
) -> None:
    """Without digests nothing finds a flipped bit, so none is flipped."""
    faults = faults if digests else faults - {"flip"}
    assert_settled(drive(World(random.Random(seed), faults, is_fetch=is_fetch, digests=digests)))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_fetch", [False, True], ids=["hand-off", "fetch"])
def test_a_fault_at_every_single_step_ends_well(fault: str, is_fetch: bool) -> None:
    for seed in range(8):
        for at in range(40):
            world = World(random.Random(seed), set(), is_fetch=is_fetch)
            for _ in range(at):
                if world.events():
                    world.run(world.rng.choice(world.events()))
            world.run(fault)
            assert_settled(drive(world))


@pytest.mark.parametrize("is_fetch", [False, True], ids=["hand-off", "fetch"])
def test_the_checker_catches_a_holder_that_says_held_for_released_blocks(is_fetch: bool) -> None:
    """Positive control: without Verify's refusal, some order activates foreign bytes."""

    class Careless(ls.Lease):
        def verify(self, lease_id: str, incarnation: str) -> list[ls.LeaseAction]:
            return [ls.SendHeld()]

        def request_ended(self, reason: str) -> list[ls.LeaseAction]:
            return [ls.Release(False)] if self.state is not ls.LeaseState.ENDED else []

    caught = 0
    for seed in range(200):
        try:
            drive(World(random.Random(seed), {"request_ended"}, Careless, is_fetch, digests=False))
        except AssertionError as error:
            caught += "foreign" in str(error)
    assert caught > 0


def test_the_checker_catches_a_flipped_bit_that_no_digest_was_told_for() -> None:
    """Positive control."""
    caught = 0
    for seed in range(200):
        try:
            drive(World(random.Random(seed), {"flip"}, digests=False))
        except AssertionError as error:
            caught += "flipped" in str(error)
    assert caught > 0


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), is_fetch=st.booleans())
def test_duplicates_of_every_message_change_nothing(seed: int, is_fetch: bool) -> None:
    world = World(random.Random(seed), set(), is_fetch=is_fetch)
    deliver = world.deliver_reader

    def twice(message: object) -> None:
        deliver(message)
        deliver(message)

    world.deliver_reader = twice  # type: ignore[method-assign]
    drive(world)
    assert world.reader.state is h.HandoffState.ACTIVE
    assert world.releases == [True]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_reader_survives_any_holder(data: st.DataObject) -> None:
    """Nonsense from the other side fails the hand-off; it never raises and never activates without Held."""
    is_fetch = data.draw(st.booleans())
    reader = h.Handoff(BLOCK_SIZE, is_fetch=is_fetch)
    reader.reserved([1, 2, 3, 4], data.draw(st.integers(0, 4)))
    activated = False
    in_flight: list[int] = []
    for _ in range(data.draw(st.integers(1, 20))):
        fact = data.draw(st.sampled_from(["opened", "announced", "record", "held", "revoked", "done", "broken"]))
        match fact:
            case "opened":
                actions = reader.opened(data.draw(st.sampled_from(["a", "b"])))
            case "announced":
                first, digests = data.draw(st.integers(0, 5)), st.lists(st.integers(0, 3), max_size=5)
                blocks = data.draw(st.lists(st.integers(0, 9), max_size=5))
                actions = reader.announced(first, blocks, data.draw(digests) if data.draw(st.booleans()) else [])
            case "record":
                ids = tuple(data.draw(st.lists(st.integers(0, 9), max_size=2)))
                finished = data.draw(st.booleans())
                actions = reader.handed_off(ls.HandOffRecord(ids, data.draw(st.integers(0, 20)), finished))
            case "held":
                verifying = reader.state is h.HandoffState.VERIFYING
                actions = reader.held()
                activated = any(isinstance(a, h.Activate) for a in actions)
                assert verifying or not activated
                if activated and is_fetch:
                    assert reader.record == ls.whole_blocks(len(reader._remote), BLOCK_SIZE)
            case "done":
                actions = reader.pull_done(in_flight.pop()) if in_flight else []
            case "revoked":
                actions = reader.revoked("x")
            case _:
                actions = reader.broken()
        in_flight += [a.action_id for a in actions if isinstance(a, h.Pull)]
        assert activated == (reader.state is h.HandoffState.ACTIVE)


def test_local_contradictions_raise() -> None:
    reader = h.Handoff(BLOCK_SIZE)
    with pytest.raises(InvariantError):
        reader.broken()
    reader.reserved([1, 2], 1)
    assert reader.reserved([1, 2], 1) == []
    with pytest.raises(InvariantError):
        reader.reserved([1, 3], 1)
    with pytest.raises(InvariantError):
        reader.pull_done(1)
    with pytest.raises(InvariantError):
        reader.read_terminal(1)

"""The slot machine and the reconciler on a virtual clock, against a small world of processes that die and hang."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core import lifecycle
from cluster.core.lifecycle import TRANSITIONS, Kind, LifecyclePolicy, Slot, SlotState, advance, restart_delay_s
from cluster.core.reconcile import Action, Desired, Forget, Kill, Observed, PushMembers, Start, book, observe, reconcile
from headrace.errors import InvariantError
from headrace.ids import IdFactory, counting_ids

POLICY = LifecyclePolicy(liveness_s=8, start_timeout_s=30, restart_initial_s=0.5, restart_max_s=10, restart_reset_s=60)
DESIRED = Desired(
    slots={
        "prefill-0": (Kind.WORKER, "prefill"),
        "decode-0": (Kind.WORKER, "decode"),
        "gateway-0": (Kind.GATEWAY, ""),
    }
)


SEVERAL = Desired(slots=DESIRED.slots | {f"gateway-{i}": (Kind.GATEWAY, "") for i in range(3)})


@dataclass
class Process:
    slot: str
    alive: bool = True
    hung: bool = False
    ready: bool = False
    first_silent_probe: float = 0.0
    version: int = 0
    members: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()


@dataclass
class World:
    """Carries out actions at once, or keeps them for later, and reports facts like the controller does."""

    desired: Desired = DESIRED
    now: float = 100.0
    observed: Observed = field(default_factory=Observed)
    processes: dict[str, Process] = field(default_factory=dict)
    new_id: IdFactory = field(default_factory=counting_ids)
    unseen_deaths: list[str] = field(default_factory=list)

    def step(self) -> list[Action]:
        observe(self.desired, self.observed)
        actions = reconcile(self.desired, self.observed, self.now, POLICY, lambda: self.new_id("inc"))
        book(self.observed, actions, self.now, POLICY)
        for action in actions:
            self.carry_out(action)
        self.check()
        return actions

    def carry_out(self, action: Action) -> None:
        match action:
            case Start(slot, incarnation):
                self.processes[incarnation] = Process(slot)
            case Kill(_, incarnation, _):
                self.die(incarnation)
            case PushMembers(slot, incarnation, version, members, gateways):
                process = self.processes[incarnation]
                accepted = process.alive and not process.hung
                if accepted and version > process.version:
                    process.version, process.members = version, tuple(m.incarnation for m in members)
                    process.gateways = tuple(g.incarnation for g in gateways)
                self.note_pushed(slot, incarnation, version, accepted)
            case Forget():
                pass

    def note_pushed(self, slot: str, incarnation: str, version: int, accepted: bool) -> None:
        lifecycle.note_pushed(self.observed.slots[slot], incarnation, version, accepted, self.now, POLICY)

    def die(self, incarnation: str) -> None:
        process = self.processes[incarnation]
        if process.alive:
            process.alive = False
            self.unseen_deaths.append(incarnation)

    def see_deaths(self) -> None:
        for incarnation in self.unseen_deaths:
            slot = self.observed.slots.get(self.processes[incarnation].slot)
            if slot is not None:
                lifecycle.note_dead(slot, incarnation, "killed", self.now, POLICY)
        self.unseen_deaths.clear()

    def become_ready(self, incarnation: str) -> None:
        process = self.processes[incarnation]
        slot = self.observed.slots.get(process.slot)
        if process.alive and not process.hung and slot is not None:
            process.ready = True
            lifecycle.note_ready(slot, incarnation, f"address of {incarnation}", self.now)

    def probe_all(self) -> None:
        connected = frozenset(i for i, p in self.processes.items() if p.alive and not p.hung)
        for incarnation, process in self.processes.items():
            slot = self.observed.slots.get(process.slot)
            if slot is None:
                continue
            answered = process.alive and not process.hung
            lifecycle.note_probe(slot, incarnation, answered, self.now)
            if answered and slot.kind is Kind.GATEWAY:
                lifecycle.note_connected(slot, incarnation, connected)

    def alive(self) -> list[str]:
        return [incarnation for incarnation, process in self.processes.items() if process.alive]

    def check(self) -> None:
        by_slot: dict[str, list[str]] = {}
        for incarnation in self.alive():
            by_slot.setdefault(self.processes[incarnation].slot, []).append(incarnation)
        assert all(len(incarnations) == 1 for incarnations in by_slot.values()), by_slot

    def calm(self, seconds: float) -> None:
        """Time in which nothing breaks any more."""
        end = self.now + seconds
        while self.now < end:
            for incarnation in self.alive():
                self.become_ready(incarnation)
            self.see_deaths()
            self.probe_all()
            self.step()
            self.now += 0.5

    def assert_serving(self) -> None:
        for name in self.desired.slots:
            slot = self.observed.slots[name]
            assert slot.state is SlotState.READY
            assert self.processes[slot.incarnation].alive
        workers = tuple(
            self.observed.slots[name].incarnation
            for name in sorted(self.desired.slots)
            if self.desired.slots[name][0] is Kind.WORKER
        )
        gateways = tuple(slot.incarnation for name, slot in sorted(self.observed.slots.items()) if "gateway" in name)
        for incarnation in gateways:
            assert self.processes[incarnation].members == workers
            assert self.processes[incarnation].gateways == (gateways if len(gateways) > 1 else ())
        assert self.step() == []


def test_a_fresh_deployment_starts_everything_and_publishes_once_ready() -> None:
    world = World()
    assert [type(action) for action in world.step()] == [Start, Start, Start]
    assert world.step() == []
    world.calm(2)
    world.assert_serving()


def test_the_first_restart_is_immediate_and_later_ones_wait_longer_up_to_a_limit() -> None:
    assert [restart_delay_s(n, POLICY) for n in (1, 2, 3, 4, 5, 6, 7, 5000)] == [0, 0.5, 1, 2, 4, 8, 10, 10]


def test_time_in_service_makes_the_delays_begin_anew() -> None:
    world = World()
    world.calm(2)
    slot = world.observed.slots["decode-0"]
    for _ in range(3):
        world.die(slot.incarnation)
        world.calm(12)
    assert slot.deaths_in_row == 3
    world.calm(POLICY.restart_reset_s)
    world.die(slot.incarnation)
    world.see_deaths()
    assert (slot.deaths_in_row, slot.total_deaths, slot.not_before) == (1, 4, world.now)


def test_a_dead_worker_leaves_the_membership_before_its_successor_is_ready() -> None:
    world = World()
    world.calm(2)
    world.die(world.observed.slots["prefill-0"].incarnation)
    world.see_deaths()
    actions = world.step()
    assert [type(action) for action in actions] == [Start, PushMembers]
    assert [member.worker_id for member in world.observed.members] == ["decode-0"]


def test_gateways_hear_of_one_that_died_and_of_its_successor() -> None:
    world = World(SEVERAL)
    world.calm(2)
    world.assert_serving()
    # 1. one dies: it starts again at once, and the others know that it is gone
    dead = world.observed.slots["gateway-1"].incarnation
    world.die(dead)
    world.see_deaths()
    assert [type(action) for action in world.step()] == [Start, PushMembers, PushMembers]
    assert [gateway.name for gateway in world.observed.gateways] == ["gateway-0", "gateway-2"]
    # 2. its successor is told of all, and all of it; no worker noticed
    world.calm(2)
    world.assert_serving()
    assert all(slot.total_deaths == 0 for name, slot in world.observed.slots.items() if name != "gateway-1")


def test_a_hung_worker_is_killed_after_the_liveness_time_and_no_earlier() -> None:
    world = World()
    world.calm(2)
    victim = world.observed.slots["decode-0"].incarnation
    world.processes[victim].hung = True
    hung_at = world.now
    while world.processes[victim].alive:
        world.probe_all()
        world.step()
        world.now += 0.5
        assert world.now - hung_at < 20
    assert 8 <= world.now - hung_at <= 9.5


def test_a_worker_that_a_gateway_still_talks_to_is_left_alone() -> None:
    world = World()
    world.calm(2)
    victim = world.observed.slots["decode-0"]
    gateway = world.observed.slots["gateway-0"]
    for _ in range(40):
        lifecycle.note_probe(victim, victim.incarnation, False, world.now)
        lifecycle.note_probe(gateway, gateway.incarnation, True, world.now)
        assert world.step() == []
        world.now += 0.5
    # 2. its word is worth nothing once the gateway itself is silent
    lifecycle.note_probe(gateway, gateway.incarnation, False, world.now)
    assert Kill("decode-0", victim.incarnation, "silent for 8 s") in world.step()


def test_one_late_answer_after_a_long_pause_of_the_machine_kills_nobody() -> None:
    """The launcher was stopped for a minute: the one probe that was under way times out with an old beginning."""
    world = World()
    world.calm(2)
    began = world.now
    world.now += 60
    for slot in world.observed.slots.values():
        lifecycle.note_probe(slot, slot.incarnation, False, began)
    assert world.step() == []
    world.calm(5)
    world.assert_serving()


def test_a_process_that_never_gets_ready_is_killed_at_the_start_timeout() -> None:
    world = World()
    world.step()
    stuck = world.observed.slots["prefill-0"].incarnation
    world.now += POLICY.start_timeout_s
    assert Kill("prefill-0", stuck, "not ready after 30 s") in world.step()


def test_a_kill_is_repeated_until_the_exit_is_seen() -> None:
    world = World()
    world.step()
    slot = world.observed.slots["prefill-0"]
    lifecycle.note_killing(slot, slot.incarnation, "told to", world.now, POLICY)
    world.now += POLICY.kill_repeat_s
    assert world.step() == [Kill("prefill-0", slot.incarnation, "told to")]
    assert slot.state is SlotState.STOPPING


def test_a_slot_that_is_not_desired_any_more_is_killed_and_forgotten() -> None:
    world = World()
    world.calm(2)
    world.desired = Desired({name: value for name, value in DESIRED.slots.items() if name != "decode-0"})
    assert [type(action) for action in world.step()] == [Kill, PushMembers]
    world.see_deaths()
    assert world.step() == [Forget("decode-0")]
    assert "decode-0" not in world.observed.slots


def test_a_refused_push_is_tried_again_later() -> None:
    world = World()
    world.calm(2)
    gateway = world.observed.slots["gateway-0"]
    world.processes[gateway.incarnation].hung = True
    world.die(world.observed.slots["prefill-0"].incarnation)
    world.see_deaths()
    assert PushMembers in [type(action) for action in world.step()]
    assert PushMembers not in [type(action) for action in world.step()]
    world.now += POLICY.push_retry_s
    assert [type(action) for action in world.step()] == [PushMembers]


def test_every_illegal_edge_raises() -> None:
    for source in SlotState:
        for target in SlotState:
            slot = Slot("s", Kind.WORKER, state=source)
            if target in TRANSITIONS[source]:
                advance(slot, target, 1.0)
            else:
                with pytest.raises(InvariantError):
                    advance(slot, target, 1.0)


def test_facts_about_a_gone_incarnation_change_nothing() -> None:
    world = World()
    world.calm(2)
    slot = world.observed.slots["prefill-0"]
    before = (slot.state, slot.incarnation, slot.address, slot.deaths_in_row)
    lifecycle.note_ready(slot, "old", "elsewhere", world.now)
    lifecycle.note_dead(slot, "old", "late news", world.now, POLICY)
    lifecycle.note_killing(slot, "old", "late", world.now, POLICY)
    lifecycle.note_probe(slot, "old", False, 0.0)
    assert (slot.state, slot.incarnation, slot.address, slot.deaths_in_row) == before
    # a contradiction is not news
    with pytest.raises(InvariantError):
        lifecycle.note_ready(slot, slot.incarnation, "elsewhere", world.now)


FAULT = st.one_of(
    st.tuples(st.just("die"), st.integers(0, 5)),
    st.tuples(st.just("hang"), st.integers(0, 5)),
    st.tuples(st.just("ready"), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.integers(1, 20)),
    st.tuples(st.just("see"), st.just(0)),
    st.tuples(st.just("probe"), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(FAULT, max_size=60), st.sampled_from([DESIRED, SEVERAL]))
def test_after_any_faults_it_converges_and_no_slot_ever_has_two_processes(
    faults: list[tuple[str, int]], desired: Desired
) -> None:
    world = World(desired)
    for what, number in faults:
        world.step()
        alive = world.alive()
        victim = alive[number % len(alive)] if alive else None
        if what == "wait":
            world.now += number
        elif what == "see":
            world.see_deaths()
        elif what == "probe":
            world.probe_all()
        elif victim is not None:
            if what == "die":
                world.die(victim)
            elif what == "hang":
                world.processes[victim].hung = True
            else:
                world.become_ready(victim)
    # hung ones may need the start timeout, then the longest delay
    world.calm(POLICY.start_timeout_s + POLICY.liveness_s + POLICY.restart_max_s + 5)
    world.assert_serving()

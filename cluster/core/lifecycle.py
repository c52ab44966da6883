"""A slot is a name (`prefill-0`, `gateway-0`) that holds at most one process, its incarnation.

            start                 ready
    DEAD ----------> STARTING -----------> READY
     ^                 |    \\               |
     |   exit          |     \\ kill         | kill
     +-----------------+      v             v
     +----------------------- STOPPING <----+
     +--- exit (from READY too)

Only a seen exit leads to DEAD, and only DEAD can start: two processes of one slot never serve together. Facts about an
incarnation that is gone are no-ops; a contradiction raises InvariantError. Nothing here knows how processes are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from headrace.errors import InvariantError


class SlotState(StrEnum):
    DEAD = "dead"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.DEAD: frozenset({SlotState.STARTING}),
    SlotState.STARTING: frozenset({SlotState.READY, SlotState.STOPPING, SlotState.DEAD}),
    SlotState.READY: frozenset({SlotState.STOPPING, SlotState.DEAD}),
    SlotState.STOPPING: frozenset({SlotState.DEAD}),
}


class Kind(StrEnum):
    WORKER = "worker"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class LifecyclePolicy:
    """Times in seconds."""

    liveness_s: float = 8.0
    """Silence after which a process is hung."""
    start_timeout_s: float = 120.0
    restart_initial_s: float = 0.5
    restart_max_s: float = 30.0
    restart_reset_s: float = 60.0
    """Time in READY after which earlier deaths no longer count."""
    min_failed_probes: int = 3
    """Silence is this many failed probes as well: after a pause of the whole machine one late answer must not kill."""
    kill_repeat_s: float = 1.0
    push_retry_s: float = 0.5


@dataclass(slots=True)
class Probe:
    """What the probes of one incarnation said. `failed_since` is when the first of the failed probes in a row began."""

    failed: int = 0
    failed_since: float = 0.0


@dataclass(slots=True)
class Slot:
    name: str
    kind: Kind
    role: str = ""
    state: SlotState = SlotState.DEAD
    incarnation: str = ""
    since: float = 0.0
    """When the state was entered."""
    address: str = ""
    deaths_in_row: int = 0
    total_deaths: int = 0
    not_before: float = 0.0
    """Earliest time of the next start."""
    reason: str = ""
    """Why the last incarnation died."""
    killed_at: float = 0.0
    probe: Probe = field(default_factory=Probe)
    connected: frozenset[str] = frozenset()
    """Gateways: the worker incarnations that it holds a session with, as of its last answer."""
    acked_version: int = 0
    """Gateways: the membership that it has taken."""
    pushing: bool = False
    push_not_before: float = 0.0


def advance(slot: Slot, to: SlotState, now: float) -> None:
    """The only place that assigns a state."""
    if to not in TRANSITIONS[slot.state]:
        raise InvariantError(f"slot {slot.name}: {slot.state} -> {to}")
    slot.state = to
    slot.since = now


def note_started(slot: Slot, incarnation: str, now: float) -> None:
    if incarnation == slot.incarnation:
        raise InvariantError(f"slot {slot.name}: incarnation {incarnation} started twice")
    advance(slot, SlotState.STARTING, now)
    slot.incarnation = incarnation
    slot.address = ""
    slot.probe = Probe()
    slot.connected = frozenset()
    slot.acked_version = 0
    slot.pushing = False
    slot.push_not_before = 0.0


def note_ready(slot: Slot, incarnation: str, address: str, now: float) -> None:
    """A ready message that arrives after the exit or after a kill was decided changes nothing."""
    if incarnation != slot.incarnation or slot.state in (SlotState.STOPPING, SlotState.DEAD):
        return
    if slot.state is SlotState.READY:
        if address != slot.address:
            raise InvariantError(f"slot {slot.name}: incarnation {incarnation} is ready at two addresses")
        return
    advance(slot, SlotState.READY, now)
    slot.address = address


def note_killing(slot: Slot, incarnation: str, reason: str, now: float, policy: LifecyclePolicy) -> None:
    if incarnation != slot.incarnation or slot.state is SlotState.DEAD:
        return
    if slot.state is not SlotState.STOPPING:
        _reward(slot, now, policy)
        advance(slot, SlotState.STOPPING, now)
        slot.reason = reason
    slot.killed_at = now


def _reward(slot: Slot, now: float, policy: LifecyclePolicy) -> None:
    """Forgets earlier deaths of a slot that leaves READY after it was stable."""
    if slot.state is SlotState.READY and now - slot.since >= policy.restart_reset_s:
        slot.deaths_in_row = 0


def note_dead(slot: Slot, incarnation: str, reason: str, now: float, policy: LifecyclePolicy) -> None:
    """Sets when the slot may start again: at once the first time, then after delays that double up to a limit."""
    if incarnation != slot.incarnation or slot.state is SlotState.DEAD:
        return
    _reward(slot, now, policy)
    if slot.state is not SlotState.STOPPING:
        slot.reason = reason
    advance(slot, SlotState.DEAD, now)
    slot.address = ""
    slot.connected = frozenset()
    slot.pushing = False
    slot.deaths_in_row += 1
    slot.total_deaths += 1
    slot.not_before = now + restart_delay_s(slot.deaths_in_row, policy)


def restart_delay_s(deaths_in_row: int, policy: LifecyclePolicy) -> float:
    if deaths_in_row <= 1:
        return 0.0
    # The exponent is capped: 2.0 ** 1100 would overflow after a night of crashes.
    delay: float = policy.restart_initial_s * 2.0 ** min(deaths_in_row - 2, 40)
    return min(delay, policy.restart_max_s)


def note_probe(slot: Slot, incarnation: str, answered: bool, began_at: float) -> None:
    if incarnation != slot.incarnation or slot.state is not SlotState.READY:
        return
    if answered:
        slot.probe = Probe()
    elif slot.probe.failed == 0:
        slot.probe = Probe(failed=1, failed_since=began_at)
    else:
        slot.probe.failed += 1


def note_connected(slot: Slot, incarnation: str, connected: frozenset[str]) -> None:
    """The gateway's own view of its worker sessions."""
    if incarnation == slot.incarnation and slot.state is SlotState.READY:
        slot.connected = connected


def note_pushed(
    slot: Slot, incarnation: str, version: int, accepted: bool, now: float, policy: LifecyclePolicy
) -> None:
    if incarnation != slot.incarnation:
        return
    slot.pushing = False
    if accepted:
        slot.acked_version = max(slot.acked_version, version)
    else:
        slot.push_not_before = now + policy.push_retry_s


def is_silent(slot: Slot, now: float, policy: LifecyclePolicy) -> bool:
    probe = slot.probe
    return probe.failed >= policy.min_failed_probes and now - probe.failed_since >= policy.liveness_s

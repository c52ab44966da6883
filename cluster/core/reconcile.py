"""Compares what should run with what is seen and says what to do: `reconcile(desired, observed, now, ...) -> actions`.

It changes nothing; `book` writes down the actions that the shell is about to carry out. It does not start, kill or call
anybody, and never waits: whatever is not finished yet is looked at again on the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.core.lifecycle import (
    Kind,
    LifecyclePolicy,
    Slot,
    SlotState,
    is_silent,
    note_killing,
    note_started,
)


@dataclass(frozen=True, slots=True)
class Desired:
    """Slot names that should hold a process: name -> (kind, role)."""

    slots: dict[str, tuple[Kind, str]]


@dataclass(frozen=True, slots=True)
class MemberView:
    worker_id: str
    incarnation: str
    address: str
    role: str


@dataclass(frozen=True, slots=True)
class SiblingView:
    """A gateway as the others know it."""

    name: str
    incarnation: str
    address: str


@dataclass(slots=True)
class Observed:
    """The shell's one record. `version`, `members` and `gateways` are the membership as last published to a gateway."""

    slots: dict[str, Slot] = field(default_factory=dict)
    version: int = 0
    members: tuple[MemberView, ...] = ()
    gateways: tuple[SiblingView, ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    slot: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Kill:
    slot: str
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class PushMembers:
    slot: str
    """The gateway."""
    incarnation: str
    version: int
    members: tuple[MemberView, ...]
    gateways: tuple[SiblingView, ...] = ()
    """All of several, the receiver among them."""


@dataclass(frozen=True, slots=True)
class Forget:
    slot: str


Action = Start | Kill | PushMembers | Forget


def observe(desired: Desired, observed: Observed) -> None:
    """Gives every desired name its slot."""
    for name, (kind, role) in desired.slots.items():
        if name not in observed.slots:
            observed.slots[name] = Slot(name=name, kind=kind, role=role)


def members_of(observed: Observed) -> tuple[MemberView, ...]:
    """Workers that can take requests, by name."""
    ready = (slot for slot in observed.slots.values() if slot.kind is Kind.WORKER and slot.state is SlotState.READY)
    return tuple(
        MemberView(slot.name, slot.incarnation, slot.address, slot.role) for slot in sorted(ready, key=lambda s: s.name)
    )


def gateways_of(observed: Observed) -> tuple[SiblingView, ...]:
    """Gateways that serve, by name; none where there is one, which has nobody to know."""
    ready = (slot for slot in observed.slots.values() if slot.kind is Kind.GATEWAY and slot.state is SlotState.READY)
    views = tuple(
        SiblingView(slot.name, slot.incarnation, slot.address) for slot in sorted(ready, key=lambda s: s.name)
    )
    return views if len(views) > 1 else ()


def reconcile(
    desired: Desired, observed: Observed, now: float, policy: LifecyclePolicy, new_incarnation: Callable[[], str]
) -> list[Action]:
    """Actions in a fixed order: slots by name, then pushes. `now` in monotonic seconds."""
    actions: list[Action] = []
    for name in sorted(observed.slots):
        slot = observed.slots[name]
        action = _slot_action(slot, name in desired.slots, observed, now, policy, new_incarnation)
        if action is not None:
            actions.append(action)
    killed = {action.incarnation for action in actions if isinstance(action, Kill)}
    members = tuple(member for member in members_of(observed) if member.incarnation not in killed)
    gateways = tuple(gateway for gateway in gateways_of(observed) if gateway.incarnation not in killed)
    version = observed.version + ((members, gateways) != (observed.members, observed.gateways))
    for name in sorted(observed.slots):
        gateway = observed.slots[name]
        if (
            gateway.kind is Kind.GATEWAY
            and gateway.state is SlotState.READY
            and gateway.incarnation not in killed
            and not gateway.pushing
            and gateway.push_not_before <= now
            and gateway.acked_version != version
        ):
            actions.append(PushMembers(name, gateway.incarnation, version, members, gateways))
    return actions


def book(observed: Observed, actions: Sequence[Action], now: float, policy: LifecyclePolicy) -> None:
    """Writes down actions that are being carried out."""
    for action in actions:
        match action:
            case Start(name, incarnation):
                note_started(observed.slots[name], incarnation, now)
            case Kill(name, incarnation, reason):
                note_killing(observed.slots[name], incarnation, reason, now, policy)
            case PushMembers(name, _, version, members, gateways):
                observed.version, observed.members, observed.gateways = version, members, gateways
                observed.slots[name].pushing = True
            case Forget(name):
                del observed.slots[name]


def _slot_action(
    slot: Slot,
    is_desired: bool,
    observed: Observed,
    now: float,
    policy: LifecyclePolicy,
    new_incarnation: Callable[[], str],
) -> Action | None:
    match slot.state:
        case SlotState.DEAD:
            if not is_desired:
                return Forget(slot.name)
            return Start(slot.name, new_incarnation()) if slot.not_before <= now else None
        case SlotState.STARTING:
            if not is_desired:
                return Kill(slot.name, slot.incarnation, "not desired any more")
            if now - slot.since >= policy.start_timeout_s:
                return Kill(slot.name, slot.incarnation, f"not ready after {policy.start_timeout_s:g} s")
        case SlotState.READY:
            if not is_desired:
                return Kill(slot.name, slot.incarnation, "not desired any more")
            if is_silent(slot, now, policy) and not _seen_by_a_gateway(slot, observed, now, policy):
                return Kill(slot.name, slot.incarnation, f"silent for {policy.liveness_s:g} s")
        case SlotState.STOPPING:
            if now - slot.killed_at >= policy.kill_repeat_s:
                return Kill(slot.name, slot.incarnation, slot.reason)
    return None


def _seen_by_a_gateway(slot: Slot, observed: Observed, now: float, policy: LifecyclePolicy) -> bool:
    """A worker that talks to a gateway lives even if the controller cannot reach it. A silent gateway's word is old."""
    return slot.kind is Kind.WORKER and any(
        gateway.kind is Kind.GATEWAY
        and gateway.state is SlotState.READY
        and gateway.probe.failed == 0
        and slot.incarnation in gateway.connected
        for gateway in observed.slots.values()
    )

"""Which fault at which step: drawn from the seed, uniformly over kinds and over the triggers of a kind.

A trigger is a message of the hand-off or of a request, as it is sent or as it arrives, or a part of a read. Every fault
has a proof that it happened (CASES law g); one whose trigger never came is `missed`, which is counted and no fault of
anybody's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvtransfer.transports.base import Pull, TransferError, TransferFault
from tests.virtual.deployment import LIVENESS_S, READ_TIMEOUT_S, ROUGH, Deployment, Record
from tests.virtual.loop import Life, Process
from tests.virtual.wire import Event, Fate, Link
from tests.virtual.worker import VirtualWorker


class Kind(StrEnum):
    KILL = "kill"
    STOP = "stop"
    CUT = "cut"
    DARK = "dark"
    SLOW = "slow"
    DROP = "drop"
    TWICE = "twice"
    LATE = "late"
    READ_FAILS = "read_fails"
    READ_STALLS = "read_stalls"
    FLIP = "flip"
    CANCEL = "cancel"
    FULL = "full"


HEARD_S = LIVENESS_S / 4
"""A link with a stream carries something at least so often."""
HOSTILE = {Kind.DROP: Fate.DROP, Kind.TWICE: Fate.TWICE, Kind.LATE: Fate.LATE}
"""What no network does to a stream; only to leases of the rough tenant."""
LEASE_STEPS = ("open", "opened", "announce", "pulled", "hand_off", "verify", "held", "close", "revoked")
REQUEST_STEPS = ("submit", "started", "adopt", "prefilled", "tokens", "done", "finish")
READ_STEPS = ("read began", "read half")
SENT = [f"Lease.{step} sent" for step in LEASE_STEPS]
TRIGGERS = [
    *SENT,
    *(f"Lease.{step} arrived" for step in LEASE_STEPS),
    *(f"Session.{step} {when}" for step in REQUEST_STEPS for when in ("sent", "arrived")),
    *READ_STEPS,
]


def _fits(kind: Kind, trigger: str) -> bool:
    if kind in HOSTILE:
        return trigger in SENT
    if kind in (Kind.READ_FAILS, Kind.FLIP):
        return trigger in READ_STEPS
    if kind is Kind.CANCEL:
        return trigger not in READ_STEPS and trigger.startswith("Lease")
    return True


PAIRS = [(kind, trigger) for kind in Kind for trigger in TRIGGERS if _fits(kind, trigger)]


@dataclass(slots=True, eq=False)
class Fault:
    kind: Kind
    trigger: str
    at_receiver: bool
    """Which end of the message it hits."""
    nth: int
    """Time that the trigger comes, counted since the fault before was applied."""
    lasts_s: float
    ends_cut: bool
    """A dark link is cut when its time is over, instead of lit."""
    applied_s: float | None = None
    proof: Callable[[], bool] = lambda: False

    @property
    def name(self) -> str:
        return f"{self.kind} at {self.trigger} x{self.nth} {'receiver' if self.at_receiver else 'sender'}"


def draw(rng: random.Random) -> Fault:
    kind = rng.choice(list(Kind))
    return Fault(
        kind,
        rng.choice([trigger for trigger in TRIGGERS if _fits(kind, trigger)]),
        at_receiver=rng.random() < 0.5,
        nth=rng.choice((1, 2, 3, 5, 8)),
        lasts_s=rng.choice((0.02, 0.3, READ_TIMEOUT_S * 1.5, LIVENESS_S * 1.6)),
        ends_cut=rng.random() < 0.5,
    )


@dataclass(slots=True)
class Step:
    """What faults see of an event: a message, or a part of a read (`sender`: the holder)."""

    what: str
    sender: Process
    receiver: Process
    link: Link
    label: str
    pull: Pull | None = None


class Injector:
    """Applies a seed's faults one after the other; `heal` ends them all."""

    def __init__(self, deployment: Deployment, faults: list[Fault], find: Callable[[str], Record | None]) -> None:
        self.faults = faults
        self.burst: Callable[[], int] = lambda: 0
        """Floods the decode workers; how many requests."""
        self._deployment = deployment
        self._loop = deployment.loop
        self._find = find
        self._waiting = list(faults)
        self._seen = 0
        self._undo: dict[int, Callable[[], None]] = {}
        deployment.wire.on_event = self._event
        deployment.wire.filter = self._filter
        deployment.on_worker = self._watch_reads
        for worker in deployment.workers.values():
            self._watch_reads(worker)

    @property
    def waiting(self) -> int:
        """Faults whose trigger has not come yet."""
        return len(self._waiting)

    @property
    def lasting(self) -> int:
        return len(self._undo)

    def heal(self) -> None:
        """No further fault; what lasts ends now."""
        self._waiting.clear()
        for undo in list(self._undo.values()):
            undo()

    # ---- triggers

    def _event(self, event: Event) -> None:
        if self._waiting and self._waiting[0].kind not in HOSTILE:
            self._step(Step(event.what, event.sender, event.receiver, event.stream.link, event.stream.label))

    def _filter(self, event: Event) -> Fate:
        fault = self._waiting[0] if self._waiting else None
        if fault is None or fault.kind not in HOSTILE or event.what != fault.trigger:
            return Fate.PASS
        record = self._find(event.stream.label)
        if record is None or record.request.tenant != ROUGH:
            return Fate.PASS
        self._seen += 1
        if self._seen < fault.nth:
            return Fate.PASS
        record.disturbed = fault.name
        self._applied(fault)
        fault.proof = lambda: True
        return HOSTILE[fault.kind]

    def _watch_reads(self, worker: VirtualWorker) -> None:
        worker.on_read = self._read

    def _read(self, worker: VirtualWorker, holder_name: str, part: str, pull: Pull) -> None:
        if not self._waiting or self._waiting[0].kind in HOSTILE:
            return
        holder = self._deployment.workers.get(holder_name.partition("/")[0])
        if holder is not None:
            link = self._deployment.wire.link(holder.spec.worker_id, worker.spec.worker_id)
            self._step(Step(f"read {part}", holder.process, worker.process, link, "", pull))

    def _step(self, step: Step) -> None:
        fault = self._waiting[0]
        if step.what != fault.trigger:
            return
        self._seen += 1
        if self._seen < fault.nth:
            return
        # Not in the middle of a process's own work: as a signal or the network, between two of its callbacks.
        if self._can(fault, step):
            self._applied(fault)
            self._loop.call_soon(self._apply, fault, step, context=self._deployment.context)

    def _applied(self, fault: Fault) -> None:
        self._waiting.pop(0)
        self._seen = 0
        fault.applied_s = self._loop.time()
        self._deployment.wire.note(f"fault {fault.name}")

    # ---- what faults do

    def _target(self, fault: Fault, step: Step) -> Process:
        return step.receiver if fault.at_receiver else step.sender

    def _can(self, fault: Fault, step: Step) -> bool:
        target = self._target(fault, step)
        if fault.kind in (Kind.KILL, Kind.STOP):
            return target.life is Life.RUNNING
        if fault.kind is Kind.READ_STALLS:
            return target.name in self._deployment.workers
        if fault.kind is Kind.CANCEL:
            record = self._find(step.label)
            return record is not None and record.request.tenant == ROUGH and not record.ends
        if fault.kind in (Kind.READ_FAILS, Kind.FLIP):
            return step.pull is not None and not step.pull.done.done()
        return True

    def _apply(self, fault: Fault, step: Step) -> None:
        if not getattr(self, f"_{fault.kind.value}")(fault, step, self._target(fault, step)):
            # What it was aimed at has ended meanwhile: it waits for its trigger again.
            fault.applied_s = None
            self._waiting.insert(0, fault)

    def _for_a_while(self, fault: Fault, undo: Callable[[], None]) -> None:
        def end() -> None:
            if self._undo.pop(id(fault), None) is not None:
                timer.cancel()
                undo()

        self._undo[id(fault)] = end
        timer = self._loop.call_later(fault.lasts_s, end)

    # Each tells whether there was anything to hit.

    def _kill(self, fault: Fault, step: Step, target: Process) -> bool:
        if target.life is not Life.RUNNING:
            return False
        if target.name in self._deployment.gateways:
            self._deployment.kill_gateway(target.name)
        else:
            self._deployment.kill_worker(target.name)
        fault.proof = lambda: target.life is Life.DEAD and bool(target.buried)
        return True

    def _stop(self, fault: Fault, step: Step, target: Process) -> bool:
        if target.life is not Life.RUNNING:
            return False
        worker = self._deployment.workers.get(target.name)
        stalls = worker is not None and worker.process is target and fault.ends_cut
        self._loop.stop_process(target)
        if stalls and worker is not None:
            worker.transport.stall()
        parked: list[int] = []

        def go_on() -> None:
            parked.append(len(target.parked))
            if target.life is Life.STOPPED:
                self._loop.continue_process(target)
                if target.name in self._deployment.gateways:
                    self._deployment.push_members()  # the controller tells it again what it did not take
            if stalls and worker is not None:
                worker.transport.resume()

        self._for_a_while(fault, go_on)
        fault.proof = lambda: parked[0] > 0 or target.life is Life.DEAD or fault.lasts_s < 0.1
        return True

    def _cut(self, fault: Fault, step: Step, target: Process) -> bool:
        streams = len(step.link.streams)
        broken = self._deployment.wire.cut(step.link)
        fault.proof = lambda: broken == streams
        return streams > 0

    def _dark(self, fault: Fault, step: Step, target: Process) -> bool:
        link, before = step.link, step.link.swallowed
        if not link.streams:
            return False
        link.dark = was_busy = True

        def light() -> None:
            nonlocal was_busy
            was_busy = bool(link.streams)
            if fault.ends_cut:
                self._deployment.wire.cut(link)
            self._deployment.wire.light(link)

        self._for_a_while(fault, light)
        # Where no stream is left nothing is said that could be swallowed.
        fault.proof = lambda: link.swallowed > before or fault.lasts_s < HEARD_S or not was_busy
        return True

    def _slow(self, fault: Fault, step: Step, target: Process) -> bool:
        link, before = step.link, step.link.carried
        if not link.streams:
            return False
        delay_s = min(fault.lasts_s, LIVENESS_S / 4)
        link.extra_delay_s += delay_s

        def quick() -> None:
            link.extra_delay_s -= delay_s

        self._for_a_while(fault, quick)
        fault.proof = lambda: link.carried > before or fault.lasts_s < HEARD_S
        return True

    def _read_fails(self, fault: Fault, step: Step, target: Process) -> bool:
        """The transport says so, while what is under way is written later."""
        holder = self._deployment.workers.get(step.sender.name)
        if step.pull is None or step.pull.done.done() or holder is None or holder.process is not step.sender:
            return False
        holder.transport.stall()
        self._for_a_while(fault, holder.transport.resume)
        step.receiver.run(step.pull.fail, TransferError(TransferFault.FAILED, "injected"))
        done = step.pull.done
        fault.proof = lambda: done.done() and done.exception() is not None
        return True

    def _read_stalls(self, fault: Fault, step: Step, target: Process) -> bool:
        worker = self._deployment.workers[target.name]
        if worker.process is not target:
            return False
        worker.transport.stall()
        stalled = not worker.transport._moving.is_set()

        self._for_a_while(fault, worker.transport.resume)
        fault.proof = lambda: stalled
        return True

    def _flip(self, fault: Fault, step: Step, target: Process) -> bool:
        """A bit of what this read brings is another one when its owner hears that it is done."""
        reader, pull = self._deployment.workers.get(step.receiver.name), step.pull
        if pull is None or pull.done.done() or reader is None or reader.process is not step.receiver:
            return False
        transport, before = reader.transport, reader.transport.flipped
        transport.to_flip.add(pull)
        # A read that never ends well brings nothing that could be wrong.
        fault.proof = lambda: transport.flipped > before or not pull.done.done() or pull.done.exception() is not None
        return True

    def _cancel(self, fault: Fault, step: Step, target: Process) -> bool:
        record = self._find(step.label)
        if record is None or record.task is None or not record.task.cancel():
            return False
        record.disturbed = fault.name
        fault.proof = lambda: bool(record.ends)
        return True

    def _full(self, fault: Fault, step: Step, target: Process) -> bool:
        sent = self.burst()
        fault.proof = lambda: sent > 0
        return True


@dataclass(slots=True)
class Coverage:
    """How often each pair was applied, over many seeds."""

    applied: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)

    def add(self, faults: list[Fault]) -> None:
        for fault in faults:
            counts: Any = self.missed if fault.applied_s is None else self.applied
            name = f"{fault.kind} at {fault.trigger}"
            counts[name] = counts.get(name, 0) + 1

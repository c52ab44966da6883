"""The faults of a long run: which there are, how each is done to a deployment, and the proof that it happened."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, field

from headrace.core.records import Role
from tests.fault_fleet import FaultyFleet
from tests.fault_proxy import EVERY, OTHER, Rule

HOLDER_MESSAGES = ("opened", "announce", "hand_off", "held")
READER_MESSAGES = ("open", "pulled", "verify", "close")
LATE_S = 1.0
KEPT_BLOCKS = 64
"""What is left of a pool for the fault `full`: room for one request of the greatest length."""
FULL_BLOCKS = 27
"""A pool with less room is full: the longest request of a long run, 400 + 24 tokens, waits."""
UNTOUCHED_S = 8.0
"""A fault of a link that hits nobody for so long is over without having happened."""
PROCESS = ("kill", "stop", "pause", "late", "flip", "full", "pressure")
CONTROL = ("rst", "blackhole", "outage", "delay", "throttle", "message")
LANE = ("rst_lane", "blackhole_lane", "throttle_lane")
"""Where KV moves over TCP; the reader finds out."""


@dataclass(slots=True)
class Fault:
    """One fault, drawn; the rest is filled in by `Faults.inject`."""

    kind: str
    victim: str
    detail: str = ""
    """Links, or `VERB MESSAGE`."""
    lasts_s: float = 0.0
    long: bool = False
    """It lasts until the gateway has noticed."""
    proof: str = ""
    """"": it has not happened."""
    detected_s: float | None = None
    limit_s: float | None = None
    """By when the gateway must have noticed; None: it need not."""
    counted: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.detail}".strip()


def draw(rng: random.Random, fleet: FaultyFleet) -> Fault:
    """Uniform over kinds, then over victims, then over links, messages and durations."""
    kind = rng.choice([*PROCESS, *CONTROL, *(LANE if fleet.lanes else ())])
    names = sorted(fleet.ready)
    holders = [name for name in names if fleet.ready[name].role is Role.PREFILL]
    readers = [name for name in names if fleet.ready[name].role is Role.DECODE]
    match kind:
        case "rst" | "blackhole" | "outage" | "delay" | "throttle":
            victim = rng.choice(names)
            links = rng.choice(["session", "lease", "all"]) if victim in holders else "session"
            if kind == "blackhole":
                links = rng.choice(["session", "all"])
            return Fault(kind, victim, links, lasts_s=rng.uniform(0.5, 2.5))
        case "message":
            victim = rng.choice(names)
            message = rng.choice(HOLDER_MESSAGES if victim in holders else READER_MESSAGES)
            verbs = ["drop", "duplicate"] if message == "close" else ["drop", "duplicate", "reorder"]
            return Fault(kind, victim, f"{rng.choice(verbs)} {message}")
        case "late" | "flip":
            return Fault(kind, rng.choice(readers))
        case "rst_lane" | "blackhole_lane" | "throttle_lane":
            return Fault(kind, rng.choice(holders), lasts_s=rng.uniform(0.5, 2.5))
        case _:
            return Fault(kind, rng.choice(names), lasts_s=rng.uniform(0.5, 2.5))


class Faults:
    """Does drawn faults to one deployment. `prepare` before the load begins, `inject` under it, `confirm` after it."""

    def __init__(self, fleet: FaultyFleet, dead_limit_s: float, silent_limit_s: float) -> None:
        self._fleet = fleet
        self._dead_limit_s = dead_limit_s
        self._silent_limit_s = silent_limit_s

    def prepare(self, fault: Fault) -> None:
        """Arms what waits for its moment by itself."""
        worker = self._fleet.workers[fault.victim]
        fault.counted = worker.ask(do="report")
        match fault.kind:
            case "message":
                verb, _, message = fault.detail.partition(" ")
                worker.ask(do="message", verb=verb, kind=message)
            case "late":
                worker.ask(do="late", wait_s=LATE_S)
            case "flip":
                worker.ask(do="flip")
            case "full":
                self._shrink(fault, KEPT_BLOCKS)

    def inject(self, fault: Fault) -> None:
        """Returns when the fault is over and the deployment whole again."""
        match fault.kind:
            case "kill":
                self._kill(fault)
            case "stop" | "pause":
                self._stop(fault)
            case "rst" | "rst_lane":
                self._reset(fault)
            case "blackhole":
                self._break(fault, Rule(self._links(fault), blackhole=True), until_lost=True)
            case "outage" | "blackhole_lane":
                self._break(fault, Rule(self._links(fault), blackhole=True))
            case "delay":
                self._break(fault, Rule(self._links(fault), delay_s=0.15))
            case "throttle":
                self._break(fault, Rule(self._links(fault), bytes_per_s=20e3))
            case "throttle_lane":
                self._break(fault, Rule(self._links(fault), bytes_per_s=4e6))
            case "full":
                self._fill(fault)
            case "pressure":
                self._press(fault)
        self._fleet.wait_connected(len(self._fleet.workers), timeout_s=30)

    def confirm(self, fault: Fault, timeout_s: float = 8.0) -> None:
        """Asks a faulty worker for the proof of what was armed. A late read comes after the load; nothing else does."""
        what = {"message": fault.detail, "late": "late blocks", "flip": "flip"}.get(fault.kind)
        if what is None:
            return
        worker, end = self._fleet.workers[fault.victim], time.monotonic() + timeout_s
        while (times := worker.ask(do="report").get(what, 0) - fault.counted.get(what, 0)) == 0:
            if time.monotonic() > end or (fault.kind != "late" and not self._fleet.held()):
                break
            time.sleep(0.02)
        if times:
            fault.proof = f"{times} x {what}"
        worker.ask(do="disarm")

    def _links(self, fault: Fault) -> frozenset[str]:
        if fault.kind.endswith("_lane"):
            return frozenset({OTHER})
        return EVERY if fault.detail == "all" else frozenset({fault.detail})

    def _kill(self, fault: Fault) -> None:
        fleet, worker = self._fleet, self._fleet.workers[fault.victim]
        at = time.monotonic()
        worker.kill()
        if worker.process.returncode == -signal.SIGKILL:
            fault.proof = "SIGKILL"
        self._detect(fault, at, self._dead_limit_s)
        fleet.restart(fault.victim)

    def _stop(self, fault: Fault) -> None:
        worker = self._fleet.workers[fault.victim]
        at = time.monotonic()
        worker.signal(signal.SIGSTOP)
        while worker.state() != "T":
            time.sleep(0.001)
        if fault.kind == "stop":
            self._detect(fault, at, self._silent_limit_s)
        else:
            time.sleep(fault.lasts_s)
        if worker.state() == "T":
            fault.proof = f"stopped for {time.monotonic() - at:.1f} s"
        worker.signal(signal.SIGCONT)

    def _reset(self, fault: Fault) -> None:
        proxies = self._fleet.lanes if fault.kind == "rst_lane" else self._fleet.control
        if resets := proxies[fault.victim].reset(self._links(fault)):
            fault.proof = f"{resets} connections"

    def _break(self, fault: Fault, rule: Rule, until_lost: bool = False) -> None:
        proxies = self._fleet.lanes if fault.kind.endswith("_lane") else self._fleet.control
        proxy = proxies[fault.victim]
        before = proxy.counts.swallowed_bytes + proxy.counts.delayed_bytes
        at = time.monotonic()
        proxy.obey(rule)
        if until_lost:
            self._detect(fault, at, self._silent_limit_s)
        else:
            time.sleep(fault.lasts_s)
        # With several workers of a role nothing may have come here yet: the fault lasts until it hits somebody.
        while not (touched := proxy.counts.swallowed_bytes + proxy.counts.delayed_bytes - before):
            if time.monotonic() > at + UNTOUCHED_S:
                break
            time.sleep(0.02)
        if touched:
            fault.proof = f"{touched:,} bytes"
        proxy.heal()

    def _fill(self, fault: Fault) -> None:
        """The load does the rest; there is less room since before it began."""
        end = time.monotonic() + 20
        while not fault.proof and time.monotonic() < end:
            load = self._fleet.worker_status(fault.victim).load
            left, waiting = load.free_blocks + load.evictable_blocks, load.waiting_requests + load.adopting_requests
            if left < FULL_BLOCKS and waiting:
                fault.proof = f"{left} blocks left, {waiting} wait"
                time.sleep(fault.lasts_s)
            time.sleep(0.01)
        self._shrink(fault, None)

    def _shrink(self, fault: Fault, keep: int | None) -> None:
        """All workers of the victim's role: the router would send the load to one that has room."""
        role = self._fleet.ready[fault.victim].role
        for name, worker in self._fleet.workers.items():
            if self._fleet.ready[name].role is role:
                worker.ask(do="shrink", keep=keep)

    def _press(self, fault: Fault) -> None:
        worker = self._fleet.workers[fault.victim]
        worker.ask(do="memory", bytes=0)
        end = time.monotonic() + 4
        while time.monotonic() < end and not fault.proof:
            if closed := self._fleet.worker_status(fault.victim).load.closed:
                fault.proof = f"closed for {closed}"
            time.sleep(0.02)
        worker.ask(do="memory", bytes=None)

    def _detect(self, fault: Fault, since: float, limit_s: float) -> None:
        fault.limit_s = limit_s
        fault.detected_s = self._fleet.lost_after(fault.victim, since, within_s=limit_s + 20)

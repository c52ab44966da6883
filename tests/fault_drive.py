"""A long fault run on real processes: rounds of requests, one fault a round, judged after each round."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from headrace.client import HeadraceClient
from tests.fault_fleet import FaultyFleet
from tests.fault_kinds import Fault, Faults
from tests.fault_requests import Streams, verdicts

TRIES = 4
"""Rounds for a fault that found no victim."""


@dataclass(frozen=True, slots=True)
class Limits:
    """In seconds: until a dead worker is noticed, until a silent one is, and until all blocks are back once the last
    request of a round has ended and its fault is over.
    """

    dead_s: float
    silent_s: float
    back_s: float


@dataclass(slots=True)
class Round:
    fault: Fault
    seconds: float
    retries: int
    back_s: float
    found: list[str]
    """What went wrong, a sentence each."""


@dataclass(slots=True)
class Report:
    lane: str
    topology: str
    rounds: list[Round] = field(default_factory=list)
    num_requests: int = 0
    num_asked_again: int = 0
    unproven: int = 0
    """Rounds whose fault found no victim; they were repeated."""

    @property
    def found(self) -> list[str]:
        return [line for one in self.rounds for line in one.found]

    def table(self) -> str:
        kinds = sorted({one.fault.kind for one in self.rounds})
        counts = verdicts(self.found)
        seconds = sum(one.seconds for one in self.rounds)
        lines = [
            f"{self.topology} {self.lane}: {len(self.rounds)} faults, {self.num_requests} requests in {seconds:.0f} s; "
            f"lost {counts['lost']}, wrong {counts['wrong']}, duplicate {counts['duplicate']}, other "
            f"{len(self.found) - counts['lost'] - counts['wrong'] - counts['duplicate']}; asked again "
            f"{self.num_asked_again}; rounds without a victim {self.unproven}",
            f"{'fault':<16}{'count':>6}{'retries':>9}{'round s':>9}{'back s':>8}{'noticed s':>11}{'max':>7}  victims",
        ]
        for kind in kinds:
            mine = [one for one in self.rounds if one.fault.kind == kind]
            noticed = [one.fault.detected_s for one in mine if one.fault.detected_s is not None]
            p50, most = (f"{statistics.median(noticed):.2f}", f"{max(noticed):.2f}") if noticed else ("-", "-")
            victims = Counter(one.fault.victim for one in mine)
            lines.append(
                f"{kind:<16}{len(mine):>6}{sum(one.retries for one in mine):>9}"
                f"{statistics.median(one.seconds for one in mine):>9.1f}{max(one.back_s for one in mine):>8.2f}"
                f"{p50:>11}{most:>7}  {' '.join(f'{name} {count}' for name, count in sorted(victims.items()))}"
            )
        return "\n".join(lines)


class Drive:
    """`width` streams at a time; each round's fault comes at a random moment of its load."""

    def __init__(self, fleet: FaultyFleet, streams: Streams, seed: int, limits: Limits, within_s: float = 1.5) -> None:
        """Faults come within `within_s` of the beginning of their round."""
        self._fleet = fleet
        self._limits = limits
        self._within_s = within_s
        self._streams = streams
        self._rng = random.Random(seed)
        self._faults = Faults(fleet, limits.dead_s, limits.silent_s)
        lane = next(iter(fleet.ready.values())).lane
        roles = Counter(ready.role.value for ready in fleet.ready.values())
        self.report = Report(lane, f"{roles['prefill']}P{roles['decode']}D")

    def run(self, faults: Iterable[Fault], requests_a_fault: int) -> Report:
        with self._fleet.client() as client:
            for fault in faults:
                for _ in range(TRIES):
                    one = self._round(client, fault, requests_a_fault)
                    self.report.num_requests += requests_a_fault
                    if fault.proof or one.found:
                        break
                    self.report.unproven += 1
                if not fault.proof:
                    one.found.append(f"unproven: {fault.name} at {fault.victim} never happened")
                self.report.rounds.append(one)
                print(f"{one.seconds:6.1f} s  {fault.victim:<10} {fault.name}: {fault.proof}", *one.found, flush=True)
        return self.report

    def _round(self, client: HeadraceClient, fault: Fault, num_requests: int) -> Round:
        rng, streams = self._rng, self._streams
        chosen = [rng.randrange(len(streams.requests)) for _ in range(num_requests)]
        salts = [streams.salt() if rng.random() < 0.5 else "" for _ in chosen]
        began, retries = time.monotonic(), client.status().gateway.retries
        self._faults.prepare(fault)
        with ThreadPoolExecutor(num_requests) as pool:
            answers = [pool.submit(streams.send, client, i, salt) for i, salt in zip(chosen, salts, strict=True)]
            time.sleep(rng.uniform(0.0, self._within_s))
            self._faults.inject(fault)
            over_at = time.monotonic()
            told = [answer.result() for answer in answers]
        self._faults.confirm(fault)
        if fault.kind == "late":
            over_at = time.monotonic()
        found = [line for i, answer in zip(chosen, told, strict=True) if (line := streams.judge(i, answer))]
        self.report.num_asked_again += sum(answer.asked_again for answer in told)
        ended_at = max(over_at, *(answer.ended_at for answer in told))
        held = self._fleet.wait_nothing_held(max(0.0, ended_at + self._limits.back_s - time.monotonic()))
        back_s = time.monotonic() - ended_at
        if held:
            found.append(f"held: {held} {back_s:.1f} s after {fault.name} at {fault.victim}")
            self._fleet.wait_nothing_held(30)
        if fault.limit_s is not None and (fault.detected_s is None or fault.detected_s > fault.limit_s):
            found.append(f"unnoticed: {fault.name} at {fault.victim} after {fault.detected_s} s")
        if not found:
            audit = self._fleet.audit(settle_s=2)
            found += [f"audit: {line}" for line in audit.findings]
        retries = client.status().gateway.retries - retries
        return Round(fault, time.monotonic() - began, retries, back_s, found)

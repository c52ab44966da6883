"""One seed: a deployment, its load, its faults, the healing, the laws.

python -m tests.virtual.run SEED|FIRST-LAST ...     runs seeds and prints what happened
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from headrace.core.records import Role
from headrace.errors import HeadraceError
from tests.virtual import laws
from tests.virtual.deployment import DEADLINE_S, GOOD, ROUGH, Deployment, Record, request, shared_text
from tests.virtual.faults import Fault, Injector, draw
from tests.virtual.loop import PROCESS, Life, VirtualLoop

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
SHAPES = ([P, D], [P, P, D], [P, D, D], [P, P, D, D], [P, D, C], [P, P, D, D, C])
NUM_REQUESTS = 50


@dataclass(slots=True)
class Outcome:
    seed: int
    findings: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    digest: str = ""
    ends: dict[str, int] = field(default_factory=dict)
    virtual_s: float = 0.0
    messages: int = 0
    exits: list[str] = field(default_factory=list)
    moved: int = 0
    """Requests told to leave their worker."""

    @property
    def laws(self) -> set[str]:
        return {finding.partition(":")[0] for finding in self.findings}

    def report(self) -> str:
        what = f"{len(self.findings)} findings; ends {self.ends}; {self.moved} moved; {self.virtual_s:.1f} virtual s"
        lines = [f"seed {self.seed}: {what}"]
        lines += [f"  fault {'missed' if f.applied_s is None else f'{f.applied_s:.4f}'} {f.name}" for f in self.faults]
        lines += [f"  exit {text}" for text in self.exits]
        lines += [f"  LAW {text}" for text in self.findings]
        return "\n".join([*lines, f"  replay: python -m tests.virtual.run {self.seed}"])


class ProcessEnded(BaseException):
    """Production wanted to end its process."""


def run_seed(seed: int, num_requests: int = NUM_REQUESTS, faults: list[Fault] | None = None) -> Outcome:
    """`faults`: instead of those that the seed draws."""
    loop = VirtualLoop()
    rng = random.Random(seed)
    outcome = Outcome(seed)
    drawn = [draw(rng) for _ in range(rng.randint(1, 4))]
    outcome.faults = drawn if faults is None else faults
    run = _Run(loop, rng, outcome, num_requests)

    def end_process(code: int) -> None:
        process = PROCESS.get()
        run.deployment.broken.append(f"{process.name if process else 'nobody'} ended itself with {code}")
        raise ProcessEnded

    try:
        with patch.object(os, "_exit", end_process):
            loop.run_until_complete(run.main())
    finally:
        loop.close()
    return outcome


class _Run:
    def __init__(self, loop: VirtualLoop, rng: random.Random, outcome: Outcome, num_requests: int) -> None:
        self._loop, self._rng, self._outcome, self._num_requests = loop, rng, outcome, num_requests
        self._records: list[Record] = []
        self._shared = [rng.randrange(3, 260) for _ in range(48)]

    async def main(self) -> None:
        rng, outcome = self._rng, self._outcome
        self.deployment = deployment = Deployment(
            self._loop,
            rng,
            rng.choice(SHAPES),
            num_gateways=rng.choice((1, 2)),
            num_blocks=rng.choice((20, 32, 64)),
            gateway={"routing_policy": rng.choice(("least_loaded", "least_loaded", "cost"))},
        )
        await asyncio.sleep(0.01)
        deployment.push_members()
        if not await deployment.until(deployment.connected, 5.0):
            outcome.findings.append("h: the deployment did not come up")
        canary = Record(request(rng, GOOD, self._shared), 0.0)
        await self._finish([canary], 5.0)
        injector = Injector(deployment, outcome.faults, self._find)
        injector.burst = self._burst
        self._load()
        self._plan_moves()
        last = max(record.at_s for record in self._records)
        await deployment.until(lambda: all(r.began for r in self._records), last + 1.0)
        await deployment.until(lambda: self._over() or not injector.waiting, 8.0)
        await deployment.until(lambda: self._over() and not injector.lasting, 8.0)
        injector.heal()
        await self._settle()
        again = replace(canary, tokens=[], finish_reasons=[], usage=None, ends=[], began=0.0)
        await self._finish([again], 0.5 if outcome.findings else laws.LIVE_S)
        patience_s = 0.5 if outcome.findings else laws.DRAIN_S
        if not await deployment.until(lambda: not laws.held(deployment), patience_s):
            outcome.findings += laws.held(deployment)
        self._judge(canary, again)
        await deployment.bury()

    # ---- load

    def _load(self) -> None:
        rng = self._rng
        for i in range(self._num_requests):
            tenant = GOOD if i % 3 == 0 else ROUGH
            record = Record(request(rng, tenant, self._shared), rng.choice((0.0, 0.1, rng.uniform(0, 0.6))))
            if tenant == ROUGH:
                kind = rng.random()
                if kind < 0.1:
                    record.cancel_after_s = rng.uniform(0.0, 0.3)
                elif kind < 0.2:
                    record.request = replace(record.request, deadline_s=rng.choice((0.02, 0.1, 0.5, 3.0)))
                elif kind < 0.3:
                    record.slow_s = rng.uniform(0.001, 0.1)
            self._ask_later(record)

    def _plan_moves(self) -> None:
        """In some seeds somebody empties workers in the middle of it all."""
        rng = random.Random(f"moves {self._outcome.seed}")
        for _ in range(rng.choice((0, 0, 1, 5))):
            self._loop.call_later(rng.uniform(0.0, 0.8), self._move, rng.choice(sorted(self.deployment.workers)))

    def _move(self, worker_id: str) -> None:
        for gateway in self.deployment.gateways.values():
            if gateway.process.life is Life.RUNNING:
                with suppress(HeadraceError):  # it is not connected
                    self._outcome.moved += gateway.process.run(gateway.core.move, worker_id, None, "").moved

    def _burst(self) -> int:
        """More than fits: long prompts, all at once."""
        records = [Record(request(self._rng, ROUGH, self._shared, most_prompt=180), 0.0) for _ in range(8)]
        for record in records:
            self._ask_later(record)
        return len(records)

    def _ask_later(self, record: Record) -> None:
        self._records.append(record)
        self._loop.call_later(record.at_s, self.deployment.ask, record)

    def _find(self, label: str) -> Record | None:
        """Whose attempt it is: `gateway/req-n`."""
        gateway = self.deployment.gateways.get(label.partition("/")[0])
        branch = None if gateway is None else gateway.core._live.get(label)  # type: ignore[call-overload]
        return None if branch is None else next((r for r in self._records if r.request is branch.spec), None)

    def _over(self) -> bool:
        laws.lost_with_their_gateway(self._records, self.deployment)
        return all(record.ends for record in self._records)

    # ---- the end

    async def _finish(self, records: list[Record], limit_s: float) -> None:
        for record in records:
            self.deployment.ask(record)
        await self.deployment.until(lambda: all(record.ends for record in records), limit_s)

    async def _settle(self) -> None:
        """h: what is still open when everything is healed ends within a stated time."""
        deployment = self.deployment
        if not await deployment.until(deployment.connected, laws.LIVE_S):
            self._outcome.findings.append("h: the deployment did not connect again")
        if await deployment.until(self._over, laws.LIVE_S):
            return
        for record in self._records:
            if not record.ends and not record.disturbed:
                self._outcome.findings.append(
                    f"h: a request of {record.request.tenant} at {record.gateway} with {len(record.tokens)} tokens "
                    f"does not end"
                )
        if not self._outcome.findings:
            await deployment.until(self._over, DEADLINE_S)

    def _judge(self, canary: Record, again: Record) -> None:
        outcome, deployment, records = self._outcome, self.deployment, self._records
        outcome.findings += [
            *laws.ended_once(records, deployment),
            *laws.exact_tokens(records),
            *laws.counted(records),
            *laws.neighbours(records),
            *laws.canaries(canary, again),
            *laws.proven([fault for fault in outcome.faults if fault.applied_s is not None]),
            *laws.unbroken(deployment),
        ]
        outcome.digest = deployment.wire.digest()
        outcome.virtual_s = self._loop.time()
        outcome.messages = deployment.wire.messages
        outcome.exits = deployment.exits
        for record in records:
            for end in record.ends:
                outcome.ends[end] = outcome.ends.get(end, 0) + 1


def _range(text: str) -> range:
    """`7`, or `0-99`."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main(seeds: list[int]) -> int:
    shared_text()
    broken = 0
    for seed in seeds:
        began = time.process_time()
        outcome = run_seed(seed)
        broken += bool(outcome.findings)
        print(outcome.report(), f"\n  digest {outcome.digest} {time.process_time() - began:.2f} s", flush=True)
    return broken


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main([int(seed) for text in sys.argv[1:] for seed in _range(text)]) > 0)

"""The laws that hold after every run (CASES, `Laws every fault test asserts`), each with its checker.

A finding names its law, so that a planted bug can be shown to be caught by the checker of its own law.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

from tests.virtual.deployment import DEADLINE_S, GOOD, Deployment, Record, expected
from tests.virtual.faults import Fault
from tests.virtual.loop import Life

LATE_S = 1.0
"""Beyond its deadline: for what is on its way when it passes."""
LIVE_S = 10.0
"""After all faults are over, everything that is still open and has no earlier deadline ends within this time."""
DRAIN_S = 10.0


def ended_once(records: list[Record], deployment: Deployment) -> Iterator[str]:
    """a: accepted = completed + failed + cancelled; none open past its deadline."""
    for record in records:
        if not record.began:
            continue
        if len(record.ends) != 1:
            yield f"a: {record.gateway} {record.request.tenant} ended {record.ends}"
        deadline_s = record.request.deadline_s or DEADLINE_S
        excused_s = record.slow_total_s + (record.process.stopped_s if record.process is not None else 0.0)
        if record.ends != ["gateway_lost"] and record.ended - record.began > deadline_s + LATE_S + excused_s:
            yield f"a: open for {record.ended - record.began:.1f} s with a deadline of {deadline_s} s"
    for gateway in deployment.gateways.values():
        c = gateway.core.counters
        if c.accepted != c.completed + c.failed + c.cancelled:
            yield f"a: {gateway.name} accepted {c.accepted}, {c.completed} + {c.failed} + {c.cancelled} ended"


def exact_tokens(records: list[Record]) -> Iterator[str]:
    """b: an exact prefix of the run without faults; all of it where the request completed."""
    for record in records:
        whole = expected(record.request)
        if record.tokens != whole[: len(record.tokens)]:
            yield f"b: wrong tokens {record.tokens} instead of {whole} ({record.ends}, {record.disturbed})"
        elif record.ends == ["completed"] and record.tokens != whole:
            yield f"b: completed after {len(record.tokens)} of {len(whole)} tokens"
        if "INTERNAL" in record.ends:
            yield f"b: a worker's output contradicted what was delivered ({len(record.tokens)} tokens)"


def held(deployment: Deployment) -> list[str]:
    """c: what is not given back yet."""
    found = []
    for gateway in deployment.gateways.values():
        core = gateway.core
        parts = {
            "live": len(core._live),
            "legs": len(core._legs),
            "queued": len(core._queued),
            "kin": len(core._kin),
            "bookings": core.router.table.total,
            "admitted": sum(map(bool, astuple(core.gate.admission.held))),
            "pairs that cannot read from each other": len(core.router.table._apart),
        }
        found += [f"c: {gateway.name}: {n} {what}" for what, n in parts.items() if n]
        sessions = len(core.fleet.sessions)
        if (tasks := len(gateway.process.open_tasks())) > sessions * 4:
            found.append(f"c: {gateway.name}: {tasks} tasks for {sessions} sessions")
    for name, worker in deployment.workers.items():
        status = worker.process.run(worker.service.status, True)
        for what in ("live_requests", "leases", "handoffs", "transfers", "used_blocks", "quarantined_blocks"):
            if n := getattr(status, what):
                found.append(f"c: {name}: {n} {what} {[(h.holder, h.blocks) for h in status.holders]}")
        if status.integrity_error:
            found.append(f"c: {name}: {status.integrity_error}")
        if status.sessions != len(deployment.gateways):
            found.append(f"c: {name}: {status.sessions} sessions")
        if (tasks := len(worker.process.open_tasks())) > 1 + 4 * len(deployment.gateways):
            found.append(f"c: {name}: {tasks} tasks")
    return found


def counted(records: list[Record]) -> Iterator[str]:
    """d: one finish reason; usage = tokens counted."""
    for record in records:
        completed = record.ends == ["completed"]
        # A gateway may die between its last piece and the end of the stream.
        cut_short = record.ends == ["gateway_lost"] and record.tokens == expected(record.request)
        if len(record.finish_reasons) != completed and not (cut_short and len(record.finish_reasons) == 1):
            yield f"d: finish reasons {record.finish_reasons} of a request that ended {record.ends}"
        if completed and (record.usage is None or record.usage.completion_tokens != len(record.tokens)):
            yield f"d: usage {record.usage} for {len(record.tokens)} tokens"
        if completed and record.usage is not None and record.usage.prompt_tokens != len(record.request.prompt_ids):
            yield f"d: usage {record.usage} for a prompt of {len(record.request.prompt_ids)}"


def neighbours(records: list[Record]) -> Iterator[str]:
    """e: whoever is not aimed at completes."""
    for record in records:
        if record.request.tenant == GOOD and record.ends not in (["completed"], ["gateway_lost"]):
            yield f"e: an undisturbed request ended {record.ends} after {len(record.tokens)} tokens"


def canaries(before: Record, after: Record) -> Iterator[str]:
    """f: the same request gives the same before and after."""
    if (before.tokens, before.ends) != (after.tokens, after.ends) or after.ends != ["completed"]:
        yield f"f: canary {before.ends} {before.tokens} before, {after.ends} {after.tokens} after"


def proven(faults: list[Fault]) -> Iterator[str]:
    """g: every fault that counts as applied has happened."""
    for fault in faults:
        if not fault.proof():
            yield f"g: no proof that it happened: {fault.name}"


def unbroken(deployment: Deployment) -> Iterator[str]:
    """No process may find itself broken (DESIGN law 8), whatever happens around it."""
    for text in deployment.broken:
        yield f"x: {text}"


def lost_with_their_gateway(records: list[Record], deployment: Deployment) -> None:
    """A client of a killed gateway sees its connection break: an explicit end."""
    dead = {id(process) for process in deployment.dead if process.life is Life.DEAD}
    for record in records:
        if not record.ends and record.process is not None and id(record.process) in dead:
            record.ends.append("gateway_lost")

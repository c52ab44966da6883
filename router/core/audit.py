"""Conservation over the whole deployment, from each process's own account. Pure: it reads accounts and returns
sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerAccount:
    """A worker's account as it gave it; `answered` false when it did not."""

    name: str
    answered: bool
    used_blocks: int = 0
    quarantined_blocks: int = 0
    leases: int = 0
    transfers: int = 0
    handoffs: int = 0
    live_requests: int = 0
    holders: tuple[tuple[str, int], ...] = ()
    integrity_error: str = ""
    tiers: tuple[tuple[str, int, int], ...] = ()
    """(name, blocks that there are, blocks that are accounted for)."""


@dataclass(frozen=True, slots=True)
class GatewayAccount:
    live: frozenset[str]
    """Ids of the requests in progress."""
    bookings: int
    name: str = "gateway"
    answered: bool = True
    """False: nobody knows what it has in progress."""


def findings(gateways: Sequence[GatewayAccount], workers: Sequence[WorkerAccount]) -> list[str]:
    """What is held for nothing, one sentence a holder; [] is clean.

    While requests are in progress holding blocks is their right, so only foreign holders and broken conservation count.
    """
    found = [f"{gateway.name}: did not answer" for gateway in gateways if not gateway.answered]
    found += [
        f"{gateway.name}: {gateway.bookings} bookings without a request"
        for gateway in gateways
        if gateway.bookings and not gateway.live
    ]
    live = frozenset[str]().union(*(gateway.live for gateway in gateways))
    for worker in workers:
        if not worker.answered:
            found.append(f"{worker.name}: did not answer")
        if worker.integrity_error:
            found.append(f"{worker.name}: {worker.integrity_error}")
        found += [
            f"{worker.name}: {tier} tier accounts for {known} of {capacity} blocks"
            for tier, capacity, known in worker.tiers
            if known != capacity
        ]
        found += [
            f"{worker.name}: {holder} holds {blocks} blocks"
            for holder, blocks in worker.holders
            if _request_of(holder) not in live
        ]
    if live:
        return found
    for worker in workers:
        for what in ("leases", "transfers", "handoffs", "live_requests"):
            if count := getattr(worker, what):
                found.append(f"{worker.name}: {count} {what.replace('_', ' ')} without a request at a gateway")
        held = sum(blocks for _, blocks in worker.holders)
        if worker.used_blocks > held:
            found.append(f"{worker.name}: {worker.used_blocks - held} used blocks without a holder")
    return found


def _request_of(holder: str) -> str:
    """The request's id in a holder's name `KIND ID/ATTEMPT`; '' for holders that no request excuses."""
    kind, _, name = holder.rpartition(" ")
    return name.rpartition("/")[0] if kind in ("request", "fetch", "lease fetch", "staged for") else ""

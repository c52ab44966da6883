"""Judges how KV moves: each lane's speed beside the speed of plain copies, what UCX really used, network cards.

Shares are of medians that were measured in one run, so that a busy or slow machine is not blamed on the lane.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from headrace.core.findings import Finding, fail, ok, warn

MIN_UCX_SHARE = 0.25
"""Of a plain copy in memory. Shared memory reaches half to three quarters, UCX over loopback TCP a tenth."""
MIN_SOCKET_SHARE = 0.4
"""Of a bare socket loop, for the lanes that go through sockets."""
MIN_NIC_MBPS = 10_000
_NOT_SHARED = frozenset({"tcp", "sockcm"})
_READ = "remote memory read by ucp_get"
_TRANSPORT = re.compile(r"\b([a-z][a-z0-9_]*)/[\w.:-]+")


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """Two processes of this machine, one reading scattered blocks of the other. Rates in GB/s (10^9 bytes)."""

    lane: str
    wanted: str
    """The configured transport: a lane's name, or `auto`."""
    gbps: float = 0.0
    memcpy_gbps: float = 0.0
    """Plain copies of the same blocks within one process."""
    socket_gbps: float = 0.0
    """A bare socket loop between the same two processes."""
    transports: tuple[str, ...] = ()
    """What UCX says that it read through; empty where it is not known."""
    error: str = ""
    is_late: bool = False
    """It was not measured in time: it hangs, or the machine is busy."""


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    in_cluster: bool
    """Workers may be on other machines."""
    speeds_mbps: dict[str, int]
    """Of interfaces that are up and tell their speed, loopback left out."""
    infiniband: tuple[str, ...]


def read_transports(log: str, worker: str) -> tuple[str, ...]:
    """The transports by which UCX's worker of that name reads into host memory, from what UCX logs with
    UCX_PROTO_INFO=y.

    In its tables a line names the worker, the next one the operation; the others have columns, of which the last says
    `transport/device` for a range of sizes.
    """
    found: dict[str, None] = {}
    is_worker = is_read = False
    for line in log.splitlines():
        columns = [column.strip() for column in line.split("|")[1:-1]]
        if len(columns) == 1 and " by ucp_" in columns[0]:
            is_read = is_worker and columns[0].startswith(_READ)
        elif len(columns) == 1:
            is_worker, is_read = columns[0].startswith(f"{worker} "), False
        elif columns and is_read:
            found |= dict.fromkeys(_TRANSPORT.findall(columns[-1]))
    return tuple(found)


def judge_lane(facts: LaneFacts) -> Finding:
    check = f"lane {facts.lane}"
    if facts.is_late:
        return warn(
            check,
            "not measured in time",
            "look again when the machine is idle, or with a higher --limit-s; else it hangs",
        )
    if facts.error:
        return _broken(check, facts)
    numbers = {"gbps": facts.gbps, "memcpy_gbps": facts.memcpy_gbps, "socket_gbps": facts.socket_gbps}
    return replace(_judge_speed(check, facts), numbers=numbers)


def _judge_speed(check: str, facts: LaneFacts) -> Finding:
    shares = f"memcpy {facts.memcpy_gbps:.1f}, bare sockets {facts.socket_gbps:.1f}"
    through = f" through {', '.join(facts.transports)}" if facts.transports else ""
    found = f"{facts.gbps:.1f} GB/s{through} ({shares})"
    if facts.lane == "ucx":
        return _judge_ucx(check, found, facts)
    if facts.gbps < MIN_SOCKET_SHARE * facts.socket_gbps:
        advice = "stop what else runs here and look again; else tell which machine this is"
        return warn(check, f"{found}: below {MIN_SOCKET_SHARE:.0%} of bare sockets", advice)
    return ok(check, found)


def _broken(check: str, facts: LaneFacts) -> Finding:
    found = f"does not work: {facts.error}"
    if facts.wanted == facts.lane:
        return fail(check, found, "set kv_transfer.transport: auto, or another lane")
    if facts.lane == "tcp":
        return fail(check, found, "this is what remains when others fail: check kv_transfer.host and the firewall")
    if facts.lane == "ucx" and facts.wanted == "auto":
        return warn(check, f"{found}; KV would move over tcp", "pip install -e '.[ucx]' -c constraints.txt")
    return ok(check, f"not wanted, and {found}")


def _judge_ucx(check: str, found: str, facts: LaneFacts) -> Finding:
    advice = (
        "let workers share a PID namespace and trace each other (ptrace_scope below 2, or CAP_SYS_PTRACE); leave "
        "UCX_TLS unset and expandable_segments off"
    )
    if facts.transports and _NOT_SHARED.issuperset(facts.transports):
        return warn(check, f"UCX fell back to TCP: {found}", advice)
    if facts.gbps < MIN_UCX_SHARE * facts.memcpy_gbps:
        what = "slow" if facts.transports else "UCX fell back to TCP, by its speed"
        return warn(check, f"{what}: {found}, below {MIN_UCX_SHARE:.0%} of a copy", advice)
    return ok(check, found)


def judge_network(facts: NetworkFacts) -> Finding:
    check = "network cards"
    cards = [f"{name} {mbps / 1000:g} Gbit/s" for name, mbps in sorted(facts.speeds_mbps.items())]
    cards += [f"InfiniBand {name}" for name in facts.infiniband]
    found = ", ".join(cards) or "none tells its speed, no InfiniBand"
    if not facts.in_cluster:
        return ok(check, f"{found}; all workers are on this machine")
    fastest = max(facts.speeds_mbps.values(), default=0)
    if facts.infiniband or fastest >= MIN_NIC_MBPS:
        return ok(check, found)
    if not fastest:
        return warn(check, found, "measure between two nodes before you rely on it: KV of a long prompt is 100s of MB")
    return warn(
        check,
        f"{found}: at most {fastest / 8000:g} GB/s of KV between machines",
        "keep the prefill and decode workers of a pair on one node, or use faster cards",
    )

"""What the doctor says of lanes and network cards, from made-up measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.doctor.lanes import LaneFacts, NetworkFacts, judge_lane, judge_network, read_transports
from headrace.core.findings import Level

UCX = LaneFacts("ucx", wanted="auto", gbps=4.0, memcpy_gbps=6.0, socket_gbps=2.0, transports=("cma",))
TCP = LaneFacts("tcp", wanted="auto", gbps=1.5, memcpy_gbps=6.0, socket_gbps=2.0)
BROKEN = LaneFacts("ucx", wanted="auto", error="NIXL is not importable")

LOG = """
[1796065194.331673] [vm:21866:0]   ucp_worker.c:1997 UCX  INFO    reader/1 intra-node cfg#1 am(tcp/lo cma/memory)
[1796065194.338392] [vm:21866:0]   +--------+-------------+-----------------------------------+
[1796065194.338392] [vm:21866:0]   | reader/1 intra-node cfg#1                                |
[1796065194.338392] [vm:21866:0]   | remote memory write by ucp_put* from host memory to host |
[1796065194.338392] [vm:21866:0]   +--------+-------------+-----------------------------------+
[1796065194.338392] [vm:21866:0]   | 0..inf | zero-copy   | posix/memory                      |
[1796065194.338392] [vm:21866:0]   +--------+-------------+-----------------------------------+
[1796065194.496496] [vm:21866:0]   | reader/1/probe self cfg#0                                |
[1796065194.496496] [vm:21866:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1796065194.496496] [vm:21866:0]   | 0..inf | zero-copy   | self/memory                       |
[1796065194.596496] [vm:21866:0]   | reader/1 intra-node cfg#1                                |
[1796065194.596496] [vm:21866:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1796065194.596496] [vm:21866:0]   +--------+-------------+-------------------------------------------+
[1796065194.596496] [vm:21866:0]   | Range  | Description |                  Config                   |
[1796065194.596496] [vm:21866:0]   |   0..8 | short       | 52% on rc_mlx5/mlx5_0:1 and 48% on tcp/eth0 |
[1796065194.596496] [vm:21866:0]   | 9..inf | zero-copy   | cma/memory                                |
"""


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (UCX, Level.OK, "4.0 GB/s through cma (memcpy 6.0"),
        (replace(UCX, transports=("tcp",)), Level.WARN, "UCX fell back to TCP"),
        (replace(UCX, transports=("tcp", "cma")), Level.OK, "tcp, cma"),
        (replace(UCX, transports=(), gbps=0.7), Level.WARN, "UCX fell back to TCP, by its speed"),
        (replace(UCX, gbps=0.7), Level.WARN, "slow"),
        (TCP, Level.OK, "bare sockets 2.0"),
        (replace(TCP, gbps=0.7), Level.WARN, "below 40% of bare sockets"),
        (replace(TCP, memcpy_gbps=60.0), Level.OK, "1.5 GB/s"),
        (BROKEN, Level.WARN, "KV would move over tcp"),
        (replace(BROKEN, wanted="ucx"), Level.FAIL, "NIXL is not importable"),
        (replace(BROKEN, wanted="tcp"), Level.OK, "not wanted"),
        (replace(BROKEN, lane="tcp"), Level.FAIL, "does not work"),
        (replace(TCP, is_late=True), Level.WARN, "not measured in time"),
    ],
)
def test_a_lane_is_judged_beside_plain_copies_and_bare_sockets(facts: LaneFacts, level: Level, says: str) -> None:
    finding = judge_lane(facts)
    assert (finding.check, finding.level) == (f"lane {facts.lane}", level)
    assert says in finding.found
    assert bool(finding.advice) == (level is not Level.OK)


def test_what_was_measured_is_there_as_numbers() -> None:
    assert judge_lane(UCX).numbers == {"gbps": 4.0, "memcpy_gbps": 6.0, "socket_gbps": 2.0}
    assert not judge_lane(BROKEN).numbers


def test_ucx_tells_what_a_worker_reads_through() -> None:
    # Neither what it writes through, nor what another worker of the same process uses.
    assert read_transports(LOG, "reader/1") == ("rc_mlx5", "tcp", "cma")
    assert read_transports(LOG, "reader/1/probe") == ("self",)
    assert read_transports("UCX  INFO  nothing of that kind", "reader/1") == ()


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (NetworkFacts(False, {"eth0": 1000}, ()), Level.OK, "all workers are on this machine"),
        (NetworkFacts(True, {"eth0": 1000}, ()), Level.WARN, "at most 0.125 GB/s"),
        (NetworkFacts(True, {"eth0": 1000, "eth1": 25_000}, ()), Level.OK, "eth1 25 Gbit/s"),
        (NetworkFacts(True, {"eth0": 1000}, ("mlx5_0",)), Level.OK, "InfiniBand mlx5_0"),
        (NetworkFacts(True, {}, ()), Level.WARN, "none tells its speed"),
    ],
)
def test_slow_cards_matter_where_workers_are_on_several_machines(facts: NetworkFacts, level: Level, says: str) -> None:
    finding = judge_network(facts)
    assert finding.level is level
    assert says in finding.found

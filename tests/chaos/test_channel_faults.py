"""300 faults over 6,000 requests on real processes with the default model: nothing is lost, wrong or twice, and every
block is back within a second.

`make chaos` runs all of it, over the liveness that deployments have by default, and demands the times too. `make test`
runs ten of the faults with a tiny model and a shorter liveness, on a machine that may be busy.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from headrace.core.records import Role
from headrace.paths import cache_root
from tests.fault_drive import Drive, Limits
from tests.fault_fleet import FaultyFleet, faulty_fleet
from tests.fault_kinds import Fault, draw
from tests.fault_requests import Streams, distinct_requests
from tests.model_fixtures import tiny_model
from workers.model.prepare import prepare_model

P, D = Role.PREFILL, Role.DECODE
LIMITS = Limits(dead_s=1.0, silent_s=10.0, back_s=1.0)
PATIENT = Limits(dead_s=10.0, silent_s=10.0, back_s=10.0)
OPTIONS = {
    "max_model_len": 1024,
    "kv_cache_bytes": 128 << 20,
    "low_memory_bytes": 64 << 20,
    "critical_memory_bytes": 32 << 20,
    "read_timeout_s": 3.0,
}
"""Marks that a machine whose memory is gone falls below, and reads that are given up within a round."""
TEN_FAULTS = [
    Fault("kill", "prefill-0"),
    Fault("kill", "decode-0"),
    Fault("stop", "decode-0"),
    Fault("rst", "prefill-0", "all"),
    Fault("rst_lane", "prefill-0"),
    Fault("message", "prefill-0", "drop hand_off"),
    Fault("message", "decode-0", "drop verify"),
    Fault("late", "decode-0"),
    Fault("flip", "decode-0"),
    Fault("full", "decode-0", lasts_s=0.5),
]


@pytest.fixture(scope="module")
def default_model() -> Path:
    return prepare_model("smollm2-135m-instruct", cache_root())


@pytest.fixture(scope="module")
def streams() -> Streams:
    return Streams(distinct_requests(60, seed=6, vocabulary=48_000))


def drive(
    running: FaultyFleet, streams: Streams, faults: Iterable[Fault], seed: int, limits: Limits, within_s: float
) -> None:
    """The first deployment that `streams` meets is the quiet one; all others must answer as it did."""
    if not streams.expected:
        with running.client() as client:
            streams.learn(client)
        running.assert_drained()
    report = Drive(running, streams, seed, limits, within_s).run(faults, requests_a_fault=20)
    print(report.table(), flush=True)
    assert not report.found, report.found
    running.assert_accounts_close()
    running.assert_drained()


@pytest.mark.chaos
@pytest.mark.real_model
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("lane", ["ucx", "tcp"])
@pytest.mark.parametrize("roles", [(P, D), (P, P, D)], ids=["1P1D", "2P1D"])
def test_three_hundred_faults_lose_and_change_nothing(
    default_model: Path, streams: Streams, roles: tuple[Role, ...], lane: str
) -> None:
    """75 of the 300 faults in each of the four deployments."""
    seed = len(roles) * 1000 + ord(lane[0])
    rng = random.Random(seed)
    with faulty_fleet(default_model, *roles, transport=lane, liveness_s=8.0, **OPTIONS) as running:
        drive(running, streams, (draw(rng, running) for _ in range(75)), seed, LIMITS, within_s=1.5)


def test_ten_faults_lose_and_change_nothing(tmp_path: Path) -> None:
    """Tiny models repeat themselves unless they sample, and are quick: outputs are long, or faults would hit nobody."""
    quick = Streams(distinct_requests(20, seed=7, vocabulary=500, outputs=(100, 300), greedy_share=0.1))
    options = OPTIONS | {"kv_cache_bytes": 8 << 20, "read_timeout_s": 1.0}
    with faulty_fleet(tiny_model(tmp_path), P, D, transport="tcp", liveness_s=1.5, **options) as running:
        drive(running, quick, TEN_FAULTS, 7, PATIENT, within_s=0.3)
        # Without its digest the turned bit would have been used: unit/test_kvtransfer_pairing.py has that control.
        assert sum(pair.corrupt_blocks for pair in running.worker_status("decode-0").pairs) == 1
        running.assert_drained()

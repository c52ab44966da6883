"""Ten thousand deployments of fifty requests under faults, in virtual time (`tests/virtual`).

HEADRACE_SEEDS=FIRST-LAST runs another range, for example what an interrupted run had left.
"""

from __future__ import annotations

import os

import pytest

from tests.virtual.faults import PAIRS
from tests.virtual.sweep import Sweep, sweep

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(6 * 3600)]


def test_ten_thousand_seeds_break_no_law(capsys: pytest.CaptureFixture[str]) -> None:
    first, _, last = os.environ.get("HEADRACE_SEEDS", "0-9999").partition("-")
    done = Sweep()
    reported = 0
    for done in sweep(int(first), int(last)):
        with capsys.disabled():
            print("\n".join([*done.reports[reported:], done.summary()]), flush=True)
        reported = len(done.reports)
    assert not done.reports
    assert all(done.kinds().values())
    if done.seeds >= 10_000:
        assert len(done.coverage.applied) > 0.8 * len(PAIRS), "most faults never met their triggers"

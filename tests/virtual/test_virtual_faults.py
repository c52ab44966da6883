"""The deployment under faults in virtual time: no law broken, any seed replays, and every checker catches a bug."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvtransfer.adoption import FENCE_S
from tests.virtual.bugs import BUGS, Plant
from tests.virtual.faults import Fault, Kind
from tests.virtual.run import run_seed
from tests.virtual.sweep import run_seeds

NUM_SEEDS, CHUNK = 300, 25
FOUND = (869, 1160, 1286)
"""Further seeds that once broke a law."""
MOST_SEEDS = 12
"""A planted bug is caught within so many."""
CUT = [Fault(Kind.CUT, "Lease.announce arrived", False, 1, 0.0, False)]
STALL = [Fault(Kind.READ_STALLS, "read began", False, 2, 3.2, False)]
FAIL = [Fault(Kind.READ_FAILS, "read began", False, 1, 2 * FENCE_S, False) for _ in range(10)]
"""Written late, when it is not waited for any more."""
FLIP = [Fault(Kind.FLIP, "read began", False, 1, 0.0, False) for _ in range(3)]
FAULTS = {
    "digests_that_nobody_compares": FLIP,
    "targets_of_abandoned_reads_that_are_freed_at_once": FAIL,
    "a_cut_that_breaks_nothing": CUT,
    "quarantine_that_never_ends": STALL,
}
"""For bugs that show in one kind of fault only."""


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, CHUNK))
def test_faults_at_any_step_break_no_law(first: int) -> None:
    done = run_seeds(range(first, first + CHUNK))
    assert not done.reports, "\n".join(done.reports)
    assert done.requests >= CHUNK * 50 and sum(done.kinds().values()) > CHUNK and done.moved, done.summary()


def test_what_once_broke_a_law_does_so_no_more() -> None:
    done = run_seeds(FOUND)
    assert not done.reports, "\n".join(done.reports)


def test_a_seed_replays_identically_in_any_process() -> None:
    seeds = (3, 11, 40)
    here = [run_seed(seed).digest for seed in seeds]
    assert run_seed(seeds[0]).digest == here[0] and len(set(here)) == len(seeds)
    command = [sys.executable, "-m", "tests.virtual.run", *map(str, seeds)]
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    assert [line.split()[1] for line in said.splitlines() if line.startswith("  digest")] == here


@pytest.mark.parametrize(
    ("law", "plant"),
    [(law, plant) for law, plants in BUGS.items() for plant in plants],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_planted_bug_is_caught_by_the_checker_of_its_law(law: str, plant: Plant) -> None:
    faults = FAULTS.get(plant.__name__)
    for seed in range(MOST_SEEDS):
        with plant():
            outcome = run_seed(seed, faults=None if faults is None else [fresh(fault) for fault in faults])
        if law in outcome.laws:
            return
    pytest.fail(f"{plant.__name__} broke law {law} unseen for {MOST_SEEDS} seeds")


def fresh(fault: Fault) -> Fault:
    return Fault(fault.kind, fault.trigger, fault.at_receiver, fault.nth, fault.lasts_s, fault.ends_cut)

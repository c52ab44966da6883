"""Many seeds, by several processes: what broke, what each fault met, and how often its trigger never came.

python -m tests.virtual.sweep FIRST LAST [JOBS]     prints progress; another range goes on where an earlier one stopped
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.virtual.deployment import shared_text
from tests.virtual.faults import Coverage, Kind
from tests.virtual.run import run_seed

CHUNK = 50


@dataclass(slots=True)
class Sweep:
    seeds: int = 0
    requests: int = 0
    reports: list[str] = field(default_factory=list)
    """Of seeds that broke a law."""
    coverage: Coverage = field(default_factory=Coverage)
    ends: dict[str, int] = field(default_factory=dict)
    moved: int = 0

    def add(self, other: Sweep) -> None:
        self.seeds += other.seeds
        self.requests += other.requests
        self.moved += other.moved
        self.reports += other.reports
        for mine, theirs in (
            (self.coverage.applied, other.coverage.applied),
            (self.coverage.missed, other.coverage.missed),
            (self.ends, other.ends),
        ):
            for name, n in theirs.items():
                mine[name] = mine.get(name, 0) + n

    def kinds(self) -> dict[Kind, int]:
        """How many faults of each kind were applied."""
        counts = dict.fromkeys(Kind, 0)
        for name, n in self.coverage.applied.items():
            counts[Kind(name.partition(" ")[0])] += n
        return counts

    def summary(self) -> str:
        applied, missed = sum(self.coverage.applied.values()), sum(self.coverage.missed.values())
        kinds = " ".join(f"{kind.value}={n}" for kind, n in self.kinds().items())
        return (
            f"{self.seeds} seeds, {self.requests} requests ({self.ends}; {self.moved} moved), {applied} faults at "
            f"{len(self.coverage.applied)} pairs ({kinds}), {missed} missed their trigger; "
            f"{len(self.reports)} seeds broke a law"
        )


def run_seeds(seeds: Iterable[int]) -> Sweep:
    logging.disable(logging.CRITICAL)
    try:
        done = Sweep()
        for seed in seeds:
            outcome = run_seed(seed)
            report = [outcome.report()] if outcome.findings else []
            coverage = Coverage()
            coverage.add(outcome.faults)
            done.add(Sweep(1, sum(outcome.ends.values()), report, coverage, outcome.ends, outcome.moved))
        return done
    finally:
        logging.disable(logging.NOTSET)


def sweep(first: int, last: int, jobs: int = 2) -> Iterator[Sweep]:
    """What is done so far, after each chunk."""
    shared_text()
    done = Sweep()
    chunks = [range(at, min(at + CHUNK, last + 1)) for at in range(first, last + 1, CHUNK)]
    with ProcessPoolExecutor(jobs) as pool:
        for part in pool.map(run_seeds, chunks):
            done.add(part)
            yield done


def main(first: int, last: int, jobs: int = 2) -> int:
    done = Sweep()
    reported = 0
    for done in sweep(first, last, jobs):
        print("\n".join([*done.reports[reported:], done.summary()]), flush=True)
        reported = len(done.reports)
    return len(done.reports)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)

"""A decision's candidates for people."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.core.cost import TERMS
from router.core.decision import KINDS, Decision, PlanKind
from router.core.placement import WorkerKey


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One candidate of a decision, for people."""

    kind: PlanKind
    worker: WorkerKey
    cost_ms: float
    terms: dict[str, float]
    cached_blocks: int
    fetched_blocks: int
    is_chosen: bool


def candidate_rows(decision: Decision) -> list[CandidateRow]:
    """The candidates, cheapest first."""
    found = decision.candidates
    costs = found.terms.sum(axis=1)
    rows = []
    for at in np.argsort(costs, kind="stable").tolist():
        worker = found.roster[int(found.slots[at])]
        assert worker is not None
        kind, fetched = KINDS[int(found.kinds[at])], int(found.fetched_blocks[at])
        rows.append(
            CandidateRow(
                kind=kind,
                worker=worker,
                cost_ms=float(costs[at]),
                terms={name: float(found.terms[at, i]) for i, name in enumerate(TERMS)},
                cached_blocks=int(found.cached_blocks[at]),
                fetched_blocks=fetched,
                is_chosen=worker == decision.worker and kind is decision.kind,
            )
        )
    return rows

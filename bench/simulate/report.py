"""Runs in numbers, and numbers in tables. Latencies are printed in milliseconds, in the server's variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

from bench.simulate.worker import Run, Step
from headrace.core.slo import Slo, Spread, goodput, itl_spread, throughput, ttft_spread

Row = dict[str, str | float]
"""Column -> value; every row of a table has the same columns. NaN is undefined."""


NOTHING = Spread(nan, nan, nan, nan)


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    note: str
    rows: list[Row]


def render(table: Table) -> str:
    """Text with aligned columns, words to the left, numbers to the right."""
    columns = list(table.rows[0]) if table.rows else []
    cells = [columns, *([_cell(row[column]) for column in columns] for row in table.rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    words = [any(isinstance(row[column], str) for row in table.rows) for column in columns]
    lines = [
        "  ".join(
            cell.ljust(width) if word else cell.rjust(width)
            for cell, width, word in zip(line, widths, words, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join([f"== {table.title}", table.note, *lines])


def figures(run: Run, slo: Slo | None = None) -> Row:
    """Rates over the time from the first arrival to the last step's end; ITL over all gaps of all requests."""
    begin_s = min(outcome.job.at_s for outcome in run.outcomes)
    rates = throughput(run.timelines, run.end_s - begin_s)
    ttft, itl = (found or NOTHING for found in (ttft_spread(run.timelines), itl_spread(run.timelines)))
    row: Row = {
        "req/s": rates.completed_requests,
        "out tok/s": rates.output_tokens,
        "ttft p50": ttft.p50_s * 1e3,
        "ttft p99": ttft.p99_s * 1e3,
        "itl p50": itl.p50_s * 1e3,
        "itl p95": itl.p95_s * 1e3,
        "itl p99": itl.p99_s * 1e3,
        "pause": itl.longest_s * 1e3,
    }
    if slo is not None:
        row["goodput/s"] = goodput(run.timelines, slo, run.end_s - begin_s)
    return row


def service(steps: Sequence[Step], tenant: str, input_weight: float, output_weight: float) -> list[float]:
    """The tenant's accumulated service after each step, in weighted tokens (Sheng et al., VTC, section 3.1)."""
    total, curve = 0.0, []
    for step in steps:
        total += input_weight * step.input_tokens.get(tenant, 0)
        total += output_weight * step.output_tokens.get(tenant, 0)
        curve.append(total)
    return curve


def service_gap(first: Sequence[float], second: Sequence[float]) -> float:
    """The most that one of two tenants got more than the other in any interval of the two curves.

    With D the difference of their services, an interval's gap is |D(end) - D(begin)|; the greatest is max D - min D,
    D = 0 before the first step included. Both have to be backlogged all the time for it to say anything.
    """
    differences = [0.0, *(a - b for a, b in zip(first, second, strict=True))]
    return max(differences) - min(differences)


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return value
    if isnan(value):
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.2f}"

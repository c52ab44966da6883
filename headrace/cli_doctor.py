"""`headrace doctor` for people and as JSON. Our other packages are imported after the look at whose they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace import installation
from headrace.core.findings import Finding, Level, fail

LOG_WIDTH = 120
"""Columns of the table when standard output is no terminal."""
_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def run(source: str | None, as_json: bool, limit_s: float) -> bool:
    """Whether nothing failed. Raises StartupError for a bad configuration."""
    with Console(stderr=True).status("looking at this machine"):
        findings = list(_examine(source, limit_s))
    if as_json:
        level = max((finding.level for finding in findings), key=list(Level).index)
        print(json.dumps({"level": level, "findings": [asdict(finding) for finding in findings]}, ensure_ascii=False))
    else:
        _print(findings)
    return all(finding.level is not Level.FAIL for finding in findings)


def _examine(source: str | None, limit_s: float) -> Iterator[Finding]:
    packages = installation.judge_packages(installation.read_packages())
    yield packages
    if packages.level is Level.FAIL:
        return  # the other checks would run somebody else's code
    try:
        from cluster.config import load_config
        from cluster.doctor.examine import examine
    except ImportError as error:
        yield fail("imports", f"{error}", "pip install -e '.[ucx]' -c constraints.txt")
        return
    yield from examine(load_config(source), source, limit_s)


def _print(findings: Iterable[Finding]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "check", "found"):
        table.add_column(column)
    counts = dict.fromkeys(Level, 0)
    for finding in findings:
        counts[finding.level] += 1
        style = _STYLES[finding.level]
        found = f"{finding.found}\n-> {finding.advice}" if finding.advice else finding.found
        table.add_row(Text(finding.level, style), Text(finding.check), Text(found))
    console.print(table)
    console.print(", ".join(f"{count} {level}" for level, count in counts.items() if count))

"""Reads workers' event logs (`workers.journal_file` writes them) and tells one request's life over all of them, or who
is in them. Knows lines, not workers: a field that a line lacks is shown as empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from headrace.errors import StartupError

COLUMNS = (
    ("attempt", "attempt"),
    ("event", "event"),
    ("phase", "phase"),
    ("tokens", "scheduled_tokens"),
    ("prefilled", "prefilled_tokens"),
    ("left", "remaining_prompt_tokens"),
    ("output", "output_tokens"),
    ("decodes", "active_decodes"),
    ("budget", "token_budget"),
    ("pred ms", "predicted_iteration_ms"),
    ("free", "free_kv_blocks"),
    ("held", "held_blocks"),
    ("chosen by", "priority_reason"),
    ("reason", "reason"),
)
"""Titles, and the fields under them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a log."""

    wall_time_s: float
    worker: str
    request_id: str
    event: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Log:
    entries: list[Entry]
    """In order of time; those of one worker in their own order."""
    num_unreadable: int
    """Lines that are no entries: cut off by a crash, or something else."""


def read(paths: Iterable[Path]) -> Log:
    """Files, or folders of which every `*.jsonl` and its rotated predecessors are read. Raises StartupError."""
    entries: list[Entry] = []
    num_unreadable = 0
    for path in dict.fromkeys(file for named in paths for file in _files(named)):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}") from error
        for line in filter(None, text.splitlines()):
            entry = _entry(line)
            if entry is None:
                num_unreadable += 1
            else:
                entries.append(entry)
    return Log(sorted(entries, key=lambda entry: entry.wall_time_s), num_unreadable)


def life(entries: Sequence[Entry], request_id: str) -> Iterator[str]:
    """The request's events as lines of text, each with the milliseconds since the one before; nothing when unknown."""
    mine = [entry for entry in entries if entry.request_id == request_id]
    if not mine:
        return
    first, last = mine[0], mine[-1]
    whole_ms = 1000 * (last.wall_time_s - first.wall_time_s)
    yield (
        f"{request_id}: {len(mine)} events in {whole_ms:.1f} ms, tenant {_text(first, 'tenant') or '-'}, "
        f"class {_text(first, 'priority')}, cache identity {_text(first, 'cache_identity') or '-'}"
    )
    gaps = [0.0, *(after.wall_time_s - before.wall_time_s for before, after in pairwise(mine))]
    rows = [["time", "+ms", "worker", *(title for title, _ in COLUMNS)]]
    for entry, gap_s in zip(mine, gaps, strict=True):
        at = datetime.fromtimestamp(entry.wall_time_s).strftime("%H:%M:%S.%f")[:-3]
        rows.append([at, f"{1000 * gap_s:.1f}", entry.worker, *(_text(entry, name) for _, name in COLUMNS)])
    yield from _table(rows)
    for entry in mine:
        terms = entry.fields.get("cost_ms")
        if isinstance(terms, Mapping):
            costs = ", ".join(f"{name} {ms}" for name, ms in terms.items())
            yield f"{entry.worker} {_text(entry, 'event')} it: {costs}"


def overview(entries: Sequence[Entry]) -> Iterator[str]:
    """One line of text for each request, in order of their first events."""
    rows = [["request", "tenant", "workers", "events", "first token ms", "ms", "ended"]]
    by_request: dict[str, list[Entry]] = {}
    for entry in entries:
        by_request.setdefault(entry.request_id, []).append(entry)
    for request_id, mine in by_request.items():
        begin = mine[0].wall_time_s
        token = next((f"{1000 * (e.wall_time_s - begin):.1f}" for e in mine if e.event == "first_token"), "")
        ends = [_text(entry, "reason") for entry in mine if entry.event in ("finished", "refused")]
        ends = [end for end in ends if end != "handed_off"] or ends
        workers = " ".join(dict.fromkeys(entry.worker for entry in mine))
        whole_ms = f"{1000 * (mine[-1].wall_time_s - begin):.1f}"
        rows.append([request_id, _text(mine[0], "tenant"), workers, str(len(mine)), token, whole_ms, " ".join(ends)])
    yield from _table(rows)


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]


def _entry(line: str) -> Entry | None:
    try:
        data = json.loads(line)
        return Entry(float(data["wall_time_s"]), str(data["worker"]), str(data["request_id"]), str(data["event"]), data)
    except (ValueError, KeyError, TypeError):
        return None


def _text(entry: Entry, name: str) -> str:
    value = entry.fields.get(name)
    return "" if value is None else str(value)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

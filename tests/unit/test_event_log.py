"""What `headrace events` makes of workers' files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace import event_log
from headrace.cli import app
from headrace.errors import StartupError


def write(path: Path, *entries: tuple[float, str, str, str], tail: str = "") -> None:
    keys = ("wall_time_s", "worker", "request_id", "event")
    text = "".join(json.dumps(dict(zip(keys, entry, strict=True)) | {"tenant": "t"}) + "\n" for entry in entries)
    path.write_text(text + tail)


def test_a_life_is_in_order_of_time_over_files_with_the_time_between(tmp_path: Path) -> None:
    write(
        tmp_path / "p.jsonl",
        (10.0, "prefill-0", "a", "submitted"),
        (10.5, "prefill-0", "a", "finished"),
        (10.5, "prefill-0", "b", "submitted"),
    )
    write(tmp_path / "d.jsonl", (10.25, "decode-0", "a", "adopted"), (12.0, "decode-0", "a", "finished"))
    lines = list(event_log.life(event_log.read([tmp_path]).entries, "a"))
    assert lines[0].startswith("a: 4 events in 2000.0 ms, tenant t,")
    assert [line.split()[1:4] for line in lines[2:]] == [
        ["0.0", "prefill-0", "submitted"],
        ["250.0", "decode-0", "adopted"],
        ["250.0", "prefill-0", "finished"],
        ["1500.0", "decode-0", "finished"],
    ]
    assert list(event_log.life([], "a")) == []


def test_rotated_files_of_a_folder_are_read_once_and_torn_lines_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl.1", (1.0, "p", "a", "submitted"), tail='{"wall_time_s": 2.0, "wor')
    write(tmp_path / "p.jsonl", (3.0, "p", "a", "finished"), tail="[]\n7\n")
    log = event_log.read([tmp_path, tmp_path / "p.jsonl"])
    assert [entry.event for entry in log.entries] == ["submitted", "finished"]
    assert log.num_unreadable == 3


def test_an_overview_has_a_line_for_each_request(tmp_path: Path) -> None:
    write(
        tmp_path / "p.jsonl",
        (1.0, "p", "b", "submitted"),
        (1.5, "p", "a", "submitted"),
        (1.75, "p", "a", "first_token"),
        (2.0, "p", "b", "refused"),
    )
    lines = list(event_log.overview(event_log.read([tmp_path]).entries))
    assert [line.split() for line in lines[1:]] == [
        ["b", "t", "p", "2", "1000.0"],
        ["a", "t", "p", "2", "250.0", "250.0"],
    ]


def test_what_cannot_be_read_or_found_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"No such file or directory$"):
        event_log.read([tmp_path / "nowhere.jsonl"])
    write(tmp_path / "p.jsonl", (1.0, "p", "a", "submitted"))
    result = CliRunner().invoke(app, ["events", str(tmp_path), "--request", "zzz"])
    assert result.exit_code == 1
    assert "no event of request zzz in these files" in result.output

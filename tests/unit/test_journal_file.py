"""The journal on disk: whole lines, bounded in memory and on disk, and never in the engine's way."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path

import pytest

from headrace.errors import StartupError
from tests.core_world import World
from workers.core.journal import Record, Tracing
from workers.journal_file import QUEUE_RECORDS, JournalFile, open_journal
from workers.spec import WorkerSpec


def make_spec(folder: Path, **changes: object) -> WorkerSpec:
    values: dict[str, object] = {
        "worker_id": "decode-3",
        "incarnation": "inc-7",
        "role": "decode",
        "model_path": "fake",
        "max_model_len": 100,
        "threads": 1,
        "kv_cache_bytes": 1 << 20,
        "cluster_token": "t",
        "event_log_path": str(folder),
    }
    return WorkerSpec.model_validate(values | changes)


def some_records(count: int) -> list[Record]:
    """Records of one real life, as many times as asked."""
    records: list[Record] = []
    world = World(tracing=Tracing(records.append, 1.0))
    world.submit(9, max_tokens=3)
    world.run()
    return (records * count)[:count]


def write(spec: WorkerSpec, records: list[Record]) -> JournalFile:
    journal = JournalFile(spec, clock=lambda: 50.0, wall_clock=lambda: 1_000.0)
    journal.start()
    for record in records:
        journal.record(record)
    journal.stop()
    return journal


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_record_is_a_line_with_the_articles_fields_and_wall_time(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    records = [record._replace(time_s=2.5) for record in some_records(5)]
    journal = write(make_spec(folder), records)
    written = lines(folder / "decode-3.jsonl")
    assert len(written) == journal.written == 5
    for line, record in zip(written, records, strict=True):
        assert line.items() >= record._asdict().items()
        assert (line["wall_time_s"], line["worker"], line["incarnation"]) == (1_002.5, "decode-3", "inc-7")
    assert journal.tracing.started_at == 50.0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "decode-3.jsonl").stat().st_mode) == 0o600


def test_a_full_queue_drops_and_counts_and_does_not_wait(tmp_path: Path) -> None:
    journal = JournalFile(make_spec(tmp_path))  # its thread has not started: nobody empties the queue
    for record in some_records(QUEUE_RECORDS + 13):
        journal.record(record)
    assert journal.dropped == 13
    journal.start()
    journal.stop()
    assert journal.counters == {"events_written": QUEUE_RECORDS, "events_dropped": 13, "events_failed": 0}


@pytest.mark.parametrize("max_files", [1, 3])
def test_files_are_bounded_in_size_and_number_and_the_newest_lines_stay(tmp_path: Path, max_files: int) -> None:
    spec = make_spec(tmp_path, event_log_max_bytes=4_000, event_log_max_files=max_files)
    records = [record._replace(time_s=float(n)) for n, record in enumerate(some_records(60))]
    write(spec, records)
    files = sorted(tmp_path.iterdir(), key=lambda path: path.name, reverse=True)
    assert [path.name for path in files] == [f"decode-3.jsonl{end}" for end in (".2", ".1", "")[-max_files:]]
    assert all(path.stat().st_size <= 4_000 for path in files)
    kept = [line["time_s"] for path in files for line in lines(path)]
    assert kept == [float(n) for n in range(60)][-len(kept) :]


def test_the_next_incarnation_goes_on_in_the_same_file_and_keeps_no_more_files_than_it_may(tmp_path: Path) -> None:
    write(make_spec(tmp_path, event_log_max_bytes=2_000, event_log_max_files=4), some_records(40))
    assert len(list(tmp_path.iterdir())) == 4
    write(make_spec(tmp_path, incarnation="inc-8", event_log_max_files=2), some_records(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode-3.jsonl", "decode-3.jsonl.1"]
    assert [line["incarnation"] for line in lines(tmp_path / "decode-3.jsonl")][-2:] == ["inc-7", "inc-8"]


def test_a_folder_that_cannot_be_is_one_clear_line_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError) as raised:
        open_journal(make_spec(tmp_path / "file" / "events"))
    text = str(raised.value)
    assert text.startswith("events.path: cannot write ") and text.endswith("Not a directory") and "\n" not in text


def test_a_full_disk_costs_records_and_one_log_line_but_not_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "decode-3.jsonl").symlink_to("/dev/full")
    journal = JournalFile(make_spec(tmp_path))
    records = some_records(3)
    with caplog.at_level(logging.ERROR):
        for _ in range(4):
            for record in records:
                journal.record(record)
            journal._drain()
        assert journal.counters == {"events_written": 0, "events_dropped": 0, "events_failed": 12}
        assert [r.getMessage().split(" ")[0] for r in caplog.records] == ["events_not_written"]
        assert "No space left on device" in caplog.text
        # There is room again: it goes on.
        (tmp_path / "decode-3.jsonl").unlink()
        journal.record(records[0])
        journal.start()
        journal.stop()
    assert journal.written == 1
    assert len(lines(tmp_path / "decode-3.jsonl")) == 1


def test_no_file_is_made_without_a_path_or_without_a_share(tmp_path: Path) -> None:
    assert open_journal(make_spec(tmp_path, event_log_path="")) is None
    assert open_journal(make_spec(tmp_path, event_log_sample_rate=0.0)) is None
    assert list(tmp_path.iterdir()) == []

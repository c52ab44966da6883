"""Events of requests over a whole deployment: both workers tell of the same request, and the command shows its life."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace import event_log
from headrace.cli import app
from headrace.core.records import Role
from headrace.errors import StartupError
from tests.world import expected, spec, world

P, D = Role.PREFILL, Role.DECODE


def run_world(folder: Path, num_requests: int, **options: object) -> dict[str, dict[str, float]]:
    """Serves requests on 1P1D and stops; each worker's counters."""
    counters: dict[str, dict[str, float]] = {}

    async def main() -> None:
        async with asyncio.timeout(60), world(P, D, event_log_path=str(folder), **options) as w:
            requests = [spec([5 + n, *range(20, 60 + n)], 12, ignore_eos=True) for n in range(num_requests)]
            for request, answer in zip(
                requests, await asyncio.gather(*(w.ask(request) for request in requests)), strict=True
            ):
                assert answer.tokens == expected(request)
            await w.assert_drained()
            for name, worker in w.workers.items():
                events = worker._events
                assert events is not None
                while events._queue or not events.counters.items() <= worker.hub.counters.items():
                    await asyncio.sleep(0.05)
                counters[name] = dict(worker.service.status(audit=False).counters)

    asyncio.run(main())
    return counters


def test_one_request_has_its_life_in_both_workers_files(tmp_path: Path) -> None:
    counters = run_world(tmp_path, 1)
    entries = event_log.read([tmp_path]).entries
    assert len({entry.request_id for entry in entries}) == 1
    by_worker = {name: [e.event for e in entries if e.worker == name] for name in ("prefill-0", "decode-0")}
    first, last = by_worker["prefill-0"], by_worker["decode-0"]
    assert (first[0], first[-2:]) == ("submitted", ["handed_off", "finished"])
    assert set(first[1:-3]) == {"scheduled"} and first[-3] == "first_token"
    assert last == ["submitted", "reserved", "adopted", "scheduled", "finished"]
    assert {e.fields["tenant"] for e in entries} == {"t"}
    assert len({e.fields["cache_identity"] for e in entries if e.fields["cache_identity"]}) == 1
    assert [e.fields["reason"] for e in entries if e.event == "finished" and e.worker == "decode-0"] == ["length"]
    for name, events in by_worker.items():
        assert (counters[name]["events_written"], counters[name]["events_dropped"]) == (len(events), 0)
    # Whatever a line may hold, it is no list: neither tokens nor text.
    assert not any(isinstance(value, list) for entry in entries for value in entry.fields.values())

    shown = CliRunner().invoke(app, ["events", str(tmp_path), "--request", entries[0].request_id])
    assert shown.exit_code == 0
    assert len(shown.output.splitlines()) == 2 + len(entries)
    assert "prefill-0" in shown.output and "decode-0" in shown.output


def test_both_workers_record_the_same_part_of_the_requests(tmp_path: Path) -> None:
    run_world(tmp_path, 40, event_log_sample_rate=0.4)
    entries = event_log.read(sorted(tmp_path.iterdir())).entries
    seen = {name: {e.request_id for e in entries if e.worker == name} for name in ("prefill-0", "decode-0")}
    assert seen["prefill-0"] == seen["decode-0"]
    assert 5 < len(seen["prefill-0"]) < 30
    shown = CliRunner().invoke(app, ["events", str(tmp_path)])
    assert len(shown.output.splitlines()) == 1 + len(seen["prefill-0"])


def test_a_worker_whose_log_cannot_be_written_does_not_start_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")

    async def main() -> None:
        async with world(P, D, event_log_path=str(tmp_path / "taken")):
            pass

    with pytest.raises(StartupError, match=r"^events\.path: cannot write .*: "):
        asyncio.run(main())

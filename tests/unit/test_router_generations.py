"""Invalidated names stay invalid, over restarts and whatever happens to the file."""

from __future__ import annotations

import contextlib
import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from router.generations import Generations


def test_a_generation_outlives_its_gateway_and_is_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "kv" / "generations.json"
    first = Generations(path)
    assert first.of("a") == first.of("b") == 0
    first.next("a")
    first.next(None)
    again = Generations(path)
    assert (again.of("a"), again.of("b")) == (2, 1)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert {file.name for file in path.parent.iterdir()} == {"generations.json", "generations.lock"}


def test_a_generation_holds_at_once_for_every_gateway_of_the_file(tmp_path: Path) -> None:
    first, second = (Generations(tmp_path / "generations.json") for _ in range(2))
    for count, one in enumerate([first, second, first, second, second, first], start=1):
        one.next("a")
        assert first.of("a") == second.of("a") == count
    assert first.of("b") == 0


def test_gateways_that_clear_at_the_same_time_lose_no_generation(tmp_path: Path) -> None:
    path = tmp_path / "generations.json"

    def clear(times: int) -> None:
        mine = Generations(path)
        while times:
            with contextlib.suppress(BlockingIOError):
                mine.next("a")
                times -= 1

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(clear, 10) for _ in range(4)]:
            done.result()
    assert Generations(path).of("a") == 40


def test_a_gateway_that_hangs_in_the_middle_blocks_nobody(tmp_path: Path) -> None:
    kept = Generations(tmp_path / "generations.json")
    kept.next("a")
    with (tmp_path / "generations.lock").open() as hung:
        fcntl.flock(hung, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            kept.next("a")
        assert kept.of("a") == 1
    kept.next("a")
    assert kept.of("a") == 2


def test_a_broken_file_means_the_same_to_every_gateway(tmp_path: Path) -> None:
    path = tmp_path / "generations.json"
    path.write_text("{")
    first, second = Generations(path), Generations(path)
    assert first.of("a") == second.of("b") > 0
    first.next("a")
    assert second.of("a") == first.of("a") == second.of("b") + 1


def test_in_memory_there_is_no_file() -> None:
    kept = Generations()
    kept.next("a")
    assert (kept.of("a"), kept.of("b"), Generations().of("a")) == (1, 0, 0)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a": "x"}', '{"a": null}', "5", '{"a": Infinity}', '{"a": NaN}', 100_000 * "["]
)
def test_a_broken_file_makes_old_names_invalid_rather_than_valid(tmp_path: Path, text: str) -> None:
    path = tmp_path / "generations.json"
    path.write_text(text)
    assert Generations(path).of("a") > 0


def test_what_cannot_be_written_has_not_happened(tmp_path: Path) -> None:
    path = tmp_path / "generations.json"
    kept = Generations(path)
    kept.next("a")
    path.with_suffix(".draft").mkdir()
    with pytest.raises(OSError):
        kept.next("a")
    assert kept.of("a") == Generations(path).of("a") == 1


@pytest.mark.parametrize("has_read", [True, False])
def test_what_cannot_be_read_makes_names_that_nobody_has_had(
    tmp_path: Path, has_read: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path, aside = tmp_path / "generations.json", tmp_path / "aside"
    other = Generations(path)
    other.next("a")
    kept = Generations(path) if has_read else None
    # 1. It cannot be opened, and another gateway clears meanwhile: neither what was read nor what was made up before
    # the clear is a name any more.
    path.rename(aside)
    path.mkdir()
    kept = kept or Generations(path)
    named = [kept.of("a") for _ in range(4)]
    assert len({*named, 0, 1, 2}) == 7
    assert [record.getMessage().split()[0] for record in caplog.records] == ["generations_unreadable"]
    # 2. Once it can be read everybody names alike again.
    path.rmdir()
    aside.rename(path)
    other.next("a")
    assert kept.of("a") == other.of("a") == 2


def test_a_file_that_was_unreadable_for_a_while_is_read_again_although_it_is_the_same(tmp_path: Path) -> None:
    path, aside = tmp_path / "generations.json", tmp_path / "aside"
    kept = Generations(path)
    kept.next("a")
    assert kept.of("a") == 1
    path.rename(aside)
    path.mkdir()
    assert kept.of("a") != 1
    path.rmdir()
    aside.rename(path)
    assert kept.of("a") == 1

"""Invalidated names stay invalid, over restarts and whatever happens to the file."""

from __future__ import annotations

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
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_in_memory_there_is_no_file() -> None:
    kept = Generations()
    kept.next("a")
    assert (kept.of("a"), kept.of("b"), Generations().of("a")) == (1, 0, 0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": "x"}', '{"a": null}', "5"])
def test_a_broken_file_makes_old_names_invalid_rather_than_valid(tmp_path: Path, text: str) -> None:
    path = tmp_path / "generations.json"
    path.write_text(text)
    assert Generations(path).of("a") > 0


def test_what_cannot_be_written_has_not_happened(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file where the folder belongs")
    kept = Generations(tmp_path / "kv" / "generations.json")
    before = kept.of("a")
    with pytest.raises(OSError):
        kept.next("a")
    assert kept.of("a") == before

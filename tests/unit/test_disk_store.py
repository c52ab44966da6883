"""Blocks as files: private, whole or not at all, kept over restarts, and no trouble of the disk gets out."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from headrace.errors import StartupError
from workers import disk_store
from workers.core.tier_actions import Block, Outcome, tenant_tag
from workers.disk_store import HEADER_BYTES, DiskStore

BYTES = 4096
MODEL = b"m" * 16
ALICE = tenant_tag("alice")


def block(number: int, tag: bytes = ALICE) -> Block:
    return Block(number.to_bytes(16, "little"), (number - 1).to_bytes(16, "little"), tag, float(number))


def content(number: int) -> memoryview:
    return memoryview(bytearray(os.urandom(64) * (BYTES // 64 - 1) + number.to_bytes(64, "little")))


def opened(folder: Path, *, identity: bytes = MODEL, most: int = 8, size: int = BYTES) -> DiskStore:
    store = DiskStore(folder, "prefill-0", identity, size, most)
    store.open()
    return store


def read(store: DiskStore, wanted: Block) -> tuple[Outcome, bytes]:
    into = bytearray(store.block_bytes)
    return store.read(wanted, memoryview(into)), bytes(into)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def test_a_block_comes_back_as_it_was_and_nobody_else_may_look(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        store = opened(tmp_path / "kv")
        data = content(1)
        assert store.write(block(1), data) is Outcome.DONE
    finally:
        os.umask(umask)
    assert read(store, block(1)) == (Outcome.DONE, bytes(data))
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    (file,) = files(tmp_path)
    assert file.stat().st_size == disk_store.file_bytes(BYTES)
    store.remove(block(1).hash)
    store.remove(block(1).hash)
    assert files(tmp_path) == []


def test_an_open_folder_is_closed_and_one_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    kv.mkdir(mode=0o777)
    kv.chmod(0o777)
    opened(kv)
    assert stat.S_IMODE(kv.stat().st_mode) == 0o700
    link = tmp_path / "link"
    link.symlink_to(kv)
    with pytest.raises(StartupError, match="disk_cache_dir"):
        opened(link)


@pytest.mark.parametrize("at", [0, 9, 13, 17, 30, 40, 60, 77, 85, 93, 100, HEADER_BYTES, HEADER_BYTES + BYTES - 1])
def test_a_flipped_bit_anywhere_is_noticed_and_the_file_is_gone(tmp_path: Path, at: int) -> None:
    store = opened(tmp_path)
    store.write(block(1), content(1))
    (file,) = files(tmp_path)
    damaged = bytearray(file.read_bytes())
    damaged[at] ^= 4
    file.write_bytes(damaged)
    assert read(store, block(1))[0] is Outcome.CORRUPT
    assert files(tmp_path) == []


def test_every_bit_of_the_header_counts(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(block(1), content(1))
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert read(store, block(1))[0] is Outcome.CORRUPT


@pytest.mark.parametrize("length", [0, 5, HEADER_BYTES, HEADER_BYTES + BYTES - 1, HEADER_BYTES + BYTES + 1])
def test_a_file_of_another_length_is_corrupt(tmp_path: Path, length: int) -> None:
    store = opened(tmp_path)
    store.write(block(1), content(1))
    (file,) = files(tmp_path)
    os.truncate(file, length)
    assert read(store, block(1))[0] is Outcome.CORRUPT


def test_another_blocks_another_tenants_or_another_models_file_is_not_taken(tmp_path: Path) -> None:
    store = opened(tmp_path / "a")
    store.write(block(1), content(1))
    (file,) = files(tmp_path / "a")
    assert read(store, block(1, tenant_tag("bob")))[0] is Outcome.CORRUPT
    store.write(block(1), content(1))
    store.write(block(2), content(2))
    target = next(path for path in files(tmp_path / "a") if path != file)
    target.write_bytes(file.read_bytes())
    assert read(store, block(2))[0] is Outcome.CORRUPT
    other = opened(tmp_path / "b", identity=b"x" * 16)
    other.write(block(1), content(1))
    (theirs,) = files(tmp_path / "b")
    file.write_bytes(theirs.read_bytes())
    assert read(store, block(1))[0] is Outcome.CORRUPT


def test_a_file_that_is_not_there_is_an_error_and_no_more(tmp_path: Path) -> None:
    assert read(opened(tmp_path), block(1))[0] is Outcome.FAILED


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    room = [1000]
    real_write = os.write

    def write(file: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real_write(file, data[: min(300, room[0])])
        room[0] -= written
        return written

    monkeypatch.setattr(disk_store.os, "write", write)
    assert store.write(block(1), content(1)) is Outcome.FAILED
    assert files(tmp_path) == []
    room[0] = 10 * BYTES
    data = content(2)
    assert store.write(block(2), data) is Outcome.DONE
    assert read(store, block(2)) == (Outcome.DONE, bytes(data))


def test_a_read_in_pieces_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    data = content(1)
    store.write(block(1), data)
    real_readv = os.readv

    def readv(file: int, buffers: list[memoryview]) -> int:
        first = memoryview(next(b for b in buffers if len(b)))
        return real_readv(file, [first[: max(1, len(first) // 3)]])

    monkeypatch.setattr(disk_store.os, "readv", readv)
    assert read(store, block(1)) == (Outcome.DONE, bytes(data))


def test_a_restart_finds_what_was_there_in_the_order_of_use_and_within_its_bound(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in (1, 2, 3, 4):
        store.write(block(number), content(number))
        os.utime(store._path(block(number).hash), ns=(number, number))
    read(store, block(1))
    store.close()
    again = opened(tmp_path, most=3)
    assert list(again.scan()) == [(block(n), block(n).hash) for n in (3, 4, 1)]
    assert len(files(tmp_path)) == 3
    assert read(again, block(4))[0] is Outcome.DONE


def test_a_restart_drops_what_is_no_block_and_what_another_model_left(tmp_path: Path) -> None:
    other = opened(tmp_path, identity=b"x" * 16)
    other.write(block(9), content(9))
    other.close()
    store = opened(tmp_path)
    for number in (1, 2):
        store.write(block(number), content(number))
    whole, short = files(store._folder)
    os.truncate(short, 7)
    (whole.parent / "ab.part").write_bytes(b"half")
    whole.with_name("zz").write_bytes(b"?" * disk_store.file_bytes(BYTES))
    assert [found for found, _ in store.scan() if found is not None] == [block(1)]
    assert files(tmp_path) == [whole]


def test_two_workers_of_one_name_have_folders_of_their_own_until_one_ends(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.write(block(1), content(1))
    second = opened(tmp_path)
    assert list(second.scan()) == []
    first.close()
    assert len(list(opened(tmp_path).scan())) == 1

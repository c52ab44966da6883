"""Cached blocks as files, one a block. The disk is slow, may be full, may lie, and is not needed: no error of it gets
out of here.

    DIRECTORY/WORKER_ID/lock                          held for as long as this worker lives
    DIRECTORY/WORKER_ID/IDENTITY/2 HEX DIGITS/HASH    header, then the block's bytes

Each worker has a folder of its own, so nobody else's files count against its bound. A second worker of that name on
the machine takes `WORKER_ID.1`, and so on. What another model has left in the folder goes at the start.

Folders are 0700, files 0600 and written under another name first. The header names model, block, tenant and schema; a
checksum covers header and bytes, so a file that is short, changed or another block's is deleted, never used. Nothing is
synced: after a power failure the checksum says what is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from struct import Struct

from headrace.errors import StartupError
from workers.core.tier_actions import Block, Outcome

log = logging.getLogger("headrace.workers.disk_store")

SCHEMA_VERSION = 1
_MAGIC = b"HEADRKV\0"
_FIELDS = Struct("<8sIIQ16s16s16s8sd")
"""Magic, version, length of the checksum, block bytes, model identity, hash, parent, tenant's tag, value in ms."""
_CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
_FOLDERS = 8
"""Workers of one name on a machine."""


def file_bytes(block_bytes: int) -> int:
    """What a block takes on disk."""
    return HEADER_BYTES + block_bytes


class DiskStore:
    """open -> scan -> write | read | remove.. -> close, all on one thread. `block_bytes`: of each block."""

    def __init__(self, directory: Path, worker_id: str, identity: bytes, block_bytes: int, max_blocks: int) -> None:
        self.block_bytes = block_bytes
        self._directory = directory
        self._worker_id = worker_id
        self._identity = identity
        self._max_blocks = max_blocks
        self._folder = directory
        self._lock = -1
        self._header = bytearray(HEADER_BYTES)

    def open(self) -> None:
        """Makes or takes over the worker's folder. Raises StartupError, one line, when it cannot be used safely."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(self._directory)
            for number in range(_FOLDERS):
                home = self._directory / (self._worker_id + (f".{number}" if number else ""))
                home.mkdir(mode=0o700, exist_ok=True)
                _check_private(home)
                if self._take(home / "lock"):
                    self._folder = home / self._identity.hex()
                    self._folder.mkdir(mode=0o700, exist_ok=True)
                    _check_private(self._folder)
                    return
        except OSError as error:
            raise StartupError(f"disk_cache_dir: cannot use {self._directory}: {error.strerror}") from error
        raise StartupError(f"disk_cache_dir: {self._directory} is in use by {_FOLDERS} workers of this name")

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def scan(self) -> Iterator[tuple[Block | None, bytes]]:
        """What an earlier life has left, the least recently used first: (block, its hash), or (None, ..) for a file
        that is no block of this model and is gone now. Deletes what is over the bound, the oldest first, and what is
        of other models."""
        for other in self._folder.parent.iterdir():
            if other.is_dir() and other != self._folder:
                shutil.rmtree(other, ignore_errors=True)
        found: list[tuple[int, Path]] = []
        for bucket in self._folder.iterdir():
            with contextlib.suppress(OSError):
                found += [(entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry)) for entry in os.scandir(bucket)]
        found.sort()
        for _, path in found[: max(0, len(found) - self._max_blocks)]:
            path.unlink(missing_ok=True)
        for _, path in found[-self._max_blocks :] if self._max_blocks else []:
            try:
                name = bytes.fromhex(path.name)
                block = self._look(path, name)
            except (OSError, ValueError):
                name, block = b"", None
            if block is None:
                with contextlib.suppress(OSError):
                    path.unlink()
            yield block, name

    def write(self, block: Block, content: memoryview) -> Outcome:
        """DONE or FAILED; after a failure there is no such file."""
        path = self._path(block.hash)
        temporary = path.with_name(f"{path.name}.part")
        fields = self._fields(block)
        checksum = _checksum(fields, content)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                for piece in (memoryview(fields + checksum), content):
                    left = piece
                    while left:
                        left = left[os.write(file, left) :]
            finally:
                os.close(file)
            temporary.replace(path)
        except OSError as error:
            log.warning("disk_write_failed worker=%s error=%s", self._worker_id, error.strerror)
            with contextlib.suppress(OSError):
                temporary.unlink()
            return Outcome.FAILED
        return Outcome.DONE

    def read(self, block: Block, content: memoryview) -> Outcome:
        """Fills `content`, of `block_bytes` writable bytes. CORRUPT: the file was not what it should be and is gone,
        and `content` is anything."""
        path = self._path(block.hash)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if self._is_whole(file, block, content):
                    os.utime(file)  # so that a restart knows what was used last
                    return Outcome.DONE
            finally:
                os.close(file)
        except OSError as error:
            log.warning("disk_read_failed worker=%s error=%s", self._worker_id, error.strerror)
            return Outcome.FAILED
        log.warning("disk_block_corrupt worker=%s block=%s", self._worker_id, block.hash.hex())
        self.remove(block.hash)
        return Outcome.CORRUPT

    def remove(self, block_hash: bytes) -> None:
        """Deletes the block's file, if there is one."""
        with contextlib.suppress(OSError):
            self._path(block_hash).unlink()

    def _is_whole(self, file: int, block: Block, content: memoryview) -> bool:
        if os.fstat(file).st_size != HEADER_BYTES + self.block_bytes:
            return False
        got = os.readv(file, [self._header, content])
        while 0 < got < HEADER_BYTES + self.block_bytes:
            more = os.readv(file, [memoryview(self._header)[got:], content[max(0, got - HEADER_BYTES) :]])
            if not more:
                return False
            got += more
        fields = self._fields(block)
        # The value is no part of a block's name: it is what the writer knew, and the checksum covers it.
        named, told = _FIELDS.unpack(fields)[:-1], _FIELDS.unpack_from(self._header)[:-1]
        written = bytes(self._header[: _FIELDS.size])
        return named == told and bytes(self._header[_FIELDS.size :]) == _checksum(written, content)

    def _look(self, path: Path, name: bytes) -> Block | None:
        """The block that a file says it is; its bytes are checked when they are read."""
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != HEADER_BYTES + self.block_bytes:
                return None
            header = file.read(HEADER_BYTES)
        magic, version, checksum, size, identity, block_hash, parent, tag, value_ms = _FIELDS.unpack_from(header)
        mine = (_MAGIC, SCHEMA_VERSION, _CHECKSUM_BYTES, self.block_bytes, self._identity, name)
        if (magic, version, checksum, size, identity, block_hash) != mine or not 0.0 <= value_ms < 1e12:
            return None
        return Block(block_hash, parent, tag, value_ms)

    def _fields(self, block: Block) -> bytes:
        return _FIELDS.pack(
            _MAGIC,
            SCHEMA_VERSION,
            _CHECKSUM_BYTES,
            self.block_bytes,
            self._identity,
            block.hash,
            block.parent,
            block.tag,
            block.value_ms,
        )

    def _path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self._folder / name[:2] / name

    def _take(self, path: Path) -> bool:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True


def _checksum(fields: bytes, content: memoryview) -> bytes:
    check = blake2b(fields, digest_size=_CHECKSUM_BYTES, person=b"headrace.kvfile")
    check.update(content)
    return check.digest()


def _check_private(folder: Path) -> None:
    """Nobody else may read prompts' KV. Raises OSError when the folder is not ours to close."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise PermissionError(1, "not a folder of this user")
    if info.st_mode & 0o077:
        folder.chmod(0o700)

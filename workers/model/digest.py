"""Digests of files by content: blake2b over every byte, in threads, remembered by path, size and modification time."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from headrace.errors import StartupError
from workers.model.config import read_json
from workers.model.loaders import CODES, weight_files

MARK = "headrace.json"
"""In a folder that this product converted: digest of its source, converter version."""
_PIECE_BYTES = 16 << 20
_DIGEST_BYTES = 16


def weights_digest(folder: Path, cache_dir: Path) -> str:
    """Hex digest of a model folder's weights: from its mark where we made the folder, else of the bytes of its
    files.
    """
    if (folder / MARK).is_file():
        digest = read_json(folder / MARK).get("weights_digest")
        if isinstance(digest, str):
            return digest
    codes = [folder / CODES] if (folder / CODES).is_file() else []
    return files_digest([*weight_files(folder), *codes], cache_dir)


def files_digest(paths: Sequence[Path], cache_dir: Path) -> str:
    """Hex digest over names, sizes and contents. Raises StartupError when a file cannot be read."""
    total = blake2b(digest_size=_DIGEST_BYTES, person=b"headrace/files")
    for path in paths:
        total.update(f"{len(path.name)}:{path.name}".encode() + bytes.fromhex(_file_digest(path, cache_dir)))
    return total.hexdigest()


def _file_digest(path: Path, cache_dir: Path) -> str:
    try:
        stat = path.stat()
        whole_path = os.fspath(path.resolve())
        stamp = [whole_path, stat.st_size, stat.st_mtime_ns]
        note = cache_dir / "digests" / f"{blake2b(os.fsencode(whole_path), digest_size=12).hexdigest()}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(note.read_bytes())
            if known["stamp"] == stamp:
                return str(known["digest"])
        digest = _hash(path, stat.st_size)
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: unreadable ({error})") from error
    # Forgetting only costs time, so a full disk is no reason to stop.
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_name(f"{note.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"stamp": stamp, "digest": digest}))
        temporary.replace(note)
    return digest


def _hash(path: Path, size: int) -> str:
    """Digest of the digests of fixed pieces, so that threads can share the work."""
    total = blake2b(size.to_bytes(8, "little"), digest_size=_DIGEST_BYTES, person=b"headrace/file")
    if size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            view = memoryview(data)
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                spans = range(0, size, _PIECE_BYTES)
                for piece in pool.map(lambda at: blake2b(view[at : at + _PIECE_BYTES], digest_size=32).digest(), spans):
                    total.update(piece)
            view.release()
    return total.hexdigest()

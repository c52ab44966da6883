"""Weights from safetensors files, one or sharded: mapped into memory, checked, never unpickled (J1).

The header is read here rather than by the safetensors package so that each way a file can be broken gives one clear
line.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import StartupError
from workers.model.config import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file: where its bytes are. dtype is safetensors' name."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in a fixed order. StartupError when there is none or one is missing."""
    if (folder / INDEX).is_file():
        mapping = read_json(folder / INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
            raise StartupError(f"{folder / INDEX}: no weight_map")
        names = sorted(set(mapping.values()))
        if any(Path(name).name != name for name in names):
            raise StartupError(f"{folder / INDEX}: names a file outside the folder")
        files = [folder / name for name in names]
    else:
        files = [folder / SINGLE]
    for path in files:
        if not path.is_file():
            raise StartupError(f"{path}: weights are missing")
    return files


def read_entries(path: Path) -> dict[str, Entry]:
    """The header of one safetensors file. StartupError when it is truncated or does not describe the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise StartupError(f"{path}: not a safetensors file, or truncated")
            header = json.loads(file.read(length))
    except OSError as error:
        raise StartupError(f"{path}: unreadable ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: corrupt safetensors header") from error
    if not isinstance(header, dict):
        raise StartupError(f"{path}: corrupt safetensors header")
    return dict(_entries(path, header, 8 + length, size))


def _entries(path: Path, header: dict[str, Any], base: int, size: int) -> Iterator[tuple[str, Entry]]:
    for name, info in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, end) = str(info["dtype"]), tuple(info["shape"]), info["data_offsets"]
            wanted = math.prod(shape) * _ITEM_BYTES.get(dtype, 0)
            good = dtype not in _ITEM_BYTES or (0 <= start <= end and end - start == wanted)
        except (KeyError, TypeError, ValueError) as error:
            raise StartupError(f"{path}: corrupt safetensors header at tensor {name!r}") from error
        if not good:
            raise StartupError(f"{path}: tensor {name!r} has the wrong number of bytes")
        if base + end > size:
            raise StartupError(f"{path}: truncated ({size:,} bytes, tensor {name!r} ends at {base + end:,})")
        yield name, Entry(path, dtype, shape, base + start, base + end)


class Weights:
    """All tensors of a model folder, read through memory maps that live as long as this object or a tensor from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, Entry] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for path in weight_files(folder):
            self._entries.update(read_entries(path))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def check(self, name: str, shape: tuple[int, ...]) -> Entry:
        """The entry of a tensor that must exist with this shape and a float dtype; StartupError otherwise."""
        entry = self._entries.get(name)
        if entry is None:
            raise StartupError(f"{self.folder}: tensor {name!r} is missing")
        if entry.dtype not in _ITEM_BYTES:
            raise StartupError(
                f"{entry.path}: tensor {name!r} has dtype {entry.dtype}; {', '.join(_ITEM_BYTES)} are supported"
            )
        if entry.shape != shape:
            raise StartupError(
                f"{entry.path}: tensor {name!r} has shape {list(entry.shape)}, config.json wants {list(shape)}"
            )
        return entry

    def get(self, name: str, *shape: int) -> Any:
        """A float32 torch tensor; a view of the file where that is float32 already (private pages: writes stay
        here).
        """
        import torch

        entry = self.check(name, shape)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[entry.dtype]
        if entry.start == entry.end:
            return torch.zeros(shape)
        buffer = self._map(entry.path)
        if entry.start % _ITEM_BYTES[entry.dtype]:
            # Old writers did not pad the header: move the bytes to where the dtype may lie.
            raw = torch.frombuffer(bytearray(buffer[entry.start : entry.end]), dtype=dtype)
        else:
            raw = torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=entry.start)
        return raw.view(shape).float()

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise StartupError(f"{path}: cannot be mapped into memory ({error})") from error
        return self._maps[path]

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
from typing import TYPE_CHECKING, Any

from headrace.errors import StartupError
from workers.model.config import read_json

if TYPE_CHECKING:
    from kernels.weights import Codes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CODES = "headrace.codes"
"""In a folder that was made from a GGUF: its quantized matrices as integers. `NAME.codes` I8 [N, K], or U8 [N, K / 2]
with two 4-bit codes a byte, the first in the low half; `NAME.scales`, and `NAME.offsets` where there are any, F32
[N, K / group]. They stand for the same values as NAME in the model's own file. Not called *.safetensors: other engines
load every file of that name in a folder."""
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}
"""safetensors' names of the dtypes that are read and written here."""
_FLOATS = ("F32", "F16", "BF16")
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file: where its bytes are. dtype is safetensors' name."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class CodeEntries:
    """Where the codes of one matrix are."""

    codes: Entry
    scales: Entry
    offsets: Entry | None

    @property
    def num_bytes(self) -> int:
        return self.codes.num_bytes + self.scales.num_bytes + (self.offsets.num_bytes if self.offsets else 0)


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
            wanted = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
            good = dtype not in ITEM_BYTES or (0 <= start <= end and end - start == wanted)
            if not all(isinstance(number, int) for number in (*shape, start, end)):
                raise TypeError("not an integer")
        except (KeyError, TypeError, ValueError) as error:
            raise StartupError(f"{path}: corrupt safetensors header at tensor {name!r}") from error
        if not good:
            raise StartupError(f"{path}: tensor {name!r} has the wrong number of bytes")
        if base + end > size:
            raise StartupError(f"{path}: truncated ({size:,} bytes, tensor {name!r} ends at {base + end:,})")
        yield name, Entry(path, dtype, shape, base + start, base + end)


def _codes_fit(shape: tuple[int, ...], codes: Entry, scales: Entry, offsets: Entry | None) -> bool:
    if len(shape) != 2 or len(codes.shape) != 2 or len(scales.shape) != 2:
        return False
    depth = {"I8": 1, "U8": 2}.get(codes.dtype, 0) * codes.shape[1]
    if (codes.shape[0], depth) != shape or (codes.dtype == "U8" and offsets is None):
        return False
    rows, groups = scales.shape
    if rows != shape[0] or groups < 1 or depth % groups:
        return False
    return all(t.dtype == "F32" and t.shape == scales.shape for t in (scales, offsets) if t is not None)


class Weights:
    """All tensors of a model folder, read through memory maps that live as long as this object or a tensor from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for path in weight_files(folder):
            self.entries.update(read_entries(path))
        self._codes = read_entries(folder / CODES) if (folder / CODES).is_file() else {}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def check(self, name: str, shape: tuple[int, ...]) -> Entry:
        """The entry of a tensor that must exist with this shape and a float dtype; StartupError otherwise."""
        entry = self.entries.get(name)
        if entry is None:
            raise StartupError(f"{self.folder}: tensor {name!r} is missing")
        if entry.dtype not in _FLOATS:
            raise StartupError(
                f"{entry.path}: tensor {name!r} has dtype {entry.dtype}; {', '.join(_FLOATS)} are supported"
            )
        if entry.shape != shape:
            raise StartupError(
                f"{entry.path}: tensor {name!r} has shape {list(entry.shape)}, config.json wants {list(shape)}"
            )
        return entry

    def check_codes(self, name: str, shape: tuple[int, ...]) -> CodeEntries | None:
        """The entries of a tensor's codes, or None when it has none; StartupError when they do not fit its shape."""
        codes, scales, offsets = (self._codes.get(f"{name}.{part}") for part in ("codes", "scales", "offsets"))
        if codes is None and scales is None and offsets is None:
            return None
        if codes is None or scales is None or not _codes_fit(shape, codes, scales, offsets):
            raise StartupError(
                f"{self.folder / CODES}: the codes of tensor {name!r} are not whole or do not fit {list(shape)}"
            )
        return CodeEntries(codes, scales, offsets)

    def get(self, name: str, *shape: int) -> Any:
        """A float32 torch tensor; see `stored`."""
        return self.stored(name, *shape).float()

    def stored(self, name: str, *shape: int) -> Any:
        """A torch tensor in the dtype that it has in the file, and a view of it (private pages: writes stay here)."""
        return self._read(self.check(name, shape))

    def codes(self, name: str, *shape: int) -> Codes | None:
        """A matrix [N, K] as integers, where the folder has it so. The same errors as `check_codes`."""
        from kernels.weights import Codes

        entries = self.check_codes(name, shape)
        if entries is None:
            return None
        codes, scales = self._read(entries.codes), self._read(entries.scales)
        offsets = None if entries.offsets is None else self._read(entries.offsets)
        group = shape[1] // scales.shape[1]
        if entries.codes.dtype == "I8":
            return Codes(codes, scales, offsets, group)
        import torch

        halves = torch.stack((codes & 15, codes >> 4), dim=2)
        return Codes(halves.view(torch.int8).view(shape), scales, offsets, group, bits=4)

    def _read(self, entry: Entry) -> Any:
        import torch

        dtypes = {
            "F32": torch.float32,
            "F16": torch.float16,
            "BF16": torch.bfloat16,
            "I8": torch.int8,
            "U8": torch.uint8,
        }
        dtype = dtypes[entry.dtype]
        if entry.start == entry.end:
            return torch.zeros(entry.shape, dtype=dtype)
        buffer = self._map(entry.path)
        if entry.start % ITEM_BYTES[entry.dtype]:
            # Old writers did not pad the header: move the bytes to where the dtype may lie.
            raw = torch.frombuffer(bytearray(buffer[entry.start : entry.end]), dtype=dtype)
        else:
            raw = torch.frombuffer(buffer, dtype=dtype, count=math.prod(entry.shape), offset=entry.start)
        return raw.view(entry.shape)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise StartupError(f"{path}: cannot be mapped into memory ({error})") from error
        return self._maps[path]

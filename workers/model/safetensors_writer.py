"""A safetensors file written from front to back, so that memory stays at one tensor. Needs the shapes beforehand."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np

from workers.model.loaders import ITEM_BYTES


class SafetensorsWriter:
    """tensors: (name, dtype, shape) in the order in which they will be written. Raises OSError for the disk."""

    def __init__(self, path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._due: deque[tuple[str, int]] = deque()
        offset = 0
        for name, dtype, shape in tensors:
            size = ITEM_BYTES[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
            self._due.append((name, size))
            offset += size
        data = json.dumps(header, separators=(",", ":")).encode()
        data += b" " * (-len(data) % 64)
        self._file = path.open("wb")
        self._file.write(len(data).to_bytes(8, "little") + data)

    def write(self, name: str, values: np.ndarray[Any, Any]) -> None:
        """The next tensor. Raises ValueError when another one is due."""
        values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        if not self._due or self._due.popleft() != (name, values.nbytes):
            raise ValueError(f"{name} with {values.nbytes} bytes is not the next tensor of {self._file.name}")
        self._file.write(values.data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

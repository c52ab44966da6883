"""Byte sizes as people write them: `1073741824`, `512MiB`, `1.5 GB`."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(value: object) -> int:
    """Bytes of an int or of a string such as `512MiB`. Raises ValueError for anything else, negative sizes included."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        factor = _FACTORS.get(match[2].upper()) if match else None
        if match is not None and factor is not None:
            return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    raise ValueError("must be a number of bytes or a size such as 512MiB")


def format_bytes(num_bytes: int) -> str:
    """A size for people: `540.0 MiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

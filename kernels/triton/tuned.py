"""Launch parameters of the attention kernels: from a table of what was measured on this device, else by rule.

The table (`tuned.json`, filled by `python -m kernels.triton.tune`) is keyed by device name, operation and shape class.
A class rounds what varies from step to step up to a power of two, so that a handful of launches serves all steps and a
CUDA graph's bucket meets one class. Results that must not change with the batch have a class that leaves the batch out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

TABLE = Path(__file__).with_name("tuned.json")

PROGRAMS_PER_PROCESSOR = 2
"""Decode programs that one multiprocessor is to hold, by their shared memory."""
MAX_SPLITS = 64
_WAVES = 2
_MAX_WAVES = 64
_FIXED_LEAST = 256
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Device:
    """name: as CUDA tells it; processors: its multiprocessors."""

    name: str
    processors: int


@dataclass(frozen=True, slots=True)
class Heads:
    """What a model and its pool fix. dtype: "bf16", "fp16" or "fp32"; group: query heads of a KV head."""

    dtype: str
    dim: int
    group: int
    block: int

    def __str__(self) -> str:
        return f"{self.dtype} d{self.dim} g{self.group} b{self.block}"

    @property
    def row_bytes(self) -> int:
        return round_up_power(self.dim) * (4 if self.dtype == "fp32" else 2)


SUPPORTED = [
    *(Heads("bf16", *kind) for kind in product((64, 96, 128, 256), (1, 4, 8, 16), (16, 32, 64))),
    *(Heads("bf16", 128, group, 16) for group in (3, 7)),
    *(Heads("fp32", dim, 4, 16) for dim in (64, 128, 256)),
]
"""Kinds of heads that are compiled for the report; float16 is launched like bfloat16."""


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """tile: positions of one iteration; splits: most pieces of a row; least: fewest positions of a piece, a multiple of
    tile.
    """

    tile: int
    num_warps: int
    num_stages: int
    splits: int
    least: int


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """tile_rows: queries times heads of one program; tile: positions of one iteration."""

    tile_rows: int
    tile: int
    num_warps: int
    num_stages: int


@cache
def device_of(device: torch.device) -> Device:
    """A CPU stands for a device of few processors: there kernels are interpreted, one program after the other."""
    if device.type != "cuda":
        return Device(device.type, 4)
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.name, properties.multi_processor_count)


def dtype_name(dtype: torch.dtype) -> str:
    """Raises ValueError for a type that the kernels do not take."""
    if dtype not in _DTYPES:
        raise ValueError(f"attention takes {', '.join(map(str, _DTYPES))}, not {dtype}")
    return _DTYPES[dtype]


def round_up_power(n: int) -> int:
    """The least power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def decode_class(heads: Heads, pairs: int, capacity: int) -> str:
    """pairs: rows times KV heads; capacity: most positions of a row."""
    return f"{heads} pairs{round_up_power(pairs)} capacity{round_up_power(capacity)}"


def fixed_class(heads: Heads) -> str:
    return f"{heads} fixed"


@cache
def decode_launch(device: Device, heads: Heads, rows: int, kv_heads: int, capacity: int, splits: int) -> DecodeLaunch:
    """splits: 0 lets the class decide; any other number is kept, and nothing else depends on rows and capacity then."""
    if splits:
        found = _measured(device, "decode", fixed_class(heads))
        tile, warps, stages = _decode_tile(heads)
        return DecodeLaunch(**{**(found or _fields(tile, warps, stages, _FIXED_LEAST)), "splits": splits})
    pairs = rows * kv_heads
    found = _measured(device, "decode", decode_class(heads, pairs, capacity))
    return DecodeLaunch(**found) if found else decode_rule(device, heads, pairs, capacity)


def decode_rule(device: Device, heads: Heads, pairs: int, capacity: int) -> DecodeLaunch:
    """Few rows are cut so small that all processors read at once; many only so that no long one ends alone."""
    tile, warps, stages = _decode_tile(heads)
    slots = PROGRAMS_PER_PROCESSOR * device.processors
    least = min(max(_round_up(pairs * 256 // slots, tile), 2 * tile), 1024)
    piece = min(max(-(-pairs * capacity // (_WAVES * slots)), least), 2048)
    most = max(1, min(MAX_SPLITS, _MAX_WAVES * slots // pairs))
    return DecodeLaunch(tile, warps, stages, min(-(-capacity // piece), most), least)


@cache
def prefill_launch(device: Device, heads: Heads, max_tokens: int) -> PrefillLaunch:
    """max_tokens: the longest row's own tokens; 0: a launch that is the same for all rows."""
    found = _measured(device, "prefill", prefill_class(heads, max_tokens))
    return PrefillLaunch(**found) if found else prefill_rule(heads, max_tokens)


def prefill_class(heads: Heads, max_tokens: int) -> str:
    return f"{heads} tokens{min(round_up_power(max_tokens), 256)}" if max_tokens else fixed_class(heads)


def prefill_rule(heads: Heads, max_tokens: int) -> PrefillLaunch:
    if heads.dtype == "fp32":
        return PrefillLaunch(max(16, round_up_power(heads.group)), 16, 4, 2)
    small = 0 < max_tokens * heads.group <= 64
    rows = max(64 if small else 128, round_up_power(heads.group))
    # The accumulator takes rows * dim registers: keys that are few beside it keep the rest from spilling.
    return PrefillLaunch(rows, min(128, 8192 // round_up_power(heads.dim)), 4 if rows <= 64 else 8, 3)


def _decode_tile(heads: Heads) -> tuple[int, int, int]:
    """(tile, num_warps, num_stages): K and V of a tile are 32 KiB, and three such stages let two programs share a
    processor's memory; each has more under way than the memory's latency times a processor's part of its rate.
    """
    return max(16, min(128, 16384 // heads.row_bytes)), 4, 4


def _fields(tile: int, num_warps: int, num_stages: int, least: int) -> dict[str, int]:
    return {"tile": tile, "num_warps": num_warps, "num_stages": num_stages, "least": least}


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _measured(device: Device, operation: str, shape_class: str) -> dict[str, int] | None:
    return _table().get(device.name, {}).get(operation, {}).get(shape_class)


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())

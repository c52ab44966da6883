"""Launch parameters of the attention kernels: from a table of what was measured on this device, else by rule.

The table (`tuned.json`, filled by `python -m kernels.triton.tune`) is keyed by device name, operation and shape class.
A class rounds what varies from step to step up to a power of two, so that a handful of launches serves all steps and a
CUDA graph's bucket meets one class. Results that must not change with the batch have a class that leaves the batch out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("tuned.json")

PROGRAMS_PER_PROCESSOR = 2
"""Decode programs that one multiprocessor holds, by their shared memory."""
MAX_SPLITS = 64
_WAVES = 2
_MAX_WAVES = 64
_LEAST = 256
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


SUPPORTED = [
    *(Heads("bf16", *kind) for kind in product((64, 96, 128, 256), (1, 4, 8, 16), (16, 32, 64))),
    *(Heads("bf16", 128, group, 16) for group in (3, 7)),
    *(Heads("fp32", dim, 4, 16) for dim in (64, 128, 256)),
]
"""Kinds of heads that are compiled for the report; float16 is launched like bfloat16."""


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """tile: positions of one iteration, a power of two; splits: most pieces of a row; least: fewest positions of a
    piece, a multiple of tile.
    """

    tile: int
    num_warps: int
    num_stages: int
    splits: int
    least: int


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """tile_rows: queries times heads of one program; tile: positions of one iteration; both powers of two."""

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


def prefill_class(heads: Heads, max_tokens: int) -> str:
    return f"{heads} tokens{min(round_up_power(max_tokens), 256)}"


def fixed_class(heads: Heads) -> str:
    """Of results that are the same in every batch."""
    return f"{heads} fixed"


def decode_rule(heads: Heads, pairs: int, capacity: int, processors: int) -> DecodeLaunch:
    """Few rows are cut so small that all processors read at once; many only so that no long one ends alone."""
    # K and V of a tile are 32 KiB. Four stages keep three of them, and let two programs share a processor's memory;
    # each then has more on its way than the memory's latency times a processor's part of its rate. float32 is
    # multiplied without the tensor core, from registers: its tiles are what these hold.
    tile = max(16, min(128, 8192 // round_up_power(heads.dim) // (4 if heads.dtype == "fp32" else 1)))
    slots = PROGRAMS_PER_PROCESSOR * processors
    # The fewer pieces, the sooner they are merged: a single row of 4k positions takes one program a processor.
    least = min(max(_round_up(pairs * _LEAST // slots, tile), _LEAST), 1024)
    piece = min(max(-(-pairs * capacity // (_WAVES * slots)), least), 2048)
    most = max(1, min(MAX_SPLITS, _MAX_WAVES * slots // pairs))
    return DecodeLaunch(tile, 4, 4, min(-(-capacity // piece), most), least)


def prefill_rule(heads: Heads, max_tokens: int) -> PrefillLaunch:
    """max_tokens: of the longest row; 0 for any."""
    if heads.dtype == "fp32":
        return PrefillLaunch(max(16, round_up_power(heads.group)), 16, 4, 2)
    small = 0 < max_tokens * heads.group <= 64
    rows = max(64 if small else 128, round_up_power(heads.group))
    # The accumulator takes rows * dim registers: keys that are few beside it keep the rest from spilling.
    return PrefillLaunch(rows, min(128, 8192 // round_up_power(heads.dim)), 4 if rows <= 64 else 8, 3)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


@dataclass(frozen=True, slots=True)
class Tuned:
    """entries: device name -> operation ("decode" or "prefill") -> shape class -> fields of its launch."""

    entries: Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]

    @classmethod
    def load(cls, path: Path = TABLE) -> Tuned:
        return cls(json.loads(path.read_text()))

    def save(self, path: Path = TABLE) -> None:
        path.write_text(json.dumps(self.entries, indent=1, sort_keys=True) + "\n")

    def changed(self, device: Device, shape_class: str, launch: DecodeLaunch | PrefillLaunch) -> Tuned:
        """A table with this entry too."""
        operation = "decode" if isinstance(launch, DecodeLaunch) else "prefill"
        operations = self.entries.get(device.name, {})
        classes = {**operations.get(operation, {}), shape_class: asdict(launch)}
        return Tuned({**self.entries, device.name: {**operations, operation: classes}})

    def decode(
        self, device: Device, heads: Heads, rows: int, kv_heads: int, capacity: int, splits: int = 0
    ) -> DecodeLaunch:
        """splits: 0 leaves them to the class; with another number nothing depends on rows and capacity."""
        pairs = rows * kv_heads
        key = fixed_class(heads) if splits else decode_class(heads, pairs, capacity)
        found = self.entries.get(device.name, {}).get("decode", {}).get(key)
        if splits:
            fixed = found or asdict(decode_rule(heads, 1, 1, 1)) | {"least": _LEAST}
            return DecodeLaunch(**{**fixed, "splits": splits})
        return DecodeLaunch(**found) if found else decode_rule(heads, pairs, capacity, device.processors)

    def prefill(self, device: Device, heads: Heads, max_tokens: int) -> PrefillLaunch:
        """max_tokens: the longest row's own tokens; 0: a launch that is the same for all rows."""
        key = prefill_class(heads, max_tokens) if max_tokens else fixed_class(heads)
        found = self.entries.get(device.name, {}).get("prefill", {}).get(key)
        return PrefillLaunch(**found) if found else prefill_rule(heads, max_tokens)


@cache
def _table() -> Tuned:
    return Tuned.load()


@cache
def decode_launch(device: Device, heads: Heads, rows: int, kv_heads: int, capacity: int, splits: int) -> DecodeLaunch:
    """`Tuned.decode` of the table beside this file."""
    return _table().decode(device, heads, rows, kv_heads, capacity, splits)


@cache
def prefill_launch(device: Device, heads: Heads, max_tokens: int) -> PrefillLaunch:
    """`Tuned.prefill` of the table beside this file."""
    return _table().prefill(device, heads, max_tokens)

"""Matrices of a model folder, in the format that was asked for, packed for the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headrace.errors import StartupError
from kernels.weights import Codes, PackedWeight, Storage, pack, quantize_int8
from workers.model.loaders import Weights
from workers.model.weight_format import WeightFormat

_STORAGE = {
    torch.float32: Storage.FLOAT32,
    torch.float16: Storage.FLOAT16,
    torch.bfloat16: Storage.BFLOAT16,
}
_HALF = {WeightFormat.FLOAT16: torch.float16, WeightFormat.BFLOAT16: torch.bfloat16}


def load_packed(
    weights: Weights,
    weight_format: WeightFormat,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    biases: Sequence[Tensor] = (),
    paired: bool = False,
) -> PackedWeight:
    """Matrices of these (name, shape), one under the other. biases, paired: see `kernels.weights.pack`.

    Raises StartupError when one is missing, has another shape or does not fit the format.
    """
    parts = unified([_load(weights, weight_format, name, shape) for name, shape in shapes])
    first = parts[0]
    storage = first.storage if isinstance(first, Codes) else _STORAGE[first.dtype]
    return pack(parts, biases, storage, paired)


def storage_text(storages: Iterable[Storage]) -> str:
    """For people: `int4 and float16`."""
    return " and ".join(dict.fromkeys(storage.name.lower().removesuffix("_shifted") for storage in storages))


def unified(parts: Sequence[Tensor | Codes]) -> list[Tensor | Codes]:
    """The same matrices, bit for bit, all kept in one way: the narrowest that holds them all.

    Integers of several kinds become one kind of integers, halves of one dtype stay, every other mix becomes float32.
    """
    coded = [part for part in parts if isinstance(part, Codes)]
    if len(coded) < len(parts):
        floats = [part.values() if isinstance(part, Codes) else part for part in parts]
        mixed = len({part.dtype for part in floats}) > 1
        return [part.float() for part in floats] if mixed else list(floats)
    group = math.gcd(*(part.group for part in coded))
    bits = max(part.bits for part in coded)
    shifted = bits == 4 or any(part.offsets is not None for part in coded)
    return [_regrouped(part, group, bits, shifted) for part in coded]


def _regrouped(part: Codes, group: int, bits: int, shifted: bool) -> Codes:
    """With scales for each smaller group. 4-bit codes, 0..15, are 8-bit codes as they are."""
    repeats = part.group // group
    offsets = part.offsets
    if offsets is None and shifted:
        # x + -0.0 is x for every x; 0.0 would make a zero of a negative one.
        offsets = torch.full_like(part.scales, -0.0)
    if offsets is not None:
        offsets = offsets.repeat_interleave(repeats, 1)
    return Codes(part.codes, part.scales.repeat_interleave(repeats, 1), offsets, group, bits)


def _load(weights: Weights, weight_format: WeightFormat, name: str, shape: tuple[int, ...]) -> Tensor | Codes:
    if weight_format is WeightFormat.AUTO:
        codes = weights.codes(name, *shape)
        stored: Tensor = weights.stored(name, *shape)
        return stored if codes is None else codes
    values: Tensor = weights.get(name, *shape)
    if weight_format is WeightFormat.INT8:
        return quantize_int8(values)
    if weight_format is WeightFormat.FLOAT32:
        return values
    half = values.to(_HALF[weight_format])
    if half.isinf().any():
        raise StartupError(f"{weights.folder}: tensor {name!r} has values beyond the range of {weight_format}")
    return half

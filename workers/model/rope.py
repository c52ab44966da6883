"""Rotation tables (Su et al. 2021) with linear and Llama 3 scaling, in the float32 steps of transformers so that
angles are equal.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from workers.model.config import RopeConfig


def llama3_factors(
    theta: float, dim: int, factor: float, low: float, high: float, original: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Divisors [dim / 2] of the inverse frequencies: 1 for short waves, `factor` for long ones, smooth between."""
    wave = 2 * math.pi * theta ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((original / wave - low) / (high - low), 0.0, 1.0)
    result = 1.0 / ((1 - smooth) / factor + smooth)
    return result.astype(np.float32)


def rope_tables(rope: RopeConfig, dim: int, positions: int) -> tuple[Any, Any]:
    """cos and sin, float32 torch tensors [positions, dim / 2]."""
    import torch

    inverse = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3(inverse, rope)
    angles = torch.arange(positions).float()[:, None] * inverse[None, :]
    return angles.cos().contiguous(), angles.sin().contiguous()


def _llama3(inverse: Any, rope: RopeConfig) -> Any:
    """transformers' `_compute_llama3_parameters`, step by step."""
    import torch

    low_wave = rope.original_max_positions / rope.low_freq_factor
    high_wave = rope.original_max_positions / rope.high_freq_factor
    wave = 2 * math.pi / inverse
    scaled = torch.where(wave > low_wave, inverse / rope.factor, inverse)
    smooth = (rope.original_max_positions / wave - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where((wave >= high_wave) & (wave <= low_wave), between, scaled)

"""From logits to token ids. Pure: the only randomness is `headrace.sampling.uniform` at the token's absolute position.

Order of the steps: banned ids, greedy or temperature, top-k, top-p. Ties go to the lowest id, everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.sampling import SamplingParams, uniform

_FIRST_LOOK = 1024
"""Candidates that top-p looks at before it sorts the whole vocabulary."""

Logits = np.ndarray[Any, np.dtype[np.float32]]


def sample(logits: Logits, params: SamplingParams, position: int, banned: Sequence[int] = ()) -> int:
    """The token for `position` (its index in prompt + output). logits: float32 [vocab]; not changed.

    A row without a finite logit (a broken model) gives token 0 rather than an error: it must not stop the batch.
    """
    if banned:
        logits = logits.copy()
        logits[list(banned)] = -np.inf
    best = int(np.argmax(logits))
    if params.greedy or not np.isfinite(logits[best]) or params.top_k == 1:
        return best if np.isfinite(logits[best]) else _first_finite_best(logits)
    # float64 keeps the quotient finite for every temperature that a request may carry, down to 1e-45.
    scaled = (logits.astype(np.float64) - float(logits[best])) / params.temperature
    ids = _candidates(scaled, params)
    weights = np.exp(scaled if ids is None else scaled[ids])
    if ids is not None and params.top_p < 1.0:
        weights = weights[: _nucleus(weights, params.top_p * _total(scaled, ids, weights, params))]
    cumulative = np.cumsum(weights)
    draw = uniform(params.seed, params.branch, position) * cumulative[-1]
    chosen = min(int(np.searchsorted(cumulative, draw, side="right")), len(weights) - 1)
    return chosen if ids is None else int(ids[chosen])


def _first_finite_best(logits: Logits) -> int:
    """argmax that skips NaN and infinities; 0 when nothing is left."""
    finite = np.isfinite(logits)
    if not finite.any():
        return 0
    return int(np.argmax(np.where(finite, logits, -np.inf)))


def _candidates(scaled: np.ndarray[Any, Any], params: SamplingParams) -> np.ndarray[Any, Any] | None:
    """Ids that top-k and top-p leave to look at, best first; None: all of them, by id."""
    size = len(scaled)
    if 0 < params.top_k < size:
        return _best(scaled, params.top_k)
    if params.top_p >= 1.0:
        return None
    if size > _FIRST_LOOK:
        ids = _best(scaled, _FIRST_LOOK)
        if np.exp(scaled[ids]).sum() >= params.top_p * np.exp(scaled).sum():
            return ids
    return np.argsort(-scaled, kind="stable")


def _best(scaled: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Ids of the `count` best, best first, equals by id."""
    border = np.partition(scaled, len(scaled) - count)[len(scaled) - count]
    ids = np.flatnonzero(scaled >= border)
    return ids[np.argsort(-scaled[ids], kind="stable")][:count]


def _total(
    scaled: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], params: SamplingParams
) -> float:
    """Weight that top-p is a share of: what top-k left, or everything."""
    return float(weights.sum() if 0 < params.top_k < len(scaled) or len(ids) == len(scaled) else np.exp(scaled).sum())


def _nucleus(weights: np.ndarray[Any, Any], wanted: float) -> int:
    """How many of the best-first weights reach `wanted`; at least one (Holtzman et al. 2020)."""
    return min(int(np.searchsorted(np.cumsum(weights), wanted, side="left")) + 1, len(weights))

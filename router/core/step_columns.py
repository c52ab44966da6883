"""The workers' step costs as columns over slots: what `headrace.core.step_shape.CostTable` says of one, of all.

A worker that tells no costs has the average of those that do; when nobody does, generic proportions. The level of
either follows what its requests took (`observe`). So an unknown worker is never free. What depends on a worker's
decodes alone is worked out when its row is told, not with each choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numba import njit

from headrace.core.step_shape import GENERIC_S, KNOTS, NUM_FEATURES
from router.core.arrays import Floats, Ints

_NUM_KNOTS = len(KNOTS)
_WIDTHS = np.array([*(b - a for a, b in pairwise(KNOTS)), KNOTS[-1]], np.float64)
_KNOTS = np.array(KNOTS, np.int64)
_PACE_NEW = 0.1
_PACE_LIMIT = 1e4
_OWN = ("token_ms", "step_ms", "next_step_ms", "context_ms", "beside_ms", "chunk_ms", "pair_ms", "prompt_ms")


class StepColumns:
    """See the module's docstring. All [slots], milliseconds."""

    token_ms: Floats
    """One more prompt token in a large step."""
    step_ms: Floats
    """A step of the decodes there now; 0 when there are none."""
    next_step_ms: Floats
    """The same with one decode row more, without its context."""
    context_ms: Floats
    """A token that a decode row attends to."""
    beside_ms: Floats
    """What the decodes there and a chunk's own row add to each step of a prefill, apart from rows."""
    chunk_ms: Floats
    """Rows of the decodes and a whole chunk."""
    pair_ms: Floats
    """A pair of tokens that a prefill's attention looks at."""
    prompt_ms: Floats
    """Sampling the first token."""
    at_zero: Floats
    """[slots, pieces], as `slope`: a step of r rows takes at_zero + slope * r, of the piece of `knots` that r is in."""
    slope: Floats
    knots: Ints = _KNOTS

    def __init__(self) -> None:
        self.has_own = np.zeros(0, np.bool_)
        self._rows = np.zeros(0, np.int64)
        self._context = np.zeros(0, np.int64)
        self._chunk_tokens = np.zeros(0, np.int64)
        self._costs = np.zeros((0, NUM_FEATURES))
        self._told: dict[int, tuple[float, ...]] = {}
        self._pace: dict[int, float | None] = {}
        """Realised over predicted time, of those that tell no costs; None: nothing of it was seen yet."""
        self._dirty: set[int] = set()
        self._is_average_old = False
        self.at_zero = np.zeros((0, _NUM_KNOTS))
        self.slope = np.zeros((0, _NUM_KNOTS))
        for name in _OWN:
            setattr(self, name, np.zeros(0))

    def grow(self, size: int) -> None:
        for name in (*_OWN, "has_own", "_rows", "_context", "_chunk_tokens", "_costs", "at_zero", "slope"):
            old = getattr(self, name)
            new = np.zeros((size, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    def tell(self, slot: int, costs_s: Sequence[float], rows: int, context: int, chunk_tokens: int) -> None:
        """A worker's costs, seconds of each feature (empty: not told), its decodes, and its whole chunk."""
        self._rows[slot], self._context[slot], self._chunk_tokens[slot] = rows, context, chunk_tokens
        costs = tuple(costs_s)
        if costs != self._told.get(slot, None):
            if costs:
                self._lay_out(np.array([slot]), np.array(costs) * 1e3)
                self._pace.pop(slot, None)
            else:
                self._pace[slot] = None
            self._told[slot] = costs
            self.has_own[slot] = bool(costs)
            self._is_average_old = True
        self._dirty.add(slot)

    def forget(self, slot: int) -> None:
        self._told.pop(slot, None)
        self._pace.pop(slot, None)
        self._dirty.discard(slot)
        self.has_own[slot] = False
        self._is_average_old = True

    def observe(self, slot: int, ratio: float) -> None:
        """A request there took `ratio` times as long as predicted. Passed over where costs are told."""
        if slot in self._pace and 0.0 < ratio < _PACE_LIMIT:
            pace = self._pace[slot] or self._usual_pace()
            self._pace[slot] = min(max(pace * ratio**_PACE_NEW, 1.0 / _PACE_LIMIT), _PACE_LIMIT)
            self._is_average_old = True

    def refresh(self) -> None:
        """Brings all rows up to date with what was told: call it before a choice."""
        if self._is_average_old:
            self._is_average_old = False
            if self._pace:
                costs = self._costs[self.has_own].mean(axis=0) if self.has_own.any() else np.array(GENERIC_S) * 1e3
                usual = self._usual_pace()
                paces = [pace or usual for pace in self._pace.values()]
                self._lay_out(np.array(list(self._pace)), np.outer(paces, costs))
                self._dirty.update(self._pace)
        if self._dirty:
            own = tuple(getattr(self, name) for name in _OWN)
            told = (self._rows, self._context, self._chunk_tokens)
            _derive(np.array(list(self._dirty)), *told, self._costs, self.at_zero, self.slope, self.knots, own)
            self._dirty.clear()

    def share_ms(self, slot: int, tokens: int, start: int) -> float:
        """What those tokens add to the work ahead of others there: they share full steps with other prompts."""
        steps = tokens / self._chunk_tokens[slot] * (self.chunk_ms[slot] + self.beside_ms[slot])
        return float(steps + self.pair_ms[slot] * tokens * (start + 0.5 * tokens))

    def _usual_pace(self) -> float:
        paces = [pace for pace in self._pace.values() if pace]
        return float(np.exp(np.mean(np.log(paces)))) if paces else 1.0

    def _lay_out(self, slots: Ints, costs_ms: Floats) -> None:
        """costs_ms: [features] or [n, features]."""
        self._costs[slots] = costs_ms
        pieces = self._costs[slots, 1 : _NUM_KNOTS + 1]
        slopes = pieces / _WIDTHS
        ends = self._costs[slots, :1] + np.cumsum(pieces, axis=1)
        self.slope[slots] = slopes
        self.at_zero[slots] = ends - slopes * (_KNOTS + _WIDTHS)


@njit(inline="always")
def _rows_ms(at_zero, slope, knots, rows):  # type: ignore[no-untyped-def]
    """Of so many rows; at_zero and slope: [pieces] of one slot."""
    piece = 0
    while piece + 1 < len(knots) and knots[piece + 1] <= rows:
        piece += 1
    return at_zero[piece] + slope[piece] * rows


@njit(cache=True)
def _derive(slots, rows_of, context_of, chunk_of, costs, at_zero, slope, knots, to):  # type: ignore[no-untyped-def]
    """Fills in `_OWN`, in that order, of some slots. costs: [slots, features] milliseconds."""
    token_ms, step_ms, next_step_ms, context_ms, beside_ms, chunk_ms, pair_ms, prompt_ms = to
    last = len(knots)
    for slot in slots:
        rows, zero, rise = rows_of[slot], at_zero[slot], slope[slot]
        decode_row, decode_token, prefill_row, pair, sampled_row = costs[slot, last + 1 :]
        beside = decode_row * rows + decode_token * context_of[slot]
        sampled = sampled_row * rows
        token_ms[slot] = rise[last - 1]
        step_ms[slot] = _rows_ms(zero, rise, knots, rows) + beside + sampled if rows else 0.0
        next_step_ms[slot] = _rows_ms(zero, rise, knots, rows + 1) + beside + decode_row + sampled + sampled_row
        context_ms[slot] = decode_token
        beside_ms[slot] = beside + sampled + prefill_row
        chunk_ms[slot] = _rows_ms(zero, rise, knots, rows + chunk_of[slot])
        pair_ms[slot] = pair
        prompt_ms[slot] = sampled_row

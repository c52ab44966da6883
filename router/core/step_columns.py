"""The workers' step costs as columns over slots: what `headrace.core.step_shape.CostTable` says of one, of all.

A worker that tells no costs has the average of those that do; when nobody does, generic proportions. The level of
either follows what its requests took (`observe`). So an unknown worker is never free. What depends on a worker's
decodes alone is worked out when its row is told, not with each choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace.core.step_shape import GENERIC_S, KNOTS, NUM_FEATURES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NUM_KNOTS = len(KNOTS)
_WIDTHS = np.array([*(b - a for a, b in pairwise(KNOTS)), KNOTS[-1]], np.float64)
_KNOTS = np.array(KNOTS, np.int64)
_AT = np.searchsorted(_KNOTS, np.arange(KNOTS[-1] + 1), side="right") - 1
"""Rows -> piece, up to the last knot; 0 rows count as one."""
_AT[0] = 0
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

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk = chunk_tokens
        self.has_own = np.zeros(0, np.bool_)
        self._rows = np.zeros(0, np.int64)
        self._context = np.zeros(0, np.int64)
        self._costs = np.zeros((0, NUM_FEATURES))
        self._told: dict[int, tuple[float, ...]] = {}
        self._pace: dict[int, float | None] = {}
        """Realised over predicted time, of those that tell no costs; None: nothing of it was seen yet."""
        self._dirty: set[int] = set()
        self._is_average_old = False
        # A step of `rows` rows takes at_zero + slope * rows, of the piece that those rows are in.
        self._at_zero = np.zeros((0, _NUM_KNOTS))
        self._slope = np.zeros((0, _NUM_KNOTS))
        for name in _OWN:
            setattr(self, name, np.zeros(0))
        self._row_starts = np.zeros(0, np.int64)

    def grow(self, size: int) -> None:
        for name in (*_OWN, "has_own", "_rows", "_context", "_costs", "_at_zero", "_slope"):
            old = getattr(self, name)
            new = np.zeros((size, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
        self._row_starts = np.arange(size) * _NUM_KNOTS

    def tell(self, slot: int, costs_s: Sequence[float], rows: int, context: int) -> None:
        """A worker's costs, seconds of each feature (empty: not told), and its decodes."""
        self._rows[slot], self._context[slot] = rows, context
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
            self._derive(np.array(list(self._dirty)))
            self._dirty.clear()

    def prefill_ms(self, tokens: Ints, start: Ints) -> tuple[Floats, Floats]:
        """Of `tokens` (at least 1) prompt tokens after `start` cached ones, [..., n] over the first n slots: the time
        beside that worker's decodes, and how much of it those would have taken anyway.
        """
        count = tokens.shape[-1]
        full, rest = np.divmod(tokens, self._chunk)
        rows = rest + self._rows[:count]
        at = _AT.take(np.minimum(rows, KNOTS[-1])) + self._row_starts[:count]
        last = self._at_zero.take(at) + self._slope.take(at) * rows
        has_rest = rest > 0
        steps = full + has_rest
        total = full * self.chunk_ms[:count] + has_rest * last + steps * self.beside_ms[:count]
        total += self.pair_ms[:count] * (tokens * (start + 0.5 * tokens)) + self.prompt_ms[:count]
        return total, steps * self.step_ms[:count]

    def share_ms(self, slot: int, tokens: int, start: int) -> float:
        """What those tokens add to the work ahead of others there: they share full steps with other prompts."""
        steps = tokens / self._chunk * (self.chunk_ms[slot] + self.beside_ms[slot])
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
        self._slope[slots] = slopes
        self._at_zero[slots] = ends - slopes * (_KNOTS + _WIDTHS)

    def _derive(self, slots: Ints) -> None:
        rows, context = self._rows[slots], self._context[slots]
        decode_row, decode_token, prefill_row, pair, sampled_row = self._costs[slots, _NUM_KNOTS + 1 :].T
        beside = decode_row * rows + decode_token * context
        sampled = sampled_row * rows
        self.token_ms[slots] = self._slope[slots, -1]
        now, one_more, with_chunk = self._rows_ms(slots, np.array((rows, rows + 1, rows + self._chunk)))
        self.step_ms[slots] = (rows > 0) * (now + beside + sampled)
        self.next_step_ms[slots] = one_more + beside + decode_row + sampled + sampled_row
        self.context_ms[slots] = decode_token
        self.beside_ms[slots] = beside + sampled + prefill_row
        self.chunk_ms[slots] = with_chunk
        self.pair_ms[slots] = pair
        self.prompt_ms[slots] = sampled_row

    def _rows_ms(self, slots: Ints, rows: Ints) -> Floats:
        """rows: [k, n] of n slots."""
        at = _AT[np.minimum(rows, KNOTS[-1])]
        return np.asarray(self._at_zero[slots, at] + self._slope[slots, at] * rows)

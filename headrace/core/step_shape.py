"""What a step's time depends on, as numbers, and the least squares under bounds that weighs them. It knows no machine
and measures nothing: `headrace.core.predictor` does the learning.

A step costs a constant, a piecewise linear function of its rows (weights are read once whatever the rows, then tiles
fill, then arithmetic rules: a 576 x 3072 stack takes 28-37 / 74 / 81 / 120 / 685 ms at 1 / 4 / 8 / 32 / 512 rows),
and adders for attention, for each sequence, and for sampling.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

FEATURES_VERSION = 1
"""Raise it when the meaning or the order of the features changes: profiles of another version are refused."""
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Rows at which the cost may bend. The last piece goes on for ever."""
FEATURES = (
    "constant",
    *(f"rows {first}-{last}" for first, last in itertools.pairwise(KNOTS)),
    f"rows {KNOTS[-1]}-",
    "decode_rows",
    "decode_context",
    "prefill_rows",
    "prefill_context",
    "sampled_rows",
)
NUM_FEATURES = len(FEATURES)
GENERIC_S = (
    *(0.032, 0.018, 0.024, 0.007, 0.013, 0.026, 0.04, 0.08, 0.16, 0.285, 0.57),
    *(2e-4, 2.5e-6, 5e-4, 7e-7, 3e-4),
)
"""Seconds of each feature for a small model on two cores: the proportions from which learning starts."""
LOWEST_SHARE = 0.01
"""No coefficient falls below this share of where it started: a bigger step is always a little dearer."""
_WIDTHS = (*(last - first for first, last in itertools.pairwise(KNOTS)), KNOTS[-1])


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step: rows, and tokens or pairs of tokens summed over them."""

    decode_rows: int
    decode_context: int
    """Sum over decode rows of the tokens that each attends to, itself included."""
    prefill_rows: int
    prefill_tokens: int
    prefill_context: int
    """Pairs of tokens attended to: sum over chunks of tokens * (start + tokens / 2), rounded down."""
    sampled_rows: int = 0

    @classmethod
    def of(
        cls, num_tokens: Sequence[int], start_pos: Sequence[int], samples: Sequence[bool], num_decode_rows: int
    ) -> StepShape:
        """The shape of a plan's columns, one entry a row; the first `num_decode_rows` rows are decodes."""
        chunks = list(zip(num_tokens, start_pos, strict=True))[num_decode_rows:]
        return cls(
            num_decode_rows,
            sum(start_pos[:num_decode_rows]) + num_decode_rows,
            len(chunks),
            sum(num_tokens[num_decode_rows:]),
            sum(chunk_pairs(start, tokens) for tokens, start in chunks),
            sum(samples),
        )

    @property
    def rows(self) -> int:
        """Rows of the matrix products: one a decode, one a token of prefill."""
        return self.decode_rows + self.prefill_tokens

    def with_chunk(self, start: int, tokens: int) -> StepShape:
        """This step and one chunk more, of `tokens` tokens after `start` that are in the cache."""
        return StepShape(
            self.decode_rows,
            self.decode_context,
            self.prefill_rows + 1,
            self.prefill_tokens + tokens,
            self.prefill_context + chunk_pairs(start, tokens),
            self.sampled_rows,
        )


def chunk_pairs(start: int, tokens: int) -> int:
    """Pairs of tokens that a chunk's attention looks at: see `StepShape.prefill_context`."""
    return tokens * (2 * start + tokens) // 2


def features(shape: StepShape) -> list[float]:
    """[NUM_FEATURES] in the order of `FEATURES`; a piece of the row axis counts from 0 at its start to 1 at its end."""
    rows, last = shape.rows, len(KNOTS) - 1
    pieces = [max(0, rows - knot) / width for knot, width in zip(KNOTS, _WIDTHS, strict=True)]
    return [
        1.0,
        *(min(1.0, piece) for piece in pieces[:last]),
        pieces[last],
        shape.decode_rows,
        shape.decode_context,
        shape.prefill_rows,
        shape.prefill_context,
        shape.sampled_rows,
    ]


class CostTable:
    """Coefficients laid out for speed: `cost_s` is a microsecond where `features` and a product are twenty."""

    __slots__ = ("_adders", "_at_knot", "_slopes")

    def __init__(self, coefficients: Sequence[float]) -> None:
        """`coefficients`: seconds of each feature, [NUM_FEATURES]."""
        pieces = coefficients[1 : len(KNOTS) + 1]
        self._at_knot = [coefficients[0]]
        for piece in pieces[:-1]:
            self._at_knot.append(self._at_knot[-1] + piece)
        self._slopes = [piece / width for piece, width in zip(pieces, _WIDTHS, strict=True)]
        self._adders = tuple(coefficients[len(KNOTS) + 1 :])

    def cost_s(self, shape: StepShape) -> float:
        """Seconds; 0 for a step without rows."""
        rows = shape.decode_rows + shape.prefill_tokens
        if rows <= 0:
            return 0.0
        at = bisect_right(KNOTS, rows) - 1
        decode_row, decode_token, prefill_row, pair, sampled_row = self._adders
        return (
            self._at_knot[at]
            + self._slopes[at] * (rows - KNOTS[at])
            + decode_row * shape.decode_rows
            + decode_token * shape.decode_context
            + prefill_row * shape.prefill_rows
            + pair * shape.prefill_context
            + sampled_row * shape.sampled_rows
        )


def continue_last_slope(coefficients: Sequence[float], most_rows: int) -> list[float]:
    """The same with every piece of the row axis that begins at `most_rows` or later as steep as the one before it."""
    out = list(coefficients)
    for at in range(1, len(KNOTS)):
        if KNOTS[at] >= most_rows:
            out[at + 1] = out[at] * _WIDTHS[at] / _WIDTHS[at - 1]
    return out


def descend(
    gram: Sequence[Sequence[float]], moments: Sequence[float], shares: list[float], tie: float, sweeps: int
) -> None:
    """Moves `shares` towards the least of |X u - t|^2 + tie * |u - mean(u)|^2 with every u >= LOWEST_SHARE.

    gram: X^T X, moments: X^T t, shares: u, all in units of the coefficients that learning started from. Cyclic
    coordinate descent (Wright 2015, Coordinate descent algorithms, section 1): what two features share is settled in
    the first sweep, what tells them apart takes many, and matters little meanwhile. The tie makes features that no
    data has told apart keep their proportions.
    """
    total, count = sum(shares), len(shares)
    for _ in range(sweeps):
        for j, row in enumerate(gram):
            old = shares[j]
            slope = moments[j] - sum(map(mul, row, shares)) - tie * (old - total / count)
            new = max(LOWEST_SHARE, old + slope / (row[j] + tie))
            shares[j] = new
            total += new - old

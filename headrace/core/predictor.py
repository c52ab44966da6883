"""How long a step will take, from its shape: one object for budgets, admission, routing and simulation.

Pure: nothing here measures. `Profile` is what `headrace profile` found on a machine; `StepPredictor` starts from it,
or from nothing, and follows what the engine then sees.
"""

from __future__ import annotations

import json
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from statistics import median

from headrace.core.step_shape import (
    FEATURES_VERSION,
    GENERIC_S,
    NUM_FEATURES,
    CostTable,
    StepShape,
    continue_last_slope,
    descend,
    features,
)

__all__ = ["FEATURES_VERSION", "Profile", "StepPredictor", "StepShape", "fit"]

READY_SAMPLES = 32
"""Steps seen after which a predictor without a profile is worth asking."""
_WINDOW = 128
"""Steps whose ratios of actual to predicted time give the quantiles, and whose errors give `error`."""
_RECENT = 9
"""Steps whose median ratio tells a machine that has changed from one that hiccuped: five of them must agree."""
_KEEP = 0.99
_KEEP_AFTER_SHIFT = 0.5
"""What each step leaves of the weight of those before it."""
_SHIFT = 1.3
"""The recent median ratio, either way, from which on the past is no guide."""
_CLIP = 1.5
"""A step counts as at most so many times the recent median, either way."""
_PROFILE_WEIGHT = 10.0
"""Steps that the level of a profile counts for; its proportions count by the tie."""
_PROFILE_TIE, _GENERIC_TIE, _FIT_TIE = 0.5, 0.05, 1e-4
_SWEEPS, _FIT_SWEEPS, _FIT_PASSES = 2, 2000, 4
_NUM_QUANTILES = 32
_UNKNOWN_RATIOS = tuple(0.75 + 0.5 * (i + 0.5) / _NUM_QUANTILES for i in range(_NUM_QUANTILES))
"""The spread to reckon with before any is known: a quarter either way."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured, and of what."""

    key: Mapping[str, str]
    """Model, weights, machine, threads, kernels, dtype, parallel degree: each must be equal for the profile to fit."""
    features_version: int
    coefficients: tuple[float, ...]
    """Seconds of each of `headrace.core.step_shape.FEATURES`."""
    ratios: tuple[float, ...]
    """Quantiles of actual over fitted time, evenly spaced: entry i of n is that of (i + 0.5) / n."""
    seen: Mapping[str, tuple[int, int]]
    """Least and greatest of each field of the shapes measured, and of their rows; beyond them costs grow linearly."""
    samples: int
    held_out_error: float | None = None
    """Median absolute error, as a share, on steps that were not fitted."""

    def mismatch(self, key: Mapping[str, str]) -> str:
        """Why this profile is not one for `key`, in words; empty when it is."""
        if self.features_version != FEATURES_VERSION:
            return f"the profile has features of version {self.features_version}, this program {FEATURES_VERSION}"
        for name in sorted({*self.key, *key}):
            there, here = self.key.get(name, "not told"), key.get(name, "not told")
            if there != here:
                return f"{name} is {there!r} in the profile and {here!r} here"
        return ""

    def checked(self, samples: Sequence[tuple[StepShape, float]]) -> Profile:
        """This profile with error and quantiles from steps that were not fitted: at least one (shape, seconds)."""
        ratios = _ratios_of(CostTable(self.coefficients), samples)
        error = median(abs(1.0 / ratio - 1.0) for ratio in ratios)
        return replace(self, ratios=_quantiles(ratios), held_out_error=error)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """Reads any version, so that `mismatch` can tell it. Raises ValueError, one line, for what is no profile."""
        try:
            data = json.loads(text)
            profile = cls(
                {str(name): str(value) for name, value in data["key"].items()},
                int(data["features_version"]),
                tuple(float(value) for value in data["coefficients"]),
                tuple(sorted(float(value) for value in data["ratios"])),
                {str(name): (int(low), int(high)) for name, (low, high) in data["seen"].items()},
                int(data["samples"]),
                None if data["held_out_error"] is None else float(data["held_out_error"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a step-time profile ({type(error).__name__}: {error})") from error
        if profile.features_version == FEATURES_VERSION:
            profile._check()
        return profile

    def _check(self) -> None:
        if len(self.coefficients) != NUM_FEATURES or not all(0 < value < inf for value in self.coefficients):
            raise ValueError(f"a step-time profile has {NUM_FEATURES} coefficients above 0")
        if not self.ratios or not all(0 < value < inf for value in self.ratios):
            raise ValueError("a step-time profile has ratios above 0")


class StepPredictor:
    """Recursive least squares on relative error, with forgetting, coefficients bounded from below.

    A profile's level is forgotten like any other past, its proportions between features are not: they decide wherever
    recent steps do not. Without a profile generic proportions stand in, and the first step sets the level.
    """

    def __init__(self, profile: Profile | None = None) -> None:
        """Raises ValueError for a profile of another feature version; its key is the caller's to check."""
        if profile is not None and profile.features_version != FEATURES_VERSION:
            raise ValueError(profile.mismatch(profile.key))
        self._has_profile = profile is not None
        self._scale = list(profile.coefficients if profile else GENERIC_S)
        self._tie = _PROFILE_TIE if profile else _GENERIC_TIE
        self._first_ratios = profile.ratios if profile else _UNKNOWN_RATIOS
        even = 1.0 / NUM_FEATURES
        weight = _PROFILE_WEIGHT if profile else 0.0
        self._shares = [1.0] * NUM_FEATURES
        self._gram = [[weight * even * even] * NUM_FEATURES for _ in range(NUM_FEATURES)]
        self._moments = [weight * even] * NUM_FEATURES
        self._table = CostTable(self._scale)
        self._recent: deque[tuple[StepShape, float]] = deque(maxlen=_RECENT)
        self._errors: deque[float] = deque(maxlen=_WINDOW)
        self._samples = 0
        self._forget_ratios()

    @property
    def samples(self) -> int:
        """Steps observed; those of the profile are not among them."""
        return self._samples

    @property
    def error(self) -> float:
        """Median absolute error, as a share of the actual time, of the last predictions; 0 before the first step."""
        return median(self._errors) if self._errors else 0.0

    @property
    def ready(self) -> bool:
        """Whether there is ground for a prediction: a profile, or enough steps."""
        return self._has_profile or self._samples >= READY_SAMPLES

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds of each of `headrace.core.step_shape.FEATURES` in the median step; what `predict_s` adds up."""
        level = self._ratio(0.5)
        return tuple(share * scale * level for share, scale in zip(self._shares, self._scale, strict=True))

    def predict_s(self, shape: StepShape, quantile: float = 0.5) -> float:
        """Seconds that a step of this shape stays below with probability `quantile` (0..1). Grows with every field."""
        return self._table.cost_s(shape) * self._ratio(quantile)

    def chunk_for(self, base: StepShape, start: int, most: int, budget_s: float, quantile: float = 0.5) -> int:
        """Most tokens of one more chunk, after `start` cached ones, with which `base` stays within `budget_s`.

        0 to `most`; 0 when not even one token fits.
        """
        limit_s = budget_s / self._ratio(quantile)
        fits, over = 0, most + 1
        while over - fits > 1:
            middle = (fits + over) // 2
            if self._table.cost_s(base.with_chunk(start, middle)) <= limit_s:
                fits = middle
            else:
                over = middle
        return fits

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learns from a step that took `seconds`. Steps without rows and impossible times are passed over."""
        if shape.rows <= 0 or not 0.0 < seconds < inf:
            return
        cost_s = self._table.cost_s(shape)
        self._errors.append(abs(cost_s * self._ratio(0.5) - seconds) / seconds)
        if not self._samples and not self._has_profile:
            self._scale = [value * seconds / cost_s for value in self._scale]
            self._table = CostTable(self._scale)
            cost_s = seconds
        self._samples += 1
        self._note_ratio(seconds / cost_s)
        self._recent.append((shape, seconds))
        level = median(took / self._table.cost_s(at) for at, took in self._recent)
        has_shifted = not 1.0 / _SHIFT < level < _SHIFT
        # One step, however slow, is not news: a page fault. Several in a row are, and then the past counts little.
        target = min(max(seconds / cost_s, level / _CLIP), level * _CLIP)
        self._learn(shape, cost_s, target, _KEEP_AFTER_SHIFT if has_shifted else _KEEP)
        if has_shifted:
            self._forget_ratios()

    def _learn(self, shape: StepShape, cost_s: float, target: float, keep: float) -> None:
        x = [value * scale / cost_s for value, scale in zip(features(shape), self._scale, strict=True)]
        for at, value in enumerate(x):
            self._gram[at] = [keep * old + value * other for old, other in zip(self._gram[at], x, strict=True)]
        self._moments = [keep * old + target * value for old, value in zip(self._moments, x, strict=True)]
        descend(self._gram, self._moments, self._shares, self._tie, _SWEEPS)
        self._table = CostTable([share * scale for share, scale in zip(self._shares, self._scale, strict=True)])

    def _ratio(self, quantile: float) -> float:
        """Quantile of actual over fitted time, between the two nearest."""
        return _quantile(self._ordered, quantile)

    def _note_ratio(self, ratio: float) -> None:
        if len(self._ratios) == _WINDOW:
            self._ordered.remove(self._ratios.popleft())
        self._ratios.append(ratio)
        insort(self._ordered, ratio)

    def _forget_ratios(self) -> None:
        self._ratios = deque(self._first_ratios)
        self._ordered = sorted(self._first_ratios)


def fit(samples: Sequence[tuple[StepShape, float]], key: Mapping[str, str]) -> Profile:
    """Least squares on relative error over (shape, seconds). Raises ValueError without a sample."""
    import numpy as np

    usable = [(shape, seconds) for shape, seconds in samples if shape.rows > 0 and 0.0 < seconds < inf]
    if not usable:
        raise ValueError("a profile needs at least one measured step")
    x = np.array([features(shape) for shape, _ in usable])
    y = np.array([seconds for _, seconds in usable])
    scale = np.array(GENERIC_S)
    scale *= np.median(y / (x @ scale))
    shares = [1.0] * NUM_FEATURES
    # Weighing by the fitted time, not the measured one: the latter would draw the fit below the middle of the noise.
    for _ in range(_FIT_PASSES):
        fitted = x @ (scale * shares)
        weighted = x * scale / fitted[:, None]
        targets = np.clip(y / fitted, 1.0 / _CLIP, _CLIP)
        gram, moments = weighted.T @ weighted, weighted.T @ targets
        descend(gram.tolist(), moments.tolist(), shares, _FIT_TIE * len(usable), _FIT_SWEEPS)
    most_rows = max(shape.rows for shape, _ in usable)
    coefficients = continue_last_slope((scale * shares).tolist(), most_rows)
    ratios = _quantiles(_ratios_of(CostTable(coefficients), usable))
    return Profile(dict(key), FEATURES_VERSION, tuple(coefficients), ratios, _seen(usable), len(usable))


def _ratios_of(table: CostTable, samples: Sequence[tuple[StepShape, float]]) -> list[float]:
    """Actual over fitted time."""
    return [seconds / table.cost_s(shape) for shape, seconds in samples]


def _quantiles(ratios: Sequence[float]) -> tuple[float, ...]:
    ordered = sorted(ratios)
    return tuple(_quantile(ordered, (i + 0.5) / _NUM_QUANTILES) for i in range(_NUM_QUANTILES))


def _quantile(ordered: Sequence[float], quantile: float) -> float:
    """Between the two nearest entries; entry i of n is the quantile (i + 0.5) / n."""
    place = min(max(quantile * len(ordered) - 0.5, 0.0), len(ordered) - 1.0)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _seen(samples: Sequence[tuple[StepShape, float]]) -> dict[str, tuple[int, int]]:
    shapes = [{**asdict(shape), "rows": shape.rows} for shape, _ in samples]
    return {name: (min(s[name] for s in shapes), max(s[name] for s in shapes)) for name in shapes[0]}

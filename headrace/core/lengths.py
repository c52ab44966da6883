"""How long outputs will be: quantiles learned from the outputs of the same endpoint, tenant and task.

`max_tokens` is a bound, no prediction (scheduler article, section 16). What comes out here is a reservation: the caller
keeps headroom for the outputs above the quantile.

| question | answer |
| --- | --- |
| a key with few samples | falls back: (endpoint, tenant, task), (endpoint, tenant), (endpoint), everything |
| nothing known at all | max_tokens |
| an output that ran into its max_tokens | censored, see below |
| an output that failed or was cancelled | not observed: it tells of the client or a fault, not of the answer |
| old outputs | a sample weighs half after `half_life_samples` newer ones of its key; `max_samples` are kept |
| memory | `max_keys` keys at each level, the least recently observed goes: many task names drop task names only |

A capped output is "at least so long" (Kaplan and Meier 1958): it stays in the group at risk up to its length and ends
nowhere. Where too many are capped the tail is unknown, and the answer is max_tokens. Counted as ends, caps would teach
that answers are as short as the caps; left out, that only short ones exist.

Does not: read a clock, know requests, or reserve anything.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

_KEY_PARTS = 3
_REFRESH_SHARE = 16
"""A quantile is computed anew once a 16th of its samples is new: sorting them for each request costs 0.3 ms."""


@dataclass(frozen=True, slots=True)
class LengthSettings:
    """Raises ValueError when a key could never have enough samples."""

    min_samples: int = 16
    """Below it a key says nothing and the next coarser one is asked."""
    max_samples: int = 256
    """Kept of one key."""
    half_life_samples: int = 64
    max_keys: int = 1024
    """Kept at one level."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_samples <= self.max_samples:
            raise ValueError("min_samples must be between 1 and max_samples")
        if min(self.half_life_samples, self.max_keys) < 1:
            raise ValueError("half_life_samples and max_keys must be at least 1")


class OutputLengths:
    """See the module's docstring. Mutated by `observe` alone; equal observations give equal predictions."""

    def __init__(self, settings: LengthSettings | None = None) -> None:
        self._settings = settings or LengthSettings()
        self._weights = [0.5 ** (age / self._settings.half_life_samples) for age in range(self._settings.max_samples)]
        # By the number of key parts, finest first.
        self._levels: tuple[OrderedDict[tuple[str, ...], _Samples], ...] = tuple(
            OrderedDict() for _ in range(_KEY_PARTS + 1)
        )

    def observe(self, endpoint: str, tenant: str, task: str, output_tokens: int, *, capped: bool = False) -> None:
        """One output that ended normally, in tokens; `capped`: max_tokens ended it. Amortised O(1)."""
        if output_tokens < 1:
            return
        for level, key in self._keys(endpoint, tenant, task):
            samples = level.get(key)
            if samples is None:
                samples = level[key] = _Samples(self._settings.max_samples)
                if len(level) > self._settings.max_keys:
                    level.popitem(last=False)
            level.move_to_end(key)
            samples.add(output_tokens, capped)

    def predict(self, endpoint: str, tenant: str, task: str, max_tokens: int, quantile: float) -> int:
        """Output tokens that the share `quantile` (above 0, below 1) of such requests does not exceed; 1..max_tokens.

        max_tokens where it is not known. Raises ValueError on another quantile.
        """
        length = self.quantile(endpoint, tenant, task, quantile)
        return max_tokens if length is None else min(length, max_tokens)

    def quantile(self, endpoint: str, tenant: str, task: str, quantile: float) -> int | None:
        """The same without a bound; None: no key has enough samples, or capped outputs hide it."""
        if not 0.0 < quantile < 1.0:
            raise ValueError("quantile must be between 0 and 1, both excluded")
        for level, key in self._keys(endpoint, tenant, task):
            samples = level.get(key)
            if samples is not None and len(samples) >= self._settings.min_samples:
                return samples.quantile(quantile, self._weights)
        return None

    @property
    def num_keys(self) -> int:
        return sum(len(level) for level in self._levels)

    def _keys(
        self, endpoint: str, tenant: str, task: str
    ) -> list[tuple[OrderedDict[tuple[str, ...], _Samples], tuple[str, ...]]]:
        parts = (endpoint, tenant, task)
        return [(level, parts[: _KEY_PARTS - i]) for i, level in enumerate(self._levels)]


class _Samples:
    """The last outputs of one key, newest last, and the quantiles already computed from them."""

    __slots__ = ("_known", "_num_new", "_outputs")

    def __init__(self, max_samples: int) -> None:
        self._outputs: deque[tuple[int, bool]] = deque(maxlen=max_samples)
        self._known: dict[float, int | None] = {}
        self._num_new = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, output_tokens: int, capped: bool) -> None:
        self._outputs.append((output_tokens, capped))
        self._num_new += 1
        if self._num_new >= len(self._outputs) // _REFRESH_SHARE:
            self._known.clear()
            self._num_new = 0

    def quantile(self, quantile: float, weights: list[float]) -> int | None:
        """Smallest length that the share `quantile` does not exceed; None when capped outputs hide it."""
        if quantile not in self._known:
            self._known[quantile] = self._product_limit(quantile, weights)
        return self._known[quantile]

    def _product_limit(self, quantile: float, weights: list[float]) -> int | None:
        """Kaplan and Meier's estimate with weights: S(v) = prod over lengths u <= v of (1 - ended at u / at risk at u).

        A capped output is at risk at its own length too: it sorts after those that ended there.
        """
        newest_first = reversed(self._outputs)
        weighted = sorted((tokens, capped, weights[age]) for age, (tokens, capped) in enumerate(newest_first))
        at_risk = sum(weight for _, _, weight in weighted)
        survival = 1.0
        for tokens, capped, weight in weighted:
            if not capped:
                # One by one is the same product as all of a length together.
                survival *= max(0.0, 1.0 - weight / at_risk)
                if survival <= 1.0 - quantile + 1e-9:
                    return tokens
            at_risk -= weight
            if at_risk <= 1e-12:
                break
        return None

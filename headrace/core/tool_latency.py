"""How long tools take to answer, and how often they never do: learned from the pauses of the same tenant and tool.

| question | answer |
| --- | --- |
| a key with few pauses | falls back: (tenant, tool), (tenant), everything |
| nothing known at all | `UNKNOWN`: points from a fifth of a second to two minutes |
| a pause that ended without an answer | counts in `lost_share`, not in the times: it tells of the client |
| few lost pauses, or none | the share is that of the key with `_PRIOR_PAUSES` more, of which `_PRIOR_LOST` was lost |
| old pauses | one weighs half after `half_life_pauses` newer ones of its key; `max_pauses` are kept |
| memory | `max_keys` keys at each level, the least recently observed goes: names of tools come from clients |

Does not: read a clock, know requests, or decide what becomes of their KV.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Middles of five equal shares, so that each is as likely as another."""
_PRIOR_PAUSES, _PRIOR_LOST = 20.0, 0.2


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of one pause."""

    wait_s: tuple[float, ...]
    """Points that are equally likely if the answer comes; rising."""
    lost_share: float
    """How likely it never comes."""


UNKNOWN = Outlook((0.2, 1.0, 5.0, 20.0, 120.0), _PRIOR_LOST / _PRIOR_PAUSES)


@dataclass(frozen=True, slots=True)
class ToolLatencySettings:
    """Raises ValueError when a key could never have enough pauses."""

    min_pauses: int = 5
    """Below it a key says nothing and the next coarser one is asked."""
    max_pauses: int = 128
    half_life_pauses: int = 32
    max_keys: int = 1024
    """Kept at one level."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_pauses <= self.max_pauses:
            raise ValueError("min_pauses must be between 1 and max_pauses")
        if min(self.half_life_pauses, self.max_keys) < 1:
            raise ValueError("half_life_pauses and max_keys must be at least 1")


class ToolLatency:
    """See the module's docstring. Mutated by `answered` and `lost`; equal pauses give equal outlooks."""

    def __init__(self, settings: ToolLatencySettings | None = None) -> None:
        self._settings = settings or ToolLatencySettings()
        self._weights = [0.5 ** (age / self._settings.half_life_pauses) for age in range(self._settings.max_pauses)]
        # By the number of key parts, finest first.
        self._levels: tuple[OrderedDict[tuple[str, ...], deque[float | None]], ...] = tuple(
            OrderedDict() for _ in range(3)
        )

    def answered(self, tenant: str, tool: str, wait_s: float) -> None:
        """A tool has answered after so many seconds."""
        self._observe(tenant, tool, max(0.0, wait_s))

    def lost(self, tenant: str, tool: str) -> None:
        """A pause ended without an answer: cancelled, or its deadline passed."""
        self._observe(tenant, tool, None)

    def outlook(self, tenant: str, tool: str) -> Outlook:
        """O(max_pauses log max_pauses)."""
        for level, key in zip(self._levels, _keys(tenant, tool), strict=True):
            pauses = level.get(key)
            if pauses is not None and sum(wait_s is not None for wait_s in pauses) >= self._settings.min_pauses:
                return self._of(pauses)
        return UNKNOWN

    @property
    def num_keys(self) -> int:
        return sum(len(level) for level in self._levels)

    def _observe(self, tenant: str, tool: str, wait_s: float | None) -> None:
        for level, key in zip(self._levels, _keys(tenant, tool), strict=True):
            pauses = level.get(key)
            if pauses is None:
                pauses = level[key] = deque(maxlen=self._settings.max_pauses)
                if len(level) > self._settings.max_keys:
                    level.popitem(last=False)
            level.move_to_end(key)
            pauses.append(wait_s)

    def _of(self, pauses: deque[float | None]) -> Outlook:
        weighted = list(zip(reversed(pauses), self._weights, strict=False))
        came = sorted((wait_s, weight) for wait_s, weight in weighted if wait_s is not None)
        whole = sum(weight for _, weight in weighted)
        came_weight = sum(weight for _, weight in came)
        lost_share = (whole - came_weight + _PRIOR_LOST) / (whole + _PRIOR_PAUSES)
        return Outlook(tuple(_quantile(came, share * came_weight) for share in _QUANTILES), lost_share)


def _keys(tenant: str, tool: str) -> tuple[tuple[str, ...], ...]:
    return (tenant, tool), (tenant,), ()


def _quantile(weighted: list[tuple[float, float]], target: float) -> float:
    """Smallest value up to which the weights reach `target`."""
    reached = 0.0
    for value, weight in weighted:
        reached += weight
        if reached >= target - 1e-9:
            return value
    return weighted[-1][0]

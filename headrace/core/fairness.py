"""Service that each tenant has received, in weighted tokens: the virtual token counters of VTC.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2. A tenant's counter grows by
w_p for a prompt token and w_q for an output token, divided by the tenant's weight; the backlogged tenant with the
lowest counter is served next. A tenant that comes back is lifted to the lowest counter of those that have work, so that
nobody saves service up. For two tenants with work all the time the difference in service stays within

    2 * max(w_p * L, w_q * M)        L: longest prompt in tokens, M: tokens that the KV pool holds

Beyond the paper: a prompt token found in the cache has a weight of its own, and residence in memory may be charged for.

Does not: queue requests or choose one (the scheduler's policy does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


_FEW = 8
"""Tenants up to which a loop is faster than an array."""


@dataclass(frozen=True, slots=True)
class ServiceWeights:
    """What a unit of service counts; `tenants` divides it: a tenant with weight 2 is entitled to twice as much."""

    input_token: float = 1.0
    output_token: float = 2.0
    cached_token: float = 0.1
    kv_block_s: float = 0.0
    """A KV block held for a second."""
    tenants: Mapping[str, float] = field(default_factory=dict)
    default_tenant: float = 1.0

    def __post_init__(self) -> None:
        if min(self.input_token, self.output_token, self.cached_token, self.kv_block_s) < 0:
            raise ValueError("service weights must not be negative")
        if min([self.default_tenant, *self.tenants.values()]) <= 0:
            raise ValueError("a tenant's weight must be above 0")


class ServiceCounters:
    """Tenants are dense indices, so that a step's rows are charged at once. Idle tenants at or below the lowest counter
    of the others are forgotten: coming back would lift them there anyway."""

    def __init__(self, weights: ServiceWeights | None = None, max_idle_tenants: int = 1024) -> None:
        self.weights = weights or ServiceWeights()
        self._max_idle = max_idle_tenants
        self._index: dict[str, int] = {}
        self._names: list[str] = []
        self._free: list[int] = []
        self._counters: Floats = np.zeros(16)
        self._scale: Floats = np.ones(16)
        self._live: Ints = np.zeros(16, np.int64)
        self._busy: set[int] = set()
        """Tenants with work."""
        self._floor = 0.0
        """Lowest counter when somebody last had work."""
        self._lowest = -1
        """Tenant with the lowest counter of those with work; -1 until it is looked for. Counters only grow, so it
        stays the lowest until it is charged or leaves."""

    def enter(self, tenant: str) -> int:
        """One more request of the tenant has work here; returns the tenant's index, valid until the same many leave."""
        index = self._index.get(tenant)
        if index is None:
            index = self._new(tenant)
        if self._live[index] == 0:
            self._counters[index] = max(self._counters[index], self.lowest())
            self._busy.add(index)
        self._live[index] += 1
        return index

    def leave(self, index: int) -> None:
        """One request less."""
        if self._live[index] == 1:
            self._floor = self.lowest()
            self._busy.discard(index)
            self._changed(index)
        self._live[index] -= 1
        if len(self._index) - len(self._free) > self._max_idle and self._live[index] == 0:
            self._forget_idle()

    def charge_input(self, index: int, computed_tokens: int, cached_tokens: int = 0) -> None:
        weights = self.weights
        service = weights.input_token * computed_tokens + weights.cached_token * cached_tokens
        self._counters[index] += service * self._scale[index]
        self._changed(index)

    def charge_output(self, index: int, tokens: int) -> None:
        self._counters[index] += self.weights.output_token * tokens * self._scale[index]
        self._changed(index)

    def raise_to(self, index: int, counter: float) -> None:
        """Somebody who sees more of the tenant's service counts at least so much."""
        if counter > self._counters[index]:
            self._counters[index] = counter
            self._changed(index)

    def charge_outputs(self, indices: Ints) -> None:
        """One output token for each entry."""
        counts = np.bincount(indices, minlength=len(self._counters))
        self._counters += self.weights.output_token * counts * self._scale
        self._lowest = -1

    def charge_residence(self, indices: Ints, blocks: Floats, seconds: float) -> None:
        """KV blocks that each entry has held for `seconds`."""
        if self.weights.kv_block_s:
            held = np.bincount(indices, blocks, minlength=len(self._counters))
            self._counters += self.weights.kv_block_s * seconds * held * self._scale
            self._lowest = -1

    def counter(self, index: int) -> float:
        return float(self._counters[index])

    def lowest(self) -> float:
        """Lowest counter of the tenants with work; the last such value when nobody has any."""
        if self._lowest < 0:
            if not self._busy:
                return self._floor
            if len(self._busy) < _FEW:
                self._lowest = min(self._busy, key=self._counters.__getitem__)
            else:
                live = np.flatnonzero(self._live)
                self._lowest = int(live[self._counters[live].argmin()])
        return float(self._counters[self._lowest])

    def service(self) -> dict[str, float]:
        """Counter of each known tenant, in weighted tokens over the tenant's weight."""
        return {name: float(self._counters[index]) for name, index in self._index.items()}

    def most_served(self, limit: int) -> dict[str, float]:
        """As `service`, of the `limit` tenants with the highest counters."""
        names = sorted(self._index, key=lambda name: (-self._counters[self._index[name]], name))[:limit]
        return {name: float(self._counters[self._index[name]]) for name in names}

    def _changed(self, index: int) -> None:
        if index == self._lowest:
            self._lowest = -1

    def _new(self, tenant: str) -> int:
        if self._free:
            index = self._free.pop()
            self._names[index] = tenant
        else:
            index = len(self._names)
            self._names.append(tenant)
            if index == len(self._counters):
                self._counters = np.concatenate((self._counters, np.zeros(index)))
                self._scale = np.concatenate((self._scale, np.ones(index)))
                self._live = np.concatenate((self._live, np.zeros(index, np.int64)))
        self._index[tenant] = index
        self._counters[index] = 0.0
        self._scale[index] = 1.0 / self.weights.tenants.get(tenant, self.weights.default_tenant)
        return index

    def _forget_idle(self) -> None:
        floor = self.lowest()
        for tenant, index in list(self._index.items()):
            if self._live[index] == 0 and self._counters[index] <= floor:
                del self._index[tenant]
                self._free.append(index)

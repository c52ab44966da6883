"""Ways to choose among workers without a cost, by name: what `cost` is compared with. Pure; they see columns.

| name | takes |
| --- | --- |
| round_robin | the next one |
| least_loaded | least work ahead, in tokens |
| power_of_two | the less loaded of two at random (Mitzenmacher 2001) |
| prefix_only | the longest cached prefix, the less loaded of equals |
| cost | the cheapest plan, see `router.core.cost`; the only one that fetches or serves whole beside both pools |
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import numpy as np

from router.core.arrays import Floats, Ints
from router.core.fleet_table import FleetTable

DECODE_ROW_TOKENS = 16
"""A running decode weighs as much as this many waiting prompt tokens."""

Chance = Callable[[], float]
"""The next random number of 0..1, without 1."""


class Policy(StrEnum):
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    PREFIX_ONLY = "prefix_only"
    COST = "cost"


def queued_tokens(table: FleetTable, slots: Ints) -> Ints:
    """[n] work ahead of a new request."""
    return np.asarray(table.waiting_tokens[slots] + DECODE_ROW_TOKENS * table.requests[slots])


def choose_by(policy: Policy, load: Ints, depths: Ints, turn: int, chance: Chance) -> int:
    """A place in the columns `load` and `depths`, [n] with n >= 1."""
    count = len(load)
    if policy is Policy.ROUND_ROBIN:
        return turn % count
    if policy is Policy.POWER_OF_TWO and count > 2:
        first = int(chance() * count)
        second = (first + 1 + int(chance() * (count - 1))) % count
        return first if load[first] <= load[second] else second
    if policy is Policy.PREFIX_ONLY:
        deepest = np.flatnonzero(depths == depths.max())
        return int(deepest[lowest(load[deepest], chance)])
    return lowest(load, chance)


def lowest(values: Ints | Floats, chance: Chance) -> int:
    """The place of the least value; chance decides among equals."""
    ties = np.flatnonzero(values <= values.min())
    return int(ties[int(chance() * len(ties))]) if len(ties) > 1 else int(ties[0])

"""How gateways choose workers: the `gateway.routing` section. Weights are on terms of `router.core.cost`, in
milliseconds each; those that are not here are fixed by measurement (`router.core.settings`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.config.section import Milliseconds, Section
from router.core.settings import RoutingSettings

Weight = Annotated[float, Field(ge=0, le=1e6)]
_DEFAULT = RoutingSettings()


class RoutingConfig(Section):
    policy: Literal["cost", "round_robin", "least_loaded", "power_of_two", "prefix_only"] = "cost"
    """cost: the plan with the lowest predicted cost. The others are there to be compared with."""
    queue_weight: Annotated[float, Field(gt=0, le=1e6)] = _DEFAULT.queue_weight
    """What waiting behind others counts beside prefill time; above 1 balances more, below it keeps more together."""
    decode_weight: Weight = _DEFAULT.decode_weight
    """What time after the first token counts."""
    eviction_weight: Weight = _DEFAULT.eviction_weight
    """What cached blocks that a request displaces count."""
    duplication_weight: Weight = _DEFAULT.duplication_weight
    """What second copies of a prefix count."""
    session_ms: Milliseconds = _DEFAULT.session_ms
    """Price of leaving the worker that a session was at last."""
    topology_ms: Milliseconds = _DEFAULT.topology_ms
    """Price of a prefill and a decode worker on different nodes."""
    fetch_overhead_ms: Milliseconds = _DEFAULT.fetch_overhead_ms
    """What reading a prefix from another worker costs whatever its length."""
    max_index_entries: Annotated[int, Field(ge=1024, le=1 << 30)] = 4_000_000
    """Bound of the prefix index in pairs of a block and a worker that has it, about 130 bytes each."""

    def settings(self) -> RoutingSettings:
        return RoutingSettings(**self.model_dump(exclude={"policy", "max_index_entries"}))

"""What the router's cost weighs, and with how much. Weights are pure numbers on milliseconds; 1.0 is face value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """Of one gateway. `*_weight`: on a term of `router.core.cost.TERMS`; `*_ms`: the price of a preference missed."""

    queue_weight: float = 1.0
    prefill_weight: float = 1.0
    decode_weight: float = 0.25
    interference_weight: float = 0.25
    """Of both: nobody waits for a later token as for the first. Measured: at 1.0 a prompt rather queues behind others
    than beside decodes, and the 99th percentile of the first token is 10 % later."""
    contention_weight: float = 1.0
    least_contention: float = 0.25
    """Later milliseconds that one of prefill costs at least: where nobody waits now, a burst may be on its way."""
    most_contention: float = 4.0
    """Most later milliseconds that one of prefill is taken to cost."""
    pressure_weight: float = 1.0
    eviction_weight: float = 1.0
    duplication_weight: float = 1.0
    deadline_weight: float = 10.0
    """Milliseconds that one of lateness is worth."""
    session_ms: float = 1.0
    adapter_ms: float = 50.0
    topology_ms: float = 1.0
    restored_share: float = 0.1
    """Cached blocks that lie in a lower tier, of a worker that has one."""
    default_block_ms: float = 0.5
    """Transfer of a block until a lane has been measured."""
    fetch_overhead_ms: float = 5.0
    """Lease, first read and check, whatever the blocks."""
    least_fetch_blocks: int = 2
    expect_s: float = 2.0
    """How long the blocks of a sent request are expected beyond three times its predicted time to the first token."""
    busy_half_life_s: float = 10.0
    """Of the average that says how busy the fleet is."""
    most_explained: int = 256
    """Candidates kept for `explain`, the cheapest."""

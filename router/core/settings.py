"""What the router's cost weighs, and with how much. Weights are pure numbers on milliseconds; 1.0 is face value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """Of one gateway. `*_weight`: on a term of `router.core.cost.TERMS`; `*_ms`: the price of a preference missed."""

    queue_weight: float = 1.0
    """Above 0. That of the prefill is 1.0: the others are relative to it."""
    decode_weight: float = 0.2
    interference_weight: float = 0.2
    """Both below 1: a millisecond in the middle of an answer is missed less than one before it begins."""
    contention_weight: float = 1.0
    least_contention: float = 0.1
    most_contention: float = 4.0
    """Bounds of the later milliseconds that one of prefill is taken to cost."""
    pressure_weight: float = 1.0
    eviction_weight: float = 1.0
    duplication_weight: float = 0.25
    """Share of the copied blocks' price; a hot prefix earns its copies back."""
    redundant_weight: float = 0.5
    """Price of a millisecond of prefill that makes blocks which another worker has."""
    sibling_weight: float = 1.0
    """The same of blocks that another worker is making at this moment, times the square of how many are. It keeps a
    burst of siblings together: what each would gain elsewhere is small, and all of them would go.
    """
    deadline_weight: float = 10.0
    """Milliseconds that one of lateness is worth."""
    session_ms: float = 1.0
    adapter_ms: float = 50.0
    topology_ms: float = 1.0
    chunk_tokens: int = 512
    """Prompt tokens that a worker is taken to compute in a step."""
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

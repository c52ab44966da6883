"""What the engine asks of a runner: it computes a StepPlan over KV memory that it owns. Implementations: TorchRunner,
FakeRunner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvtransfer.core.layout import KvLayout
from workers.core.plan import StepPlan, StepResult

KvPool = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory that only a GPU and its transports can address."""

    address: int
    num_bytes: int
    device_index: int


class Runner(Protocol):
    """Used by one engine thread. The pool's memory may be read and written by transports between and during steps,
    block by block: which blocks, is the scheduler's promise.
    """

    kv_pool: KvPool | DeviceMemory
    """Flat uint8 view of the whole pool, num_blocks * layout.block_bytes bytes."""
    lane_pool: KvPool | DeviceMemory
    """The pool and, behind it, the blocks of `kvtransfer.probe`: what transports register."""
    host_pool: KvPool
    """The same of host memory, host_blocks * layout.block_bytes bytes; tiers copy to and from it beside steps."""
    layout: KvLayout
    num_blocks: int
    host_blocks: int
    """Blocks of host memory, for preempted requests and for cached blocks."""
    host_copy_block_s: float
    """Seconds to copy one block to the host, or back, as the warm-up measured; 0 without host blocks."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    exact_rows: str
    """Which row counts give bit-equal rows, in words; empty when nothing was tested."""
    weight_storage: str
    """How the weights are kept in memory, in words."""

    @property
    def counters(self) -> Mapping[str, float]:
        """What it counts of its own, since the start."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Copy to the host, give back and take memory, copy from the host and in the pool, compute the rows, write
        their KV, sample.

        Raises InvariantError for an impossible plan.
        """
        ...

    def warm_up(self) -> None:
        """Touch memory and code that the first requests would wait for. Leaves the pool's content undefined."""
        ...

    def identity_fields(self) -> Mapping[str, bytes | str | int]:
        """The fields of `kvtransfer.core.identity.IDENTITY_FIELDS`."""
        ...

    def fingerprint(self) -> bytes:
        """`root_hash(identity_fields())`: workers exchange KV only when theirs are equal."""
        ...

    def memory_plan(self) -> dict[str, int]:
        """Bytes by use: weights, workspace, kv, block_metadata."""
        ...

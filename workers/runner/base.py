"""What the engine asks of a runner: it computes a StepPlan over KV memory that it owns. Implementations: TorchRunner,
FakeRunner. One that can begin a step before the last one is over is a StepQueue as well; `workers.runner.threaded`
makes one of any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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


@runtime_checkable
class StepQueue(Protocol):
    """Steps that run one after another, in the order in which they were begun; two at most are under way.

    `Runner.run(plan)` is `submit` and `collect` with none under way.
    """

    def submit(self, plan: StepPlan) -> None:
        """Begin a step, behind the one that runs. Its lists may grow as soon as this returns: what a step needs of them
        is read by then. Tokens of the step before are put where the plan has -1 - k."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step. Raises what `Runner.run` raises."""
        ...

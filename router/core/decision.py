"""What the router is asked and what it answers: records, with their candidates as columns. No logic."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from router.core.placement import Mode, WorkerKey


class PlanKind(StrEnum):
    """See `router.core.plans`. A plan with a fetch follows the same without one."""

    PAIR = "pair"
    FETCH_PAIR = "fetch_pair"
    WHOLE = "whole"
    FETCH_WHOLE = "fetch_whole"
    HOLDER_WHOLE = "holder_whole"
    DECODE = "decode"


KINDS = tuple(PlanKind)


@dataclass(frozen=True, slots=True)
class RouteAsk:
    """A request to place. `num_tokens`: prompt and output so far; `keys`: of its full blocks, in order."""

    request_id: str
    num_tokens: int
    keys: tuple[int, ...] = ()
    max_tokens: int = 1
    """Output tokens that may still come."""
    expected_output_tokens: int = 1
    mode: Mode = Mode.AUTO
    excluded: Collection[WorkerKey] = ()
    avoided: Collection[WorkerKey] = ()
    """Taken only when nobody else can."""
    tenant: str = ""
    session: str = ""
    adapter: str = ""
    time_left_s: float | None = None
    no_cache: bool = False
    may_wait: bool = False
    """`choose` may answer that it is better to ask again when the next load or cache change has come: its prefix is
    being computed, or read, where it could use it."""

    @property
    def most_tokens(self) -> int:
        """Tokens of KV that it may need in the end."""
        return self.num_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks 0 to `num_blocks` of the prompt are read from `source` before the prefill."""

    source: WorkerKey
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """Those of a decision that were kept, the cheapest, as columns [n]."""

    roster: tuple[WorkerKey | None, ...]
    """Who had each slot then; slots are reused."""
    kinds: NDArray[np.int8]
    """Places in `KINDS`."""
    slots: NDArray[np.int32]
    cached_blocks: NDArray[np.int32]
    """Not to be computed there: held, or fetched."""
    fetched_blocks: NDArray[np.int32]
    terms: NDArray[np.float32]
    """[n, NUM_TERMS] weighted milliseconds."""
    considered: int
    """How many there were."""

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen, and enough to say why."""

    kind: PlanKind
    worker: WorkerKey
    whole: bool
    fetch: Fetch | None
    reason: str
    cost_ms: float
    terms: tuple[float, ...]
    """In the order of `router.core.cost.TERMS`."""
    held_blocks: int
    """Of the prompt, at that worker already."""
    cached_blocks: int
    """Not computed there, fetched ones included."""
    predicted_ttft_ms: float
    booked_ms: float
    """Work ahead of later requests that it adds there."""
    diverged_at_block: int
    """The first block of the prompt that no usable worker holds."""
    candidates: Candidates

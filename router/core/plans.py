"""The plans that a request may have, as columns, and the one that was chosen (SPEC E2). It books and sends nothing.

| kind | who computes the prompt | who decodes |
| --- | --- | --- |
| pair | a prefill worker, the holder or another | a decode worker chosen when the prefill starts |
| fetch_pair | the same, after it fetched the prefix from a holder | the same |
| whole | a colocated worker; any worker when its pool is down | the same worker |
| fetch_whole | the same, after it fetched the prefix | the same worker |
| holder_whole | the decode worker that holds the conversation | the same worker |
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from router.core.cost import Floats, Ints
from router.core.fleet_table import COLOCATED, DECODE, PREFILL, FleetTable
from router.core.placement import Mode, WorkerKey

Mask = NDArray[np.bool_]


class PlanKind(StrEnum):
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
    """Columns over candidates, [n]; `terms`: [terms, n] weighted milliseconds."""

    roster: tuple[WorkerKey | None, ...]
    """Who had each slot then; slots are reused."""
    kinds: Ints
    """Places in `KINDS`."""
    slots: Ints
    cached_blocks: Ints
    fetched_blocks: Ints
    terms: Floats

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
    cached_blocks: int
    """Not computed there, fetched ones included."""
    predicted_ttft_ms: float
    prefill_ms: float
    """Prefill work that it adds there."""
    diverged_at_block: int
    """The first block of the prompt that no usable worker holds."""
    candidates: Candidates
    chosen: int
    """Its place among the candidates."""


@dataclass(frozen=True, slots=True)
class Eligible:
    """Slots by the part that they may play in this request."""

    prefill: Mask
    whole: Mask
    holder: Mask
    """Decode workers that may serve it whole, if they hold the conversation."""
    decode: Mask
    reason: str


def ready_mask(
    table: FleetTable, most_tokens: int, excluded: Collection[WorkerKey], avoided: Collection[WorkerKey]
) -> Mask:
    """[num_slots] workers that can take it. Closed and avoided ones only when there is nobody else."""
    count = table.num_slots
    ready = table.live[:count] & (table.capacity_tokens[:count] >= most_tokens)
    _remove(ready, table, excluded)
    willing = ready & ~table.closed[:count]
    _remove(willing, table, avoided)
    return willing if willing.any() else ready


def eligible(table: FleetTable, mode: Mode, ready: Mask) -> Eligible | None:
    """None when no worker can take it now. Any role serves whole requests when a pool is empty."""
    count = table.num_slots
    role, lane = table.role[:count], table.lane[:count]
    nobody = np.zeros(count, np.bool_)
    decode, colocated = ready & (role == DECODE), ready & (role == COLOCATED)
    prefill = ready & (role == PREFILL)
    if decode.any():
        prefill &= np.isin(lane, np.unique(lane[decode]))
    if mode is Mode.DISAGGREGATED:
        source = prefill if prefill.any() else colocated
        target = decode if decode.any() else colocated
        if not source.any() or not target.any() or (source.sum() == 1 and (source == target).all()):
            return None
        return Eligible(source, nobody, nobody, target, "mode")
    if mode is Mode.AUTO and prefill.any() and decode.any():
        return Eligible(prefill, colocated, decode, decode, "pools")
    for pool, name in ((colocated, "colocated"), (decode, "pool_down"), (prefill, "pool_down")):
        if pool.any():
            return Eligible(nobody, pool, nobody, nobody, "mode" if mode is Mode.COLOCATED else name)
    return None


def decode_pool(table: FleetTable, ready: Mask, source: int | None) -> Ints:
    """Slots that may adopt from `source`: on its lane, decode workers first, never itself."""
    count = table.num_slots
    pool = ready.copy()
    if source is not None:
        pool &= table.lane[:count] == table.lane[source]
        pool[source] = False
    decode = pool & (table.role[:count] == DECODE)
    return np.flatnonzero(decode if decode.any() else pool & (table.role[:count] == COLOCATED))


def _remove(mask: Mask, table: FleetTable, workers: Collection[WorkerKey]) -> None:
    for key in workers:
        slot = table.slot(key)
        if slot is not None:
            mask[slot] = False

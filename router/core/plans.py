"""The plans that a request may have, as columns, and the one that was chosen (SPEC E2). It books and sends nothing.

| kind | who computes the prompt | who decodes |
| --- | --- | --- |
| pair | a prefill worker, the holder or another | a decode worker chosen when the prefill starts |
| fetch_pair | the same, after it fetched the prefix from a holder | the same |
| whole | a colocated worker; any other when a pool is down, or where that is cheaper | the same worker |
| fetch_whole | the same, after it fetched the prefix | the same worker |
| holder_whole | a decode worker that holds the conversation | the same worker |

At a prefill worker there is one of pair and whole, whichever costs less there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from router.core.arrays import Floats, Ints, Mask
from router.core.cost import Parts, Prefix, Priced, Weights, Work, price, price_decode
from router.core.fleet_table import COLOCATED, DECODE, PREFILL, FleetTable
from router.core.lanes import Lanes
from router.core.placement import Mode, WorkerKey
from router.core.settings import RoutingSettings


@dataclass(frozen=True, slots=True)
class Eligible:
    """Who may do what, and why those."""

    parts: Parts
    reason: str

    def only(self, slot: int) -> Eligible:
        """The same with one worker to prefill at."""
        one = np.zeros_like(self.parts.prefill)
        one[slot] = True
        prefill, whole, _, decode = self.parts
        return Eligible(Parts(prefill & one, whole & one, np.zeros_like(one), decode), self.reason)


def weights_of(settings: RoutingSettings) -> Weights:
    """As the compiled loops take them."""
    return Weights(
        queue=settings.queue_weight,
        prefill=settings.prefill_weight,
        decode=settings.decode_weight,
        interference=settings.interference_weight,
        contention=settings.contention_weight,
        least_contention=settings.least_contention,
        most_contention=settings.most_contention,
        pressure=settings.pressure_weight,
        eviction=settings.eviction_weight,
        duplication=settings.duplication_weight,
        deadline=settings.deadline_weight,
        session_ms=settings.session_ms,
        adapter_ms=settings.adapter_ms,
        topology_ms=settings.topology_ms,
        restored_share=settings.restored_share,
        fetch_overhead_ms=settings.fetch_overhead_ms,
        least_fetch_blocks=settings.least_fetch_blocks,
    )


def ready_mask(
    table: FleetTable,
    most_tokens: int,
    excluded: Collection[WorkerKey],
    avoided: Collection[WorkerKey],
    willing: bool = True,
) -> Mask:
    """[num_slots] workers that can take it; `willing`: only those that are not closed."""
    count = table.num_slots
    ready: Mask = table.live[:count] & (table.capacity_tokens[:count] >= most_tokens)
    if willing:
        ready &= ~table.closed[:count]
    for key in (*excluded, *avoided):
        slot = table.slot(key)
        if slot is not None:
            ready[slot] = False
    return ready


def eligible(table: FleetTable, mode: Mode, ready: Mask) -> Eligible | None:
    """None when no worker can take it now. Any role serves whole requests when a pool is empty."""
    count = table.num_slots
    lane, nobody = table.lane[:count], np.zeros(count, np.bool_)
    prefill, decode, colocated = (ready & table.by_role[code] for code in (PREFILL, DECODE, COLOCATED))
    if mode is Mode.DISAGGREGATED:
        for source, target in ((prefill, decode), (prefill, colocated), (colocated, decode), (colocated, colocated)):
            on_lane = np.bincount(lane[target], minlength=table.num_lanes)[lane]
            paired = source & (on_lane > target)
            if paired.any():
                return Eligible(Parts(paired, nobody, nobody, target), "mode")
        return None
    if table.num_lanes > 1 and decode.any():
        prefill &= np.bincount(lane[decode], minlength=table.num_lanes)[lane] > 0
    if mode is Mode.AUTO and prefill.any() and decode.any():
        return Eligible(Parts(prefill, colocated, prefill | decode, decode), "pools")
    for pool, name in ((colocated, "colocated"), (decode, "pool_down"), (prefill, "pool_down")):
        if pool.any():
            return Eligible(Parts(nobody, pool, nobody, nobody), "mode" if mode is Mode.COLOCATED else name)
    return None


def decode_pool(table: FleetTable, ready: Mask, source: int | None) -> Mask:
    """Slots that may adopt from `source`: who can read from it, decode workers first, never itself."""
    count = table.num_slots
    pool = ready.copy()
    if source is not None:
        pool &= table.lane[:count] == table.lane[source]
        pool[source] = False
        pool[table.apart_from(source)] = False
    decode, colocated = pool & table.by_role[DECODE], pool & table.by_role[COLOCATED]
    return decode if decode.any() else colocated


def plan_all(
    table: FleetTable, lanes: Lanes, parts: Parts, prefix: Prefix, work: Work, weights: Weights, terms: Floats
) -> Priced:
    """terms: room for `Priced.terms`."""
    block_ms = lanes.block_ms(table.lane[: table.num_slots], table.num_lanes)
    return Priced(terms, *price(table.columns, parts, prefix, block_ms, work, weights, terms))


def holder_of(table: FleetTable, prefix: Prefix, slot: int) -> int:
    """The one of the workers on that slot's lane that most can be fetched from that can send first."""
    n = table.num_slots
    able = np.flatnonzero(table.live[:n] & (table.lane[:n] == table.lane[slot]))
    held = prefix.readable[able]
    deepest = able[held == held.max()]
    return int(deepest[prefix.reads_ms[deepest].argmin()])


def decode_all(
    table: FleetTable,
    lanes: Lanes,
    pool: Mask,
    depths: Ints,
    work: Work,
    weights: Weights,
    source: int | None,
) -> tuple[Floats, Floats]:
    """Of adopting the request at each slot of `pool` from a prefill at `source`: see `price_decode`."""
    block_ms = lanes.block_ms(table.lane[: table.num_slots], table.num_lanes)
    terms, costs = price_decode(table.columns, pool, depths, block_ms, -1 if source is None else source, work, weights)
    return terms, costs

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

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import numpy as np

from router.core.cost import (
    DECODING,
    EVICTION,
    INTERFERENCE,
    PRESSURE,
    TOPOLOGY,
    TRANSFER,
    Affinity,
    Mask,
    Work,
    decode_terms,
    holding,
    later_share,
    prefill_terms,
)
from router.core.decision import KINDS, PlanKind
from router.core.fleet_table import COLOCATED, DECODE, PREFILL, FleetTable
from router.core.lanes import Lanes
from router.core.placement import Mode, WorkerKey
from router.core.settings import RoutingSettings
from router.core.step_columns import Floats, Ints

_PAIR, _WHOLE, _HOLDER_WHOLE = (KINDS.index(k) for k in (PlanKind.PAIR, PlanKind.WHOLE, PlanKind.HOLDER_WHOLE))


@dataclass(frozen=True, slots=True)
class Eligible:
    """Slots by the part that they may play in this request."""

    prefill: Mask
    whole: Mask
    beside: Mask
    """Of both pools: they may serve it whole where that is cheaper."""
    decode: Mask
    reason: str

    def only(self, slot: int) -> Eligible:
        """The same with one worker to prefill at."""
        one = np.zeros_like(self.prefill)
        one[slot] = True
        return Eligible(self.prefill & one, self.whole & one, np.zeros_like(one), self.decode, self.reason)


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
                return Eligible(paired, nobody, nobody, target, "mode")
        return None
    if table.num_lanes > 1 and decode.any():
        prefill &= np.bincount(lane[decode], minlength=table.num_lanes)[lane] > 0
    if mode is Mode.AUTO and prefill.any() and decode.any():
        return Eligible(prefill, colocated, prefill | decode, decode, "pools")
    for pool, name in ((colocated, "colocated"), (decode, "pool_down"), (prefill, "pool_down")):
        if pool.any():
            return Eligible(nobody, pool, nobody, nobody, "mode" if mode is Mode.COLOCATED else name)
    return None


def decode_pool(table: FleetTable, ready: Mask, source: int | None) -> Mask:
    """Slots that may adopt from `source`: on its lane, decode workers first, never itself."""
    count = table.num_slots
    pool = ready.copy()
    if source is not None:
        pool &= table.lane[:count] == table.lane[source]
        pool[source] = False
    decode, colocated = pool & table.by_role[DECODE], pool & table.by_role[COLOCATED]
    return decode if decode.any() else colocated


@dataclass(frozen=True, slots=True)
class Plans:
    """All candidates of a request, [k, n] over slots. Row 0 computes what a worker lacks; row 1 fetches first, from
    whoever has most now; row 2 waits for whoever will have most soon, and fetches then.
    """

    terms: Floats
    """[NUM_TERMS, k, n] weighted milliseconds."""
    usable: Mask
    depths: Ints
    """[n] blocks that each worker holds, or will."""
    fetched: Ints
    """[k, n] blocks that are fetched."""
    source: Callable[[int], int]
    """Slot -> the slot that a fetch to it reads from."""
    waits: Mask
    """[k, n] the request should not be sent yet."""
    pairs: Mask
    """[n] where only the prompt is computed."""
    holders: Mask
    """[n] decode workers that hold the conversation."""

    def kinds(self, rows: Ints | int, slots: Ints | int) -> Ints:
        """Places in `KINDS`."""
        kinds = np.where(self.pairs[slots], _PAIR, _WHOLE) + (self.fetched[rows, slots] > 0)
        return np.where((kinds == _WHOLE) & self.holders[slots], _HOLDER_WHOLE, kinds)


@dataclass(frozen=True, slots=True)
class Coming:
    """Blocks that workers will have soon, because of requests that were sent to them. All [n]."""

    readable: Ints
    """Blocks that each worker has now, of those that it has or will have."""
    wait_ms: Floats
    """Until it has the rest."""
    is_read: Mask
    """The rest comes from a peer: a request sent there now would not wait for it, as it does for what is computed."""
    reads_ms: Floats
    """Until what each was asked to send before is sent."""


def plan_all(
    table: FleetTable,
    lanes: Lanes,
    part: Eligible,
    depths: Ints,
    coming: Coming | None,
    work: Work,
    settings: RoutingSettings,
    affinity: Affinity,
) -> Plans:
    """depths: [n] over the slots ever used; coming: None: neither fetch nor wait."""
    n = len(depths)
    starts = part.prefill | part.whole | part.beside
    block_ms = lanes.block_ms(table.lane[:n], table.num_lanes)
    nobody, at_once = np.zeros(n, np.bool_), np.zeros(n)
    usable, fetched, fetch_ms, waits = [starts], [np.zeros(n, np.int64)], [at_once], [nobody]
    source = partial(holder_of, table, depths, at_once)
    if coming is not None and work.best_depth >= settings.least_fetch_blocks:
        readable, queue_ms = coming.readable, table.queue_ms[:n]
        source = partial(holder_of, table, readable, coming.reads_ms)
        if coming.is_read.any():
            waits[0] = coming.is_read
            fetch_ms[0] = np.maximum(coming.wait_ms - queue_ms, 0.0) * coming.is_read
        now = _best_on_lane(table, readable)
        soon = _best_on_lane(table, depths)
        for best, wait_ms in (
            (now, _reads_ahead(table, readable, now, coming.reads_ms)),
            (soon, _least_wait(depths, coming.wait_ms)),
        ):
            more = best - depths
            able = starts & (more >= settings.least_fetch_blocks)
            if best is soon:
                able &= best > now
            if able.any():
                usable.append(able)
                fetched.append(np.maximum(more, 0))
                # It is read while the worker is busy with what is ahead.
                read_ms = settings.fetch_overhead_ms + more * block_ms
                fetch_ms.append(np.maximum(wait_ms + read_ms - queue_ms, 0.0))
                waits.append(able if best is soon else nobody)
    held = holding(table, depths, work, settings)
    rows = np.array(fetched)
    terms = prefill_terms(table, depths, rows, np.array(fetch_ms), held, work, settings, affinity)
    decoding = decode_terms(table, depths, held, work, settings, 0.0)
    pairs, whole = part.prefill, part.whole | part.beside
    if pairs.any():
        near, far = _decode_prices(table, part, decoding.sum(axis=0))
        topology = np.minimum(near - far, settings.topology_ms)
        size = table.block_sizes
        left = np.minimum(np.maximum(work.num_tokens - depths * size, 1), settings.chunk_tokens)
        transfer = -(-left // size) * block_ms
        both = pairs & whole
        if both.any():
            # It decodes where prompts are computed all the time, which hold it up.
            decoding[DECODING] *= 1.0 + later_share(work, settings) * both
            apart = held.eviction_ms + far + topology + transfer
            together = decoding[DECODING] + decoding[INTERFERENCE] + decoding[PRESSURE] + decoding[EVICTION]
            pairs = pairs & ~(both & (together < apart))
            whole = whole & ~pairs
        terms[DECODING] += pairs * far
        terms[TOPOLOGY] = pairs * topology
        terms[TRANSFER] = pairs * transfer
    if whole.any():
        for term in (DECODING, INTERFERENCE, PRESSURE):
            terms[term] += decoding[term] * whole
        terms[EVICTION] = np.where(whole, decoding[EVICTION], terms[EVICTION])
    holders = part.beside & part.decode & (depths > 0)
    return Plans(terms, np.array(usable), depths, rows, source, np.array(waits), pairs, holders)


def holder_of(table: FleetTable, readable: Ints, reads_ms: Floats, slot: int) -> int:
    """The one of the workers on that slot's lane that most can be fetched from that can send first."""
    n = len(readable)
    able = np.flatnonzero(table.live[:n] & (table.lane[:n] == table.lane[slot]))
    deepest = able[readable[able] == readable[able].max()]
    return int(deepest[reads_ms[deepest].argmin()])


def decode_all(
    table: FleetTable,
    lanes: Lanes,
    depths: Ints,
    work: Work,
    settings: RoutingSettings,
    source: int | None,
) -> Floats:
    """[NUM_TERMS, n] of adopting the request at each slot from a prefill at `source`."""
    n = len(depths)
    size = table.block_sizes
    last = -(-min(work.num_tokens, settings.chunk_tokens) // size)
    lacks = np.minimum(np.maximum(-(-work.num_tokens // size) - depths, 1), last)
    transfer = lacks * lanes.block_ms(table.lane[:n], table.num_lanes)
    held = holding(table, depths, work, settings)
    terms = decode_terms(table, depths, held, work, settings, transfer)
    if source is not None:
        terms[TOPOLOGY] = settings.topology_ms * (table.node[:n] != table.node[source])
    return terms


def _reads_ahead(table: FleetTable, readable: Ints, best: Ints, reads_ms: Floats) -> Floats | float:
    """[n] until the first of those on each one's lane that hold most can send."""
    if not reads_ms.any():
        return 0.0
    least = np.full(table.num_lanes, np.inf)
    lane = table.lane[: len(readable)]
    able = table.live[: len(readable)] & (readable == best)
    np.minimum.at(least, lane[able], reads_ms[able])
    return least[lane]


def _least_wait(depths: Ints, wait_ms: Floats) -> float:
    """Until the first of those that will have most has it."""
    return float(wait_ms[depths == depths.max()].min())


def _best_on_lane(table: FleetTable, depths: Ints) -> Ints:
    """[n] the most blocks that a live worker on each one's lane holds."""
    n = len(depths)
    alive = depths * table.live[:n]
    if table.num_lanes == 1:
        return np.full(n, alive.max(initial=0))
    best = np.zeros(table.num_lanes, np.int64)
    np.maximum.at(best, table.lane[:n], alive)
    return best[table.lane[:n]]


def _decode_prices(table: FleetTable, part: Eligible, prices: Floats) -> tuple[Floats, Floats]:
    """([n] of the cheapest decode worker at the same place, [n] on the same lane). What a pair costs at its decode
    worker does not depend on who prefills, so pairs need no product of the two pools.
    """
    n = len(prices)
    pool = np.flatnonzero(part.decode)
    lane, place = np.full(table.num_lanes, np.inf), np.full(table.num_places, np.inf)
    np.minimum.at(lane, table.lane[pool], prices[pool])
    np.minimum.at(place, table.place[pool], prices[pool])
    # A source without a partner is taken only when nobody has one; then it costs all the same.
    lane[np.isinf(lane)] = 0.0
    return place[table.place[:n]], lane[table.lane[:n]]

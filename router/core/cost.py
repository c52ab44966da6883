"""What each candidate plan costs, in milliseconds by term, for all candidates at once (SPEC E1).

Everything is time that somebody waits: this request (queue, prefill, fetch, hand-off, decode), those that decode where
it would run (interference), and those that come later and find less free time or fewer cached blocks (contention,
eviction, duplication). Preferences (session, adapter, topology, lateness) are prices in the settings. Does not:
choose, or know who may do what.

Prefilling w ms where a share `busy` of the time is taken delays those that come in that busy period by about
w * busy / (1 - busy) in all (M/G/1, Kleinrock 1975, volume 1, section 5.8): the `contention` of prefill work. Waiting
behind others' work delays only oneself, so the queue has no such part.

The loops over workers are compiled by numba: as a few hundred operations of numpy on short columns a choice took three
times as long. Numba looks at this file alone to see whether what it keeps compiled is still true, so all that the loops
use is here, or is passed to them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from router.core.arrays import Floats, Ints, Mask

TERMS = (
    *("queue", "memory_wait", "prefill", "restore", "fetch", "transfer", "decode", "interference", "contention"),
    *("pressure", "eviction", "duplication", "session", "adapter", "topology", "deadline"),
)
NUM_TERMS = len(TERMS)
(QUEUE, MEMORY_WAIT, PREFILL_WORK, RESTORE, FETCH, TRANSFER, DECODING, INTERFERENCE) = range(8)
(CONTENTION, PRESSURE, EVICTION, DUPLICATION, SESSION, ADAPTER, TOPOLOGY, DEADLINE) = range(8, NUM_TERMS)
NUM_FIRST_TOKEN_TERMS = FETCH + 1
"""The first so many terms are together the predicted time to the first token, see `first_token_ms`."""
USUAL_CHUNK_TOKENS = 512
"""Most prompt tokens of one request in a step of a worker that does not tell, or is not known."""
NUM_WAYS = 3
"""To come by the prefix: compute what is missing there (0), fetch it from whoever has most now (1), or wait for whoever
will have most soon and fetch then (2)."""
PAIR_KIND, WHOLE_KIND, HOLDER_KIND = 0, 2, 4
"""Places in `router.core.decision.KINDS`; that of a plan with a fetch follows."""


class Columns(NamedTuple):
    """The fleet: [n] over slots, from `router.core.fleet_table` and `router.core.step_columns`, which say more."""

    live: Mask
    decodes_only: Mask
    lane: Ints
    node: Ints
    place: Ints
    block_size: Ints
    chunk_tokens: Ints
    rows: Ints
    context: Ints
    output_left: Ints
    evictable_blocks: Ints
    unused_blocks: Ints
    available_blocks: Ints
    growth_blocks: Ints
    queue_ms: Floats
    eviction_ms: Floats
    restore_ms: Floats
    token_ms: Floats
    step_ms: Floats
    next_step_ms: Floats
    context_ms: Floats
    beside_ms: Floats
    chunk_ms: Floats
    pair_ms: Floats
    prompt_ms: Floats
    at_zero: Floats
    """[n, pieces], as `slope`."""
    slope: Floats
    knots: Ints
    """[pieces]"""


class Weights(NamedTuple):
    """Of `router.core.settings`, which says what they are."""

    queue: float
    prefill: float
    decode: float
    interference: float
    contention: float
    least_contention: float
    most_contention: float
    pressure: float
    eviction: float
    duplication: float
    deadline: float
    session_ms: float
    adapter_ms: float
    topology_ms: float
    restored_share: float
    fetch_overhead_ms: float
    least_fetch_blocks: int


class Work(NamedTuple):
    """What the request needs, whoever serves it."""

    num_tokens: int
    """Prompt and the output so far."""
    output_tokens: int
    """Expected still."""
    best_depth: int
    """Blocks that the best holder has."""
    busy: float
    """0..1, the share of time in which a prefill finds another one ahead of it."""
    time_left_ms: float
    """Infinite without a deadline."""
    session: int
    """The slot that it would rather have; -1: any."""
    adapter: Mask
    """[n] slots that have its adapter loaded; [0]: it has none."""


class Parts(NamedTuple):
    """[n] slots by the part that they may play in this request."""

    prefill: Mask
    whole: Mask
    beside: Mask
    """Of both pools: they may serve it whole where that is cheaper."""
    decode: Mask


class Prefix(NamedTuple):
    """Where the prompt's blocks are, and will be. [n] each."""

    depths: Ints
    """Leading blocks that each slot has, or will have, because of requests that were sent there."""
    readable: Ints
    """Those of them that it has now."""
    wait_ms: Floats
    """Until it has the rest."""
    is_read: Mask
    """The rest comes from a peer: a request sent there now would not wait for it, as it does for what is computed."""
    reads_ms: Floats
    """Until what each was asked to send before is sent."""
    may_fetch: bool


class Priced(NamedTuple):
    """All candidates of a request: ways of `NUM_WAYS` by slots."""

    terms: Floats
    """[ways, n or more, NUM_TERMS] weighted milliseconds, where costs are finite. Until the next choice."""
    costs: Floats
    """[ways, n] their sums; infinite where there is no such plan."""
    fetched: Ints
    """[ways, n] blocks that are fetched."""
    waits: Mask
    """[ways, n] the request should not be sent yet."""
    kinds: Ints
    """[ways, n] places in `router.core.decision.KINDS`."""


def first_token_ms(terms: Floats, queue_weight: float) -> Floats:
    """[...] predicted time to the first token of [..., NUM_TERMS]: the queue at face value."""
    weighted = terms[..., :NUM_FIRST_TOKEN_TERMS].sum(axis=-1)
    if queue_weight in (0.0, 1.0):
        return np.asarray(weighted)
    return np.asarray(weighted + terms[..., QUEUE] * (1.0 / queue_weight - 1.0))


@njit(cache=True, error_model="numpy", fastmath={"reassoc"})
def price(c, parts, prefix, block_ms, work, weights, terms):  # type: ignore[no-untyped-def]
    """Of every way at every slot that may compute the prompt; see `Columns`, `Parts`, `Prefix`, `Work`, `Weights`.

    block_ms: [n] transfer of a block to or from each; terms: [ways, n or more, NUM_TERMS] to be filled in. Returns the
    other fields of `Priced`.
    """
    n = len(c.live)
    costs = np.full((NUM_WAYS, n), np.inf)
    fetched = np.zeros((NUM_WAYS, n), np.int64)
    waits = np.zeros((NUM_WAYS, n), np.bool_)
    kinds = np.zeros((NUM_WAYS, n), np.int64)
    now, soon, ahead_ms, soon_ms = _holders(c, prefix)
    # What memory and decode say of each slot, and the cheapest decode worker at each place and on each lane: what a
    # pair costs at its decode worker does not depend on who prefills, so pairs need no product of the two pools.
    held = np.zeros((n, 6))
    near_ms, far_ms = np.full(1 + c.place.max(), np.inf), np.full(len(now), np.inf)
    for slot in range(n):
        if parts.decode[slot] or parts.prefill[slot] or parts.whole[slot] or parts.beside[slot]:
            h = held[slot]
            h[0], h[1], h[2], h[3] = _holding(c, slot, prefix.depths[slot], work, weights)
            h[4], h[5] = _decoding(c, slot, work, weights)
            if parts.decode[slot]:
                lane, place = c.lane[slot], c.place[slot]
                whole_ms = h[0] + h[1] + h[3] + h[4] + h[5]
                near_ms[place] = min(near_ms[place], whole_ms)
                far_ms[lane] = min(far_ms[lane], whole_ms)
    for lane in range(len(far_ms)):
        # A source without a partner is taken only when nobody has one; then it costs all the same.
        if far_ms[lane] == np.inf:
            far_ms[lane] = 0.0
    later = later_share(work, weights)
    may_fetch = prefix.may_fetch and work.best_depth >= weights.least_fetch_blocks
    for slot in range(n):
        prefills, wholes = parts.prefill[slot], parts.whole[slot] or parts.beside[slot]
        if not (prefills or wholes):
            continue
        depth, size, lane = prefix.depths[slot], max(c.block_size[slot], 1), c.lane[slot]
        room_ms, pressure_ms, eviction_ms, whole_eviction_ms, decode_ms, interference_ms = held[slot]
        # What follows the prefill, there or at a decode worker.
        far = far_ms[lane]
        topology_ms = min(near_ms[c.place[slot]] - far, weights.topology_ms)
        left = min(max(work.num_tokens - depth * size, 1), c.chunk_tokens[slot])
        transfer_ms = -(-left // size) * block_ms[slot]
        is_pair = prefills
        if prefills and wholes:
            # It decodes where prompts are computed all the time, which hold it up.
            decode_ms *= 1.0 + later
            apart = eviction_ms + far + topology_ms + transfer_ms
            is_pair = decode_ms + interference_ms + pressure_ms + whole_eviction_ms >= apart
        kind = PAIR_KIND if is_pair else WHOLE_KIND
        # A decode worker that has nothing to do now is there for those that will come.
        rows = max(c.rows[slot], int(c.decodes_only[slot]))
        queue_ms = c.queue_ms[slot]
        for way in range(NUM_WAYS):
            more, fetch_ms = 0, 0.0
            if way == 0:
                if may_fetch and prefix.is_read[slot]:
                    waits[way, slot] = True
                    fetch_ms = max(prefix.wait_ms[slot] - queue_ms, 0.0)
            else:
                more = (now[lane] if way == 1 else soon[lane]) - depth
                if not may_fetch or more < weights.least_fetch_blocks or (way == 2 and soon[lane] <= now[lane]):
                    continue
                waits[way, slot] = way == 2
                # It is read while the worker is busy with what is ahead.
                read_ms = weights.fetch_overhead_ms + more * block_ms[slot]
                fetch_ms = max((ahead_ms[lane] if way == 1 else soon_ms) + read_ms - queue_ms, 0.0)
            fetched[way, slot] = more
            kinds[way, slot] = kind + (more > 0)
            if kind == WHOLE_KIND and not more and depth and parts.beside[slot] and parts.decode[slot]:
                kinds[way, slot] = HOLDER_KIND
            start = min((depth + more) * size, work.num_tokens - 1)
            compute_ms, alone_ms = prefill_ms(c, slot, work.num_tokens - start, start)
            t = terms[way, slot]
            t[:] = 0.0
            t[QUEUE] = weights.queue * queue_ms
            t[MEMORY_WAIT] = room_ms
            t[PREFILL_WORK] = weights.prefill * compute_ms
            t[RESTORE] = c.restore_ms[slot] * weights.restored_share * depth
            t[FETCH] = fetch_ms
            t[INTERFERENCE] = weights.interference * rows * max(compute_ms - alone_ms, 0.0)
            t[CONTENTION] = weights.contention * later * compute_ms
            t[DUPLICATION] = weights.duplication * max(work.best_depth - depth, 0) * c.eviction_ms[slot]
            if work.session >= 0 and work.session != slot:
                t[SESSION] = weights.session_ms
            if len(work.adapter) and not work.adapter[slot]:
                t[ADAPTER] = weights.adapter_ms
            if work.time_left_ms < np.inf:
                first = queue_ms + room_ms + t[PREFILL_WORK] + t[RESTORE] + fetch_ms
                t[DEADLINE] = weights.deadline * max(first - work.time_left_ms, 0.0)
            if is_pair:
                t[DECODING], t[TOPOLOGY], t[TRANSFER], t[EVICTION] = far, topology_ms, transfer_ms, eviction_ms
            else:
                t[DECODING], t[PRESSURE], t[EVICTION] = decode_ms, pressure_ms, whole_eviction_ms
                t[INTERFERENCE] += interference_ms
            costs[way, slot] = t.sum()
    return costs, fetched, waits, kinds


@njit(cache=True, error_model="numpy")
def price_decode(c, pool, depths, block_ms, source, work, weights):  # type: ignore[no-untyped-def]
    """Of adopting the request at each slot of `pool`: (terms [n, NUM_TERMS], costs [n], infinite elsewhere).

    depths: [n] blocks that each has; block_ms: [n] transfer of a block to each; source: where it is prefilled; -1: not
    known.
    """
    n = len(c.live)
    terms, costs = np.zeros((n, NUM_TERMS)), np.full(n, np.inf)
    chunk_tokens = c.chunk_tokens[source] if source >= 0 else USUAL_CHUNK_TOKENS
    for slot in range(n):
        if pool[slot]:
            room_ms, pressure_ms, _, eviction_ms = _holding(c, slot, depths[slot], work, weights)
            t = terms[slot]
            t[DECODING], t[INTERFERENCE] = _decoding(c, slot, work, weights)
            t[MEMORY_WAIT], t[PRESSURE], t[EVICTION] = room_ms, pressure_ms, eviction_ms
            # Of what it lacks, the blocks of the last chunk are sent when the first token is there.
            size = max(c.block_size[slot], 1)
            last = -(-min(work.num_tokens, chunk_tokens) // size)
            t[TRANSFER] = min(max(-(-work.num_tokens // size) - depths[slot], 1), last) * block_ms[slot]
            if source >= 0 and c.node[slot] != c.node[source]:
                t[TOPOLOGY] = weights.topology_ms
            costs[slot] = t.sum()
    return terms, costs


@njit(inline="always")
def prefill_ms(c, slot, tokens, start):  # type: ignore[no-untyped-def]
    """Of `tokens` (at least 1) prompt tokens after `start` cached ones: (the time beside the decodes there, how much of
    it those would have taken anyway)."""
    chunk_tokens = c.chunk_tokens[slot]
    steps, rest = tokens // chunk_tokens, tokens % chunk_tokens
    total = steps * c.chunk_ms[slot]
    if rest > 0:
        rows = rest + c.rows[slot]
        piece = 0
        while piece + 1 < len(c.knots) and c.knots[piece + 1] <= rows:
            piece += 1
        total += c.at_zero[slot, piece] + c.slope[slot, piece] * rows
        steps += 1
    total += steps * c.beside_ms[slot] + c.pair_ms[slot] * (tokens * (start + 0.5 * tokens)) + c.prompt_ms[slot]
    return total, steps * c.step_ms[slot]


@njit(inline="always")
def later_share(work, weights):  # type: ignore[no-untyped-def]
    """Milliseconds that those who come later wait for one of prefill."""
    later = work.busy / max(1.0 - work.busy, 1e-3)
    return min(max(weights.least_contention, later), weights.most_contention)


@njit(inline="always")
def _holding(c, slot, depth, work, weights):  # type: ignore[no-untyped-def]
    """What memory says of the request at a slot that has `depth` blocks of it. Milliseconds: waiting for room to
    prefill; the risk of being preempted while it decodes there, in prefill to be done again; prefill saved in the
    blocks that the prompt displaces; the same with the output to come."""
    size = max(c.block_size[slot], 1)
    need = -(-work.num_tokens // size) - depth
    end = need + work.output_tokens // size
    unused, available = c.unused_blocks[slot], c.available_blocks[slot]
    room_ms = 0.0
    if need > available:
        # Room comes back as decodes end; at a worker that only prefills, as the prefills ahead are handed on.
        room_ms = 1.0 * (need - available) * size
        if c.rows[slot] > 0:
            room_ms *= c.output_left[slot] / c.rows[slot] * c.step_ms[slot] / max(c.context[slot], 1)
        else:
            room_ms *= c.token_ms[slot]
    final = end + c.growth_blocks[slot]
    pressure_ms = 0.0
    if final > available:
        again_ms = c.token_ms[slot] * work.num_tokens + c.pair_ms[slot] * 0.5 * work.num_tokens * work.num_tokens
        pressure_ms = weights.pressure * again_ms * (final - available) / max(final, 1)
    price_ms, most = weights.eviction * c.eviction_ms[slot], c.evictable_blocks[slot]
    eviction_ms, whole_eviction_ms = min(max(need - unused, 0), most), min(max(end - unused, 0), most)
    return room_ms, pressure_ms, price_ms * eviction_ms, price_ms * whole_eviction_ms


@njit(inline="always")
def _decoding(c, slot, work, weights):  # type: ignore[no-untyped-def]
    """Milliseconds: (its decode at that slot, what those that decode there wait longer, until they or this one end)."""
    rows, output = c.rows[slot], c.output_left[slot]
    context = work.num_tokens + work.output_tokens // 2
    step_ms = c.next_step_ms[slot] + c.context_ms[slot] * context
    interference_ms = 0.0
    if rows > 0:
        shared = min(max(output, rows), rows * work.output_tokens)
        interference_ms = weights.interference * shared * max(step_ms - c.step_ms[slot], 0.0)
    return weights.decode * work.output_tokens * step_ms, interference_ms


@njit(cache=True, error_model="numpy")
def _holders(c, prefix):  # type: ignore[no-untyped-def]
    """By lane: the most blocks that a live slot has now, and soon, and when the first that has most now can send. And
    when the first that will have most of all has it, milliseconds."""
    lanes = 1 + c.lane.max()
    now, soon = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
    ahead_ms, most, soon_ms = np.zeros(lanes), 0, 0.0
    for slot in range(len(c.live)):
        lane, held, depth = c.lane[slot], prefix.readable[slot], prefix.depths[slot]
        if depth > most or (depth == most and prefix.wait_ms[slot] < soon_ms):
            most, soon_ms = depth, prefix.wait_ms[slot]
        if not c.live[slot]:
            continue
        soon[lane] = max(soon[lane], depth)
        if held > now[lane]:
            now[lane], ahead_ms[lane] = held, prefix.reads_ms[slot]
        elif held == now[lane] and held:
            ahead_ms[lane] = min(ahead_ms[lane], prefix.reads_ms[slot])
    return now, soon, ahead_ms, soon_ms

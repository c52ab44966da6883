"""What each candidate plan costs, in milliseconds by term, for all candidates at once (SPEC E1).

Everything is time that somebody waits: this request (queue, prefill, fetch, hand-off, decode), those that decode where
it would run (interference), and those that come later and find less free time or fewer cached blocks (contention,
eviction, duplication). Preferences (session, adapter, topology, lateness) are prices in the settings. Does not:
choose, or know which plans exist.

Prefilling w ms where a share `busy` of the time is taken delays those that come in that busy period by about
w * busy / (1 - busy) in all (M/G/1, Kleinrock 1975, volume 1, section 5.8): the `contention` of prefill work. Waiting
behind others' work delays only oneself, so the queue has no such part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router.core.fleet_table import DECODE, FleetTable
from router.core.settings import RoutingSettings
from router.core.step_columns import Floats, Ints

Mask = NDArray[np.bool_]

TERMS = (
    *("queue", "memory_wait", "prefill", "restore", "fetch", "transfer", "decode", "interference", "contention"),
    *("pressure", "eviction", "duplication", "session", "adapter", "topology", "deadline"),
)
NUM_TERMS = len(TERMS)
(QUEUE, MEMORY_WAIT, PREFILL_WORK, RESTORE, FETCH, TRANSFER, DECODING, INTERFERENCE) = range(8)
(CONTENTION, PRESSURE, EVICTION, DUPLICATION, SESSION, ADAPTER, TOPOLOGY, DEADLINE) = range(8, NUM_TERMS)
NUM_FIRST_TOKEN_TERMS = FETCH + 1
"""The first so many terms are together the predicted time to the first token, see `first_token_ms`."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the request needs, whoever serves it."""

    num_tokens: int
    """Prompt and the output so far."""
    output_tokens: int
    """Expected still."""
    best_depth: int
    """Blocks that the best holder has."""
    busy: float
    """0..1, the share of time in which a prefill finds another one ahead of it."""
    time_left_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Affinity:
    """Slots that the request would rather have; None: no preference."""

    session: int | None = None
    adapter: Mask | None = None
    """[n] workers that have it loaded."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What memory says of the request at each worker, [n]."""

    wait_ms: Floats
    """For room to prefill."""
    pressure_ms: Floats
    """Risk of being preempted while it decodes there, in prefill to be done again."""
    eviction_ms: Floats
    """Prefill time saved in the blocks that the prompt displaces."""
    whole_eviction_ms: Floats
    """The same, with the output to come."""


def first_token_ms(terms: Floats, settings: RoutingSettings) -> Floats:
    """[...] predicted time to the first token of [NUM_TERMS, ...]: the queue at face value."""
    weighted = terms[:NUM_FIRST_TOKEN_TERMS].sum(axis=0)
    if settings.queue_weight in (0.0, 1.0):
        return np.asarray(weighted)
    return np.asarray(weighted + terms[QUEUE] * (1.0 / settings.queue_weight - 1.0))


def later_share(work: Work, settings: RoutingSettings) -> float:
    """Milliseconds that those who come later wait for one of prefill."""
    later = work.busy / max(1.0 - work.busy, 1e-3)
    return min(max(settings.least_contention, later), settings.most_contention)


def holding(table: FleetTable, depths: Ints, work: Work, settings: RoutingSettings) -> Holding:
    """depths: [n] blocks of the prompt that each of the first n slots has."""
    n, steps, size = len(depths), table.steps, table.block_sizes
    evictable, unused, available = table.evictable_blocks[:n], table.unused_blocks[:n], table.available_blocks[:n]
    need = -(-work.num_tokens // size) - depths
    end = need + work.output_tokens // size
    wait_ms = np.maximum(need - available, 0) * (1.0 * size)
    if wait_ms.any():
        # Room comes back as decodes end; at a worker that only prefills, as the prefills ahead are handed on.
        rows = np.maximum(table.rows[:n], 1)
        ends = table.output_left[:n] / rows * steps.step_ms[:n] / np.maximum(table.context[:n], 1)
        wait_ms *= np.where(table.rows[:n] > 0, ends, steps.token_ms[:n])
    final = end + table.growth_blocks[:n]
    pressure_ms = np.maximum(final - available, 0) / np.maximum(final, 1)
    if pressure_ms.any():
        again = steps.token_ms[:n] * work.num_tokens + steps.pair_ms[:n] * (0.5 * work.num_tokens**2)
        pressure_ms *= settings.pressure_weight * again
    price = settings.eviction_weight * table.eviction_ms[:n]
    return Holding(
        wait_ms=wait_ms,
        pressure_ms=pressure_ms,
        eviction_ms=price * np.minimum(np.maximum(need - unused, 0), evictable),
        whole_eviction_ms=price * np.minimum(np.maximum(end - unused, 0), evictable),
    )


def decode_terms(
    table: FleetTable, depths: Ints, held: Holding, work: Work, settings: RoutingSettings, transfer_ms: Floats | float
) -> Floats:
    """[NUM_TERMS, n] of decoding at each of the first n slots, after a prefill elsewhere or there.

    transfer_ms: exposed hand-off to each; 0 when it was prefilled there.
    """
    n, steps = len(depths), table.steps
    terms = np.zeros((NUM_TERMS, n))
    context = work.num_tokens + work.output_tokens // 2
    step = steps.next_step_ms[:n] + steps.context_ms[:n] * context
    rows, output = table.rows[:n], table.output_left[:n]
    # Those that decode there wait longer, until they or this one end.
    shared = np.minimum(np.maximum(output, rows), rows * work.output_tokens)
    terms[MEMORY_WAIT] = held.wait_ms
    terms[TRANSFER] = transfer_ms
    terms[DECODING] = settings.decode_weight * work.output_tokens * step
    terms[INTERFERENCE] = settings.interference_weight * shared * np.maximum(step - steps.step_ms[:n], 0.0) * (rows > 0)
    terms[PRESSURE] = held.pressure_ms
    terms[EVICTION] = held.whole_eviction_ms
    return terms


def prefill_terms(
    table: FleetTable,
    depths: Ints,
    fetched: Ints,
    fetch_ms: Floats,
    held: Holding,
    work: Work,
    settings: RoutingSettings,
    affinity: Affinity,
) -> Floats:
    """[NUM_TERMS, k, n] of prefilling at each of the first n slots, in k ways. Decoding there is apart.

    fetched: [k, n] blocks that would be fetched there first; fetch_ms: [k, n] the exposed time of waiting for them.
    """
    n, steps = len(depths), table.steps
    cached = depths + fetched
    start = np.minimum(cached * table.block_sizes, work.num_tokens - 1)
    compute, alone = steps.prefill_ms(work.num_tokens - start, start)
    terms = np.zeros((NUM_TERMS, *compute.shape))
    terms[QUEUE] = settings.queue_weight * table.queue_ms[:n]
    terms[MEMORY_WAIT] = held.wait_ms
    terms[PREFILL_WORK] = settings.prefill_weight * compute
    terms[RESTORE] = table.restore_ms[:n] * (settings.restored_share * depths)
    terms[FETCH] = fetch_ms
    # A decode worker that has nothing to do now is there for those that will come.
    rows = np.maximum(table.rows[:n], table.by_role[DECODE][:n])
    terms[INTERFERENCE] = settings.interference_weight * rows * np.maximum(compute - alone, 0.0)
    terms[CONTENTION] = settings.contention_weight * later_share(work, settings) * compute
    terms[EVICTION] = held.eviction_ms
    copied = np.maximum(work.best_depth - depths, 0)
    terms[DUPLICATION] = settings.duplication_weight * copied * table.eviction_ms[:n]
    if affinity.session is not None:
        terms[SESSION] = settings.session_ms
        terms[SESSION, :, affinity.session] = 0.0
    if affinity.adapter is not None:
        terms[ADAPTER] = settings.adapter_ms * ~affinity.adapter
    if work.time_left_ms is not None:
        late_ms = first_token_ms(terms, settings) - work.time_left_ms
        terms[DEADLINE] = settings.deadline_weight * np.maximum(late_ms, 0.0)
    return terms

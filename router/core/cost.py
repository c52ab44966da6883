"""What a candidate plan costs, in milliseconds by term, for all candidates at once (SPEC E1).

Everything is time that somebody waits: this request (queue, prefill, fetch, hand-off, decode), those that decode where
it would run (interference), and those that come later and find less free time and fewer cached blocks (contention,
eviction, duplication). Preferences (session, adapter, topology, lateness) are prices in the settings. Does not:
choose, or know which plans exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router.core.fleet_table import DECODE_ROW, DECODE_TOKEN, PAIR, PREFILL_ROW, SAMPLED_ROW, FleetTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TERMS = (
    "queue",
    "memory_wait",
    "prefill",
    "restore",
    "fetch",
    "transfer",
    "decode",
    "interference",
    "contention",
    "pressure",
    "eviction",
    "duplication",
    "session",
    "adapter",
    "topology",
    "deadline",
)
NUM_TERMS = len(TERMS)
FIRST_TOKEN_TERMS = tuple(TERMS.index(name) for name in ("queue", "memory_wait", "prefill", "restore", "fetch"))
"""Together the predicted time to the first token."""


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """Weights are pure numbers on milliseconds; 1.0: at its face value."""

    queue_weight: float = 1.0
    prefill_weight: float = 1.0
    decode_weight: float = 1.0
    interference_weight: float = 1.0
    contention_weight: float = 1.0
    most_contention: float = 4.0
    """Most later milliseconds that one of prefill may cost."""
    pressure_weight: float = 1.0
    eviction_weight: float = 1.0
    duplication_weight: float = 0.25
    """Share of the copied blocks' price; a hot prefix earns its copies back."""
    deadline_weight: float = 10.0
    session_ms: float = 0.0
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
    expect_s: float = 60.0
    """How long a sent request's blocks are expected."""
    busy_half_life_s: float = 10.0
    """Of the average that says how busy the fleet is."""


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
    """0..1, how likely a later request has to wait where this one runs."""
    time_left_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Candidates as columns, [n] each."""

    slots: Ints
    cached_blocks: Ints
    """Not to be computed there: held, or fetched."""
    fetched_blocks: Ints
    fetch_ms: Floats
    """Exposed."""
    is_pair: NDArray[np.bool_]
    transfer_ms: Floats
    """Exposed transfer to the decode worker, 0 unless a pair."""
    far_decode_ms: Floats
    """[n] the decode worker's price, for pairs."""


def prefill_ms(table: FleetTable, slots: Ints, tokens: Ints, start: Ints, chunk: int) -> tuple[Floats, Floats]:
    """([n] time of `tokens` prompt tokens after `start` cached ones beside that worker's decodes, [n] the same steps
    with the decodes alone).
    """
    rows = table.decode_rows[slots] + table.booked_rows[slots]
    context = table.decode_context[slots] + table.booked_context[slots]
    full = tokens // chunk
    rest = tokens - full * chunk
    has_rest = rest > 0
    steps = full + has_rest
    adders = table.adders_ms[slots]
    beside = adders[:, DECODE_ROW] * rows + adders[:, DECODE_TOKEN] * context
    total = full * table.rows_ms(slots, rows + chunk) + has_rest * table.rows_ms(slots, np.maximum(rows + rest, 1))
    total += steps * (beside + adders[:, PREFILL_ROW]) + adders[:, SAMPLED_ROW]
    total += adders[:, PAIR] * (tokens * (2 * start + tokens) // 2)
    alone = steps * (rows > 0) * (table.rows_ms(slots, np.maximum(rows, 1)) + beside)
    return total, alone


def step_ms(table: FleetTable, slots: Ints, more_rows: int, more_context: int) -> Floats:
    """[n] a decode step with so much more there."""
    rows = table.decode_rows[slots] + table.booked_rows[slots] + more_rows
    context = table.decode_context[slots] + table.booked_context[slots] + more_context
    adders = table.adders_ms[slots]
    out = table.rows_ms(slots, np.maximum(rows, 1)) + adders[:, SAMPLED_ROW] * rows
    return np.asarray(out + adders[:, DECODE_ROW] * rows + adders[:, DECODE_TOKEN] * context)


def queue_ms(table: FleetTable, slots: Ints) -> Floats:
    """[n] work ahead of a new prefill: reported and sent since."""
    return np.asarray(table.queue_ms[slots] + table.booked_us[slots] * 1e-3)


def decode_terms(table: FleetTable, slots: Ints, work: Work, held_blocks: Ints, settings: RoutingSettings) -> Floats:
    """[NUM_TERMS, n] of decoding there after the prefill; `held_blocks`: of the prompt, there already."""
    terms = np.zeros((NUM_TERMS, len(slots)))
    context = work.num_tokens + work.output_tokens // 2
    with_it = step_ms(table, slots, 1, context)
    rows = table.decode_rows[slots] + table.booked_rows[slots]
    slower = with_it - step_ms(table, slots, 0, 0)
    terms[TERMS.index("decode")] = settings.decode_weight * work.output_tokens * with_it
    left = np.minimum(table.output_left[slots], rows * work.output_tokens)
    terms[TERMS.index("interference")] = settings.interference_weight * slower * np.maximum(left, rows)
    _memory_terms(terms, table, slots, work, held_blocks, settings, grows=True)
    return terms


def candidate_terms(table: FleetTable, rows: Rows, work: Work, settings: RoutingSettings) -> Floats:
    """[NUM_TERMS, n], weighted; a candidate's cost is the sum of its column."""
    slots = rows.slots
    terms = np.zeros((NUM_TERMS, len(slots)))
    size = np.maximum(table.block_size[slots], 1)
    start = np.minimum(rows.cached_blocks * size, work.num_tokens - 1)
    tokens = work.num_tokens - start
    compute, alone = prefill_ms(table, slots, tokens, start, settings.chunk_tokens)
    others = table.decode_rows[slots] + table.booked_rows[slots]
    held = rows.cached_blocks - rows.fetched_blocks
    terms[TERMS.index("queue")] = settings.queue_weight * queue_ms(table, slots)
    terms[TERMS.index("prefill")] = settings.prefill_weight * compute
    terms[TERMS.index("restore")] = table.restore_ms[slots] * held * settings.restored_share
    terms[TERMS.index("fetch")] = rows.fetch_ms
    terms[TERMS.index("transfer")] = rows.transfer_ms
    terms[TERMS.index("interference")] = settings.interference_weight * others * np.maximum(compute - alone, 0.0)
    later = min(settings.most_contention, work.busy / max(1.0 - work.busy, 1e-3))
    terms[TERMS.index("contention")] = settings.contention_weight * later * compute
    whole = ~rows.is_pair
    if whole.any():
        terms[:, whole] += decode_terms(table, slots[whole], work, held[whole], settings)
    if not whole.all():
        pairs = rows.is_pair
        part = np.zeros((NUM_TERMS, int(pairs.sum())))
        _memory_terms(part, table, slots[pairs], work, held[pairs], settings, grows=False)
        terms[:, pairs] += part
        terms[TERMS.index("decode"), pairs] += rows.far_decode_ms[pairs]
    copied = np.maximum(work.best_depth - held, 0)
    price = table.eviction_ms[slots]
    terms[TERMS.index("duplication")] = settings.duplication_weight * copied * price
    if work.time_left_ms is not None:
        first = terms[list(FIRST_TOKEN_TERMS)].sum(axis=0)
        terms[TERMS.index("deadline")] = settings.deadline_weight * np.maximum(first - work.time_left_ms, 0.0)
    return terms


def _memory_terms(
    terms: Floats,
    table: FleetTable,
    slots: Ints,
    work: Work,
    held_blocks: Ints,
    settings: RoutingSettings,
    grows: bool,
) -> None:
    """Waiting for room, the risk of being preempted for want of it, and the cached blocks that it costs."""
    size = np.maximum(table.block_size[slots], 1)
    now = -(-work.num_tokens // size) - held_blocks
    end = now + (work.output_tokens // size if grows else 0)
    unused = table.free_blocks[slots] - table.booked_blocks[slots]
    available = unused + table.evictable_blocks[slots]
    short = np.maximum(now - available, 0)
    adders, rows = table.adders_ms[slots], table.decode_rows[slots]
    # Room comes back as decodes end; at a worker that only prefills, as the prefills ahead are handed on.
    decode_ms = table.output_left[slots] / np.maximum(rows, 1) * step_ms(table, slots, 0, 0)
    token_ms = table.slope_ms[slots, -1] + adders[:, PAIR] * work.num_tokens
    freed = np.maximum(table.decode_context[slots], 1)
    wait = np.where(rows > 0, short * size / freed * decode_ms, short * size * token_ms)
    terms[TERMS.index("memory_wait")] += wait
    if grows:
        growth = table.output_left[slots] // size
        risk = np.clip((end + growth - available) / np.maximum(end + growth, 1), 0.0, 1.0)
        terms[TERMS.index("pressure")] += settings.pressure_weight * risk * token_ms * work.num_tokens
    displaced = np.minimum(np.maximum(end - np.maximum(unused, 0), 0), table.evictable_blocks[slots])
    terms[TERMS.index("eviction")] += settings.eviction_weight * displaced * table.eviction_ms[slots]

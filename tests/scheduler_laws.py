"""What holds of every plan and after every operation, whatever the settings: both budgets, of the step and of KV.

Time is a toy: what a step costs is known, and the predictor that budgets with it has been fitted to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random

from headrace.core.predictor import Profile, StepPredictor, StepShape, fit
from headrace.ids import RequestKey
from tests.core_world import World
from workers.core.blocks import BlockState
from workers.core.limits import peak_tokens
from workers.core.plan import StepPlan
from workers.core.request import State
from workers.core.settings import ChunkMode

_QUEUED = (State.WAITING, State.PREEMPTED)
_COMPUTING = (State.PREFILLING, State.DECODING)


def shape_of(plan: StepPlan) -> StepShape:
    return StepShape.of(plan.num_tokens, plan.start_pos, plan.samples, plan.num_decode_rows)


def toy_cost_s(shape: StepShape) -> float:
    """Seconds that a step takes: about one."""
    return 0.3 + 0.05 * shape.rows + 0.002 * shape.decode_context + 0.001 * shape.prefill_context


def toy_predictor() -> StepPredictor:
    """Ready from the start."""
    return StepPredictor(_toy_profile())


@cache
def _toy_profile() -> Profile:
    rng = Random(0)
    shapes = []
    for _ in range(300):
        decodes, chunks, each = rng.randrange(6), rng.randrange(4), rng.randrange(1, 10)
        starts = [rng.randrange(40) for _ in range(decodes + chunks)]
        tokens = [1] * decodes + [each] * chunks
        shapes.append(StepShape.of(tokens, starts, [rng.random() < 0.7 for _ in tokens], decodes))
    return fit([(shape, toy_cost_s(shape)) for shape in shapes if shape.rows], {})


def check_plan(world: World, plan: StepPlan, before: Mapping[RequestKey, State]) -> None:
    """`before`: states when the plan was asked for. Call before the plan is applied."""
    settings = world.settings
    assert plan.num_rows <= settings.max_num_seqs
    assert sum(plan.num_tokens) <= settings.max_num_batched_tokens
    assert max(plan.num_tokens[plan.num_decode_rows :], default=0) <= settings.chunk_tokens
    assert len(set(plan.keys)) == plan.num_rows
    for table, start, count in zip(plan.block_tables, plan.start_pos, plan.num_tokens, strict=True):
        assert start + count <= len(table) * settings.block_size
        assert not any(world.pool.state(block) is BlockState.RETIRED for block in table)
    for pairs in (plan.swap_in, plan.swap_out):
        assert len({target for _, target in pairs}) == len(pairs)
    # Two requests that leave the pool together may share blocks; each has a copy.
    assert len({source for source, _ in plan.swap_in}) == len(plan.swap_in)
    _check_time(world, plan)
    _check_margin(world, before)


def check_on_their_way(world: World, plans: Sequence[StepPlan]) -> None:
    """Every block that a submitted plan names is still its request's, at the same place."""
    for plan in plans:
        for key, table, start, count in zip(plan.keys, plan.block_tables, plan.start_pos, plan.num_tokens, strict=True):
            named = table[: world.pool.blocks_for(start + count)]
            assert list(named) == world.seen[key].block_ids[: len(named)]
            assert all(world.pool.state(block) is BlockState.USED for block in named)


def _check_time(world: World, plan: StepPlan) -> None:
    """A step with decodes stays inside its time, or inside the share that prefills have beside decodes that fill it.

    One token of a prefill may be too much: one that starts computes at least that.
    """
    settings, predictor = world.settings, world.predictor
    if predictor is None or not settings.itl_target_s or settings.chunk_mode != ChunkMode.ADAPTIVE:
        return
    rows = plan.num_decode_rows
    if not rows or 1 in plan.num_tokens[rows:] or rows == plan.num_rows:
        return
    whole = shape_of(plan)
    decodes_s = predictor.predict_s(StepShape(rows, whole.decode_context, 0, 0, 0, rows), settings.itl_quantile)
    limit_s = max(settings.itl_target_s, decodes_s + settings.min_prefill_share * settings.itl_target_s)
    # The prefills' own sampled rows and the halves of their pairs are not budgeted.
    least = StepShape(
        rows,
        whole.decode_context,
        whole.prefill_rows,
        whole.prefill_tokens,
        whole.prefill_context - whole.prefill_rows,
        rows,
    )
    assert predictor.predict_s(least, settings.itl_quantile) <= limit_s + 1e-9


def _check_margin(world: World, before: Mapping[RequestKey, State]) -> None:
    """Who starts beside others leaves them the watermark."""
    now = {key: request.state for key, request in world.scheduler.requests.items()}
    started = [key for key, state in now.items() if state is State.PREFILLING and before[key] in _QUEUED]
    if started and sum(state in _COMPUTING for state in now.values()) > 1:
        assert world.pool.available_blocks >= world.settings.watermark_blocks


def check_blocks(world: World) -> None:
    """Blocks are conserved, in the pool and on the host."""
    pool, requests = world.pool, world.scheduler.requests.values()
    known = pool.used_blocks + pool.free_blocks + pool.evictable_blocks + pool.quarantined_blocks
    assert known + pool.retired_blocks == pool.num_blocks
    scheduler = world.scheduler
    copied = [block for flight in scheduler._flights for block in flight.copied]
    foreign = {*scheduler.fetches.blocks(), *scheduler._pins.blocks(), *copied}
    assert pool.used_blocks == len(foreign.union(*(request.block_ids for request in requests)))
    for request in requests:
        # A tool's answer may ask for more than there is until the next step; who has handed off never grows.
        if not request.inserts and not (request.hand_off and request.state is State.TRANSFERRING):
            assert pool.blocks_for(peak_tokens(request, world.settings)) <= pool.usable_blocks
    copies = [block for request in requests if request.host is not None for block in request.host.blocks]
    assert len(set(copies)) == len(copies) <= world.settings.host_blocks
    stats = world.scheduler.stats()
    assert stats["swapped_in"] <= stats["swapped_out"]

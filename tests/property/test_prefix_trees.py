"""Random trees of prompts on one worker: with the cache as without it, token by token (CASES KV-01, 06, 08, 16).

The toy KV of a position depends on all tokens before it and is read back through the block table, copies included:
a block that is shared, copied or evicted wrongly shows in the row that reads it.
"""

from __future__ import annotations

from random import Random

import pytest

from headrace.core.records import FinishReason
from tests.core_world import World, make_settings
from tests.prefix_trees import random_tree
from tests.scheduler_laws import check_blocks
from workers.core.request import Request, State
from workers.core.settings import SchedulerSettings

B = 4
TREES = 1000
BATCHES = 10
"""One test runs a tenth of the trees."""


def random_settings(rng: Random) -> tuple[SchedulerSettings, int]:
    num_blocks = rng.choice([9, 14, 30, 80])
    settings = make_settings(
        block_size=B,
        long_prefill_token_threshold=rng.choice([1, B - 1, B, B + 1, 512]),
        max_num_batched_tokens=rng.choice([6, 16, 64]),
        max_num_seqs=6,
        max_model_len=num_blocks * B,
        watermark_blocks=rng.choice([0, 1]),
        policy=rng.choice(["decode_first", "slo_fair", "fair"]),
        tenant_cache_share=rng.choice([1.0, 1.0, 0.4]),
        host_blocks=rng.choice([0, 0, 8]),
    )
    return settings, num_blocks


def run_tree(seed: int) -> World:
    rng = Random(seed)
    settings, num_blocks = random_settings(rng)
    world = World(settings, num_blocks=num_blocks, vocab=12)
    coming = [
        prompt
        for prompt in random_tree(rng, B, settings.max_model_len - 8, range(1, 4))
        for _ in range(rng.choice([1, 1, 2, 4]))
    ]
    roots = {"a": b"a" * 16, "b": b"b" * 16}
    while coming or world.scheduler.requests:
        while coming and rng.random() < 0.6:
            tenant = rng.choice("aab")
            world.submit(
                coming.pop(),
                rng.randrange(1, 8),
                root=roots[tenant],
                tenant=tenant,
                no_cache=rng.random() < 0.1,
                hand_off=rng.random() < 0.15,
            )
        act(world, rng)
        check_blocks(world)
    return world


def act(world: World, rng: Random) -> None:
    """A step, and now and then something that gets in its way."""
    scheduler = world.scheduler
    held = [r for r in scheduler.requests.values() if r.state is State.TRANSFERRING]
    for request in held:
        if rng.random() < 0.3:
            (scheduler.pin if rng.random() < 0.5 else scheduler.unpin)(request.key)
        if rng.random() < 0.5:
            assert scheduler.release_handed_off(request.key, world.now)
    plan = world.schedule()
    if rng.random() < 0.03:
        scheduler.clear_cache(rng.choice(["a", "b", None]))
        scheduler.check_integrity()
    if rng.random() < 0.05 and scheduler.requests:
        key = rng.choice(sorted(scheduler.requests))
        scheduler.finish(key, FinishReason.CANCELLED, world.now)
        scheduler.check_integrity()
    if plan is not None:
        world.apply(plan)


def was_whole(request: Request) -> bool:
    return request.finish_reason in (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_outputs_over_random_prefix_trees_are_those_of_a_run_without_cache(batch: int) -> None:
    hits = 0
    for seed in range(batch * TREES // BATCHES, (batch + 1) * TREES // BATCHES):
        world = run_tree(seed)
        for request in world.seen.values():
            if was_whole(request):
                world.assert_output_as_alone(request)
        world.assert_drained()
        hits += world.scheduler.stats()["partial_tokens_hit"]
    assert hits

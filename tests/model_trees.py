"""Random trees of prompts through the real runner in exact mode, with the prefix cache and without it."""

from __future__ import annotations

from itertools import count
from random import Random

from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from tests.core_world import make_settings
from tests.prefix_trees import random_tree
from workers.core.blocks import BlockPool
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request
from workers.core.scheduler import Scheduler
from workers.runner.torch_runner import TorchRunner

BLOCK, POOL_BLOCKS, MAX_LEN = 8, 64, 160


class Trees:
    """One runner; each run has a scheduler and a pool of its own."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        self.hits = {"cached_tokens_hit": 0, "partial_tokens_hit": 0, "followed": 0, "evictions": 0}
        self._keys = count(1)

    def compare(self, seed: int) -> None:
        """One tree; raises AssertionError on the first difference."""
        rng = Random(seed)
        prompts = random_tree(rng, BLOCK, MAX_LEN - 16, range(3, 60))
        calls = [(prompt, self._sampling(rng)) for prompt in prompts for _ in range(rng.choice([1, 1, 2]))]
        chunk = rng.choice([1, BLOCK - 1, BLOCK, BLOCK + 1, 512])
        budget = rng.choice([8, 24, 64])
        num_blocks = rng.choice([MAX_LEN // BLOCK, 32, POOL_BLOCKS])
        plain = self._run(calls, rng.random(), 512, 64, POOL_BLOCKS, no_cache=True)
        cached = self._run(calls, rng.random(), chunk, budget, num_blocks, no_cache=False)
        assert cached == plain, f"tree {seed}: chunks of {chunk}, {budget} tokens a step, {num_blocks} blocks"

    @staticmethod
    def _sampling(rng: Random) -> SamplingParams:
        length = rng.randrange(1, 12)
        if rng.random() < 0.5:
            return SamplingParams(length, ignore_eos=True)
        return SamplingParams(length, ignore_eos=True, temperature=0.9, top_p=0.9, seed=rng.randrange(1000))

    def _run(
        self,
        calls: list[tuple[list[int], SamplingParams]],
        pace: float,
        chunk: int,
        budget: int,
        num_blocks: int,
        *,
        no_cache: bool,
    ) -> list[list[int]]:
        """Outputs. `pace`: how likely the next request comes before a step."""
        self.runner.kv_pool[:] = 0xFF  # NaN: no KV can be right because it was left there
        settings = make_settings(
            block_size=BLOCK,
            max_model_len=MAX_LEN,
            long_prefill_token_threshold=chunk,
            max_num_batched_tokens=budget,
        )
        pool = BlockPool(num_blocks, BLOCK)
        scheduler = Scheduler(settings, pool, PrefixCache(pool))
        rng, requests, now = Random(int(pace * 1e9)), [], 0.0
        while len(requests) < len(calls) or scheduler.requests:
            while len(requests) < len(calls) and rng.random() < pace:
                prompt, sampling = calls[len(requests)]
                key = RequestKey(next(self._keys))
                request = Request(key, RequestId(str(key)), 0, list(prompt), sampling, b"r" * 16, no_cache=no_cache)
                assert scheduler.submit(request, now) is None
                requests.append(request)
            plan = scheduler.schedule(now)
            now += 1.0
            if plan is not None:
                scheduler.apply(plan, self.runner.run(plan), now)
                scheduler.check_integrity()
        assert pool.used_blocks == 0
        stats = scheduler.stats()
        for name in self.hits:
            self.hits[name] += stats[name]
        return [request.output_ids for request in requests]

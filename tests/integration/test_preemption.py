"""Scheduler and real runner together: whatever takes a request's KV away for a while, its tokens stay the same.

Requests run undisturbed first, then in a pool that is too small for them; between the runs the pool is filled with NaN,
so that no KV can be right because it was left there. Every way back is taken: KV computed again from the start,
computed again behind blocks that the prefix cache still had, copied to the host and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from headrace.ids import RequestId, RequestKey
from headrace.paths import cache_root
from headrace.sampling import SamplingParams
from tests.core_world import make_settings
from tests.model_fixtures import tiny_model
from workers.core.blocks import BlockPool
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Keep, Request, State
from workers.core.scheduler import Scheduler
from workers.model.prepare import DEFAULT_MODEL, prepare_model
from workers.runner.torch_runner import TorchRunner

BLOCK, RUNNER_BLOCKS, HOST_BLOCKS, MAX_LEN = 8, 96, 96, 320
GREEDY = SamplingParams(40, ignore_eos=True)
SAMPLED = replace(
    GREEDY,
    temperature=0.8,
    top_p=0.95,
    seed=11,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
)
TEXT = (
    "The lake was still and the boats lay on the shore. An old man mended his nets and told us about the year when the "
    "ice had held until May. Question: why does a kettle sing before the water boils? Answer: because small bubbles of "
    "steam form at its hot floor, rise, and collapse in the cooler water above. def mean(values): return sum(values) /"
)
PROMPT_TOKENS, OUTPUT_TOKENS = (12, 10, 8, 6, 4), (12, 24, 36, 48, 48)
"""The last one gives way to the others again and again, in a pool of SMALL blocks."""
SMALL = 11


@dataclass
class Wish:
    prompt: list[int]
    sampling: SamplingParams
    no_cache: bool = False
    priority: int = 0
    pauses: dict[int, tuple[Keep, list[int]]] = field(default_factory=dict)
    """Output tokens after which a tool runs -> what becomes of the blocks, and what the tool answers."""


class Rig:
    """Schedulers of any pool size, one after the other, before one runner."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.runner = TorchRunner(
            folder,
            MAX_LEN,
            block_size=BLOCK,
            num_blocks=RUNNER_BLOCKS,
            host_blocks=HOST_BLOCKS,
            threads=threads,
            exact=True,
        )
        self._keys = count(1)

    def alone(self, wish: Wish) -> list[int]:
        (request,), _ = self.run([replace(wish, pauses={})])
        return request.output_ids

    def run(
        self, wishes: Sequence[Wish], num_blocks: int = RUNNER_BLOCKS, host_blocks: int = 0
    ) -> tuple[list[Request], dict[str, int]]:
        """The ended requests, and the scheduler's counters with the blocks that came back from the host."""
        self.runner.kv_pool[:] = 0xFF
        limits = make_settings(
            block_size=BLOCK,
            max_model_len=MAX_LEN,
            long_prefill_token_threshold=24,
            host_blocks=host_blocks,
            host_copy_block_s=0.0,
        )
        pool = BlockPool(num_blocks, BLOCK)
        scheduler = Scheduler(limits, pool, PrefixCache(pool))
        requests: dict[RequestKey, Request] = {}
        for wish in wishes:
            key = RequestKey(next(self._keys))
            name = RequestId(str(key))
            requests[key] = Request(key, name, 0, list(wish.prompt), wish.sampling, b"r" * 16, no_cache=wish.no_cache)
            requests[key].priority = wish.priority
            assert scheduler.submit(requests[key], 0.0) is None
        tools = {
            (key, at): tool for key, wish in zip(requests, wishes, strict=True) for at, tool in wish.pauses.items()
        }
        waiting: list[tuple[int, RequestKey, list[int]]] = []
        blocks_back = 0
        for step in range(4000):
            now = float(step)
            for resume_at, key, answer in list(waiting):
                if step >= resume_at:
                    assert scheduler.resume(key, answer, now)
                    waiting.remove((resume_at, key, answer))
            plan = scheduler.schedule(now)
            if plan is None and not waiting:
                break
            if plan is not None:
                blocks_back += len(plan.swap_in)
                scheduler.apply(plan, self.runner.run(plan), now)
            for key, request in requests.items():
                tool = tools.get((key, request.num_output)) if request.state is State.DECODING else None
                if tool is not None:
                    assert scheduler.pause(key, tool[0], now)
                    del tools[key, request.num_output]
                    waiting.append((step + 4, key, tool[1]))
            scheduler.check_integrity()
        assert scheduler.requests == {}
        assert pool.used_blocks == 0
        return list(requests.values()), scheduler.stats() | {"blocks_back": blocks_back}


def rivals(text: list[int], sampling: SamplingParams = SAMPLED, no_cache: bool = False) -> list[Wish]:
    """Pieces of `text`, the last of the lowest class."""
    wishes, start = [], 0
    for length, max_tokens in zip(PROMPT_TOKENS, OUTPUT_TOKENS, strict=True):
        wishes.append(Wish(text[start : start + length], replace(sampling, max_tokens=max_tokens), no_cache))
        start += length
    wishes[-1].priority = 1
    return wishes


def check_counters(stats: dict[str, int], host_blocks: int, no_cache: bool) -> None:
    if host_blocks:
        assert stats["swapped_in"] == stats["swapped_out"] == stats["preemptions"]
        assert stats["blocks_back"] > 0
        assert stats["recomputed_tokens"] == 0
    else:
        assert stats["swapped_in"] == stats["swapped_out"] == stats["blocks_back"] == 0
        assert stats["recomputed_tokens"] > 0
    assert (stats["cached_tokens_hit"] == 0) == no_cache


@pytest.fixture(scope="module")
def real() -> tuple[Rig, list[int]]:
    folder = prepare_model(DEFAULT_MODEL, cache_root())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert len(ids) >= 53
    return Rig(folder, 2), ids


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tiny_model(tmp_path_factory.mktemp("tiny")), 1)


@pytest.fixture(scope="module")
def undisturbed(real: tuple[Rig, list[int]]) -> list[list[int]]:
    rig, text = real
    requests, stats = rig.run(rivals(text))
    assert stats["preemptions"] == 0
    return [request.output_ids for request in requests]


@pytest.mark.real_model
@pytest.mark.parametrize(("host_blocks", "no_cache"), [(0, False), (HOST_BLOCKS, True)], ids=["recompute", "swap"])
def test_a_request_preempted_three_times_gives_the_tokens_of_an_undisturbed_one(
    real: tuple[Rig, list[int]], undisturbed: list[list[int]], host_blocks: int, no_cache: bool
) -> None:
    rig, text = real
    requests, stats = rig.run(rivals(text, no_cache=no_cache), SMALL, host_blocks)
    assert [request.output_ids for request in requests] == undisturbed
    assert requests[-1].preemptions >= 3
    check_counters(stats, host_blocks, no_cache)


@pytest.mark.parametrize("no_cache", [False, True], ids=["cache", "no-cache"])
@pytest.mark.parametrize("host_blocks", [0, HOST_BLOCKS], ids=["recompute", "swap"])
@pytest.mark.parametrize("seed", range(4))
def test_preempted_requests_of_many_seeds_give_the_tokens_of_undisturbed_ones(
    tiny: Rig, seed: int, host_blocks: int, no_cache: bool
) -> None:
    rng = Random(seed)
    text = [rng.randrange(3, 500) for _ in range(sum(PROMPT_TOKENS))]
    wishes = rivals(text, replace(SAMPLED, seed=seed), no_cache)
    requests, stats = tiny.run(wishes, SMALL, host_blocks)
    assert [request.output_ids for request in requests] == [tiny.alone(wish) for wish in wishes]
    assert requests[-1].preemptions >= 3
    check_counters(stats, host_blocks, no_cache)


def as_one_prefill(rig: Rig, wish: Wish, output: list[int]) -> list[int]:
    """The output of `wish` if what its tools answer had always been part of its prompt: each piece by a request of its
    own, whose prompt is all that came before."""
    so_far, done, expected = list(wish.prompt), 0, []
    for at in [*sorted(wish.pauses), wish.sampling.max_tokens]:
        piece = rig.alone(Wish(so_far, replace(wish.sampling, max_tokens=at - done)))
        expected += piece
        so_far, done = so_far + output[done:at] + (wish.pauses[at][1] if at in wish.pauses else []), at
    return expected


@pytest.mark.real_model
@pytest.mark.parametrize("keep", Keep)
def test_after_a_tool_the_real_model_goes_on_as_if_the_answer_had_been_there_from_the_start(
    real: tuple[Rig, list[int]], keep: Keep
) -> None:
    rig, text = real
    wish = Wish(text[:21], replace(GREEDY, max_tokens=18), pauses={5: (keep, text[30:47]), 12: (keep, text[50:53])})
    mate = Wish(text[21:30], replace(GREEDY, max_tokens=20), no_cache=True)
    (request, _), stats = rig.run([wish, mate], host_blocks=HOST_BLOCKS)
    assert request.output_ids == as_one_prefill(rig, wish, request.output_ids)
    assert request.token_ids[26:43] == text[30:47]
    check_pauses(stats, keep, 2)


def check_pauses(stats: dict[str, int], keep: Keep, pauses: int) -> None:
    assert stats["paused"] == pauses
    assert stats["swapped_out"] == stats["swapped_in"] == (pauses if keep is Keep.OFFLOAD else 0)
    assert (stats["prefix_lookups"] > 1) == (keep is not Keep.KEEP)


@pytest.mark.parametrize(("no_cache", "temperature"), [(False, 0.0), (True, 0.8)], ids=["cache", "no-cache"])
@pytest.mark.parametrize("num_blocks", [RUNNER_BLOCKS, 20], ids=["roomy", "tight"])
@pytest.mark.parametrize("keep", Keep)
def test_tools_and_preemptions_together_change_no_token(
    tiny: Rig, keep: Keep, num_blocks: int, no_cache: bool, temperature: float
) -> None:
    rng = Random(5)
    sampling = replace(GREEDY, temperature=temperature, top_p=0.9, seed=3)

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count)]

    wishes = [
        Wish(ids(10 + 3 * i), sampling, no_cache, pauses={4 + i: (keep, ids(1 + 5 * i)), 20 + i: (keep, ids(9))})
        for i in range(4)
    ]
    requests, stats = tiny.run(wishes, num_blocks, HOST_BLOCKS if keep is Keep.OFFLOAD else 0)
    for request, wish in zip(requests, wishes, strict=True):
        assert request.output_ids == as_one_prefill(tiny, wish, request.output_ids)
    assert stats["paused"] == 8
    assert (stats["preemptions"] > 0) == (num_blocks == 20)

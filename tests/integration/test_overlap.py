"""Real runner and engine with and without overlap: the same tokens, log-probabilities and reasons, whatever comes.

Requests of every kind in a pool that is too small for them, so that some are preempted, swapped out and computed again;
sampled, penalized, with bounds and stop tokens that end most of them early; some are cancelled in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from headrace.core.records import FinishReason, Role, TokenLogprobs
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from tests.core_world import make_settings
from tests.fleet import Fleet, fleet
from tests.model_fixtures import tiny_model
from workers.core.blocks import BlockPool
from workers.core.plan import StepEvents
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request
from workers.core.scheduler import Scheduler
from workers.engine import Engine
from workers.runner.torch_runner import TorchRunner

BLOCK, BLOCKS, HOST, MAX_LEN = 8, 26, 24, 96
VOCAB = 512
REQUESTS = 40
ROOT = b"r" * 16


@dataclass
class Told:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    reason: FinishReason | None = None


class Sink:
    def __init__(self, told: dict[RequestKey, Told]) -> None:
        self.told = told
        self.prefilled: list[RequestKey] = []

    def step_began(self, keys: Sequence[RequestKey]) -> None: ...

    def step_ended(self, events: StepEvents) -> None:
        for index, (key, offset, token) in enumerate(
            zip(events.token_keys, events.token_offsets, events.token_ids, strict=True)
        ):
            told = self.told[key]
            assert offset == len(told.tokens)
            told.tokens.append(token)
            told.logprobs.append(events.token_logprobs.get(index))
        for key, reason in events.finished:
            self.told[key].reason = reason
        self.prefilled += events.prefilled


def workload(seed: int) -> list[tuple[int, Request]]:
    """(step before which it comes, request)"""
    rng = Random(seed)
    prefixes = [[rng.randrange(3, VOCAB) for _ in range(40)] for _ in range(3)]
    comes, at = [], 0
    for number in range(1, REQUESTS + 1):
        at += rng.choice((0, 0, 1, 4))
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))]
        max_tokens = rng.randrange(1, 30)
        sampling = SamplingParams(
            max_tokens,
            min_tokens=rng.choice((0, 0, min(6, max_tokens))),
            temperature=rng.choice((0.0, 0.9, 1.5)),
            top_k=rng.choice((0, 20)),
            seed=number,
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=tuple(rng.sample(range(VOCAB), 60)) if rng.random() < 0.5 else (),
            repetition_penalty=rng.choice((1.0, 1.3)),
            presence_penalty=rng.choice((0.0, 0.5)),
            logprobs=rng.choice((None, None, 2)),
        )
        prompt = rng.choice(prefixes)[: rng.randrange(41)] + own
        key = RequestKey(number)
        request = Request(key, RequestId(str(number)), 0, prompt, sampling, ROOT, hand_off=rng.random() < 0.15)
        request.priority = rng.choice((0, 0, 1))
        comes.append((at, request))
    return comes


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchRunner]:
    path: Path = tiny_model(tmp_path_factory.mktemp("overlap"))
    yield TorchRunner(path, MAX_LEN, block_size=BLOCK, num_blocks=BLOCKS, host_blocks=HOST, max_batched_tokens=64)


def run(runner: TorchRunner, seed: int, overlap: str, policy: str) -> tuple[dict[RequestKey, Told], Scheduler, int]:
    """Also how many steps were begun behind another."""
    settings = make_settings(
        block_size=BLOCK,
        max_model_len=MAX_LEN,
        host_blocks=HOST,
        host_copy_block_s=1e-9,
        long_prefill_token_threshold=24,
        policy=policy,
        eos_token_ids=tuple(range(0, VOCAB, 17)),
    )
    pool = BlockPool(BLOCKS, BLOCK)
    scheduler = Scheduler(settings, pool, PrefixCache(pool))
    told: dict[RequestKey, Told] = {}
    sink, rng, behind = Sink(told), Random(seed), 0
    engine = Engine(scheduler, runner, sink, overlap=overlap)
    comes = workload(seed)
    step = 0
    while comes or scheduler.requests:
        with engine.lock:
            while comes and (comes[0][0] <= step or not scheduler.requests):
                request = comes.pop(0)[1]
                told[request.key] = Told()
                assert scheduler.submit(request, engine.now()) is None
            if rng.random() < 0.03 and scheduler.requests:
                key = rng.choice(sorted(scheduler.requests))
                if scheduler.finish(key, FinishReason.CANCELLED, engine.now()):
                    told[key].reason = FinishReason.CANCELLED
            for key in sink.prefilled:
                if scheduler.release_handed_off(key, engine.now()):
                    told[key].reason = FinishReason.HANDED_OFF
            sink.prefilled.clear()
        engine.step()
        behind += len(scheduler._flights) > 0
        scheduler.check_integrity()
        step += 1
        assert step < 5_000
    while engine.step():
        pass
    engine._tell()
    scheduler.check_integrity()
    assert pool.used_blocks == 0 and not scheduler.requests
    return told, scheduler, behind


@pytest.mark.parametrize("policy", ["decode_first", "slo_fair"])
@pytest.mark.parametrize("seed", range(3))
def test_overlap_changes_no_token(runner: TorchRunner, seed: int, policy: str) -> None:
    plain, scheduler, none = run(runner, seed, "off", policy)
    overlapped, other, behind = run(runner, seed, "on", policy)
    assert none == 0 and behind > 50
    for stats in (scheduler.stats(), other.stats()):
        assert stats["preemptions"] > 0 and stats["swapped_in"] > 0 and stats["cached_tokens_hit"] > 0
    reasons = set()
    for key, told in plain.items():
        there = overlapped[key]
        whole = FinishReason.CANCELLED not in (told.reason, there.reason)
        count = max(len(told.tokens), len(there.tokens)) if whole else min(len(told.tokens), len(there.tokens))
        assert told.tokens[:count] == there.tokens[:count]
        assert told.logprobs[:count] == there.logprobs[:count]
        assert not whole or told.reason is there.reason is not None
        reasons |= {told.reason}
    assert reasons == {*FinishReason} - {FinishReason.DEADLINE, FinishReason.ERROR}, "the comparison must not be void"


def test_workers_that_overlap_hand_off_and_decode_the_same_tokens(tmp_path: Path) -> None:
    rng = Random(5)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 15, 16, 17, 40, 100, 300, 301)]
    model = tiny_model(tmp_path)

    def answers(running: Fleet) -> list[list[int]]:
        with running.client() as client, ThreadPoolExecutor(8) as pool:

            def one(seed: int, ids: list[int]) -> list[int]:
                answer = client.generate(ids, temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True)
                return list(answer.choices[0].token_ids)

            return list(pool.map(one, range(len(prompts)), prompts))

    seen = []
    for roles, overlap in (((Role.COLOCATED,), "off"), ((Role.PREFILL, Role.DECODE), "on")):
        with fleet(model, *roles, overlap=overlap) as running:
            seen.append(answers(running))
            running.assert_drained()
    assert seen[0] == seen[1]

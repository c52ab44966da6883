"""Log-probabilities of a real model through real processes: transformers' values, and the same bits in every mode,
whatever company a request has and whoever dies on the way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.client import HeadraceClient
from headrace.core.records import Role
from headrace.v1.inference_pb2 import Choice, TokenLogprobs
from tests.fleet import Fleet, fleet
from tests.model_fixtures import tiny_model

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
NUM_TOKENS = 48
OPTIONS: list[dict[str, object]] = [
    {"temperature": 0, "logprobs": 5},
    {"temperature": 0.9, "top_p": 0.9, "seed": 7, "logprobs": 0},
    {"temperature": 0.8, "seed": 3, "logprobs": 20, "repetition_penalty": 1.3, "logit_bias": {7: 4.0, 9: -100.0}},
    {"temperature": 0.8, "seed": 3},
]
"""What is told is the model's own, whatever shapes the choice; the last one asks for nothing."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(rng.choice([1, 15, 16, 17, 100, 300]))]


def ask(client: HeadraceClient, seed: int, num_tokens: int = NUM_TOKENS) -> Choice:
    options = OPTIONS[seed % len(OPTIONS)]
    return client.generate(prompt(seed), max_tokens=num_tokens, ignore_eos=True, timeout_s=120, **options).choices[0]


def all_at_once(running: Fleet, seeds: Sequence[int]) -> list[Choice]:
    with running.client() as client, ThreadPoolExecutor(len(seeds)) as pool:
        return list(pool.map(lambda seed: ask(client, seed), seeds))


@pytest.fixture(scope="module")
def colocated(model: Path) -> Iterator[Fleet]:
    with fleet(model, C) as running:
        yield running


@pytest.fixture(scope="module")
def alone(colocated: Fleet) -> list[Choice]:
    """The undisturbed run: one worker, one request at a time."""
    with colocated.client() as client:
        return [ask(client, seed) for seed in range(8)]


def test_values_are_those_of_transformers(model: Path, alone: list[Choice]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for seed, choice in enumerate(alone):
        num_top = OPTIONS[seed % len(OPTIONS)].get("logprobs")
        if num_top is None:
            assert not choice.logprobs
            continue
        start, ids = len(prompt(seed)), [*prompt(seed), *choice.token_ids]
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0, start - 1 : -1].double()
        wanted = torch.log_softmax(logits, -1)
        assert len(choice.logprobs) == len(choice.token_ids) == NUM_TOKENS
        for row, token, told in zip(wanted, choice.token_ids, choice.logprobs, strict=True):
            assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert len(told.top_ids) == num_top
            assert list(told.top_logprobs) == pytest.approx(row[list(told.top_ids)].tolist(), abs=1e-4)
            assert list(told.top_logprobs) == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)


def test_company_and_cached_prefixes_change_no_bit(colocated: Fleet, alone: list[Choice]) -> None:
    assert all_at_once(colocated, range(8)) == alone
    colocated.assert_drained()


def test_hand_offs_and_a_killed_decode_worker_change_no_bit(colocated: Fleet, model: Path, alone: list[Choice]) -> None:
    options = {"temperature": 0.8, "seed": 5, "logprobs": 3, "max_tokens": 800, "ignore_eos": True}
    with colocated.client() as client:
        undisturbed = client.generate(prompt(4), timeout_s=120, **options).choices[0]
    with fleet(model, P, D, D) as running, running.client() as client:
        # 1. Every request is handed off.
        assert all_at_once(running, range(8)) == alone
        decoders = ("decode-0", "decode-1")
        assert sum(running.worker_status(name).counters.get("handoffs", 0) for name in decoders) == 8
        running.assert_drained()
        # 2. The worker that decodes dies in the middle of a stream.
        tokens: list[int] = []
        told: list[TokenLogprobs] = []
        killed = False
        for chunk in client.stream(prompt(4), timeout_s=120, **options):
            for choice in chunk.choices:
                tokens += choice.token_ids
                told += choice.logprobs
            if not killed and len(tokens) > 20:
                live = {name: running.worker_status(name).live_requests for name in decoders}
                running.workers[max(live, key=lambda name: live[name])].kill()
                killed = True
        assert client.status().gateway.retries == 1, "it must have been in the middle"
        # 3. The client has what it had without that.
        assert tokens == list(undisturbed.token_ids) and len(tokens) == 800
        assert told == list(undisturbed.logprobs)

"""Penalties, bias and min-p through real processes: the same tokens wherever and through whichever door they are asked
for."""

from __future__ import annotations

import random
from pathlib import Path

import httpx

from headrace.core.records import Role
from tests.fleet import Fleet, fleet
from tests.model_fixtures import tiny_model

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
SHAPING = {
    "min_p": 0.02,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
}
BIAS = {7: 3.0, 300: -100.0}
COMMON = {"temperature": 0.9, "top_p": 0.95, "top_k": 80, "seed": 11, "n": 2, "max_tokens": 40, "ignore_eos": True}


def prompt() -> list[int]:
    rng = random.Random(4)
    return [rng.randrange(3, 500) for _ in range(50)]


def over_grpc(running: Fleet, **options: object) -> list[list[int]]:
    with running.client() as client:
        answer = client.generate(prompt(), **(COMMON | options), timeout_s=60)
        return [list(choice.token_ids) for choice in answer.choices]


def over_http(running: Fleet, **options: object) -> list[list[int]]:
    body = {"prompt": prompt(), "return_token_ids": True, **COMMON, **options}
    answer = httpx.post(f"{running.http}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def test_shaped_output_is_equal_in_every_mode_and_at_both_doors(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    seen = []
    for roles in ((C,), (P, D)):
        with fleet(model, *roles) as running:
            shaped = over_grpc(running, **SHAPING, logit_bias=BIAS)
            assert over_http(running, **SHAPING, logit_bias={str(k): v for k, v in BIAS.items()}) == shaped
            greedy = over_grpc(running, **SHAPING, temperature=0)
            plain = over_grpc(running)
            seen.append((shaped, greedy, plain))
            if D in roles:
                assert running.worker_status("decode-0").counters["handoffs"] == 8, "every choice was handed off"
            running.assert_drained()
    assert seen[0] == seen[1]
    shaped, greedy, plain = seen[0]
    assert shaped != plain
    assert shaped[0] != shaped[1]
    assert greedy[0] == greedy[1]
    for output in shaped:
        assert 300 not in output

"""Sampling: greedy, temperature, top-k, top-p, bans; a draw depends on seed, branch and position only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ids import RequestKey
from headrace.sampling import SamplingParams, uniform
from kernels import reference
from kernels.ops import Sampler, SampleTable
from workers.core.plan import StepPlan
from workers.runner.sample import sampling_table

_SAMPLERS: dict[int, Sampler] = {}


def sample(logits: np.ndarray, settings: SamplingParams, position: int, banned: Sequence[int] = ()) -> int:
    """One row through the table and the kernel, as the runner does it for a step."""
    plan = StepPlan(0, [RequestKey(0)], [1], [position - 1], [0], [[0]], [True], [settings], [tuple(banned)])
    sampler = _SAMPLERS.setdefault(len(logits), Sampler(len(logits)))
    (token,) = sampler.choose(torch.from_numpy(logits[None].copy()), sampling_table(plan))
    return token


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **({"temperature": 1.0} | changes))


def rows(size: int = 64, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def counts(logits: np.ndarray, settings: SamplingParams, draws: int = 4000) -> np.ndarray:
    return np.bincount([sample(logits, settings, p) for p in range(draws)], minlength=len(logits))


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.zeros(10, np.float32)
    logits[[4, 7]] = 2.0
    assert sample(logits, params(temperature=0.0), 0) == 4
    assert sample(logits, params(temperature=0.0), 0, banned=[4]) == 7


@given(st.floats(min_value=1e-45, max_value=1e-4), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_tiny_temperatures_are_finite_and_greedy(temperature: float, position: int) -> None:
    logits = rows()
    assert sample(logits, params(temperature=temperature), position) == int(np.argmax(logits))


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 30), st.floats(0.05, 2.0), st.floats(0.05, 1.0))
@settings(max_examples=100, deadline=None)
def test_a_draw_is_a_function_and_stays_inside_top_k(
    seed: int, position: int, top_k: int, temperature: float, top_p: float
) -> None:
    logits = rows(200, seed % 7)
    settings_ = params(seed=seed, top_k=top_k, temperature=temperature, top_p=top_p)
    token = sample(logits, settings_, position)
    assert token == sample(logits, settings_, position)
    if top_k:
        assert token in np.argsort(-logits, kind="stable")[:top_k]


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    got = counts(logits, params()) / 4000
    assert np.abs(got - [0.5, 0.3, 0.15, 0.05]).max() < 0.03
    cooler = counts(logits, params(temperature=0.5)) / 4000
    wanted = np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365
    assert np.abs(cooler - wanted).max() < 0.03


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = np.log(np.array([0.05, 0.5, 0.15, 0.3], np.float32))
    assert set(np.flatnonzero(counts(logits, params(top_p=0.79)))) == {1, 3}
    assert set(np.flatnonzero(counts(logits, params(top_p=0.82)))) == {1, 2, 3}
    assert set(np.flatnonzero(counts(logits, params(top_p=1e-6)))) == {1}
    # Top-p is a share of what top-k left: 0.5 of 0.8 is 0.625.
    assert set(np.flatnonzero(counts(logits, params(top_k=2, top_p=0.6)))) == {1}


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999999])
def test_top_p_of_a_large_vocabulary_equals_the_plain_sort(top_p: float) -> None:
    logits = rows(5000, 3, scale=1.0)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits.astype(np.float64) - logits.max())[order]
    keep = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1
    allowed = set(order[:keep].tolist())
    got = {sample(logits, params(top_p=top_p), p) for p in range(300)}
    assert got <= allowed


@given(
    st.integers(0, 2**32),
    st.sampled_from([3, 64, 1023, 1024, 5000]),
    st.floats(0.05, 4.0),
    st.integers(0, 60),
    st.floats(0.01, 1.0),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_the_kernel_chooses_what_the_plain_sort_would(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float, ties: bool
) -> None:
    """Rows together on two threads: the token is where the reference's running sum passes the draw."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy((rng.standard_normal((7, size)) * 3).astype(np.float32))
    if ties:
        logits = logits.round()
    draws = [rng.random() for _ in range(7)]
    table = SampleTable(np.array([(temperature, top_k, top_p, min_p, draw, 1, 0, 0) for draw in draws]), [()] * 7)
    tokens = Sampler(size, 2).choose(logits.clone(), table)
    for row, token, draw in zip(logits, tokens, draws, strict=True):
        weights = reference.sample_weights(row, temperature, top_k, top_p, min_p)
        # The kernel's weights are float32: a nucleus that is reached within 1e-6 may end one token earlier or later.
        low = reference.sample_weights(row, temperature, top_k, max(top_p - 1e-5, 1e-9), min_p * (1 + 1e-5))
        high = reference.sample_weights(row, temperature, top_k, min(top_p + 1e-5, 1.0), min_p * (1 - 1e-5))
        if (low > 0).sum() != (high > 0).sum():
            assert high[token] > 0
            continue
        share = weights.cumsum(0) / weights.sum()
        assert weights[token] > 0
        assert share[token] > draw - 1e-5 and share[token] - weights[token] / weights.sum() < draw + 1e-5


def test_rows_of_one_step_do_not_mix() -> None:
    logits = torch.from_numpy(np.stack([rows(300, seed) for seed in range(5)]))
    kinds = [params(temperature=0.0), params(), params(top_k=5), params(top_p=0.5), params(temperature=0.3)]
    plan = StepPlan(0)
    for i, kind in enumerate(kinds):
        plan.keys.append(RequestKey(i))
        plan.num_tokens.append(1 + i)
        plan.start_pos.append(10 * i)
        plan.samples.append(True)
        plan.sampling.append(kind)
        plan.banned.append((i,) if i % 2 else ())
    together = Sampler(300, 2).choose(logits.clone(), sampling_table(plan))
    alone = [sample(logits[i].numpy(), kinds[i], 11 * i + 1, plan.banned[i]) for i in range(5)]
    assert together == alone


def test_the_draw_is_that_of_seed_branch_and_position() -> None:
    plan = StepPlan(
        0, [RequestKey(0)] * 2, [3, 4], [5, 6], [0] * 7, [[0]] * 2, [False, True], [params(seed=9)] * 2, [()] * 2
    )
    table = sampling_table(plan)
    assert table.settings[:, :5].tolist() == [[1.0, 0.0, 1.0, 0.0, uniform(9, 0, 10)]]
    assert table.banned == [()]


def test_banned_ids_never_come_and_nothing_finite_gives_a_token() -> None:
    logits = rows(8)
    banned = [int(np.argmax(logits)), 1]
    assert sample(np.full(4, np.nan, np.float32), params(), 0) == 0
    assert sample(np.array([np.nan, 1.0, 2.0], np.float32), params(temperature=0.0), 0) == 2
    assert all(sample(logits, params(), p, banned) not in banned for p in range(500))


def test_seeds_and_branches_give_different_choices() -> None:
    logits = np.zeros(1000, np.float32)
    assert len({sample(logits, params(seed=s), 5) for s in range(20)}) > 15
    assert len({sample(logits, params(branch=b), 5) for b in range(20)}) > 15

"""Sampling: greedy, temperature, top-k, top-p, bans; a draw depends on seed, branch and position only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampling import SamplingParams
from workers.runner.sample import sample


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
    assert logits[4] == 2.0, "the row was changed"


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

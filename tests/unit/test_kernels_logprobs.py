"""Log-probabilities of the kernel: the reference's values, and a row's values from that row alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.ops import LOGPROB_FLOOR, LogprobScorer, Program


def logits_of(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Few distinct values in some rows, so that there are ties."""
    values = rng.standard_normal((rows, vocab)) * rng.choice([0.1, 4.0, 30.0], (rows, 1))
    coarse = rng.random((rows, 1)) < 0.5
    return torch.from_numpy(np.where(coarse, np.round(values), values).astype(np.float32))


@given(st.integers(0, 2**32), st.sampled_from([3, 64, 1500, 4096]))
@settings(max_examples=60, deadline=None)
def test_values_are_those_of_a_log_softmax_and_the_likeliest_come_first(seed: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 7))
    logits = logits_of(rng, rows, vocab)
    chosen = rng.integers(0, vocab, rows).tolist()
    num_top = rng.integers(0, min(20, vocab) + 1, rows).tolist()
    values, ids = LogprobScorer(vocab).score(logits, chosen, num_top)
    for r, most in enumerate(num_top):
        wanted, top_ids, top = reference.logprobs(logits[r], chosen[r], most)
        assert values[r, 0] == pytest.approx(wanted, abs=1e-5)
        assert ids[r, :most].tolist() == top_ids
        assert values[r, 1 : 1 + most].tolist() == pytest.approx(top, abs=1e-5)


def test_a_row_among_others_is_the_row_alone_bit_for_bit() -> None:
    rng = np.random.default_rng(3)
    vocab, num_top = 2049, [20, 0, 3, 7, 1]
    logits = logits_of(rng, 5, vocab)
    chosen = rng.integers(0, vocab, 5).tolist()
    values, ids = LogprobScorer(vocab, threads=2).score(logits, chosen, num_top)
    for r, most in enumerate(num_top):
        alone, own_ids = LogprobScorer(vocab).score(logits[r : r + 1].clone(), chosen[r : r + 1], [most])
        assert alone[0].tobytes() == values[r, : 1 + most].tobytes()
        assert own_ids[0].tolist() == ids[r, :most].tolist()


def test_logits_are_left_as_they_were() -> None:
    logits = logits_of(np.random.default_rng(1), 3, 100)
    before = logits.clone()
    LogprobScorer(100).score(logits, [1, 2, 3], [5, 5, 5])
    assert torch.equal(logits, before)


def test_what_is_told_is_finite_whatever_the_logits_are() -> None:
    impossible = torch.zeros(3, 64)
    impossible[0, 5:] = -math.inf
    impossible[1, 7] = math.nan
    impossible[2, :] = -math.inf
    values, ids = LogprobScorer(64).score(impossible, [9, 1, 0], [8, 2, 2])
    assert np.isfinite(values).all()
    assert values[0, 0] == LOGPROB_FLOOR and values[0, 6:9].tolist() == [LOGPROB_FLOOR] * 3
    assert values[0, 1] == pytest.approx(-math.log(5), abs=1e-6)
    assert ids[0].tolist() == list(range(8))
    assert (values[1:, :3] == LOGPROB_FLOOR).all()


@pytest.mark.parametrize(
    ("shape", "chosen", "num_top"),
    [((1, 63), [0], [1]), ((2, 64), [0], [1]), ((1, 64), [64], [1]), ((1, 64), [-1], [1]), ((1, 64), [0], [65])],
)
def test_a_callers_mistake_is_told_before_anything_is_read(
    shape: tuple[int, int], chosen: list[int], num_top: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"must be|outside"):
        LogprobScorer(64).score(torch.zeros(shape), chosen, num_top)


def test_no_rows_are_no_work_and_the_operation_is_named() -> None:
    values, ids = LogprobScorer(64).score(torch.zeros(0, 64), [], [])
    assert values.shape == (0, 1) and ids.shape == (0, 0)
    assert "logprobs" in Program.chosen()

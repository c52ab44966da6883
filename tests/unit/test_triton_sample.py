"""Sampling on a device: what the reference's sort would choose, for each row alone, with bans, biases and penalties."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.ops import LOGPROB_FLOOR, Sampler, SampleTable

pytest.importorskip("triton", minversion="3.8")

from kernels.triton.edits import Edits
from kernels.triton.logprobs import logprobs
from kernels.triton.sample import sample
from kernels.triton.weigh import PART, Scratch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Row = tuple[float, int, float, float, float]
"""temperature, top_k, top_p, min_p, draw."""


def normal(rows: int, vocab: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy((np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32))


def flat(lists: Sequence[Sequence[Any]], dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
    begins = torch.tensor([0, *accumulate(map(len, lists))], dtype=torch.int32, device=DEVICE)
    return begins, torch.tensor([item for one in lists for item in one], dtype=dtype, device=DEVICE)


def edits_of(
    rows: int,
    banned: Sequence[Sequence[int]] = (),
    biases: Sequence[Sequence[tuple[int, float]]] = (),
    histories: Sequence[Sequence[int]] = (),
    prompt_lens: Sequence[int] = (),
) -> Edits:
    none: list[list[Any]] = [[]] * rows
    _, amounts = flat([[amount for _, amount in row] for row in biases or none], torch.float32)
    prompts = torch.tensor(list(prompt_lens) or [0] * rows, dtype=torch.int32, device=DEVICE)
    biased = flat([[token for token, _ in row] for row in biases or none])
    return Edits(*flat(banned or none), *biased, amounts, *flat(histories or none), prompts)


def choose(
    logits: torch.Tensor,
    rows: Sequence[Row],
    edits: Edits | None = None,
    penalties: Sequence[tuple[float, float, float]] | None = None,
) -> tuple[list[int], torch.Tensor]:
    """(tokens, logits as they were left), with poison in the scratch, in the result and between the logits' rows."""
    count, vocab = logits.shape
    room = torch.full((count, vocab + 3), float("nan"), device=DEVICE)
    room[:, :vocab] = logits
    settings = torch.tensor(rows, dtype=torch.float64, device=DEVICE).reshape(count, 5)
    more = torch.tensor(penalties or [(1.0, 0.0, 0.0)] * count, dtype=torch.float64, device=DEVICE).reshape(count, 3)
    scratch = Scratch.make(count, vocab, DEVICE)
    for poisoned in (scratch.weights, scratch.peaks, scratch.sums):
        poisoned.fill_(float("nan"))
    for poisoned in (scratch.peak_ids, scratch.faults, scratch.bands, scratch.ids):
        poisoned.fill_(1 << 29)
    out = torch.full((count,), -7, dtype=torch.int64, device=DEVICE)
    sample(room[:, :vocab], torch.cat((settings, more), 1), out, edits, scratch)
    assert room[:, vocab:].isnan().all()
    return out.tolist(), room[:, :vocab].cpu()


def random_rows(rng: np.random.Generator, count: int) -> list[Row]:
    """Some are greedy, some have each cut, some all of them."""
    rows = []
    for _ in range(count):
        cold, top_k = float(rng.choice([0.0, 0.3, 1.0, 3.0], p=[0.1, 0.2, 0.5, 0.2])), int(rng.choice([0, 1, 7, 60]))
        top_p, min_p = float(rng.choice([1.0, 0.9, 0.5, 0.01])), float(rng.choice([0.0, 0.0, 0.02, 1.0]))
        rows.append((cold, top_k, top_p, min_p, float(rng.random())))
    return rows


@pytest.mark.parametrize(("vocab", "ties", "seed"), [(3, False, 0), (1000, True, 1), (PART, False, 2), (9001, True, 3)])
def test_the_token_is_where_the_references_running_sum_passes_the_draw(vocab: int, ties: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = normal(10, vocab, seed=seed)
    logits = logits.round() if ties else logits
    rows = random_rows(rng, 10)
    tokens, _ = choose(logits, rows)
    for row, token, (temperature, top_k, top_p, min_p, draw) in zip(logits, tokens, rows, strict=True):
        if temperature == 0.0:
            assert token == int(row.argmax())
            continue
        weights = reference.sample_weights(row, temperature, top_k, top_p, min_p)
        # The kernel's weights are off by 1e-5 of themselves: a cut nearer than that may keep one token more or fewer.
        low = reference.sample_weights(row, temperature, top_k, max(top_p - 1e-5, 1e-9), min_p * (1 + 1e-5))
        high = reference.sample_weights(row, temperature, top_k, min(top_p + 1e-5, 1.0), min_p * (1 - 1e-5))
        if (low > 0).sum() != (high > 0).sum():
            assert high[token] > 0
            continue
        share = weights.cumsum(0) / weights.sum()
        assert weights[token] > 0
        assert share[token] > draw - 1e-5 and share[token] - weights[token] / weights.sum() < draw + 1e-5


def test_tokens_are_those_of_the_cpu_kernel() -> None:
    rng = np.random.default_rng(11)
    logits, rows = normal(12, 6000, 2.0, seed=5), random_rows(rng, 12)
    table = SampleTable(np.array([(*row, 1.0, 0.0, 0.0) for row in rows]), [()] * 12)
    assert choose(logits, rows)[0] == Sampler(6000).choose(logits.clone(), table)


@pytest.mark.parametrize("row", [(1.0, 0, 0.9, 0.0), (1.0, 4600, 0.95, 0.0)])
def test_a_nucleus_that_is_too_large_to_collect_is_cut_all_the_same(row: tuple[float, int, float, float]) -> None:
    logits = normal(2, PART + 900, 0.1)
    rows = [(*row, draw) for draw in (0.4, 1 - 2.0**-53)]
    weights = [reference.sample_weights(one, *row) for one in logits]
    assert all((one > 0).sum() > PART for one in weights)
    tokens, _ = choose(logits, rows)
    for token, one, (*_, draw) in zip(tokens, weights, rows, strict=True):
        share = one.cumsum(0) / one.sum()
        wanted = int((share > draw - 1e-5).nonzero()[0]), int((share > min(draw + 1e-5, 1.0 - 1e-7)).nonzero()[0])
        assert wanted[0] <= token <= wanted[1]


def test_a_row_without_cuts_is_walked_from_the_part_in_which_its_draw_falls() -> None:
    logits, draws = normal(1, 2 * PART + 3000, 0.5), [0.1, 0.38, 0.42, 0.6, 0.8, 0.99]
    tokens, _ = choose(logits.expand(len(draws), -1), [(1.0, 0, 1.0, 0.0, draw) for draw in draws])
    share = reference.sample_weights(logits[0], 1.0).cumsum(0)
    share /= share[-1].clone()
    assert {token // PART for token in tokens} == {0, 1, 2}
    for token, draw in zip(tokens, draws, strict=True):
        assert int((share > draw - 1e-6).nonzero()[0]) <= token <= int((share > draw + 1e-6).nonzero()[0])


def test_greedy_takes_the_lowest_id_among_equals_in_any_part() -> None:
    logits = torch.full((3, PART + 50), -1.0)
    logits[0, [PART - 1, PART + 3]] = 2.0
    logits[1, [PART + 3, PART + 9]] = 2.0
    greedy = [(0.0, 0, 1.0, 0.0, 0.0), (0.0, 5, 0.5, 0.0, 0.9), (1.0, 1, 1.0, 0.0, 0.9)]
    assert choose(logits, greedy)[0] == [PART - 1, PART + 3, 0]


def test_rows_that_are_not_numbers_are_greedy_over_what_is_finite() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [[nan, 1, 2, 0], [1, inf, 0, 3], [nan] * 4, [-inf] * 4, [inf, -inf, nan, inf], [-inf, 1, 0, 1]]
    )
    rows = [(1.0, 0, 0.9, 0.0, 0.1)] * 5 + [(0.0, 0, 1.0, 0.0, 0.0)]
    assert choose(logits, rows)[0] == [2, 3, 0, 0, 0, 1]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_tiny_temperatures_are_greedy() -> None:
    logits = normal(3, 64)
    rows = [(temperature, 0, 0.99, 0.0, 0.999) for temperature in (1e-300, 1e-45, 1e-5)]
    assert choose(logits, rows)[0] == logits.argmax(1).tolist()


def test_each_token_has_its_share_of_the_draws() -> None:
    """Of each distribution: settings, and the draws at which the token changes, with 0.01 of room on both sides."""
    cases: list[tuple[tuple[float, int, float, float], dict[float, int]]] = [
        ((1.0, 0, 1.0, 0.0), {0.49: 0, 0.51: 1, 0.79: 1, 0.81: 2, 0.94: 2, 0.96: 3}),
        ((0.5, 0, 1.0, 0.0), {0.67: 0, 0.70: 1, 0.92: 1, 0.94: 2, 0.98: 2, 0.999: 3}),
        ((1.0, 2, 1.0, 0.0), {0.61: 0, 0.64: 1, 0.999: 1}),
        ((1.0, 0, 0.79, 0.0), {0.61: 0, 0.64: 1, 0.999: 1}),
        ((1.0, 0, 0.81, 0.0), {0.83: 1, 0.85: 2, 0.999: 2}),
        # Top-p is a share of what top-k left: 0.5 of 0.8 is 0.625.
        ((1.0, 2, 0.6, 0.0), {0.999: 0}),
        ((1.0, 0, 1.0, 0.29), {0.83: 1, 0.85: 2, 0.999: 2}),
        # Of what min-p left, too.
        ((1.0, 0, 0.6, 0.31), {0.999: 0}),
    ]
    rows = [(*settings, draw) for settings, draws in cases for draw in draws]
    tokens, _ = choose(torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(len(rows), -1), rows)
    assert tokens == [token for _, draws in cases for token in draws.values()]


def test_of_equals_at_a_border_the_lowest_ids_stay() -> None:
    last, e = 1 - 2.0**-53, float(np.e)
    one_is_better, all_equal = [0.0, 1.0, 0.0, 0.0, 0.0], [0.0] * 5
    cases = [
        (one_is_better, (1.0, 3, 1.0, 0.0, last), 2),
        (one_is_better, (1.0, 0, (e + 1.5) / (e + 4), 0.0, last), 2),
        (one_is_better, (1.0, 4, (e + 1.5) / (e + 3), 0.0, last), 2),
        (all_equal, (1.0, 2, 1.0, 0.0, last), 1),
        (all_equal, (1.0, 2, 1.0, 0.0, 0.49), 0),
    ]
    tokens, _ = choose(torch.tensor([logits for logits, _, _ in cases]), [row for _, row, _ in cases])
    assert tokens == [token for _, _, token in cases]


@pytest.mark.parametrize("row", [(1.0, 0, 1.0, 0.0), (1.5, 40, 0.95, 0.01)])
def test_a_larger_draw_never_gives_a_lower_id_and_the_extremes_are_the_ends(
    row: tuple[float, int, float, float],
) -> None:
    logits = normal(1, PART + 500, 2.0)
    logits[0, :3] = -float("inf")
    draws = [0.0, 1e-16, *sorted(np.random.default_rng(2).random(3).tolist()), 1 - 2.0**-53]
    tokens, _ = choose(logits.expand(len(draws), -1), [(*row, draw) for draw in draws])
    kept = reference.sample_weights(logits[0], *row).nonzero()
    assert tokens == sorted(tokens)
    assert tokens[0] == int(kept[0]) and tokens[-1] <= int(kept[-1])


def random_edits(rng: np.random.Generator, rows: int, vocab: int) -> tuple[list[Any], list[Any], list[Any], list[int]]:
    banned = [rng.integers(0, vocab, rng.integers(0, 5)).tolist() for _ in range(rows)]
    biased = [rng.permutation(vocab)[: rng.integers(0, 9)].tolist() for _ in range(rows)]
    biases = [[(token, float(np.float32(rng.uniform(-100, 100)))) for token in one] for one in biased]
    histories = [rng.integers(0, vocab, rng.choice([0, 1, 60, 1500])).tolist() for _ in range(rows)]
    return banned, biases, histories, [int(rng.integers(0, len(one) + 1)) for one in histories]


def test_edits_leave_the_references_logits_bit_for_bit() -> None:
    rng = np.random.default_rng(4)
    rows, vocab = 8, 700
    logits = normal(rows, vocab)
    banned, biases, histories, prompts = random_edits(rng, rows, vocab)
    penalties = [tuple(rng.uniform(0.5, 2.0, 3).tolist()) for _ in range(rows)]
    tokens, got = choose(
        logits, [(0.0, 0, 1.0, 0.0, 0.0)] * rows, edits_of(rows, banned, biases, histories, prompts), penalties
    )
    for i in range(rows):
        row = logits[i].clone()
        row[banned[i]] = -float("inf")
        wanted = reference.edit_logits(row, histories[i], prompts[i], *penalties[i], biases[i])
        assert torch.equal(got[i], wanted)
        assert tokens[i] == int(wanted.argmax())


def test_a_bias_does_not_bring_back_a_banned_token_and_a_row_of_bans_gives_token_0() -> None:
    logits = torch.tensor([[1.0, 5.0, 0.0]] * 3)
    rows: list[Row] = [(0.0, 0, 1.0, 0.0, 0.0), (1.0, 0, 0.9, 0.0, 0.9), (1.0, 0, 1.0, 0.0, 0.5)]
    edits = edits_of(3, [[1], [0, 1], [0, 1, 2]], [[(1, 100.0)], [(1, 50.0)], []])
    assert choose(logits, rows, edits)[0] == [0, 2, 0]


def test_a_row_among_others_is_the_row_alone() -> None:
    rng = np.random.default_rng(8)
    rows, vocab = 5, PART + 77
    logits, settings = normal(rows, vocab, 1.0), random_rows(rng, rows)
    banned, biases, histories, prompts = random_edits(rng, rows, vocab)
    penalties = [(1.3, 0.4, 0.3)] * rows
    together, left = choose(logits, settings, edits_of(rows, banned, biases, histories, prompts), penalties)
    for i in range(rows):
        own = edits_of(1, banned[i : i + 1], biases[i : i + 1], histories[i : i + 1], prompts[i : i + 1])
        token, alone = choose(logits[i : i + 1], settings[i : i + 1], own, penalties[:1])
        assert token == [together[i]]
        assert torch.equal(alone[0], left[i])


def test_no_rows_are_no_work() -> None:
    assert choose(torch.empty(0, 50), [], edits_of(0))[0] == []


def told(logits: torch.Tensor, chosen: Sequence[int], num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    before = logits.clone()
    values, ids = logprobs(logits, torch.tensor(chosen, device=DEVICE), num_top)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    return values.cpu(), ids.cpu()


@pytest.mark.parametrize(("vocab", "num_top"), [(3, 3), (1500, 20), (PART + 9, 5)])
def test_logprobs_are_those_of_a_log_softmax_and_the_likeliest_come_first(vocab: int, num_top: int) -> None:
    logits = normal(4, vocab).to(DEVICE)
    logits[2:] = logits[2:].round()
    chosen = [0, 1, 2, vocab - 1]
    values, ids = told(logits, chosen, num_top)
    for row, token, own, own_ids in zip(logits.cpu(), chosen, values.tolist(), ids.tolist(), strict=True):
        wanted, top_ids, top = reference.logprobs(row, token, num_top)
        assert own == pytest.approx([wanted, *top], abs=1e-5)
        assert own_ids == top_ids


def test_logprobs_of_a_row_among_others_are_those_of_the_row_alone() -> None:
    logits = normal(5, PART + 300).to(DEVICE)
    values, ids = told(logits, range(5), 7)
    for i in range(5):
        alone, own_ids = told(logits[i : i + 1], [i], 7)
        assert torch.equal(alone[0], values[i]) and torch.equal(own_ids[0], ids[i])


def test_logprobs_are_finite_whatever_the_logits_are() -> None:
    impossible = torch.zeros(4, 64, device=DEVICE)
    impossible[0, 5:] = -torch.inf
    impossible[1, 7] = torch.nan
    impossible[2, :] = -torch.inf
    impossible[3, 1] = -0.0
    values, ids = told(impossible, [9, 1, 0, 1], 8)
    assert values[0].tolist() == pytest.approx([LOGPROB_FLOOR] + [-np.log(5)] * 5 + [LOGPROB_FLOOR] * 3, abs=1e-6)
    assert (values[1:3] == LOGPROB_FLOOR).all()
    assert ids[0].tolist() == ids[3].tolist() == list(range(8))
    assert 7 not in ids[1].tolist()


def test_no_rows_have_no_logprobs() -> None:
    values, ids = told(torch.empty(0, 64, device=DEVICE), [], 2)
    assert values.shape == (0, 3) and ids.shape == (0, 2)

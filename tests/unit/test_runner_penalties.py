"""Penalties, logit bias and min-p: equal to the plain reference, counted from where the output begins, and the same in
any company, after a preemption and on another attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvariantError
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from kernels import reference
from kernels.ops import Sampler, SampleTable
from tests.core_world import ROOT, make_settings
from tests.model_fixtures import tiny_model
from workers.core.blocks import BlockPool
from workers.core.plan import StepPlan
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request
from workers.core.scheduler import Scheduler
from workers.runner.sample import sampling_table
from workers.runner.torch_runner import TorchRunner

ALL = SamplingParams(
    max_tokens=24,
    temperature=0.9,
    top_k=60,
    top_p=0.95,
    min_p=0.01,
    seed=5,
    ignore_eos=True,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=((7, 2.5), (300, -100.0), (12, 1.0)),
)


def plan_of(rows: Sequence[tuple[SamplingParams, list[int], int]]) -> StepPlan:
    """One decode row for each (params, history, tokens of it that are the prompt)."""
    plan = StepPlan(0)
    for i, (params, history, num_prompt) in enumerate(rows):
        plan.keys.append(RequestKey(i))
        plan.num_tokens.append(1)
        plan.start_pos.append(len(history) - 1)
        plan.samples.append(True)
        plan.sampling.append(params)
        plan.banned.append(())
        plan.histories.append(history if params.needs_history else None)
        plan.prompt_lens.append(num_prompt)
    return plan


def edited(logits: torch.Tensor, plan: StepPlan, threads: int = 1) -> tuple[list[int], torch.Tensor]:
    """(chosen tokens, logits as the kernel left them)."""
    copy = logits.clone()
    return Sampler(logits.shape[1], threads).choose(copy, sampling_table(plan)), copy


def random_row(rng: np.random.Generator, vocab: int) -> tuple[SamplingParams, list[int], int]:
    history = rng.integers(0, vocab, rng.integers(1, 60)).tolist()
    values: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 0.7])),
        "min_p": float(rng.choice([0.0, 0.05])),
        "repetition_penalty": float(rng.choice([1.0, 0.3, 1.0 + rng.random()])),
        "presence_penalty": float(rng.choice([0.0, rng.uniform(-2, 2)])),
        "frequency_penalty": float(rng.choice([0.0, rng.uniform(-2, 2)])),
        "seed": int(rng.integers(1 << 40)),
    }
    biased = rng.permutation(vocab)[: rng.integers(0, 9)].tolist()
    bias = tuple((token, float(rng.uniform(-100, 100))) for token in biased)
    return SamplingParams(64, logit_bias=bias, **values), history, int(rng.integers(1, len(history) + 1))


@given(st.integers(0, 2**32), st.sampled_from([3, 64, 1500]))
@settings(max_examples=80, deadline=None)
def test_the_kernel_leaves_the_logits_of_the_reference_bit_for_bit(seed: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, vocab) for _ in range(6)]
    logits = torch.from_numpy((rng.standard_normal((6, vocab)) * 3).astype(np.float32))
    tokens, got = edited(logits, plan_of(rows), threads=2)
    for i, (params, history, num_prompt) in enumerate(rows):
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        wanted = reference.edit_logits(logits[i], history, num_prompt, *penalties, params.logit_bias)
        assert torch.equal(got[i], wanted)
        if params.greedy:
            assert tokens[i] == int(wanted.argmax())


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_row_among_others_is_the_row_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, 300) for _ in range(7)]
    logits = torch.from_numpy((rng.standard_normal((7, 300)) * 3).astype(np.float32))
    together, bits = edited(logits, plan_of(rows), threads=2)
    for i, row in enumerate(rows):
        alone, own = edited(logits[i : i + 1], plan_of([row]))
        assert alone == [together[i]]
        assert torch.equal(own[0], bits[i])


@pytest.mark.parametrize(
    ("penalty", "wanted"),
    [
        # Prompt 0 1, output 1 2 2; logits 4 4 4 4 -1.
        ({"repetition_penalty": 2.0}, [2, 2, 2, 4, -1]),
        ({"presence_penalty": 0.5}, [4, 3.5, 3.5, 4, -1]),
        ({"frequency_penalty": 0.5}, [4, 3.5, 3, 4, -1]),
        ({"presence_penalty": -1.0, "frequency_penalty": 0.25}, [4, 4.75, 4.5, 4, -1]),
        ({"repetition_penalty": 0.5, "logit_bias": ((0, -5.0), (4, -2.0))}, [-0.5, 8, 8, 4, -3]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_repetition_counts_prompt_and_output_and_the_others_the_output_alone(
    penalty: dict[str, Any], wanted: list[float]
) -> None:
    logits = torch.tensor([[4.0, 4.0, 4.0, 4.0, -1.0]])
    _, got = edited(logits, plan_of([(SamplingParams(9, **penalty), [0, 1, 1, 2, 2], 2)]))
    assert got[0].tolist() == wanted


def test_greedy_rows_use_penalties_and_bias() -> None:
    logits = torch.tensor([[3.0, 2.9, 1.0]])
    greedy = SamplingParams(9)
    cases = [{"repetition_penalty": 1.5}, {"presence_penalty": 0.2}, {"frequency_penalty": 0.2}]
    for penalty in cases:
        assert edited(logits, plan_of([(replace(greedy, **penalty), [2, 0], 1)]))[0] == [1]
    assert edited(logits, plan_of([(replace(greedy, logit_bias=((2, 2.5),)), [2, 0], 1)]))[0] == [2]
    assert edited(logits, plan_of([(greedy, [2, 0], 1)]))[0] == [0]


def test_a_bias_does_not_bring_back_a_banned_token() -> None:
    plan = plan_of([(SamplingParams(9, logit_bias=((1, 100.0),)), [0], 1)])
    plan.banned[0] = (1,)
    assert edited(torch.tensor([[1.0, 5.0, 0.0]]), plan)[0] == [0]


def test_min_p_is_a_share_of_the_best_token_and_comes_before_top_p() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.16, 0.24]]))

    def drawn(**changes: float) -> set[int]:
        params = SamplingParams(9, **({"temperature": 1.0} | changes))  # type: ignore[arg-type]
        return {edited(logits, plan_of([(replace(params, seed=seed), [0], 1)]))[0][0] for seed in range(400)}

    assert drawn(min_p=0.19) == {0, 1, 2, 3}
    assert drawn(min_p=0.3) == {1, 2, 3}
    assert drawn(min_p=0.33) == {1, 3}
    assert drawn(min_p=1.0) == {1}
    # After min-p 0.5 of 0.74 is 0.68: reaches a top-p of 0.6, which 0.5 of 1 does not.
    assert drawn(top_p=0.6) == {1, 3}
    assert drawn(top_p=0.6, min_p=0.33) == {1}
    # Temperature comes first: at 2 the ratio 0.24 / 0.5 becomes its root, 0.69.
    assert drawn(min_p=0.6) == {1}
    assert drawn(min_p=0.6, temperature=2.0) == {1, 3}


def test_without_penalties_and_bias_the_kernel_gets_neither_history_nor_bias() -> None:
    table = sampling_table(plan_of([(SamplingParams(9), [1, 2], 1), (SamplingParams(9, temperature=1.0), [3], 1)]))
    assert (table.biases, table.histories, table.prompt_lens) == ((), (), ())


def test_only_the_tokens_that_the_step_knows_count() -> None:
    """The scheduler's own list may have grown since."""
    plan = plan_of([(SamplingParams(9, presence_penalty=1.0), [0, 1], 1)])
    plan.histories[0] = [0, 1, 2, 2]
    assert sampling_table(plan).histories[0].tolist() == [0, 1]


def test_a_missing_history_is_a_broken_invariant() -> None:
    plan = plan_of([(SamplingParams(9, presence_penalty=1.0), [0, 1], 1)])
    for wrong in (None, [0]):
        plan.histories[0] = wrong
        with pytest.raises(InvariantError, match="lacks the history"):
            sampling_table(plan)


def test_a_table_that_does_not_fit_is_refused_and_nothing_is_written() -> None:
    logits = torch.zeros(2, 5)
    fits = sampling_table(plan_of([(replace(ALL, logit_bias=((1, 1.0),)), [1, 2], 1)] * 2))
    wrong = [
        replace(fits, settings=fits.settings[:, :4]),
        replace(fits, settings=fits.settings * [1, 1, 1, 200, 1, 1, 1, 1]),
        replace(fits, settings=fits.settings * [1, 1, 1, 1, 1, 0, 1, 1]),
        replace(fits, biases=[((5, 1.0),), ()]),
        replace(fits, biases=[()]),
        replace(fits, histories=[np.array([5]), np.array([0])]),
        replace(fits, histories=fits.histories[:1]),
        replace(fits, prompt_lens=[3, 1]),
    ]
    for table in wrong:
        with pytest.raises(ValueError, match=r"settings|min_p|history|bias"):
            Sampler(5).choose(logits, table)
    assert not logits.any()


def test_the_greatest_penalties_leave_a_token() -> None:
    for repetition in (1e-300, 2.0):
        params = replace(ALL, repetition_penalty=repetition, presence_penalty=2.0, frequency_penalty=2.0, logit_bias=())
        logits = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 5)).astype(np.float32))
        (token,), _ = edited(logits, plan_of([(params, [0, 1, 2, 3, 4] * 1000, 2500)]))
        assert 0 <= token < 5


def test_a_table_of_settings_without_histories_is_what_it_was() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    assert Sampler(2).choose(logits, SampleTable(np.zeros((1, 8)), [()])) == [1]


class Rig:
    """A scheduler before the tiny model; requests differ by their prompt."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self.runner = TorchRunner(folder, 256, block_size=8, num_blocks=num_blocks, exact=True)
        limits = make_settings(block_size=8, max_model_len=256, long_prefill_token_threshold=16)
        pool = BlockPool(num_blocks, 8)
        self.scheduler = Scheduler(limits, pool, PrefixCache(pool))
        self._keys = count(1)

    def run(self, *bodies: tuple[list[int], list[int]], sampling: SamplingParams = ALL) -> list[list[int]]:
        """Outputs of requests (prompt, output of an earlier attempt) that run together."""
        requests = []
        for prompt, output in bodies:
            key = RequestKey(next(self._keys))
            requests.append(Request(key, RequestId(str(key)), 0, prompt, sampling, ROOT, resumed_ids=list(output)))
            assert self.scheduler.submit(requests[-1], 0.0) is None
        steps = 0
        while (plan := self.scheduler.schedule(0.0)) is not None:
            self.scheduler.apply(plan, self.runner.run(plan), 0.0)
            steps += 1
            assert steps < 1000
        return [request.output_ids for request in requests]


PROMPTS = [np.random.default_rng(i).integers(3, 512, 20 + 9 * i).tolist() for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def test_penalties_change_the_output_and_mates_do_not(folder: Path) -> None:
    rig = Rig(folder, 64)
    alone = [rig.run((prompt, []))[0] for prompt in PROMPTS]
    assert rig.run(*((prompt, []) for prompt in PROMPTS)) == alone
    plain = SamplingParams(ALL.max_tokens, temperature=0.9, top_k=60, top_p=0.95, seed=5, ignore_eos=True)
    assert rig.run((PROMPTS[0], []), sampling=plain) != alone[:1]
    assert all(300 not in output for output in alone)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_resumed_request_goes_on_as_if_undisturbed(folder: Path, temperature: float) -> None:
    params = replace(ALL, temperature=temperature)
    rig = Rig(folder, 64)
    (whole,) = rig.run((PROMPTS[1], []), sampling=params)
    for already in (1, 7, 23):
        assert rig.run((PROMPTS[1], whole[:already]), sampling=params) == [whole]


def test_the_same_tokens_as_a_prompt_are_another_request(folder: Path) -> None:
    """Presence and frequency do not count a prompt, so a resume that lost the boundary would be seen above."""
    params = replace(ALL, repetition_penalty=1.0, presence_penalty=-2.0, frequency_penalty=-2.0)
    rig = Rig(folder, 64)
    (whole,) = rig.run((PROMPTS[1], []), sampling=params)
    assert rig.run((PROMPTS[1], whole[:7]), sampling=params) == [whole]
    rest = replace(params, max_tokens=params.max_tokens - 7)
    assert rig.run((PROMPTS[1] + whole[:7], []), sampling=rest) != [whole[7:]]


def test_preempted_requests_give_the_tokens_of_undisturbed_ones(folder: Path) -> None:
    bodies = [(prompt, []) for prompt in PROMPTS]
    wanted = Rig(folder, 64).run(*bodies)
    small = Rig(folder, 14)
    assert small.run(*bodies) == wanted
    assert small.scheduler.stats()["preemptions"] > 0, "the pool must be too small for all of them"

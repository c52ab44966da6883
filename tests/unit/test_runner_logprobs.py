"""Log-probabilities of a step: of the rows that ask, of the model's own logits, the same bits in any company."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from headrace.core.records import TokenLogprobs
from headrace.sampling import SamplingParams
from kernels.ops import LogprobScorer
from tests.model_fixtures import plan_of, tiny_model, watch_logits
from workers.core.plan import StepPlan
from workers.runner.fake import FakeRunner, fake_logprobs
from workers.runner.torch_runner import TorchRunner

SHAPED = SamplingParams(
    9, temperature=0.7, seed=3, top_k=5, repetition_penalty=1.5, logit_bias=((7, 50.0),), logprobs=3
)


def runner_of(tmp_path: Path) -> TorchRunner:
    return TorchRunner(tiny_model(tmp_path), 256, block_size=16, num_blocks=16, exact=True)


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in lengths]


def step(rows: list[tuple[list[int], SamplingParams]]) -> StepPlan:
    plan = plan_of([(0, ids, [2 * i, 2 * i + 1]) for i, (ids, _) in enumerate(rows)])
    plan.sampling = [params for _, params in rows]
    plan.histories = [ids for ids, _ in rows]
    plan.prompt_lens = [len(ids) for ids, _ in rows]
    return plan


def test_what_shapes_the_choice_changes_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_logits(monkeypatch)
    runner = runner_of(tmp_path)
    plan = step([(ids, SHAPED) for ids in prompts(5, 20)])
    plan.banned = [(9, 11), ()]
    result = runner.run(plan)
    for row, token in enumerate(result.token_ids):
        wanted = torch.log_softmax(torch.from_numpy(seen[-2 + row]).double(), 0)
        told = result.logprobs[row]
        assert token == 7, "the bias must have decided"
        assert told.logprob == pytest.approx(float(wanted[7]), abs=1e-5)
        assert list(told.top_ids) == torch.argsort(wanted, descending=True)[:3].tolist()
        assert list(told.top_logprobs) == pytest.approx(wanted[list(told.top_ids)].tolist(), abs=1e-5)


def test_a_row_among_others_has_the_bits_of_the_row_alone(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    plain = SamplingParams(9, logprobs=20)
    rows = list(zip(prompts(3, 17, 30, 1), [plain, SHAPED, SamplingParams(9), plain], strict=True))
    together = runner.run(step(rows))
    assert sorted(together.logprobs) == [0, 1, 3], "who does not ask is not told"
    for number, row in enumerate(rows):
        alone = runner.run(step([row]))
        assert alone.token_ids == [together.token_ids[number]]
        assert alone.logprobs.get(0) == together.logprobs.get(number)


def test_a_step_where_nobody_asks_scores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("scored")

    runner = runner_of(tmp_path)
    monkeypatch.setattr(LogprobScorer, "score", never)
    assert not runner.run(step([(ids, SamplingParams(9)) for ids in prompts(4, 9)])).logprobs


def test_a_row_that_does_not_sample_is_not_counted(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    plan = step([(ids, SamplingParams(9, logprobs=1)) for ids in prompts(4, 9)])
    plan.samples[0] = False
    assert list(runner.run(plan).logprobs) == [0]


def test_the_fake_runner_tells_a_function_of_the_whole_history() -> None:
    runner = FakeRunner()
    [ids] = prompts(20)
    result = runner.run(plan_of([(0, ids, [3, 5])], SamplingParams(9, logprobs=4)))
    [token] = result.token_ids
    assert result.logprobs == {0: fake_logprobs(ids, token, 4)}
    assert fake_logprobs([ids[0] + 1, *ids[1:]], token, 4) != fake_logprobs(ids, token, 4)
    told = fake_logprobs(ids, token, 512)
    assert dict(zip(told.top_ids, told.top_logprobs, strict=True))[token] == told.logprob
    assert isinstance(told, TokenLogprobs) and len(set(told.top_ids)) == 512
    assert list(told.top_logprobs) == torch.tensor(told.top_logprobs, dtype=torch.float32).tolist()

"""What each format of the weights costs in quality on the default model: perplexity of a fixed text, and how often the
likeliest token stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from headrace.paths import cache_root
from kernels.ops import step_rows
from tests.model_fixtures import plan_of
from workers.model.prepare import DEFAULT_MODEL, prepare_model
from workers.model.weight_format import WeightFormat
from workers.runner.torch_runner import TorchRunner

TEXT = """A water mill uses the force of a river to turn a wheel. For many hundred years mills of this kind ground \
grain into flour, sawed wood, and drove the hammers of the smiths. The oldest wheels lay flat in the stream \
and turned a stone directly above them. Later ones stood upright, and a pair of wooden gears carried the \
motion around the corner to the stones. The miller could not choose the weather. In a dry summer the river \
was low, and the wheel stood still; in spring there was more water than anybody could use. So people began \
to build ponds. A dam held the water back during the night, and in the morning the gate was opened and a \
narrow channel, the headrace, led the water to the top of the wheel. After it had fallen, a second channel, \
the tailrace, took it back to the river. The difference in height between the two is called the head, and it \
decides how much power a mill can have. An engineer named John Smeaton measured this with small models in \
the middle of the eighteenth century. He found that a wheel which is filled from above does about twice as \
much work as one that is pushed from below, because the weight of the water does more than its speed. When \
steam engines came, many mills were given up, but the idea was not lost. Modern power stations have turbines \
instead of wheels and pipes instead of channels, and yet they still need the same two things: a place that \
is high, and water that wants to go down.
"""
PROMPT = "<|im_start|>user\nExplain in a few sentences why the sky is blue.<|im_end|>\n<|im_start|>assistant\n"
ANSWER_TOKENS = 48


class Probe:
    """The default model in one format."""

    def __init__(self, folder: Path, weight_format: WeightFormat) -> None:
        self.runner = TorchRunner(folder, 512, num_blocks=32, threads=2, weight_format=weight_format)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Of every position, in one chunk: [len(ids), vocab]."""
        rows = step_rows(self.runner._shape, self.runner.config.heads, [0], [len(ids)], [list(range(32))], ids)
        return self.runner._decoder.forward(replace(rows, sampled=np.arange(len(ids)))).clone()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` tokens, one at a time."""
        history, done = list(prompt), 0
        while len(history) < len(prompt) + count:
            plan = plan_of([(done, history[done:], list(range(32)))])
            done = len(history)
            history += self.runner.run(plan).token_ids
        return history[len(prompt) :]


def _perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).exp())


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare_model(DEFAULT_MODEL, cache_root())


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Probe]:
    yield Probe(folder, WeightFormat.FLOAT32)


def _ids(folder: Path, text: str) -> list[int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids


@pytest.mark.real_model
def test_the_checkpoints_own_integers_give_the_bits_of_float32(folder: Path, exact: Probe) -> None:
    auto = Probe(folder, WeightFormat.AUTO)
    assert auto.runner.weight_storage == "int4 and int8"
    assert auto.runner.memory_plan()["weights"] < 0.25 * exact.runner.memory_plan()["weights"]
    text, prompt = _ids(folder, TEXT), _ids(folder, PROMPT)
    assert torch.equal(auto.logits(text), exact.logits(text))
    assert auto.greedy(prompt, ANSWER_TOKENS) == exact.greedy(prompt, ANSWER_TOKENS)


@pytest.mark.real_model
def test_lossy_formats_keep_perplexity_and_most_tokens(folder: Path, exact: Probe) -> None:
    text, prompt = _ids(folder, TEXT), _ids(folder, PROMPT)
    assert len(text) > 250
    wanted = exact.logits(text)
    perplexity = _perplexity(wanted, text)
    answer = exact.greedy(prompt, ANSWER_TOKENS)
    # bounds: perplexity over that of float32; share of positions of the text, and tokens of the answer, that stay
    for name, most, positions, tokens in (
        ("float16", 1.001, 0.99, 47),
        ("bfloat16", 1.005, 0.98, 46),
        ("int8", 1.01, 0.93, 44),
    ):
        probe = Probe(folder, WeightFormat(name))
        logits = probe.logits(text)
        ratio = _perplexity(logits, text) / perplexity
        kept = float((logits.argmax(1) == wanted.argmax(1)).float().mean())
        forced = probe.logits(prompt + answer)[len(prompt) - 1 : -1].argmax(1)
        same = int((forced == torch.tensor(answer)).sum())
        assert 1 / most < ratio < most
        assert kept >= positions
        assert same >= tokens

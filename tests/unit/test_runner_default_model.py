"""The default model, converted from its GGUF, answers through the runner's real path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from headrace.paths import cache_root
from tests.model_fixtures import plan_of
from workers.model.prepare import DEFAULT_MODEL, prepare_model
from workers.runner.torch_runner import TorchRunner

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare_model(DEFAULT_MODEL, cache_root())


def _answer(runner: TorchRunner, prompt: list[int], chunk: int) -> list[int]:
    history, done, table = list(prompt), 0, list(range(20))[::-1]
    while len(history) < len(prompt) + 20:
        part = history[done : done + chunk]
        (token,) = runner.run(plan_of([(done, part, table)])).token_ids
        done += len(part)
        if done == len(history):
            if token in runner.eos_token_ids:
                break
            history.append(token)
    return history[len(prompt) :]


@pytest.mark.real_model
def test_the_default_model_knows_the_capital_of_france(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    runner = TorchRunner(folder, 2048, num_blocks=24, threads=2, exact=True)
    runner.warm_up()
    assert tokenizer.decode(_answer(runner, prompt, 512)) == "The capital of France is Paris."
    assert tokenizer.decode(_answer(runner, prompt, 5)) == "The capital of France is Paris."
    assert runner.memory_plan()["kv"] == 24 * runner.layout.block_bytes


@pytest.mark.real_model
def test_kv_of_the_default_model_is_the_same_bits_for_other_chunks_and_threads(folder: Path) -> None:
    ids = np.random.default_rng(0).integers(3, 49000, 96).tolist()
    pools = []
    for threads, chunks in ((1, [96]), (2, [1, 17, 40, 38])):
        runner = TorchRunner(folder, 512, num_blocks=8, threads=threads)
        done = 0
        for chunk in chunks:
            runner.run(plan_of([(done, ids[done : done + chunk], [0, 1, 2, 3, 4, 5]), (0, ids[:9], [7])]))
            done += chunk
        pools.append(runner.kv_pool[: 6 * runner.layout.block_bytes].copy())
    assert np.array_equal(*pools)

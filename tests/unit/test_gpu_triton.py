"""A whole model through the Triton kernels, interpreted: the tokens of plain torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from headrace.sampling import SamplingParams
from tests.gpu_runs import Row, gpu_runner, model_of, prompt_of, step_of, take

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(), reason="neither a GPU nor interpreted"
)
DRAWN = SamplingParams(max_tokens=99, temperature=0.9, top_k=40, top_p=0.9, seed=5, presence_penalty=0.4)


def small(tmp_path: Path) -> Path:
    """QK-norm, a window in one of two layers, GQA: all that the kernels can be asked for."""
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    return model_of(tmp_path, "qwen3", heads=2, kv_heads=1, hidden=32, intermediate=32, **window)


def test_tokens_are_those_of_plain_torch(tmp_path: Path) -> None:
    folder = small(tmp_path)
    told = []
    for use_triton in (True, False):
        runner = gpu_runner(folder, use_triton=use_triton, max_seqs=4, max_batched_tokens=32)
        first, *others = [Row(prompt_of(seed, 3 + 17 * (seed == 0)), [9 + seed, 3 - seed], DRAWN) for seed in range(3)]
        steps = [
            [(first, 11)],
            [(first, 9), *((row, 3) for row in others)],
            *[[(row, 1) for row in (first, *others)]] * 2,
        ]
        for rows in steps:
            take(rows, step_of(rows), runner)
        told.append([row.ids for row in (first, *others)])
        assert runner.counters["graph_padding_rows"] == 2
        if use_triton:
            assert [name for name, who in runner.kernels().items() if who == "torch"] == ["linear", "embed"]
    assert told[0] == told[1]


def test_a_batch_invariant_row_has_the_same_logits_bit_for_bit_in_every_batch(tmp_path: Path) -> None:
    pytest.importorskip("kernels.triton.matmul")
    folder = small(tmp_path)
    seen = []
    for mates in (0, 2):
        runner = gpu_runner(folder, use_triton=True, batch_invariant=True, max_seqs=3)
        row = Row(prompt_of(1, 40), [3, 17, 5])
        others = [Row(prompt_of(7 + mate, 5 + 9 * mate), [20 + mate, 30 + mate]) for mate in range(mates)]
        told = []
        for count in (21, 19, 1):
            rows = [(row, count), *((mate, len(mate.ids) - mate.done) for mate in others)]
            take(rows, step_of(rows), runner)
            told.append(runner._space.logits[0].clone())
        seen.append(torch.stack(told[1:]))
    assert torch.equal(*seen)

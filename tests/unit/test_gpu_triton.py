"""A whole model through the Triton kernels, interpreted: the tokens of plain torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.sampling import SamplingParams
from tests.gpu_runs import GREEDY, Row, gpu_runner, model_of, outputs, prompt_of, step_of, take

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(), reason="neither a GPU nor interpreted"
)
DRAWN = SamplingParams(max_tokens=99, temperature=0.9, top_k=40, top_p=0.9, seed=5, presence_penalty=0.4)


@pytest.mark.parametrize(
    ("family", "config", "sampling"),
    [
        ("qwen3", {"kv_heads": 2, "tied": False}, GREEDY),
        ("qwen2", {"kv_heads": 2, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}, DRAWN),
    ],
    ids=["qwen3", "qwen2"],
)
def test_tokens_are_those_of_plain_torch(
    tmp_path: Path, family: str, config: dict[str, Any], sampling: SamplingParams
) -> None:
    folder = model_of(tmp_path, family, **config)
    triton = gpu_runner(folder, use_triton=True, max_seqs=3)
    chosen = triton.kernels()
    assert [name for name, who in chosen.items() if who == "torch"] == ["linear", "embed", "logprobs"]
    assert outputs(triton, sampling) == outputs(gpu_runner(folder), sampling)
    assert triton.counters["graph_padding_rows"] > 0


def test_a_batch_invariant_row_has_the_same_logits_bit_for_bit_in_every_batch(tmp_path: Path) -> None:
    folder = model_of(tmp_path)
    seen = []
    for mates in (0, 2):
        runner = gpu_runner(folder, use_triton=True, batch_invariant=True, max_seqs=3)
        row = Row(prompt_of(1, 40), [3, 17, 5])
        others = [Row(prompt_of(7 + mate, 5 + 9 * mate), [20 + mate, 30 + mate]) for mate in range(mates)]
        told = []
        for count in (21, 19, 1, 1):
            rows = [(row, count), *((mate, len(mate.ids) - mate.done) for mate in others)]
            take(rows, step_of(rows), runner)
            told.append(runner._space.logits[0].clone())
        seen.append(torch.stack(told[1:]))
    assert torch.equal(*seen)

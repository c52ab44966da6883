"""The engine's logits equal those of transformers, for each family, over several chunks and decode steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model_fixtures import LLAMA3_ROPE, plan_of, tiny_model, watch_logits
from workers.runner.torch_runner import TorchRunner

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"kv_heads": 2, "head_dim": 64}),
    ("llama", {"kv_heads": 8, "head_dim": 16, "tied": False}),
    ("llama", {"kv_heads": 1, "heads": 3, "hidden": 96, "head_dim": 128, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_scaling": LLAMA3_ROPE, "head_dim": 64, "rope_theta": 500000.0}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "head_dim": 96}),
    ("llama", {"rope_parameters": {"rope_theta": 1000.0, **LLAMA3_ROPE}, "head_dim": 64}),
    ("mistral", {"sliding_window": 24, "head_dim": 64, "tied": False}),
    ("qwen2", {"kv_heads": 2, "head_dim": 64, "hidden": 512}),
    (
        "qwen2",
        {
            "kv_heads": 8,
            "head_dim": 16,
            "hidden": 128,
            "use_sliding_window": True,
            "sliding_window": 40,
            "max_window_layers": 2,
        },
    ),
    ("qwen3", {"kv_heads": 2, "head_dim": 128, "tied": False}),
    ("qwen3", {"kv_heads": 8, "head_dim": 64}),
]


@pytest.mark.parametrize(("family", "config"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_logits_equal_transformers_over_chunks_and_decode(
    tmp_path: Path, family: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    logits_of_steps = watch_logits(monkeypatch)
    folder = tiny_model(tmp_path, family, **config)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = np.random.default_rng(3).integers(0, 512, 121).tolist()
    # Positions after which a logit is sampled: chunk borders inside and at blocks, then one-token steps.
    chunks = [7, 16, 40, 33, 16, *([1] * 9)]
    assert sum(chunks) == len(ids)
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0].numpy()
    runner = TorchRunner(folder, 2048, block_size=16, num_blocks=20, threads=1)
    table = [3, 17, 5, 11, 0, 9, 2, 13]
    mate = [1, 4]

    done = 0
    for chunk in chunks:
        runner.run(plan_of([(done, ids[done : done + chunk], table), (0, ids[:20], mate)]))
        done += chunk
        got = logits_of_steps[-2]
        assert np.abs(got - wanted[done - 1]).max() < 1e-4
        assert np.abs(logits_of_steps[-1] - wanted[19]).max() < 1e-4


def test_the_tokenizer_of_a_tiny_model_reads_back_every_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model(tmp_path) / "tokenizer.json"))
    for text in ("What is the water made of?", "naïve \U0001f600 日本 \n\t x"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert max(ids) < 512

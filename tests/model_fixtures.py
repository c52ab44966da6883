"""Tiny random models as Hugging Face folders: real tokenizer, real config, seeded weights. Needs neither torch nor a
network.

Beside them two small helpers for tests that drive a runner by hand.
"""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.ids import RequestKey
from headrace.sampling import SamplingParams
from workers.core.plan import StepPlan
from workers.model.config import FAMILIES, parse_config
from workers.model.tensors import tensor_shapes

BOS, EOS = 1, 2
"""<|im_start|> and <|im_end|>; 0 is <|endoftext|>."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
    "by",
    "one",
    "had",
    "not",
    "but",
    "what",
    "all",
    "were",
    "when",
    "we",
    "there",
    "can",
    "an",
    "your",
    "which",
    "their",
    "said",
    "if",
    "do",
    "will",
    "each",
    "about",
    "how",
    "up",
    "out",
    "them",
    "then",
    "she",
    "many",
    "some",
    "so",
    "these",
    "would",
    "other",
    "into",
    "has",
    "more",
    "her",
    "two",
    "like",
    "him",
    "see",
    "time",
    "could",
    "no",
    "make",
    "than",
    "first",
    "been",
    "its",
    "who",
    "now",
    "people",
    "my",
    "made",
    "over",
    "did",
    "down",
    "only",
    "way",
    "find",
    "use",
    "may",
    "water",
    "long",
    "little",
    "very",
    "after",
    "words",
    "called",
    "just",
    "where",
    "most",
    "know",
]


def tiny_model(
    tmp_dir: Path,
    family: str = "llama",
    kv_heads: int = 2,
    *,
    heads: int = 8,
    head_dim: int = 16,
    layers: int = 4,
    hidden: int = 64,
    intermediate: int = 128,
    vocab_size: int = 512,
    tied: bool = True,
    max_positions: int = 4096,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A model folder under `tmp_dir`, made once for equal arguments. `config` entries go into config.json as they
    are.
    """
    name = next(architecture for architecture, known in FAMILIES.items() if known == family)
    raw: dict[str, Any] = {
        "architectures": [name],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_positions,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    } | config
    key = blake2b(json.dumps([raw, seed], sort_keys=True).encode(), digest_size=6).hexdigest()
    folder = tmp_dir / f"tiny-{family}-{key}"
    if folder.is_dir():
        return folder
    temporary = tmp_dir / f".{folder.name}.{os.getpid()}"
    temporary.mkdir(parents=True)
    (temporary / "config.json").write_text(json.dumps(raw, indent=1))
    (temporary / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    write_tokenizer(temporary, vocab_size)
    shapes = dict(tensor_shapes(parse_config(raw, {})))
    save_file({n: _values(n, s, seed) for n, s in shapes.items()}, temporary / "model.safetensors", {"format": "pt"})
    temporary.rename(folder)
    return folder


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Norms near 1, embeddings and biases of moderate size, matrices that keep the scale of their input."""
    word = int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little")
    noise = np.random.default_rng([seed, word]).standard_normal(shape).astype(np.float32)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if name == "model.embed_tokens.weight":
        return noise * np.float32(0.5)
    return noise * np.float32(shape[1] ** -0.5)


def write_tokenizer(folder: Path, vocab_size: int = 512) -> None:
    """A byte-level BPE: three special tokens, all bytes, then merges that spell common words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges: list[tuple[str, str]] = []
    for word in (f"\u0120{word}" for word in _WORDS):
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            if len(vocab) < vocab_size and left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    while len(vocab) < vocab_size:
        vocab[f"<unused-{len(vocab)}>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": special[1],
                "eos_token": special[2],
                "pad_token": special[0],
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )


GREEDY = SamplingParams(max_tokens=1 << 20)


def plan_of(rows: list[tuple[int, list[int], list[int]]], sampling: SamplingParams = GREEDY) -> StepPlan:
    """A step of rows (start position, token ids, block table) that all sample."""
    plan = StepPlan(1)
    for i, (start, ids, table) in enumerate(rows):
        plan.keys.append(RequestKey(i))
        plan.num_tokens.append(len(ids))
        plan.start_pos.append(start)
        plan.token_ids += ids
        plan.block_tables.append(table)
        plan.samples.append(True)
        plan.sampling.append(sampling)
        plan.banned.append(())
    return plan


def watch_logits(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray[Any, Any]]:
    """A list that gets every row of logits which TorchRunner's sampler sees, in order."""
    from workers.model.decoder import Decoder

    seen: list[np.ndarray[Any, Any]] = []
    original = Decoder.forward

    def spy(self: Decoder, *args: Any) -> Any:
        logits = original(self, *args)
        seen.extend(row.numpy().copy() for row in logits)
        return logits

    monkeypatch.setattr(Decoder, "forward", spy)
    return seen

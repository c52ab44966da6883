"""Tiny GGUF files: the metadata and tokenizer of a tiny model, its tensors in any of GGUF's types."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quantize
from safetensors.numpy import load_file

from workers.model.gguf import gguf_name

Array = np.ndarray[Any, Any]
_HALF_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}
"""Where the float16 numbers of a block lie, for types that gguf cannot make."""


def random_rows(type_name: str, rows: int, depth: int, rng: np.random.Generator, scale: float = 1e-3) -> Array:
    """uint8 [rows, bytes]: a matrix of that type from random bits, with float16 numbers of about `scale`."""
    kind = GGMLQuantizationType[type_name]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if type_name not in _HALF_AT:
        return np.asarray(quantize((rng.standard_normal((rows, depth)) * 20 * scale).astype(np.float32), kind))
    blocks = rng.integers(0, 256, (rows * depth // block, block_bytes), dtype=np.uint8)
    for at in _HALF_AT[type_name]:
        halves = (rng.standard_normal(len(blocks)) * scale).astype("<f2")
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def permute(rows: Array, heads: int) -> Array:
    """Rows of Q or K as llama.cpp's converter orders them for the llama architecture."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def tiny_gguf(model: Path, path: Path, type_of: Callable[[str], str], seed: int = 0) -> dict[str, Array]:
    """Write the model folder as a GGUF. type_of: a tensor's Hugging Face name -> F32, F16, BF16 or a block type.

    Vectors stay F32, halves are made from the model's values, block types from random bits. Returns the values of the
    tensors as gguf reads them, in Hugging Face's order of rows.
    """
    from gguf import dequantize

    config = json.loads((model / "config.json").read_text())
    writer = GGUFWriter(path, config["model_type"])
    _write_metadata(writer, config)
    _write_tokenizer(writer, model)
    values: dict[str, Array] = {}
    rng = np.random.default_rng(seed)
    for name, tensor in load_file(model / "model.safetensors").items():
        kind = "F32" if tensor.ndim == 1 else type_of(name)
        if kind in ("F32", "F16", "BF16"):
            data = np.asarray(quantize(tensor, GGMLQuantizationType[kind]))
        else:
            data = random_rows(kind, *tensor.shape, rng, 1e-3)
        values[name] = np.asarray(dequantize(data, GGMLQuantizationType[kind]))
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads and config["model_type"] == "llama":
            data = permute(data, config[heads])
        raw = None if data.dtype != np.uint8 else GGMLQuantizationType[kind]
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(data), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _write_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])


def _write_tokenizer(writer: GGUFWriter, model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {entry["id"] for entry in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3 if i in special else 1 for i in range(len(vocab))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

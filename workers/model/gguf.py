"""A GGUF file as a Hugging Face folder: config.json, generation_config.json, tokenizer and float32 safetensors.

Llama-architecture GGUF keeps the rows of Q and K permuted for interleaved RoPE; they are put back. Tensors are
dequantized and written one at a time, so memory stays at one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headrace.errors import StartupError
from workers.model.config import parse_config
from workers.model.gguf_tokenizer import write_tokenizer
from workers.model.rope import llama3_factors
from workers.model.tensors import tensor_shapes

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert_gguf(source: Path, target: Path) -> None:
    """Fill the existing, empty folder `target`. Raises StartupError for a file that is broken or not supported,
    OSError for the disk.
    """
    try:
        from gguf import GGUFReader

        reader = GGUFReader(source)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise StartupError(f"{source}: not a GGUF file, or truncated ({type(error).__name__})") from error
    try:
        raw = _config(fields, tensors, source)
    except KeyError as error:
        raise StartupError(f"{source}: metadata {error.args[0]} is missing") from error
    config = parse_config(raw, {})
    (target / "config.json").write_text(json.dumps(raw, indent=1))
    eos = {fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields}
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": sorted(eos)}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=1))
    write_tokenizer(fields, source, target)
    shapes = dict(tensor_shapes(config))
    with (target / "model.safetensors").open("wb") as file:
        _write_header(file, shapes)
        for name, values in _dequantized(shapes, tensors, config.heads, config.kv_heads, raw, source):
            if values.shape != shapes[name]:
                raise StartupError(f"{source}: tensor {name!r} has shape {values.shape}, expected {shapes[name]}")
            file.write(np.ascontiguousarray(values, "<f4").data)


def _config(fields: dict[str, Any], tensors: dict[str, Any], source: Path) -> dict[str, Any]:
    """config.json of the model that the metadata describes."""
    arch = fields.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise StartupError(f"{source}: GGUF architecture {arch!r} is not supported ({', '.join(_ARCHITECTURES)} are)")
    if fields.get(f"{arch}.expert_count"):
        raise StartupError(f"{source}: mixture-of-experts models are not supported")

    def need(key: str) -> Any:
        if f"{arch}.{key}" not in fields:
            raise StartupError(f"{source}: metadata {arch}.{key} is missing")
        return fields[f"{arch}.{key}"]

    heads, hidden = need("attention.head_count"), need("embedding_length")
    kv_heads = fields.get(f"{arch}.attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise StartupError(f"{source}: head counts that differ by layer are not supported")
    head_dim = fields.get(f"{arch}.attention.key_length", hidden // heads)
    if fields.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise StartupError(f"{source}: partial rotary embedding is not supported")
    return {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _short(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": need("context_length"),
        "rope_theta": float(fields.get(f"{arch}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(arch, fields, tensors, head_dim, source),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def _short(value: float) -> float:
    """A float32 from metadata as the decimal that was meant: 9.999999747e-06 is 1e-05."""
    return float(np.format_float_positional(np.float32(value), unique=True))


def _rope_scaling(
    arch: str, fields: dict[str, Any], tensors: dict[str, Any], head_dim: int, source: Path
) -> dict[str, Any] | None:
    """Llama 3's scaling is only present as a tensor of divisors: it is recognised by making it anew."""
    kind = fields.get(f"{arch}.rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        found = np.asarray(tensors["rope_freqs.weight"].data, np.float32)
        theta = float(fields.get(f"{arch}.rope.freq_base", 10000.0))
        factor = float(found.max())
        if found.shape == (head_dim // 2,) and np.allclose(
            found, llama3_factors(theta, head_dim, factor, 1.0, 4.0, 8192), 1e-3
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        raise StartupError(f"{source}: its RoPE frequency factors are not those of Llama 3")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(fields[f"{arch}.rope.scaling.factor"])}
    if kind != "none":
        raise StartupError(f"{source}: RoPE scaling {kind!r} is not supported")
    return None


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.{kind}"


def _dequantized(
    shapes: dict[str, tuple[int, ...]],
    tensors: dict[str, Any],
    heads: int,
    kv_heads: int,
    raw: dict[str, Any],
    source: Path,
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    from gguf import dequantize

    for name in shapes:
        tensor = tensors.get(_gguf_name(name))
        if tensor is None:
            raise StartupError(f"{source}: tensor {_gguf_name(name)!r} is missing")
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise StartupError(f"{source}: tensor type {tensor.tensor_type.name} is not supported") from error
        if raw["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = unpermute(values, heads if ".q_proj." in name else kv_heads)
        yield name, values


def unpermute(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows from pairs (2 i, 2 i + 1) back to halves (i, i + dim / 2), head by head. values: [heads * dim, ...]."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _write_header(file: BinaryIO, shapes: dict[str, tuple[int, ...]]) -> None:
    """The safetensors header of float32 tensors that follow in the order of `shapes`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 64)
    file.write(len(data).to_bytes(8, "little") + data)

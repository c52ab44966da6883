"""A GGUF file as a Hugging Face folder: config.json, generation_config.json, tokenizer and safetensors.

model.safetensors has what anybody can load: half tensors as they are, all else dequantized to float32. Beside it
headrace.codes has the quantized matrices as integer codes, where they stand for the same values bit for bit.
Llama-architecture GGUF keeps the rows of Q and K permuted for interleaved RoPE; they are put back. Tensors are read and
written one at a time, so memory stays at one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import StartupError
from workers.model.config import parse_config
from workers.model.gguf_codes import code_shapes, layout_of, unpack
from workers.model.gguf_tokenizer import write_tokenizer
from workers.model.loaders import CODES, SINGLE
from workers.model.rope import llama3_factors
from workers.model.safetensors_writer import SafetensorsWriter
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
_HALVES = ("F16", "BF16")
"""Types that are kept, under the same name. All else becomes F32."""


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
    found = {name: _find(name, shape, tensors, source) for name, shape in shapes.items()}
    permuted = {"q_proj": config.heads, "k_proj": config.kv_heads} if raw["model_type"] == "llama" else {}
    _write_tensors(shapes, found, permuted, source, target)


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


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor that Hugging Face calls `name`."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.{kind}"


def _find(name: str, shape: tuple[int, ...], tensors: Mapping[str, Any], source: Path) -> Any:
    tensor = tensors.get(gguf_name(name))
    if tensor is None:
        raise StartupError(f"{source}: tensor {gguf_name(name)!r} is missing")
    there = tuple(int(size) for size in reversed(tensor.shape))
    if there != shape:
        raise StartupError(f"{source}: tensor {name!r} has shape {there}, expected {shape}")
    return tensor


def _write_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Any],
    permuted: Mapping[str, int],
    source: Path,
    target: Path,
) -> None:
    """Both files. permuted: heads of each projection whose rows are to be put back in order."""
    kinds = {name: tensors[name].tensor_type.name for name in shapes}
    layouts = {name: layout_of(kinds[name]) if len(shapes[name]) == 2 else None for name in shapes}
    floats = [(name, kinds[name] if kinds[name] in _HALVES else "F32", shapes[name]) for name in shapes]
    coded = [
        (f"{name}.{part}", dtype, shape)
        for name, layout in layouts.items()
        if layout is not None
        for part, dtype, shape in code_shapes(layout, *shapes[name])
    ]
    with SafetensorsWriter(target / SINGLE, floats) as plain, SafetensorsWriter(target / CODES, coded) as exact:
        for name, layout in layouts.items():
            tensor, heads = tensors[name], permuted.get(name.split(".")[-2], 0)
            if layout is None:
                values = _floats(tensor, source)
                plain.write(name, unpermute(values, heads) if heads else values)
                continue
            codes = unpack(unpermute(tensor.data, heads) if heads else tensor.data, layout)
            plain.write(name, codes.values())
            for part, array in codes.arrays():
                exact.write(f"{name}.{part}", array)


def _floats(tensor: Any, source: Path) -> np.ndarray[Any, Any]:
    """The values as they are written: halves as they lie in the file (bfloat16 as its bits), else float32."""
    from gguf import dequantize

    kind = tensor.tensor_type.name
    if kind in _HALVES:
        return np.asarray(tensor.data.view("<u2"))
    try:
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
    except (NotImplementedError, ValueError) as error:
        raise StartupError(f"{source}: tensor type {kind} is not supported") from error


def unpermute(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows from pairs (2 i, 2 i + 1) back to halves (i, i + dim / 2), head by head. values: [heads * dim, ...]."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)

"""What a decoder is, read from a Hugging Face folder's config.json: Llama, Mistral, Qwen2 and Qwen3. Pure data, no
torch.

Whatever this product does not compute is refused here with one line, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.errors import StartupError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. kind: default | linear | llama3; the factors mean what they do in transformers."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. Widths in floats; `windows[i]` is layer i's sliding window in positions, 0 for full
    attention.
    """

    family: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def attention_text(self) -> str:
        """Canonical text of everything, beside weights and layout, that shapes the bytes of a KV block."""
        fields = asdict(self)
        for irrelevant in ("eos_token_ids", "bos_token_id", "max_positions"):
            del fields[irrelevant]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def load_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a model folder. Raises StartupError with one line."""
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return parse_config(raw, read_json(generation) if generation.is_file() else {})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; StartupError when it is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StartupError(f"{path}: missing; a model is a Hugging Face folder, a .gguf file or a known name") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path}: unreadable ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path}: not a JSON object")
    return value


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The decoder that `raw` (config.json) describes. Raises StartupError when it is not one that this engine
    computes.
    """
    architectures = raw.get("architectures") or []
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    family = FAMILIES.get(str(name)) or (raw.get("model_type") if raw.get("model_type") in FAMILIES.values() else None)
    if family is None:
        raise StartupError(
            f"model architecture {name or raw.get('model_type')!r} is not supported: {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(raw)
    hidden, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    layers = _size(raw, "num_hidden_layers")
    kv_heads = _size(raw, "num_key_value_heads", heads)
    head_dim = _size(raw, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise StartupError(f"config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads")
    for what, value, multiple in (("head_dim", head_dim, 16), ("hidden_size", hidden, 16)):
        if value % multiple:
            raise StartupError(f"config.json: {what} {value} is not a multiple of {multiple}, which the kernels need")
    intermediate = _size(raw, "intermediate_size")
    if intermediate % 16:
        raise StartupError(
            f"config.json: intermediate_size {intermediate} is not a multiple of 16, which the kernels need"
        )
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=_size(raw, "vocab_size"),
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw),
        windows=_windows(raw, family, layers),
        qkv_bias=True if family == "qwen2" else attention_bias and family != "mistral",
        output_bias=attention_bias and family in ("llama", "qwen3"),
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_positions=_size(raw, "max_position_embeddings", 2048),
        eos_token_ids=_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
        bos_token_id=raw.get("bos_token_id"),
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise StartupError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported (silu is)")
    if raw.get("quantization_config"):
        raise StartupError("config.json: quantized weights are not supported; use a float checkpoint or a GGUF file")
    if raw.get("num_experts") or raw.get("num_local_experts"):
        raise StartupError("config.json: mixture-of-experts models are not supported")
    if raw.get("partial_rotary_factor", 1.0) not in (1, 1.0, None):
        raise StartupError("config.json: partial rotary embedding is not supported")


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise StartupError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        raise StartupError("config.json: RoPE parameters per layer type are not supported")
    try:
        theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
        kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
        if kind == "default":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, kind, float(parameters["factor"]))
        if kind == "llama3":
            return RopeConfig(
                theta,
                kind,
                float(parameters["factor"]),
                float(parameters["low_freq_factor"]),
                float(parameters["high_freq_factor"]),
                int(parameters["original_max_position_embeddings"]),
            )
    except (KeyError, TypeError, ValueError) as error:
        raise StartupError(f"config.json: bad RoPE parameters ({error!r})") from error
    raise StartupError(f"config.json: RoPE type {kind!r} is not supported (default, linear and llama3 are)")


def _windows(raw: Mapping[str, Any], family: str, layers: int) -> tuple[int, ...]:
    """Sliding window of each layer. Mistral: every layer; Qwen: those named by layer_types or from max_window_layers
    on.
    """
    window = raw.get("sliding_window")
    if family == "llama" or not window or (family.startswith("qwen") and not raw.get("use_sliding_window", False)):
        return (0,) * layers
    if not isinstance(window, int) or window < 0:
        raise StartupError(f"config.json: sliding_window must be a positive integer, not {window!r}")
    if family == "mistral":
        return (window,) * layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise StartupError("config.json: layer_types does not name full or sliding attention for every layer")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(i, int) or i < 0 for i in ids):
        raise StartupError("eos_token_id must be a token id or a list of them")
    return tuple(ids)

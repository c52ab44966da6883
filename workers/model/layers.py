"""One decoder layer's weights, packed for the kernels, with Q, K, V and gate, up fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.weights import PackedWeight
from workers.model.config import ModelConfig
from workers.model.loaders import Weights
from workers.model.matrices import load_packed
from workers.model.tensors import layer_shapes
from workers.model.weight_format import WeightFormat


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Packed matrices: qkv [hidden -> (heads + 2 kv_heads) dim], gate_up [hidden -> 2 intermediate], paired; norms are
    float32 vectors.
    """

    input_norm: Any
    qkv: PackedWeight
    qk_norm: tuple[Any, Any, float] | None
    output: PackedWeight
    middle_norm: Any
    gate_up: PackedWeight
    down: PackedWeight

    @property
    def matrices(self) -> tuple[PackedWeight, ...]:
        return self.qkv, self.output, self.gate_up, self.down


def load_layer(config: ModelConfig, weights: Weights, weight_format: WeightFormat, layer: int) -> LayerWeights:
    """Read and pack one layer. Raises StartupError when a tensor is missing or has another shape."""
    prefix = f"model.layers.{layer}."
    shapes = {name.removeprefix(prefix): shape for name, shape in layer_shapes(config, layer)}

    def get(name: str) -> Any:
        return weights.get(prefix + name, *shapes[name])

    def packed(*names: str, paired: bool = False) -> PackedWeight:
        biases = [get(f"{name}.bias") for name in names if f"{name}.bias" in shapes]
        matrices = [(f"{prefix}{name}.weight", shapes[f"{name}.weight"]) for name in names]
        return load_packed(weights, weight_format, matrices, biases, paired)

    qk_norm = None
    if config.qk_norm:
        qk_norm = (get("self_attn.q_norm.weight").clone(), get("self_attn.k_norm.weight").clone(), config.norm_eps)
    return LayerWeights(
        input_norm=get("input_layernorm.weight").clone(),
        qkv=packed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=qk_norm,
        output=packed("self_attn.o_proj"),
        middle_norm=get("post_attention_layernorm.weight").clone(),
        gate_up=packed("mlp.gate_proj", "mlp.up_proj", paired=True),
        down=packed("mlp.down_proj"),
    )

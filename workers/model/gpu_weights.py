"""A model folder's weights in device memory, in one dtype, with Q, K, V and gate, up fused. Each tensor is read once,
from its mapped file into its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import StartupError
from kernels.gpu_reference import QkNorm
from workers.model.config import ModelConfig
from workers.model.loaders import Entry, Weights
from workers.model.rope import rope_tables
from workers.model.tensors import layer_shapes


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [N, K], bias [N]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 kv_heads) * dim, hidden]
    qk_norm: QkNorm | None
    output: Linear  # [hidden, heads * dim]
    middle_norm: Tensor  # [hidden]
    gate_up: Linear  # [2 intermediate, hidden], gate first
    down: Linear  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    embedding: Tensor  # [vocab, hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself where they are tied
    layers: tuple[DeviceLayer, ...]
    final_norm: Tensor  # [hidden]
    cos: Tensor  # float32 [positions, dim / 2]
    sin: Tensor

    def tensors(self) -> Iterator[Tensor]:
        """Each once."""
        yield from (self.embedding, self.final_norm, self.cos, self.sin)
        if self.head is not self.embedding:
            yield self.head
        for layer in self.layers:
            for field in fields(layer):
                yield from _tensors(getattr(layer, field.name))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def read_bytes(self) -> int:
        """What every step reads: all but the embedding, of which it picks rows, and the rotation tables."""
        unread = self.cos.nbytes + self.sin.nbytes + (0 if self.head is self.embedding else self.embedding.nbytes)
        return self.num_bytes - unread


class RandomWeights:
    """In the place of `Weights`: normal numbers that keep the scale of their input, the same ones each time."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._random = torch.Generator(device).manual_seed(0)

    def stored(self, name: str, *shape: int) -> Tensor:
        """A float32 tensor on the device."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._random.device)
        values = torch.randn(shape, generator=self._random, device=self._random.device)
        return values * shape[-1] ** -0.5

    def check_codes(self, name: str, shape: tuple[int, ...]) -> None:
        """There are none."""


def _tensors(part: Tensor | Linear | QkNorm | None) -> Iterator[Tensor]:
    if isinstance(part, Linear):
        yield from (tensor for tensor in (part.weight, part.bias) if tensor is not None)
    elif isinstance(part, tuple):
        yield from part[:2]
    elif part is not None:
        yield part


def load_device_weights(
    config: ModelConfig, weights: Weights | RandomWeights, device: torch.device, dtype: torch.dtype, max_positions: int
) -> DeviceWeights:
    """Raises StartupError when a tensor is missing, has another shape or does not fit the dtype."""
    c = config
    read = _Reader(weights, device, dtype)
    embedding = read.stacked([("model.embed_tokens.weight", (c.vocab_size, c.hidden))])
    head = embedding if c.tied_embeddings else read.stacked([("lm_head.weight", (c.vocab_size, c.hidden))])
    layers = tuple(_load_layer(c, read, index) for index in range(c.layers))
    final_norm = read.stacked([("model.norm.weight", (c.hidden,))])
    cos, sin = rope_tables(c.rope, c.head_dim, max_positions)
    return DeviceWeights(embedding, head, layers, final_norm, cos.to(device), sin.to(device))


def _load_layer(config: ModelConfig, read: _Reader, index: int) -> DeviceLayer:
    prefix = f"model.layers.{index}."
    shapes = dict(layer_shapes(config, index))

    def vector(name: str) -> Tensor:
        return read.stacked([(f"{prefix}{name}.weight", shapes[f"{prefix}{name}.weight"])])

    def linear(*names: str) -> Linear:
        named = {
            kind: [(key, shapes[key]) for key in (f"{prefix}{name}.{kind}" for name in names) if key in shapes]
            for kind in ("weight", "bias")
        }
        return Linear(read.stacked(named["weight"]), read.stacked(named["bias"]) if named["bias"] else None)

    qk_norm = None
    if config.qk_norm:
        qk_norm = (vector("self_attn.q_norm"), vector("self_attn.k_norm"), config.norm_eps)
    return DeviceLayer(
        input_norm=vector("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=qk_norm,
        output=linear("self_attn.o_proj"),
        middle_norm=vector("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


class _Reader:
    def __init__(self, weights: Weights | RandomWeights, device: torch.device, dtype: torch.dtype) -> None:
        self._weights, self._device, self._dtype = weights, device, dtype

    def stacked(self, named: list[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Tensors of these (name, shape), one under the other."""
        rows = [shape[0] for _, shape in named]
        result = torch.empty((sum(rows), *named[0][1][1:]), dtype=self._dtype, device=self._device)
        for part, (name, shape) in zip(result.split(rows), named, strict=True):
            part.copy_(self._weights.stored(name, *shape))
            if self._dtype is torch.float16 and part.isinf().any():
                raise StartupError(f"{self._weights.folder}: tensor {name!r} has values beyond the range of float16")
        return result

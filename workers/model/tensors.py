"""Names and shapes of the tensors that a decoder needs, as Hugging Face writes them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from workers.model.config import ModelConfig


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor; the LM head only where it is not the embedding."""
    c = config
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden)
    for layer in range(c.layers):
        yield from layer_shapes(c, layer)
    yield "model.norm.weight", (c.hidden,)
    if not c.tied_embeddings:
        yield "lm_head.weight", (c.vocab_size, c.hidden)


def layer_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of one layer's tensors."""
    c = config
    prefix = f"model.layers.{layer}"
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    yield f"{prefix}.input_layernorm.weight", (c.hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (c.hidden,)
    for name, rows, columns, bias in (
        ("self_attn.q_proj", q, c.hidden, c.qkv_bias),
        ("self_attn.k_proj", kv, c.hidden, c.qkv_bias),
        ("self_attn.v_proj", kv, c.hidden, c.qkv_bias),
        ("self_attn.o_proj", c.hidden, q, c.output_bias),
        ("mlp.gate_proj", c.intermediate, c.hidden, c.mlp_bias),
        ("mlp.up_proj", c.intermediate, c.hidden, c.mlp_bias),
        ("mlp.down_proj", c.hidden, c.intermediate, c.mlp_bias),
    ):
        yield f"{prefix}.{name}.weight", (rows, columns)
        if bias:
            yield f"{prefix}.{name}.bias", (rows,)
    if c.qk_norm:
        yield f"{prefix}.self_attn.q_norm.weight", (c.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (c.head_dim,)

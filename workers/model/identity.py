"""What a model folder contributes to the name of a KV block (SPEC C3)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import headrace
from kvtransfer.core.identity import KEY_SCHEMA_VERSION
from kvtransfer.core.layout import KvLayout
from workers.model.config import ModelConfig, read_json
from workers.model.digest import files_digest, weights_digest
from workers.model.weight_format import WeightFormat

ENGINE_VERSION = 1
"""Raise it when a change of kernels or decoder changes the bits of KV."""


def identity_fields(
    folder: Path, config: ModelConfig, layout: KvLayout, weight_format: WeightFormat, cache_dir: Path
) -> Mapping[str, bytes | str | int]:
    """The fields that `kvtransfer.core.identity.root_hash` wants. Reads every byte of the weights once per change."""
    return {
        "key_schema": KEY_SCHEMA_VERSION,
        "weights": weights_digest(folder, cache_dir),
        "quantization": weight_format.identity,
        "tokenizer": files_digest([folder / "tokenizer.json"], cache_dir)
        if (folder / "tokenizer.json").is_file()
        else "",
        "chat_template": _chat_template(folder),
        "tool_schema": "none",
        "attention": f"engine {ENGINE_VERSION} of {headrace.__version__}; {config.attention_text()}",
        "kv_dtype": "float32",
        "kv_layout": layout.describe(),
    }


def _chat_template(folder: Path) -> str:
    """The model's own template; one that a gateway puts in its place changes token ids, and those are hashed anyway."""
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8", errors="replace")
    path = folder / "tokenizer_config.json"
    return str(read_json(path).get("chat_template", "")) if path.is_file() else ""

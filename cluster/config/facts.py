"""What resolution needs to know about a prepared model and about this machine. Reads headers, never weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.control_groups import available_bytes, core_quota
from headrace.errors import StartupError
from workers.model.loaders import Weights
from workers.model.weight_format import WeightFormat

NVIDIA_CONTROL = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    path: str
    """The prepared folder."""
    max_position_embeddings: int
    kv_bytes_per_token: int
    """All layers, keys and values, in float32."""
    weight_bytes: int
    """As they are kept in memory."""


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    available_bytes: int
    num_gpus: int = 0
    """CUDA devices that torch sees."""


def read_machine() -> Machine:
    """Cores and memory that this process may use: affinity counts, and the limits of its control groups."""
    cores = len(os.sched_getaffinity(0))
    quota = core_quota()
    return Machine(max(1, int(quota)) if quota < cores else cores, available_bytes(), count_gpus())


def count_gpus() -> int:
    """Asks torch, in a process of its own and only where NVIDIA's driver is loaded: importing torch takes seconds."""
    if not NVIDIA_CONTROL.exists():
        return 0
    asked = subprocess.run([sys.executable, "-m", "workers.runner.gpus"], capture_output=True, check=False)
    try:
        return len(json.loads(asked.stdout)["names"])
    except (ValueError, KeyError, TypeError):
        return 0


def read_model_facts(folder: Path, weight_format: WeightFormat) -> ModelFacts:
    """Raises StartupError, one line, for a folder that is not a complete model."""
    config = _read_config(folder)
    try:
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        kv_bytes = int(config["num_hidden_layers"]) * kv_heads * head_dim * 2 * 4  # keys and values, float32
        max_position = int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise StartupError(f"{folder / 'config.json'}: not the configuration of a decoder ({error!r})") from None
    if kv_bytes <= 0 or max_position <= 0:
        raise StartupError(f"{folder / 'config.json'}: sizes must be positive")
    weight_bytes = weight_format.bytes_of(Weights(folder))
    return ModelFacts(str(folder), max_position, kv_bytes, weight_bytes)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(
            f"{path}: no such file; a model folder has config.json, tokenizer.json and *.safetensors"
        ) from None
    except (OSError, ValueError):
        raise StartupError(f"{path}: cannot be read as JSON") from None
    if not isinstance(config, dict):
        raise StartupError(f"{path}: must hold a JSON object")
    return config

"""Builders for the cluster tests: a model folder that only headers are read of, specs, and a look at processes."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from cluster.config import Machine, ModelFacts
from headrace.core.records import Role
from workers.spec import WorkerSpec

GIB = 1 << 30


def machine(cores: int = 2, available_bytes: int = 22 * GIB) -> Machine:
    return Machine(cores=cores, available_bytes=available_bytes)


def model(
    max_position_embeddings: int = 8192, kv_bytes_per_token: int = 46_080, weight_bytes: int = 538_000_000
) -> ModelFacts:
    """The default model's numbers."""
    return ModelFacts("/models/smol", max_position_embeddings, kv_bytes_per_token, weight_bytes)


def model_folder(path: Path) -> Path:
    """A folder with a tiny configuration and a safetensors file of one 4x4 float32 tensor."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "max_position_embeddings": 128,
    }
    (path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    return path


def worker_spec(worker_id: str = "prefill-0", threads: int = 1) -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id,
        incarnation="inc-1",
        role=Role.PREFILL,
        model_path="/models/smol",
        max_model_len=64,
        threads=threads,
        kv_cache_bytes=1 << 20,
        cluster_token="t" * 16,
    )


def is_gone(pid: int) -> bool:
    """True when no process has that id, or only its exit status is left."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return True

"""What the workers compute on: the `engine` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.config.section import Section
from workers.spec import EngineOptions

AUTO_TAKES_GPUS = False
"""A worker on a GPU cannot serve as long as no lane reads and writes KV in device memory: it is asked for by name."""


class EngineConfig(Section):
    """The same in all pools: KV that a device computed goes to workers on such devices alone."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cpu (see AUTO_TAKES_GPUS)."""
    cuda_graphs: bool = True
    """Record steps of decodes at start and replay them."""
    batch_invariant: bool = False
    """Products and attention that give a row the same bits in every batch; slower. CUDA only."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a device's memory for weights, workspace, graphs and KV, where kv_cache_bytes is not set."""

    def resolved(self, num_gpus: int) -> EngineOptions:
        """num_gpus: CUDA devices that workers will see, as far as is known."""
        options = self.model_dump()
        if self.device == "auto":
            options["device"] = "cuda" if num_gpus and AUTO_TAKES_GPUS else "cpu"
        return EngineOptions(**options)

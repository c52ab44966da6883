"""How the matrices of a model are kept in memory. Needs no torch.

Arithmetic is float32 with every format: one that keeps the values keeps every bit of the output.
"""

from __future__ import annotations

from enum import StrEnum

from workers.model.loaders import Weights


class WeightFormat(StrEnum):
    """auto: as the checkpoint has them (float32, halves, GGUF's integers), which loses nothing."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    """Symmetric, a scale for each output channel."""

    @property
    def identity(self) -> str:
        """Its part of the name of a KV block: what computes the same bits has the same one."""
        return "none" if self in (WeightFormat.AUTO, WeightFormat.FLOAT32) else self.value

    def bytes_of(self, weights: Weights) -> int:
        """What the weights of a folder take in memory, roughly: fused matrices may need a wider common form."""
        total = 0
        for name, entry in weights.entries.items():
            elements = entry.num_elements
            codes = weights.check_codes(name, entry.shape) if self is WeightFormat.AUTO else None
            if len(entry.shape) != 2 or self is WeightFormat.FLOAT32:
                total += 4 * elements
            elif self is WeightFormat.AUTO:
                total += entry.num_bytes if codes is None else codes.num_bytes
            elif self is WeightFormat.INT8:
                total += elements + 4 * entry.shape[0]
            else:
                total += 2 * elements
        return total

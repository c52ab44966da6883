"""From a plan to what the device kernels take, and from their answer to the step's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.core.records import TokenLogprobs
from headrace.errors import StartupError
from kernels.gpu_sampling import DeviceEdits
from kernels.ops import SampleTable
from workers.core.plan import StepResult
from workers.model.loaders import Weights
from workers.model.weight_format import WeightFormat

_DTYPES = {
    WeightFormat.BFLOAT16: torch.bfloat16,
    WeightFormat.FLOAT16: torch.float16,
    WeightFormat.FLOAT32: torch.float32,
}


def choose_device(asked: str) -> torch.device:
    """auto | cpu | cuda | cuda:N. Raises StartupError for a GPU that torch does not see."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartupError(f"device {asked} was asked for, and torch {torch.__version__} sees no CUDA device")
    device = torch.device("cuda:0" if asked in ("auto", "cuda") else asked)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise StartupError(f"device {asked} was asked for; there are {torch.cuda.device_count()} CUDA devices")
    return device


def choose_dtype(weight_format: WeightFormat, weights: Weights, device: torch.device) -> torch.dtype:
    """Of weights, activations and KV. auto: bfloat16 on a GPU (float16 where the checkpoint is), float32 on a CPU.

    Raises StartupError for a format that devices do not compute yet.
    """
    if weight_format in _DTYPES:
        return _DTYPES[weight_format]
    if weight_format is not WeightFormat.AUTO:
        raise StartupError(f"quantization: {weight_format} is not supported on this device; leave it out")
    if any(weights.check_codes(name, entry.shape) for name, entry in weights.entries.items()):
        raise StartupError(
            "dtype: auto keeps the integers of this GGUF, which is not supported on this device; set dtype: bfloat16, "
            "float16 or float32"
        )
    if device.type == "cpu":
        return torch.float32
    halves = {entry.dtype for entry in weights.entries.values() if len(entry.shape) == 2}
    return torch.float16 if halves == {"F16"} else torch.bfloat16


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor on the device; beside a GPU the host does not wait for the copy."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()


def device_edits(table: SampleTable, device: torch.device) -> DeviceEdits | None:
    """What the rows want done to their logits; None: nothing."""
    penalized = [row for row, history in enumerate(table.histories) if len(history)]
    if not (any(table.banned) or table.biases or penalized):
        return None
    bans, biases = [list(row) for row in table.banned], [list(row) for row in table.biases]
    histories = [table.histories[row] for row in penalized]
    outputs = [np.arange(len(h)) >= table.prompt_lens[row] for row, h in zip(penalized, histories, strict=True)]
    flat_biases = list(chain.from_iterable(biases))

    def ids(values: Any) -> Tensor:
        return upload(np.asarray(values, np.int64), torch.int64, device)

    def numbers(values: Any) -> Tensor:
        return upload(np.asarray(values, np.float32), torch.float32, device)

    return DeviceEdits(
        ban_rows=ids(_row_of(bans)),
        ban_ids=ids(list(chain.from_iterable(bans))),
        bias_rows=ids(_row_of(biases)),
        bias_ids=ids([token for token, _ in flat_biases]),
        bias_amounts=numbers([amount for _, amount in flat_biases]),
        penalized=ids(penalized),
        penalties=numbers(table.settings[penalized, 5:8]),
        history_rows=ids(_row_of(histories)),
        history_ids=ids(np.concatenate([*histories, np.zeros(0, np.int64)])),
        history_outputs=numbers(np.concatenate([*outputs, np.zeros(0, bool)])),
    )


def _row_of(lists: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.repeat(np.arange(len(lists)), [len(values) for values in lists])


@dataclass(slots=True)
class StepUnderWay:
    """A step that was submitted: where its answer will be once `done` has passed."""

    began: float
    enqueued: float = 0.0
    tokens: Tensor | None = None  # int64 [sampled], host memory
    asking: dict[int, int] = field(default_factory=dict)
    logprobs: tuple[Tensor, Tensor] | None = None  # values [asking, 1 + width], ids [asking, width], host memory
    done: Any = None
    """A CUDA event; None on a CPU, where submitting is computing."""

    def result(self, run_s: float) -> StepResult:
        """The step must be over."""
        tokens = [] if self.tokens is None else self.tokens.tolist()
        told = {}
        if self.logprobs is not None:
            values, ids = (part.tolist() for part in self.logprobs)
            for (row, most), (own, *top), top_ids in zip(self.asking.items(), values, ids, strict=True):
                told[row] = TokenLogprobs(own, tuple(top_ids[:most]), tuple(top[:most]))
        return StepResult(tokens, run_s, 0.0, told)

"""From a plan to what the device kernels take, and from their answer to the step's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.core.records import TokenLogprobs
from headrace.errors import StartupError
from kernels.gpu_sampling import DeviceEdits
from kernels.shapes import SampleTable
from workers.core.plan import StepResult
from workers.model.gpu_weights import RandomWeights
from workers.model.loaders import Weights
from workers.model.weight_format import WeightFormat

_DTYPES = {
    WeightFormat.BFLOAT16: torch.bfloat16,
    WeightFormat.FLOAT16: torch.float16,
    WeightFormat.FLOAT32: torch.float32,
}


def choose_device(asked: str) -> torch.device:
    """auto | cpu | cuda: the first that CUDA_VISIBLE_DEVICES leaves. StartupError for a GPU that torch does not see."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartupError(f"device {asked} was asked for, and torch {torch.__version__} sees no CUDA device")
    return torch.device("cuda:0")


def choose_dtype(weight_format: WeightFormat, weights: Weights | RandomWeights, device: torch.device) -> torch.dtype:
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
    if device.type == "cpu" or not host.numel():
        return host.to(device, copy=True)
    return host.pin_memory().to(device, non_blocking=True)


def device_edits(table: SampleTable, device: torch.device) -> DeviceEdits | None:
    """What the rows want done to their logits; None: nothing. Ids below 0 in a history are passed on as they are."""
    if not (any(table.banned) or any(table.biases) or any(map(len, table.histories))):
        return None
    rows = len(table.banned)
    biases, histories = table.biases or [()] * rows, table.histories or [()] * rows
    amounts = np.fromiter((amount for row in biases for _, amount in row), np.float32)
    ban_begins, banned = _flat(table.banned, device)
    bias_begins, biased = _flat([[token for token, _ in row] for row in biases], device)
    history_begins, history = _flat(histories, device)
    prompt_lens = upload(np.asarray(table.prompt_lens or [0] * rows), torch.int64, device)
    bias_amounts = upload(amounts, torch.float32, device)
    return DeviceEdits(ban_begins, banned, bias_begins, biased, bias_amounts, history_begins, history, prompt_lens)


def _flat(lists: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(where each row's ids begin [rows + 1], all ids)."""
    begins = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=begins[1:])
    parts = [np.asarray(ids, np.int64) for ids in lists]
    return upload(begins, torch.int64, device), upload(np.concatenate(parts), torch.int64, device)


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

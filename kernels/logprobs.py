"""The checked public face of the log-probability kernel. Import it through `kernels.ops`.

Apart from `Sampler`, which changes the logits: what is told is the model's own distribution (vLLM's `raw_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kernels.environment  # noqa: F401  (first: it decides where numba keeps compiled code)

# isort: split
import numpy as np
import torch
from torch import Tensor

from kernels import cpu_logprobs
from kernels.launch import Hole, Tape, address

LOGPROB_FLOOR = cpu_logprobs.FLOOR


class LogprobScorer:
    """Log-probabilities from rows of logits. One engine thread owns it."""

    def __init__(self, vocab: int, threads: int = 1) -> None:
        self._vocab = vocab
        self._tape = Tape(threads)
        stride = cpu_logprobs.scratch_floats(vocab)
        stride += stride % 2
        self._scratch = np.zeros(stride * self._tape.threads, np.float32)
        args = [Hole.LOGITS, Hole.SAMPLED, vocab, Hole.CHOSEN, Hole.NUM_TOP, Hole.TOP_WIDTH, Hole.TOP_IDS]
        args += [Hole.LOGPROBS, address(self._scratch), stride]
        self._tape.add(cpu_logprobs.logprobs_body, args)

    def score(self, logits: Tensor, chosen: Sequence[int], num_top: Sequence[int]) -> tuple[Any, Any]:
        """(values float32 [rows, 1 + width], ids int64 [rows, width]) for logits float32 [rows, vocab], natural
        logarithms; width is the largest of num_top.

        A row has the value of its chosen token, then those of its num_top likeliest tokens, ties by lowest id; what
        lies behind is undefined. -inf is told as LOGPROB_FLOOR, and so is everything in a row with NaN or +inf.
        Raises ValueError.
        """
        rows = len(chosen)
        if logits.dtype is not torch.float32 or tuple(logits.shape) != (rows, self._vocab):
            raise ValueError(
                f"logits must be float32 [{rows}, {self._vocab}], not {logits.dtype} {tuple(logits.shape)}"
            )
        if not logits.is_contiguous():
            raise ValueError("logits must be contiguous")
        tokens, wanted = np.asarray(chosen, np.int64), np.asarray(num_top, np.int64)
        if len(wanted) != rows or (rows and not 0 <= wanted.min() <= wanted.max() <= self._vocab):
            raise ValueError(f"num_top must be {rows} numbers from 0 to {self._vocab}")
        if rows and not 0 <= tokens.min() <= tokens.max() < self._vocab:
            raise ValueError(f"a chosen id is outside the vocabulary of {self._vocab}")
        width = int(wanted.max()) if rows else 0
        ids, values = np.zeros((rows, width), np.int64), np.zeros((rows, 1 + width), np.float32)
        if rows:
            holes = {
                Hole.LOGITS: logits.data_ptr(),
                Hole.SAMPLED: rows,
                Hole.CHOSEN: address(tokens),
                Hole.NUM_TOP: address(wanted),
                Hole.TOP_WIDTH: width,
                Hole.TOP_IDS: address(ids),
                Hole.LOGPROBS: address(values),
            }
            self._tape.run(holes, threads=rows)
        return values, ids

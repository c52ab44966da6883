"""The checked public face of the sampling kernel. Import it through `kernels.ops`.

Apart from `Program`, so that somebody may look at the logits before. A row's token depends on that row alone, bit for
bit, for any number of rows and threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import kernels.environment  # noqa: F401  (first: it decides where numba keeps compiled code)

# isort: split
import numpy as np
import torch
from torch import Tensor

from kernels import cpu_sample
from kernels.launch import Hole, Tape, address
from kernels.shapes import SETTINGS, SampleTable


class Sampler:
    """Chooses tokens from rows of logits. One engine thread owns it."""

    def __init__(self, vocab: int, threads: int = 1) -> None:
        self._vocab = vocab
        self._tape = Tape(threads)
        stride = cpu_sample.scratch_floats(vocab)
        stride += stride % 2
        self._scratch = np.zeros(stride * self._tape.threads, np.float32)
        args = [Hole.LOGITS, Hole.SAMPLED, vocab, Hole.SETTINGS, Hole.BANS, Hole.BANNED]
        args += [Hole.BIASES, Hole.BIASED, Hole.AMOUNTS, Hole.HISTORIES, Hole.HISTORY, Hole.PROMPTS, Hole.CHOSEN]
        self._tape.add(cpu_sample.sample_body, [*args, address(self._scratch), stride])

    def choose(self, logits: Tensor, table: SampleTable) -> list[int]:
        """A token for each row of logits float32 [rows, vocab], in which bans, biases and penalties are left.

        Ties go to the lowest id. A row with NaN or +inf is greedy over its finite logits, one without any gives
        token 0. Raises ValueError before anything is written.
        """
        rows = self._checked_rows(logits, table)
        if rows == 0:
            return []
        bans, banned = self._flat("banned", table.banned, rows)
        biases, biased = self._flat("biased", [[token for token, _ in row] for row in table.biases], rows)
        amounts = np.fromiter((amount for row in table.biases for _, amount in row), np.float32, len(biased))
        histories = np.zeros(rows + 1, np.int64)
        history, prompts = histories, histories  # not read where no row has a history
        if table.histories:
            np.cumsum(np.fromiter(map(len, table.histories), np.int64, rows), out=histories[1:])
            history = np.concatenate(table.histories)
            prompts = np.asarray(table.prompt_lens, np.int64)
            self._check_ids("history", history)
        settings = np.ascontiguousarray(table.settings)
        chosen = np.empty(rows, np.int64)
        values = {
            Hole.LOGITS: logits.data_ptr(),
            Hole.SAMPLED: rows,
            Hole.SETTINGS: address(settings),
            Hole.BANS: address(bans),
            Hole.BANNED: address(banned),
            Hole.BIASES: address(biases),
            Hole.BIASED: address(biased),
            Hole.AMOUNTS: address(amounts),
            Hole.HISTORIES: address(histories),
            Hole.HISTORY: address(history),
            Hole.PROMPTS: address(prompts),
            Hole.CHOSEN: address(chosen),
        }
        self._tape.run(values, threads=rows)
        tokens: list[int] = chosen.tolist()
        return tokens

    def _checked_rows(self, logits: Tensor, table: SampleTable) -> int:
        if logits.dtype is not torch.float32 or logits.dim() != 2 or logits.shape[1] != self._vocab:
            raise ValueError(f"logits must be float32 [rows, {self._vocab}], not {logits.dtype} {tuple(logits.shape)}")
        if not logits.is_contiguous():
            raise ValueError("logits must be contiguous")
        rows, settings = logits.shape[0], table.settings
        if settings.shape != (rows, SETTINGS) or settings.dtype != np.float64 or len(table.banned) != rows:
            raise ValueError(f"settings must be float64 [{rows}, {SETTINGS}] and banned {rows} lists")
        if len(table.biases) not in (0, rows) or not len(table.histories) == len(table.prompt_lens) in (0, rows):
            raise ValueError(f"biases and histories must be {rows} lists or none")
        drawn = settings[settings[:, 0] > 0]
        if not ((drawn[:, 2] > 0) & (drawn[:, 3] <= 1)).all():
            raise ValueError("top_p must be above 0 and min_p at most 1")
        for history, num_prompt, penalty in zip(table.histories, table.prompt_lens, settings[:, 5], strict=False):
            if len(history) and not (0 <= num_prompt <= len(history) and penalty > 0):
                raise ValueError("a history must hold its prompt, and its repetition penalty must be above 0")
        return rows

    def _flat(self, name: str, lists: Sequence[Sequence[int]], rows: int) -> tuple[Any, Any]:
        """(where each row's ids begin int64 [rows + 1], all ids int64); no lists at all are empty ones."""
        begins = np.zeros(rows + 1, np.int64)
        if lists:
            np.cumsum(np.fromiter(map(len, lists), np.int64, rows), out=begins[1:])
        ids = np.fromiter(chain.from_iterable(lists), np.int64, int(begins[-1]))
        self._check_ids(name, ids)
        return begins, ids

    def _check_ids(self, name: str, ids: Any) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab:
            raise ValueError(f"a {name} id is outside the vocabulary of {self._vocab}")

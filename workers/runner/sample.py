"""From a step's sampling parameters to what the sampling kernels want, and from their answer to the step's.

The only randomness is `headrace.sampling.uniform` at the token's absolute position; the kernel gets it as a draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from headrace.core.records import TokenLogprobs
from headrace.errors import InvariantError
from headrace.sampling import uniform
from kernels.shapes import SampleTable
from workers.core.plan import StepPlan

if TYPE_CHECKING:
    from kernels.logprobs import LogprobScorer

_NO_HISTORY = np.zeros(0, np.int64)


def sampling_table(plan: StepPlan) -> SampleTable:
    """Of the rows that sample. Raises InvariantError when one of them lacks the history that its penalties need.

    A token that the step before samples stands in histories as in the plan's token_ids.
    """
    rows = [i for i, wanted in enumerate(plan.samples) if wanted]
    settings = np.zeros((len(rows), 8))
    biased = penalized = False
    for number, i in enumerate(rows):
        params = plan.sampling[i]
        if not params.greedy:
            position = plan.start_pos[i] + plan.num_tokens[i]
            draw = uniform(params.seed, params.branch, position)
            settings[number, :5] = (params.temperature, params.top_k, params.top_p, params.min_p, draw)
        if params.needs_history:
            penalized = True
            settings[number, 5:] = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if params.logit_bias:
            biased = True
    return SampleTable(
        settings,
        [plan.banned[i] for i in rows],
        [plan.sampling[i].logit_bias for i in rows] if biased else (),
        [_history(plan, i) for i in rows] if penalized else (),
        [plan.prompt_lens[i] for i in rows] if penalized else (),
    )


def asking_rows(plan: StepPlan) -> dict[int, int]:
    """Index among the rows that sample -> how many of the likeliest tokens it asks for."""
    wanted = (params.logprobs for params, samples in zip(plan.sampling, plan.samples, strict=True) if samples)
    return {number: num_top for number, num_top in enumerate(wanted) if num_top is not None}


def score_rows(
    scorer: LogprobScorer, logits: Tensor, asking: Mapping[int, int], token_ids: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """By index in token_ids. logits: float32 [asking, vocab], as the model gave them."""
    num_top = [min(most, logits.shape[1]) for most in asking.values()]
    values, ids = scorer.score(logits, [token_ids[row] for row in asking], num_top)
    return {
        row: TokenLogprobs(own, tuple(top_ids[:most]), tuple(top[:most]))
        for row, most, (own, *top), top_ids in zip(asking, num_top, values.tolist(), ids.tolist(), strict=True)
    }


def _history(plan: StepPlan, row: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if not plan.sampling[row].needs_history:
        return _NO_HISTORY
    history = plan.histories[row]
    count = plan.start_pos[row] + plan.num_tokens[row]
    if history is not None and row < plan.num_decode_rows and plan.token_ids[row] < 0:
        history = [*history[: count - 1], plan.token_ids[row]]
    if history is None or len(history) < count:
        raise InvariantError(f"step {plan.step_id}: row {row} lacks the history of its penalties")
    return np.fromiter(history, np.int64, count)

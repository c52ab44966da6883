"""From a step's sampling parameters to the table that the sampling kernel wants.

The only randomness is `headrace.sampling.uniform` at the token's absolute position; the kernel gets it as a draw.
"""

from __future__ import annotations

import numpy as np

from headrace.errors import InvariantError
from headrace.sampling import uniform
from kernels.ops import SampleTable
from workers.core.plan import StepPlan

_NO_HISTORY = np.zeros(0, np.int64)


def sampling_table(plan: StepPlan) -> SampleTable:
    """Of the rows that sample. Raises InvariantError when one of them lacks the history that its penalties need."""
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


def _history(plan: StepPlan, row: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if not plan.sampling[row].needs_history:
        return _NO_HISTORY
    history = plan.histories[row]
    count = plan.start_pos[row] + plan.num_tokens[row]
    if history is None or len(history) < count:
        raise InvariantError(f"step {plan.step_id}: row {row} lacks the history of its penalties")
    return np.fromiter(history, np.int64, count)

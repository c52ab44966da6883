"""From a step's sampling parameters to the numbers that the sampling kernel wants.

The only randomness is `headrace.sampling.uniform` at the token's absolute position; the kernel gets it as a draw.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.sampling import uniform
from workers.core.plan import StepPlan


def sampling_table(plan: StepPlan) -> tuple[np.ndarray[Any, np.dtype[np.float64]], list[tuple[int, ...]]]:
    """(float64 [sampled rows, 4] of temperature, top_k, top_p and draw; the rows' banned ids)."""
    rows = [i for i, wanted in enumerate(plan.samples) if wanted]
    table = np.zeros((len(rows), 4))
    for number, i in enumerate(rows):
        params = plan.sampling[i]
        if not params.greedy:
            position = plan.start_pos[i] + plan.num_tokens[i]
            draw = uniform(params.seed, params.branch, position)
            table[number] = (params.temperature, params.top_k, params.top_p, draw)
    return table, [plan.banned[i] for i in rows]

"""What steps cost and carried, as totals and histograms since the start: the worker's account of its own work.

Does not read a clock; the engine adds a step while it holds its lock.
"""

from __future__ import annotations

from bisect import bisect_left

from workers.core.plan import StepPlan

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0)
_HOST_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.1)
_RATIO = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Histogram:
    """`counts[i]` values are at most `bounds[i]` and above the bound before; the last count is of all above."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class StepStats:
    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.partial_prefills = 0
        """Chunks that were not the last of their prompt."""
        self.histograms = {
            "step_seconds": Histogram(_STEP_S),
            "step_predicted_seconds": Histogram(_STEP_S),
            "step_time_ratio": Histogram(_RATIO),
            "schedule_seconds": Histogram(_HOST_S),
            "apply_seconds": Histogram(_HOST_S),
            "prefill_chunk_tokens": Histogram(_TOKENS),
        }

    def add(self, plan: StepPlan, *, predicted_s: float, step_s: float, schedule_s: float, apply_s: float) -> None:
        """A step that is over. `predicted_s` is 0 where nothing was predicted, `step_s` from planning, or from the
        end of the step before, to the result."""
        told = self.histograms
        told["schedule_seconds"].add(schedule_s)
        told["apply_seconds"].add(apply_s)
        told["step_seconds"].add(step_s)
        if predicted_s:
            told["step_predicted_seconds"].add(predicted_s)
            told["step_time_ratio"].add(step_s / predicted_s)
        self.decode_tokens += plan.num_decode_rows
        for row in range(plan.num_decode_rows, plan.num_rows):
            told["prefill_chunk_tokens"].add(plan.num_tokens[row])
            self.prefill_tokens += plan.num_tokens[row]
            self.partial_prefills += not plan.samples[row]

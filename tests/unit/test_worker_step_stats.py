"""A step's part of the totals and histograms."""

from headrace.ids import RequestKey
from workers.core.plan import StepPlan
from workers.step_stats import Histogram, StepStats


def test_a_value_counts_below_the_first_bound_that_holds_it_and_above_all_bounds_last() -> None:
    told = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 100.0):
        told.add(value)
    assert (told.counts, told.total) == ([2, 2, 2], 107.5)


def test_a_step_counts_its_decodes_chunks_and_times() -> None:
    stats = StepStats()
    plan = StepPlan(0, [RequestKey(k) for k in range(4)], [1, 1, 16, 5], samples=[True, True, False, True])
    plan.num_decode_rows = 2
    stats.add(plan, predicted_s=0.0, step_s=0.25, schedule_s=0.001, apply_s=0.002)
    stats.add(plan, predicted_s=0.2, step_s=0.25, schedule_s=0.001, apply_s=0.002)
    assert (stats.decode_tokens, stats.prefill_tokens, stats.partial_prefills) == (4, 42, 2)
    totals = {name: (sum(told.counts), round(told.total, 9)) for name, told in stats.histograms.items()}
    assert totals == {
        "step_seconds": (2, 0.5),
        "step_predicted_seconds": (1, 0.2),
        "step_time_ratio": (1, 1.25),
        "schedule_seconds": (2, 0.002),
        "apply_seconds": (2, 0.004),
        "prefill_chunk_tokens": (4, 42.0),
    }

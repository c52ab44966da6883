"""The comparisons of the scheduler bench and their tables, on loads small enough for a test."""

from collections.abc import Sequence

import pytest

from bench.simulate import host
from bench.simulate.report import Table, figures, render, service, service_gap
from bench.simulate.scenarios import CPU, GPU, SCENARIOS, Load, chunks, settings
from bench.simulate.worker import Run, Step, Unsupported, VirtualWorker
from bench.simulate.workload import Job
from headrace.core.predictor import StepShape
from headrace.core.slo import Slo
from tests.core_world import make_settings


def step(a: tuple[int, int], b: tuple[int, int]) -> Step:
    """(input, output) tokens of tenants a and b."""
    idle = StepShape(0, 0, 0, 0, 0)
    return Step(0.0, 1.0, idle, {"a": a[0], "b": b[0]}, {"a": a[1], "b": b[1]})


def column(table: Table, name: str) -> Sequence[float]:
    return [float(row[name]) for row in table.rows]


def test_a_service_gap_is_the_greatest_over_any_interval() -> None:
    steps = [step((10, 0), (0, 0)), step((0, 0), (0, 10)), step((0, 0), (5, 5)), step((4, 0), (0, 0))]
    a, b = service(steps, "a", 1.0, 2.0), service(steps, "b", 1.0, 2.0)
    assert (a, b) == ([10, 10, 10, 14], [0, 20, 35, 35])
    # Between the first and the third step b got 35 and a nothing; from the start on it was never that far ahead.
    assert service_gap(a, b) == service_gap(b, a) == 35
    assert service_gap([], []) == 0


def test_figures_of_a_run_by_hand() -> None:
    worker = VirtualWorker(make_settings(), 100, lambda shape: 0.5)
    run = worker.run([Job(1.0, 4, 3), Job(1.2, 4, 2), Job(2.0, 2_000, 2)])
    row = figures(run, Slo(ttft_s=0.6))
    # Steps end at 1.5, 2.0 and 2.5. The second request is in from 1.5 on; the third is refused.
    assert (row["req/s"], row["out tok/s"]) == (2 / 1.5, 5 / 1.5)
    assert (row["ttft p50"], row["ttft p99"]) == (500.0, pytest.approx(800.0))
    assert {row[name] for name in ("itl p50", "itl p95", "itl p99", "pause")} == {500.0}
    assert row["goodput/s"] == 1 / 1.5


def test_a_run_without_tokens_has_undefined_latencies() -> None:
    worker = VirtualWorker(make_settings(), 100, lambda shape: 0.5)
    run: Run = worker.run([Job(0.0, 4, 3), Job(0.1, 2_000, 3)], until_s=0.2)
    run.outcomes.pop(0)
    text = render(Table("nothing", "note", [figures(run)]))
    assert text.splitlines()[:2] == ["== nothing", "note"]
    assert text.splitlines()[3].split() == ["0.00", "0.00", "-", "-", "-", "-", "-", "-"]


def test_a_table_lines_up_words_to_the_left_and_numbers_to_the_right() -> None:
    table = Table("t", "n", [{"name": "a", "x": 1.0}, {"name": "long", "x": 1_234.5}])
    assert render(table).splitlines() == ["== t", "n", "name      x", "a      1.00", "long  1,234"]


def test_a_setting_that_the_scheduler_lacks_is_named() -> None:
    assert settings(CPU, max_num_seqs=3).max_num_seqs == 3
    with pytest.raises(Unsupported, match="SchedulerSettings has no such_thing"):
        settings(CPU, such_thing=1)


def test_small_chunks_cost_first_tokens_and_large_chunks_cost_pauses() -> None:
    table = chunks(Load(GPU, requests=60))
    ttft, itl = column(table, "ttft p99"), column(table, "itl p99")
    assert [row["chunk"] for row in table.rows][::9] == ["16", "unlimited"]
    assert ttft[0] > 4 * min(ttft)
    assert itl[-1] > 4 * itl[0]
    # Neither end is the best for requests that need both.
    goodput = column(table, "goodput/s")
    assert max(goodput) > max(goodput[0], goodput[-1])


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_comparison_makes_a_table_with_its_figures(name: str) -> None:
    try:
        table = SCENARIOS[name](Load(CPU, requests=12))
    except Unsupported as error:
        pytest.skip(f"not in this tree: {error}")
    assert len(table.rows) > 2
    assert len({tuple(row) for row in table.rows}) == 1
    assert table.title in render(table)


@pytest.mark.parametrize("lengths", ["mixed", "lognormal"])
def test_the_same_load_draws_the_same_jobs(lengths: str) -> None:
    load = Load(CPU, lengths, requests=20)
    assert load.steady(0.5) == load.steady(0.5)
    assert load.steady(0.5) != Load(CPU, lengths, requests=20, seed=2).steady(0.5)


def test_the_host_benchmark_keeps_its_rows_full() -> None:
    row = host.measure(max_num_seqs=4, num_waiting=30, seed=1)
    assert (row["rows"], row["waiting"]) == (4.0, 30)
    assert float(row["ended/step"]) > 0
    assert all(float(row[f"{name} p50 us"]) > 0 for name in ("submit", "schedule", "apply"))

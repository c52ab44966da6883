"""Output lengths are learned for each endpoint, tenant and task, and never promised above max_tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.lengths import LengthSettings, OutputLengths


def learned(lengths: OutputLengths, key: tuple[str, str, str], outputs: list[int]) -> OutputLengths:
    for output in outputs:
        lengths.observe(*key, output)
    return lengths


def test_nothing_known_means_max_tokens() -> None:
    assert OutputLengths().predict("chat", "a", "", 300, 0.9) == 300


def test_each_endpoint_tenant_and_task_has_its_own_quantile() -> None:
    lengths = OutputLengths()
    keys = [("chat", "a", "sum"), ("chat", "a", "code"), ("chat", "b", "sum"), ("completions", "a", "sum")]
    for scale, key in enumerate(keys, start=1):
        learned(lengths, key, [100 * scale + i for i in range(20)])
    for scale, key in enumerate(keys, start=1):
        assert 100 * scale <= lengths.predict(*key, 10_000, 0.5) < 100 * scale + 20
        assert lengths.predict(*key, 10_000, 0.9) > lengths.predict(*key, 10_000, 0.5)


def test_a_key_with_few_samples_asks_the_next_coarser_one() -> None:
    lengths = OutputLengths(LengthSettings(min_samples=10))
    learned(lengths, ("chat", "a", "sum"), [50] * 10)
    assert lengths.predict("chat", "a", "new", 1000, 0.9) == 50, "the tenant's own"
    assert lengths.predict("chat", "b", "sum", 1000, 0.9) == 50, "the endpoint's"
    assert lengths.predict("generate", "b", "", 1000, 0.9) == 50, "everybody's"
    learned(lengths, ("chat", "a", "new"), [7] * 9)
    assert lengths.predict("chat", "a", "new", 1000, 0.9) == 50, "9 are too few"
    learned(lengths, ("chat", "a", "new"), [7])
    assert lengths.predict("chat", "a", "new", 1000, 0.9) == 7


def test_an_output_cut_by_its_cap_is_at_least_so_long_and_no_end() -> None:
    """Half of the answers want 100 tokens and half 400; a cap at 200 hides the long ones."""
    lengths = OutputLengths()
    for _ in range(50):
        lengths.observe("chat", "a", "", 100)
        lengths.observe("chat", "a", "", 200, capped=True)
    assert lengths.predict("chat", "a", "", 1000, 0.4) == 100
    assert lengths.predict("chat", "a", "", 1000, 0.9) == 1000, "nobody has seen the end of the long half"
    assert lengths.quantile("chat", "a", "", 0.9) is None
    for _ in range(100):
        lengths.observe("chat", "a", "", 100)
        lengths.observe("chat", "a", "", 400)
    assert lengths.predict("chat", "a", "", 1000, 0.9) == 400


def test_early_caps_say_nothing_about_the_quantile_of_those_that_ended() -> None:
    lengths = learned(OutputLengths(), ("chat", "a", ""), [100] * 40)
    for _ in range(40):
        lengths.observe("chat", "a", "", 5, capped=True)
    assert lengths.predict("chat", "a", "", 1000, 0.9) == 100


def test_old_outputs_fade() -> None:
    settings = LengthSettings(max_samples=128, half_life_samples=16)
    lengths = learned(OutputLengths(settings), ("chat", "a", ""), [500] * 128)
    learned(lengths, ("chat", "a", ""), [20] * 16)
    assert lengths.predict("chat", "a", "", 1000, 0.4) == 20, "half the weight is new"
    assert lengths.predict("chat", "a", "", 1000, 0.9) == 500, "half is old"
    learned(lengths, ("chat", "a", ""), [20] * 48)
    assert lengths.predict("chat", "a", "", 1000, 0.9) == 20


def test_memory_is_bounded_and_a_flood_of_tasks_drops_tasks_only() -> None:
    lengths = OutputLengths(LengthSettings(max_keys=8))
    learned(lengths, ("chat", "quiet", "sum"), [30] * 16)
    for task in range(1000):
        learned(lengths, ("chat", "loud", f"task-{task}"), [900] * 2)
    assert lengths.num_keys <= 4 * 8
    assert lengths.predict("chat", "quiet", "sum", 1000, 0.9) == 30, "from the tenant's key"


@given(
    st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=80),
    st.integers(1, 200),
    st.floats(0.01, 0.99),
    st.floats(0.01, 0.99),
)
def test_a_prediction_is_within_max_tokens_and_grows_with_the_quantile(
    outputs: list[tuple[int, bool]], max_tokens: int, one: float, other: float
) -> None:
    lengths = OutputLengths(LengthSettings(min_samples=4))
    for tokens, capped in outputs:
        lengths.observe("chat", "a", "", tokens, capped=capped)
    low, high = (lengths.predict("chat", "a", "", max_tokens, q) for q in sorted((one, other)))
    assert 1 <= low <= high <= max_tokens


def test_a_random_workload_is_covered_by_its_quantile() -> None:
    rng = random.Random(1)
    lengths = OutputLengths()
    covered = 0
    for i in range(4000):
        output = max(1, round(rng.lognormvariate(4, 0.8)))
        if i >= 400:
            covered += output <= lengths.predict("chat", "a", "", 4096, 0.9)
        lengths.observe("chat", "a", "", output)
    assert 0.87 < covered / 3600 < 0.93


@pytest.mark.parametrize("quantile", [0.0, 1.0, -1, 2, float("nan")])
def test_a_quantile_outside_its_range_is_an_error(quantile: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        OutputLengths().predict("chat", "a", "", 10, quantile)

"""Laws of the step-time predictor and its profile."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.predictor import FEATURES_VERSION, READY_SAMPLES, Profile, StepPredictor, StepShape, fit

KEY = {"model": "m", "machine": "two cores", "threads": "2"}


def cost_s(shape: StepShape) -> float:
    """A machine that reads its weights once, fills its tiles at 8 rows, then computes."""
    return (
        0.02
        + 0.0012 * shape.rows
        + 0.003 * (min(shape.rows, 8) - 1)
        + 4e-6 * shape.decode_context
        + 1e-3 * shape.prefill_rows
        + 3e-7 * shape.prefill_context
        + 4e-4 * shape.sampled_rows
    )


def workload(seed: int, count: int) -> list[StepShape]:
    """Mixed steps: up to 64 decodes and up to two chunks of up to 256 tokens, at contexts up to 2,000."""
    rng = random.Random(seed)
    shapes = []
    for _ in range(count):
        decodes = rng.choice([0, 1, 2, 4, 8, rng.randrange(65)])
        chunks = [int(2 ** rng.uniform(0, 8)) for _ in range(rng.choice([0, 1, 2]) if decodes else 1)]
        starts = [rng.randrange(2000) for _ in range(decodes + len(chunks))]
        samples = [True] * decodes + [rng.random() < 0.5 for _ in chunks]
        shapes.append(StepShape.of([1] * decodes + chunks, starts, samples, decodes))
    return shapes


PROFILE = fit([(shape, cost_s(shape)) for shape in workload(1, 300)], KEY)
SHAPES = st.builds(
    StepShape,
    *(st.integers(0, most) for most in (64, 100_000, 8, 1024, 1_000_000, 64)),
)


def learned(noise: float, count: int = 200, profile: Profile | None = None) -> StepPredictor:
    predictor, rng = StepPredictor(profile), random.Random(2)
    for shape in workload(3, count):
        predictor.observe(shape, cost_s(shape) * rng.lognormvariate(0.0, noise))
    return predictor


def typical_error(predictor: StepPredictor, slower: float = 1.0) -> float:
    return median(abs(predictor.predict_s(at) / (slower * cost_s(at)) - 1.0) for at in workload(4, 200))


def test_a_shape_counts_rows_contexts_and_pairs_of_a_plan() -> None:
    shape = StepShape.of([1, 1, 10, 4], [99, 0, 0, 8], [True, True, False, True], 2)
    assert shape == StepShape(2, 101, 2, 14, 50 + 40, 3)
    assert shape.rows == 16


def test_a_profile_recovers_a_cost_function_within_two_percent() -> None:
    assert typical_error(StepPredictor(PROFILE)) < 0.02


def test_learning_without_a_profile_comes_near_in_a_few_hundred_steps() -> None:
    assert typical_error(learned(noise=0.0)) < 0.02
    assert typical_error(learned(noise=0.1)) < 0.05


@given(SHAPES, st.sampled_from(StepShape.__slots__), st.integers(1, 5000), st.floats(0, 1), st.booleans())
@settings(deadline=None)
def test_a_step_that_grows_never_gets_cheaper(
    shape: StepShape, name: str, more: int, quantile: float, from_profile: bool
) -> None:
    predictor = StepPredictor(PROFILE) if from_profile else NOISY
    grown = replace(shape, **{name: getattr(shape, name) + more})
    assert 0.0 <= predictor.predict_s(shape, quantile) <= predictor.predict_s(grown, quantile)


def test_quantiles_grow_and_cover_their_share_of_steps() -> None:
    predictor, rng = learned(noise=0.2), random.Random(5)
    steps = [(at, cost_s(at) * rng.lognormvariate(0.0, 0.2)) for at in workload(6, 500)]
    covered = [
        sum(took <= predictor.predict_s(at, quantile) for at, took in steps) / len(steps)
        for quantile in (0.1, 0.5, 0.9, 0.99)
    ]
    assert all(low < high for low, high in pairwise(covered))
    assert covered == pytest.approx([0.1, 0.5, 0.9, 0.99], abs=0.12)


@pytest.mark.parametrize("profile", [None, PROFILE], ids=["without a profile", "with one"])
@pytest.mark.parametrize("slower", [2.0, 0.5])
def test_a_machine_that_changes_its_speed_is_followed_within_thirty_steps(
    profile: Profile | None, slower: float
) -> None:
    predictor = learned(noise=0.05, profile=profile)
    for shape in workload(7, 30):
        predictor.observe(shape, slower * cost_s(shape))
    assert typical_error(predictor, slower) < 0.1


@pytest.mark.parametrize("steps", [50, 200])
def test_one_step_a_hundred_times_too_long_moves_predictions_by_less_than_a_tenth(steps: int) -> None:
    predictor, shapes = learned(noise=0.05, count=steps), workload(8, 100)
    before = [predictor.predict_s(shape) for shape in shapes]
    predictor.observe(shapes[0], 100.0 * cost_s(shapes[0]))
    assert max(abs(predictor.predict_s(at) / old - 1.0) for at, old in zip(shapes, before, strict=True)) < 0.1


@given(SHAPES, st.integers(0, 4000), st.integers(1, 600), st.integers(1, 600), st.sampled_from([0.5, 0.95]))
@settings(deadline=None)
def test_chunk_for_turns_predict_around(base: StepShape, start: int, tokens: int, most: int, quantile: float) -> None:
    predictor = StepPredictor(PROFILE)
    budget_s = predictor.predict_s(base.with_chunk(start, tokens), quantile)
    assert abs(predictor.chunk_for(base, start, most, budget_s, quantile) - min(tokens, most)) <= 1


def test_no_chunk_fits_a_budget_that_is_spent() -> None:
    predictor, base = StepPredictor(PROFILE), StepShape(8, 800, 0, 0, 0, 8)
    assert predictor.chunk_for(base, 0, 512, predictor.predict_s(base)) == 0
    assert predictor.chunk_for(base, 0, 0, 1e9) == 0
    assert predictor.chunk_for(base, 0, 512, 1e9) == 512


def test_costs_beyond_the_rows_measured_go_on_as_a_line() -> None:
    few = [shape for shape in workload(1, 300) if shape.rows <= 40]
    predictor = StepPredictor(fit([(shape, cost_s(shape)) for shape in few], KEY))
    for rows in (100, 1000, 10_000):
        shape = StepShape(0, 0, 1, rows, 0, 0)
        assert predictor.predict_s(shape) == pytest.approx(cost_s(shape), rel=0.35)


def test_what_a_profile_knows_of_prefill_outlives_hours_of_decode_alone() -> None:
    """A plain forgetting regression loses the directions that it no longer sees."""
    predictor, prefill = StepPredictor(PROFILE), StepShape(0, 0, 1, 256, 128 * 256, 1)
    for context in range(3000):
        shape = StepShape(4, 4 * context, 0, 0, 0, 4)
        predictor.observe(shape, 1.5 * cost_s(shape))
    assert predictor.predict_s(prefill) == pytest.approx(1.5 * cost_s(prefill), rel=0.2)


def test_ready_with_a_profile_or_after_enough_steps_and_the_error_is_that_of_predictions() -> None:
    assert StepPredictor(PROFILE).ready
    predictor = StepPredictor()
    for number, shape in enumerate(workload(9, READY_SAMPLES)):
        assert (predictor.samples, predictor.ready) == (number, False)
        predictor.observe(shape, cost_s(shape))
    assert predictor.ready
    assert 0.0 < predictor.error < 0.5


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_and_empty_steps_teach_nothing(seconds: float) -> None:
    predictor = learned(noise=0.0, count=5)
    before = predictor.predict_s(SHAPE)
    predictor.observe(SHAPE, seconds)
    predictor.observe(StepShape(0, 0, 0, 0, 0), 1.0)
    assert (predictor.samples, predictor.predict_s(SHAPE)) == (5, before)
    assert predictor.predict_s(StepShape(0, 0, 0, 0, 0)) == 0.0


def test_a_profile_survives_json() -> None:
    checked = PROFILE.checked([(SHAPE, 1.25 * cost_s(SHAPE))])
    assert checked.held_out_error == pytest.approx(0.2, abs=0.03)
    for profile in (PROFILE, checked):
        assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 3}', PROFILE.to_json().replace("0.", "-0.")])
def test_what_is_no_profile_is_one_clear_line(text: str) -> None:
    with pytest.raises(ValueError, match="step-time profile") as raised:
        Profile.from_json(text)
    assert "\n" not in str(raised.value)


def test_a_profile_of_another_machine_is_refused_with_the_fields_name() -> None:
    assert PROFILE.mismatch(KEY) == ""
    assert "threads is '2' in the profile and '4' here" in PROFILE.mismatch({**KEY, "threads": "4"})
    assert "kernels is 'not told' in the profile" in PROFILE.mismatch({**KEY, "kernels": "k"})
    assert "machine" in PROFILE.mismatch({"model": "m", "threads": "2"})


def test_a_profile_of_another_feature_version_is_refused() -> None:
    data = json.loads(PROFILE.to_json()) | {"features_version": FEATURES_VERSION + 1, "coefficients": [1.0]}
    other = Profile.from_json(json.dumps(data))
    assert f"version {FEATURES_VERSION + 1}" in other.mismatch(KEY)
    with pytest.raises(ValueError, match="version"):
        StepPredictor(other)


def test_a_profile_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fit([], KEY)


SHAPE = StepShape(8, 900, 1, 64, 3000, 8)
NOISY = learned(noise=0.3)

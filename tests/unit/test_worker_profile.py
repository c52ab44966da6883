"""A step-time profile from its measurement to the worker that starts from it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from bench import profile as bench
from headrace.core.predictor import Profile
from headrace.core.records import Role
from headrace.errors import StartupError
from workers.core.plan import StepPlan, StepResult
from workers.predictor_file import default_profile_path, load_predictor, profile_key
from workers.runner.fake import FakeRunner
from workers.spec import WorkerSpec

SMALL = bench.Effort((0, 1, 4), (8, 40), 2, (0, 8, 32), held_out=12, passes=2, limit_s=60.0)


def spec_of(threads: int = 1, profile_path: str = "") -> WorkerSpec:
    return WorkerSpec(
        worker_id="w",
        incarnation="i",
        role=Role.COLOCATED,
        model_path="fake",
        max_model_len=1024,
        threads=threads,
        kv_cache_bytes=1 << 20,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        cluster_token="t",
        profile_path=profile_path,
    )


class CheckedRunner(FakeRunner):
    """Looks at every plan that it is given, as a pool shared with nobody would want it."""

    def run(self, plan: StepPlan) -> StepResult:
        blocks = [block for table in plan.block_tables for block in table]
        assert len(blocks) == len(set(blocks))
        assert 0 < plan.num_rows <= 8
        assert sum(plan.num_tokens) <= 128
        assert plan.num_tokens[: plan.num_decode_rows] == [1] * plan.num_decode_rows
        self._log[:, 1] = -1  # nobody prefilled what these rows call their past
        for start, table in zip(plan.start_pos, plan.block_tables, strict=True):
            for at in range(start):
                self._log[table[at // self.layout.block_size], :, at % self.layout.block_size] = (0, at)
        return super().run(plan)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))


def measured() -> bench.Measured:
    return bench.measure(CheckedRunner(), spec_of(), SMALL, lambda text: None)


def written(change: Callable[[str], str] = str) -> Path:
    """A profile where the worker of `spec_of()` looks for it."""
    path = default_profile_path(profile_key(spec_of(), FakeRunner()))
    path.parent.mkdir(parents=True)
    path.write_text(change(measured().profile.to_json()))
    return path


def test_a_measurement_gives_a_profile_of_this_worker_that_survives_its_file() -> None:
    result = measured()
    assert result.profile.mismatch(profile_key(spec_of(), FakeRunner())) == ""
    assert Profile.from_json(result.profile.to_json()) == result.profile
    assert result.profile.held_out_error is not None
    assert (len(result.single), len(result.medians)) == (24, 12)
    assert any("median absolute error" in line for line in result.lines())


def test_random_steps_keep_the_limits_of_the_worker_and_are_of_all_kinds() -> None:
    spec, runner = spec_of(), FakeRunner(num_blocks=100)
    meter = bench.Meter(runner, spec, random.Random(0))
    steps = list(islice(bench.random_steps(spec, meter.fits, random.Random(1)), 200))
    assert all(meter.fits(step) for step in steps)
    assert {(bool(step.decodes), bool(step.chunks)) for step in steps} == {(True, True), (True, False), (False, True)}


def test_limits_too_small_for_any_step_are_one_clear_line() -> None:
    tiny = spec_of().model_copy(update={"max_model_len": 4})
    with pytest.raises(StartupError, match="too small"):
        bench.measure(FakeRunner(), tiny, SMALL, lambda text: None)


@pytest.mark.parametrize(
    ("source", "out", "told"),
    [(None, Path("/no/such/folder/p.json"), "its folder does not exist"), ("/no/model", None, "no such model")],
)
def test_a_wrong_argument_is_one_clear_line(source: str | None, out: Path | None, told: str) -> None:
    with pytest.raises(StartupError, match=told) as raised:
        bench.run(source, out, None, True)
    assert "\n" not in str(raised.value)


def test_a_worker_finds_the_profile_of_its_own_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    key = profile_key(spec_of(), FakeRunner())
    assert not load_predictor(spec_of(), key).ready
    path = written()
    assert load_predictor(spec_of(), key).ready
    assert not load_predictor(spec_of(profile_path="none"), key).ready
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "profile_none",
        "profile_used",
        "profile_off",
    ]
    assert not load_predictor(spec_of(threads=2), profile_key(spec_of(threads=2), FakeRunner())).ready
    assert path.is_file()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace('"threads": "1"', '"threads": "3"'), "threads is '3' in the profile and '1' here"),
        (lambda text: text.replace('"features_version": 1', '"features_version": 0'), "features of version 0"),
        (lambda text: text[:100], "not a step-time profile"),
    ],
    ids=["another key", "another version", "half a file"],
)
def test_a_profile_that_does_not_fit_is_refused_loudly(
    change: Callable[[str], str], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(profile_path=str(written(change)))
    assert not load_predictor(spec, profile_key(spec, FakeRunner())).ready
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert told in record.getMessage()


def test_a_named_profile_that_is_missing_is_refused_loudly(caplog: pytest.LogCaptureFixture) -> None:
    spec = spec_of(profile_path="/no/such/profile.json")
    assert not load_predictor(spec, profile_key(spec, FakeRunner())).ready
    assert "No such file" in caplog.text

"""What is expected of a tool's next answer, from those before."""

from __future__ import annotations

import random

import pytest

from headrace.core.tool_latency import UNKNOWN, ToolLatency, ToolLatencySettings


def test_a_tool_that_nobody_knows_may_take_any_time() -> None:
    assert ToolLatency().outlook("t", "search") == UNKNOWN
    assert list(UNKNOWN.wait_s) == sorted(UNKNOWN.wait_s)


def test_points_are_middles_of_equal_shares_of_what_was_seen() -> None:
    latency = ToolLatency(ToolLatencySettings(half_life_pauses=10**9))
    rng = random.Random(1)
    seen = [rng.expovariate(1.0) for _ in range(128)]
    for wait_s in seen:
        latency.answered("t", "search", wait_s)
    ordered = sorted(seen)
    points = latency.outlook("t", "search").wait_s
    assert list(points) == sorted(points)
    for share, point in zip((0.1, 0.3, 0.5, 0.7, 0.9), points, strict=True):
        assert ordered[int(share * 128) - 2] <= point <= ordered[int(share * 128) + 2]


def test_a_new_tool_is_expected_to_be_like_its_tenants_others_and_a_new_tenant_like_everybody() -> None:
    latency = ToolLatency()
    for _ in range(5):
        latency.answered("a", "slow", 60.0)
    assert latency.outlook("a", "new").wait_s == (60.0,) * 5
    assert latency.outlook("b", "slow").wait_s == (60.0,) * 5
    for _ in range(5):
        latency.answered("b", "slow", 1.0)
    assert latency.outlook("b", "slow").wait_s == (1.0,) * 5
    assert latency.outlook("a", "slow").wait_s == (60.0,) * 5


def test_pauses_without_an_answer_are_a_share_and_no_time() -> None:
    latency = ToolLatency(ToolLatencySettings(half_life_pauses=10**9))
    for i in range(128):
        if i % 2:
            latency.answered("t", "search", 2.0)
        else:
            latency.lost("t", "search")
    outlook = latency.outlook("t", "search")
    assert outlook.wait_s == (2.0,) * 5
    assert 0.4 < outlook.lost_share < 0.5
    assert latency.outlook("t", "other").lost_share == outlook.lost_share


def test_lost_pauses_alone_say_nothing_about_the_time() -> None:
    latency = ToolLatency()
    for _ in range(50):
        latency.lost("t", "search")
    assert latency.outlook("t", "search") == UNKNOWN


def test_a_tool_that_has_changed_is_known_anew_after_some_pauses() -> None:
    latency = ToolLatency()
    for _ in range(128):
        latency.answered("t", "search", 100.0)
    for _ in range(64):
        latency.answered("t", "search", 1.0)
    assert latency.outlook("t", "search").wait_s[:3] == (1.0,) * 3


def test_names_that_clients_make_up_cost_no_more_than_a_bound() -> None:
    latency = ToolLatency(ToolLatencySettings(max_keys=10))
    for i in range(1000):
        latency.answered(f"tenant-{i % 50}", f"tool-{i}", 1.0)
    assert latency.num_keys <= 21


def test_settings_that_could_never_say_anything_are_refused() -> None:
    for changes in ({"min_pauses": 0}, {"min_pauses": 9, "max_pauses": 8}, {"half_life_pauses": 0}, {"max_keys": 0}):
        with pytest.raises(ValueError):
            ToolLatencySettings(**changes)

"""Who is whose branch, and what recent requests promise for the next one."""

from __future__ import annotations

import random

import pytest

from headrace.core.records import WorkerLedger
from router.core.kin import Kin
from router.core.latency import Timeline
from router.core.pace import Pace


def test_descendants_come_youngest_generation_first_and_only_once() -> None:
    kin: Kin[str] = Kin()
    kin.join("root", "t", "r", [])
    kin.join("a", "t", "a", ["root"])
    kin.join("b", "t", "", ["root"])
    kin.join("a1", "t", "", ["a", "root"])
    heirs = kin.disown("root")
    assert sorted(heirs) == ["a", "a1", "b"]
    assert kin.disown("root") == [], "nobody is its child any more"


def test_a_child_belongs_to_those_that_had_the_label_when_it_came() -> None:
    kin: Kin[str] = Kin()
    kin.join("first", "t", "r", [])
    kin.join("other tenant", "u", "r", [])
    kin.join("child", "t", "", kin.find("t", "r"))
    kin.join("second", "t", "r", [])
    assert kin.find("t", "r") == ["first", "second"]
    assert kin.disown("second") == kin.disown("other tenant") == []
    assert kin.disown("first") == ["child"]


def test_nobody_has_the_empty_label() -> None:
    kin: Kin[str] = Kin()
    kin.join("a", "t", "", [])
    assert kin.find("t", "") == []


def test_those_that_left_are_in_nobodys_way() -> None:
    kin: Kin[str] = Kin()
    kin.join("root", "t", "r", [])
    kin.join("a", "t", "a", ["root"])
    kin.join("b", "t", "b", ["a"])
    kin.leave("a")
    kin.leave("a")
    assert kin.disown("root") == [], "b is nobody's since a ended well"
    kin.join("late", "t", "", ["a"])
    kin.leave("late")
    kin.leave("root")
    kin.leave("b")
    assert len(kin) == 0 and kin.find("t", "r") == []


def test_random_families_leave_nothing() -> None:
    rng = random.Random(1)
    kin: Kin[int] = Kin()
    live: list[int] = []
    for member in range(2000):
        kin.join(member, "t", f"l{rng.randrange(20)}", rng.sample(live, min(len(live), rng.randrange(3))))
        live.append(member)
        if rng.random() < 0.2:
            heirs = kin.disown(rng.choice(live))
            assert len(set(heirs)) == len(heirs) and set(heirs) <= set(live)
        while len(live) > 30 or (live and rng.random() < 0.3):
            kin.leave(live.pop(rng.randrange(len(live))))
    for member in live:
        kin.leave(member)
    assert len(kin) == 0 and not kin._names


def line(prefill_s: float, decode_s: float, hand_off_s: float = 0.0) -> Timeline:
    """A request with nothing but these stages, on two workers."""
    made = Timeline()
    made.submitted(0.0)
    made.first_ledger(WorkerLedger(prefill_s=prefill_s))
    made.token(prefill_s)
    made.last_ledger(WorkerLedger(hand_off_s=hand_off_s, decode_s=decode_s))
    made.ended(prefill_s + hand_off_s + decode_s)
    return made


def test_nothing_is_forecast_before_something_has_been_seen() -> None:
    pace = Pace()
    assert pace.forecast(100, 10, 1, 10) is None
    assert pace.prefill_s(100) == 0.0


def test_a_forecast_is_tokens_times_pace() -> None:
    pace = Pace()
    for _ in range(20):
        pace.completed(line(prefill_s=0.5, decode_s=2.0, hand_off_s=0.1), prompt_tokens=50, output_tokens=21)
    forecast = pace.forecast(queued_tokens=200, prompt_tokens=10, shortest_tokens=30, longest_tokens=30)
    assert forecast is not None
    assert (forecast.queue_s, forecast.prefill_s) == (pytest.approx(2.0), pytest.approx(0.1))
    assert (forecast.transfer_s, forecast.decode_s) == (pytest.approx(0.1), pytest.approx(3.0))
    assert forecast.margin_s == pytest.approx(0.0, abs=1e-9), "every request was alike"
    unsure = pace.forecast(queued_tokens=200, prompt_tokens=10, shortest_tokens=10, longest_tokens=50)
    assert unsure is not None
    assert unsure.total_s - unsure.margin_s == pytest.approx(forecast.total_s - 20 * 0.1), "a short answer"
    assert unsure.total_s + unsure.margin_s == pytest.approx(forecast.total_s + 20 * 0.1), "a long one"


def test_the_pace_follows_a_change_and_its_margin_grows_with_unrest() -> None:
    pace = Pace()
    for _ in range(50):
        pace.completed(line(0.5, 2.0), 50, 21)
    for _ in range(50):
        pace.completed(line(0.5, 8.0), 50, 21)
    steady = pace.forecast(0, 10, 10, 10)
    assert steady is not None and steady.decode_s == pytest.approx(4.0, rel=0.02)
    for i in range(50):
        pace.completed(line(0.5, 2.0 + 12.0 * (i % 2)), 50, 21)
    restless = pace.forecast(0, 10, 10, 10)
    assert restless is not None and restless.margin_s > 5 * steady.margin_s

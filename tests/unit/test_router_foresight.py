"""What admission is told: the cheapest plan's times by the router's own columns, and how wrong they have been."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.core.admission_records import Attainment, attainment
from headrace.core.records import Role
from headrace.errors import HeadraceError
from router.api import GenerationSpec
from router.core.decision import RouteAsk
from router.core.foresight import Foresight, Outlook
from router.core.placement import Mode
from router.core.policies import Policy
from router.core.router import Router
from router.gate import Gate
from tests.doors_fixtures import gateway_spec
from tests.unit.test_router_cost import BLOCK, FACE_VALUE, IDLE, KEYS, ask, choose, costs, hold, key, router
from tests.world import spec

ODD_WEIGHTS = replace(FACE_VALUE, queue_weight=3.0, decode_weight=0.0, interference_weight=0.0)


def outlook(made: Router, what: RouteAsk | None = None) -> Outlook:
    found = made.outlook(what or ask(), 0.0)
    assert found is not None
    return found


# ---- what a plan takes


def test_an_outlook_is_the_chosen_plan_at_face_value_whatever_the_weights_are() -> None:
    made = router(ODD_WEIGHTS, c0=replace(IDLE, queue_s=0.5), c1=replace(IDLE, queue_s=0.2))
    hold(made, "c0", 95)
    decision, found = choose(made), outlook(made)
    assert found.first_ms == pytest.approx(decision.predicted_ttft_ms)
    assert found.queue_ms == pytest.approx({"c0": 500.0, "c1": 200.0}[decision.worker.worker_id])
    assert found.is_told


def test_what_is_cached_is_not_computed() -> None:
    made = router(c0=IDLE)
    cold = outlook(made)
    hold(made, "c0", 80)
    warm = outlook(made)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 80 * BLOCK)
    # 1 ms a row beyond a step's first; 1000 rows are two steps, 200 are one.
    assert (cold.prefill_ms, warm.prefill_ms) == (pytest.approx(998.0), pytest.approx(199.0))
    hold(made, "c0", 100)
    assert outlook(made).cached_tokens == 999, "the last token is computed in any case"
    assert outlook(made, ask(no_cache=True)).cached_tokens == 0


def test_a_prefix_that_is_fetched_is_not_computed_but_waited_for() -> None:
    made = router(c0=replace(IDLE, queue_s=5.0), c1=IDLE)
    hold(made, "c0", 80)
    decision, found = choose(made), outlook(made)
    assert decision.fetch is not None and decision.worker == key("c1")
    assert found.cached_tokens == 80 * BLOCK and found.fetch_ms > 0.0
    assert found.first_ms == pytest.approx(decision.predicted_ttft_ms)


def test_a_pair_decodes_at_the_quickest_decode_worker() -> None:
    busy = replace(IDLE, decode_rows=50, decode_context=5000, step_costs=costs(context_ms=0.01))
    made = router(p0=replace(busy, decode_rows=0, decode_context=0), d0=busy, d1=replace(busy, decode_rows=20))
    found = outlook(made, ask(output=50, mode=Mode.DISAGGREGATED))
    # A step of 21 rows, 50 ms of the contexts there, 10.25 ms of its own.
    assert found.token_ms == pytest.approx(20.0 + 50.0 + 10.25)
    assert found.transfer_ms > 0.0
    alone = router(c0=busy)
    assert outlook(alone, ask(output=50)).transfer_ms == 0.0


@pytest.mark.parametrize("policy", Policy)
def test_looking_changes_nothing(policy: Policy) -> None:
    def chosen(looks: int) -> list[str]:
        made = Router(random.Random(1).random, policy=policy)
        for name in ("c0", "c1", "c2", "c3"):
            made.worker_up(key(name), Role.COLOCATED, 100_000, BLOCK)
        out = []
        for at in range(12):
            for _ in range(looks):
                made.outlook(ask(), at * 0.1)
            out.append(choose(made, now=at * 0.1).worker.worker_id)
        assert made.table.total == 0
        return out

    assert chosen(0) == chosen(3)


def test_without_a_worker_that_can_take_it_there_is_no_outlook() -> None:
    assert router().outlook(ask(), 0.0) is None
    assert router(c0=IDLE).outlook(ask(num_tokens=100_001), 0.0) is None


# ---- how wrong it was

PLAIN = Outlook(2000.0, 100.0, 0.0, 100.0, 100.0, 0, is_told=False)
"""2 s of queue, 0.1 s of prefill, 0.1 s of hand-off, 10 tokens a second."""


def taught(*ratios: float, tokens: int = 11) -> Foresight:
    """Requests that took so many times as long as foreseen."""
    made = Foresight()
    for ratio in ratios:
        made.completed(PLAIN, tokens, ratio * PLAIN.first_ms / 1e3, ratio * PLAIN.rest_ms(tokens) / 1e3)
    return made


def test_nothing_is_forecast_before_a_worker_tells_or_a_request_ends() -> None:
    assert Foresight().forecast(PLAIN, 1, 10) is None
    assert Foresight().forecast(None, 1, 10) is None
    assert Foresight().forecast(replace(PLAIN, is_told=True), 1, 10) is not None
    assert taught(1.0).forecast(PLAIN, 1, 10) is not None
    assert taught(1.0).forecast(None, 1, 10) is None, "nobody can take it"


def test_a_forecast_that_always_came_true_has_no_margin_but_what_lengths_leave_open() -> None:
    made = taught(*[1.0] * 100)
    sure = made.forecast(PLAIN, 31, 31)
    assert sure is not None
    assert (sure.queue_s, sure.prefill_s) == (pytest.approx(2.0), pytest.approx(0.1))
    assert (sure.transfer_s, sure.decode_s) == (pytest.approx(0.1), pytest.approx(3.0))
    assert sure.margin_s < 0.01 * sure.total_s
    unsure = made.forecast(PLAIN, 11, 51)
    assert unsure is not None
    assert unsure.total_s - unsure.margin_s == pytest.approx(sure.total_s - 20 * 0.1, abs=0.05), "a short answer"
    assert unsure.total_s + unsure.margin_s == pytest.approx(sure.total_s + 20 * 0.1, abs=0.05), "a long one"


def test_one_token_needs_no_hand_off() -> None:
    only = taught(1.0).forecast(PLAIN, 1, 1)
    assert only is not None and only.total_s == pytest.approx(PLAIN.first_ms / 1e3)


@pytest.mark.parametrize("ratio", [0.03, 0.3, 0.9, 1.4, 2.9, 100.0])
def test_forecasts_go_with_what_became_of_them_and_never_refuse_what_such_requests_could_do(ratio: float) -> None:
    """However wrong the columns are: not being able to predict is no reason to refuse."""
    needed_s = ratio * (PLAIN.first_ms + PLAIN.rest_ms(31)) / 1e3
    for num_seen in (1, 3, 100):
        forecast = taught(*[ratio] * num_seen).forecast(PLAIN, 31, 31)
        assert forecast is not None
        assert attainment(forecast, needed_s * 1.001) is not Attainment.LOST
    if ratio < 3.0:
        assert forecast.total_s == pytest.approx(needed_s, rel=0.02)
        assert attainment(forecast, needed_s * 0.9) is Attainment.LOST, "and what cannot be kept is seen"


def test_forecasts_follow_a_change_and_their_margin_grows_with_unrest_and_goes_with_it() -> None:
    def after(*ratios: float) -> tuple[float, float]:
        forecast = taught(*ratios).forecast(PLAIN, 10, 10)
        assert forecast is not None
        return forecast.total_s, forecast.margin_s

    before, steady = after(*[1.0] * 100)
    changed, restless = after(*[1.0] * 50, *[0.5, 2.5] * 25)
    again, quiet = after(*[0.5, 2.5] * 25, *[2.0] * 100)
    assert changed == pytest.approx(1.5 * before, rel=0.1) and again == pytest.approx(2.0 * before, rel=0.01)
    assert restless > 0.4 * changed and max(steady, quiet) < 0.01 * before


def test_one_hiccup_does_not_end_the_judgement() -> None:
    after = taught(*[1.0] * 20, 1000.0, *[1.0] * 10).forecast(PLAIN, 31, 31)
    assert (
        after is not None and after.margin_s < 0.5 * after.total_s < 0.75 * (PLAIN.first_ms + PLAIN.rest_ms(31)) / 1e3
    )


def test_a_day_of_short_requests_with_a_fixed_delay_leaves_the_forecast_of_a_long_one_alone() -> None:
    short = replace(PLAIN, queue_ms=0.0, prefill_ms=5.0)
    made = taught(*[1.0] * 20)
    for _ in range(500):
        made.completed(short, 11, 0.025, short.rest_ms(11) / 1e3)
    long, brief = made.forecast(PLAIN, 11, 11), made.forecast(short, 1, 1)
    assert long is not None and brief is not None
    assert long.queue_s + long.prefill_s == pytest.approx(2.12, rel=0.05)
    assert long.margin_s > 0.05 * long.total_s, "short ones do not make sure of it"
    assert brief.total_s == pytest.approx(0.025, rel=0.2)


def test_columns_that_are_ten_times_too_low_are_followed_and_what_was_cut_off_is_no_certainty() -> None:
    made, needed_s = Foresight(), 10 * PLAIN.first_ms / 1e3
    for at in range(30):
        made.completed(PLAIN, 1, needed_s, 0.0)
        forecast = made.forecast(PLAIN, 1, 1)
        assert forecast is not None
        if at < 3:
            assert forecast.margin_s > 0.1 * forecast.total_s
    assert forecast.total_s == pytest.approx(needed_s, rel=0.05)


def test_who_missed_a_deadline_took_at_least_so_long() -> None:
    """Else only those teach that were quick enough, and forecasts are too short exactly when it matters."""
    made = taught(*[1.0] * 20)

    def first_s() -> float:
        forecast = made.forecast(PLAIN, 1, 1)
        assert forecast is not None
        return forecast.total_s

    before = first_s()
    made.missed(PLAIN, 0.5 * before)
    assert first_s() == before, "nothing is known of what it would have taken"
    for _ in range(20):
        made.missed(PLAIN, 2.0 * before)
    assert first_s() > 1.8 * before


def test_a_request_without_a_second_token_tells_nothing_of_decodes() -> None:
    made = Foresight()
    made.completed(PLAIN, 1, PLAIN.first_ms / 1e3, 0.0)
    forecast = made.forecast(PLAIN, 101, 101)
    assert forecast is not None and forecast.margin_s >= 0.5 * forecast.decode_s


# ---- at the gate


def cold_and_warm() -> tuple[Gate, Router, GenerationSpec]:
    gate = Gate(gateway_spec(refuse_lost_deadlines=True, max_model_len=4096))
    return gate, router(c0=IDLE), spec([5] * 1000, 2, ignore_eos=True)


def test_a_deadline_that_only_a_cached_prefix_can_keep_is_kept_by_it() -> None:
    gate, made, request = cold_and_warm()
    [ticket] = gate.enter(replace(request, prompt_ids=(1,)), (), made, True, 9.0, 0.0).tickets
    with pytest.raises(HeadraceError) as caught:
        gate.enter(request, KEYS, made, True, 0.4, 0.0)
    assert caught.value.reason == "deadline_lost"
    hold(made, "c0", 99)
    admitted = gate.enter(request, KEYS, made, True, 0.4, 0.0)
    assert gate.decisions["accept", "ok"] == 2
    for each in (ticket, *admitted.tickets):
        gate.left(each, 0, 1, 1.0)


def test_workers_that_tell_nothing_refuse_nobody_before_something_was_seen() -> None:
    gate, _, request = cold_and_warm()
    unknown = router(c0=replace(IDLE, step_costs=(), queue_s=100.0))
    for _ in range(2):
        gate.enter(request, KEYS, unknown, True, 0.001, 0.0)
    assert gate.decisions["accept", "ok"] == 2

"""The definitions of latency, throughput and goodput, against numbers computed by hand."""

import pytest

from headrace.core.records import FinishReason
from headrace.core.slo import (
    Slo,
    Timeline,
    attainment,
    e2e_s,
    goodput,
    itl_s,
    itl_spread,
    misses,
    percentile,
    spread,
    throughput,
    tpot_s,
    ttft_s,
)


def made(*token_times: float, reason: FinishReason | None = FinishReason.LENGTH, **facts: object) -> Timeline:
    ended = token_times[-1] if token_times and reason is not None else None
    return Timeline(**({"received_at": 0.0, "token_times": token_times, "ended_at": ended, "reason": reason} | facts))  # type: ignore[arg-type]


def test_ttft_itl_tpot_and_e2e_of_a_hand_made_stream() -> None:
    stream = made(3.0, 3.5, 5.5, 6.0, received_at=1.0)
    assert ttft_s(stream) == 2.0
    assert itl_s(stream.token_times) == [0.5, 2.0, 0.5]
    assert tpot_s(stream.token_times) == 1.0
    assert e2e_s(stream) == 5.0


def test_tokens_that_come_out_together_are_one_gap_and_zeros() -> None:
    assert itl_s([1.0, 2.0, 2.0, 2.0, 3.0]) == [1.0, 0.0, 0.0, 1.0]
    assert itl_s([1.0, 1.0]) == [0.0]


def test_one_token_has_neither_itl_nor_tpot_and_breaks_no_bound_on_them() -> None:
    stream = made(1.0)
    assert (itl_s(stream.token_times), tpot_s(stream.token_times)) == ([], None)
    assert misses(stream, Slo(itl_s=0.0, tpot_s=0.0)) == ()


def test_a_stream_without_tokens_has_no_ttft_and_misses_every_bound_on_it() -> None:
    nothing = made(reason=None)
    assert (ttft_s(nothing), e2e_s(nothing)) == (None, None)
    assert misses(nothing, Slo(ttft_s=9.0)) == ("completion", "ttft")


@pytest.mark.parametrize(
    ("share", "value"), [(0.5, 5.0), (0.51, 6.0), (0.9, 9.0), (0.95, 10.0), (0.99, 10.0), (1.0, 10.0), (0.01, 1.0)]
)
def test_a_percentile_is_the_least_value_that_enough_values_do_not_exceed(share: float, value: float) -> None:
    assert percentile([float(n) for n in range(10, 0, -1)], share) == value


def test_rounding_never_asks_for_one_value_more() -> None:
    hundred = [float(n) for n in range(1, 101)]
    assert [percentile(hundred, n / 100) for n in range(1, 101)] == hundred


def test_nothing_has_no_percentile() -> None:
    assert percentile([], 0.5) is None
    assert spread([]) is None


def test_a_spread_of_itl_pools_the_gaps_of_all_requests() -> None:
    found = itl_spread([made(0.0, 1.0, 2.0, 3.0), made(0.0, 5.0)])
    assert found is not None
    assert (found.p50_s, found.p95_s, found.p99_s, found.longest_s) == (1.0, 5.0, 5.0, 5.0)


@pytest.mark.parametrize(
    ("stream", "slo", "missed"),
    [
        (made(2.0, 3.0), Slo(ttft_s=2.0, itl_s=1.0, tpot_s=1.0), ()),
        (made(2.0, 3.0), Slo(ttft_s=1.9), ("ttft",)),
        (made(0.0, 1.0, 1.0, 9.0), Slo(itl_s=1.0), ("itl",)),
        (made(0.0, 1.0, 1.0, 9.0), Slo(itl_s=1.0, itl_share=0.5), ()),
        (made(0.0, 1.0, 1.0, 9.0), Slo(tpot_s=3.0), ()),
        (made(0.0, 1.0, 1.0, 9.1), Slo(tpot_s=3.0), ("tpot",)),
        (made(1.0, 4.0, deadline=4.0), Slo(deadline=True), ()),
        (made(1.0, 4.5, deadline=4.0), Slo(deadline=True), ("deadline",)),
        (made(1.0, 4.5, deadline=4.0), Slo(), ()),
        (made(1.0, 4.5), Slo(deadline=True), ()),
        (made(1.0, tool_call_at=3.0), Slo(tool_call_s=3.0), ()),
        (made(1.0), Slo(tool_call_s=3.0), ("tool_call",)),
        (made(1.0, reason=FinishReason.CANCELLED), Slo(ttft_s=5.0), ("completion",)),
        (made(1.0, reason=FinishReason.HANDED_OFF), Slo(), ("completion",)),
    ],
)
def test_a_request_is_good_when_it_completed_and_meets_all_that_the_contract_requires(
    stream: Timeline, slo: Slo, missed: tuple[str, ...]
) -> None:
    assert misses(stream, slo) == missed


def test_goodput_counts_good_requests_and_attainment_divides_by_all() -> None:
    cohort = [
        made(1.0, 2.0),
        made(1.0, 9.0),
        made(8.0, 9.0),
        made(1.0, 2.0, reason=FinishReason.CANCELLED),
        made(reason=None),
    ]
    contract = Slo(ttft_s=2.0, itl_s=2.0)
    assert goodput(cohort, contract, duration_s=10.0) == 0.1
    assert attainment(cohort, contract) == 0.2
    assert attainment([], contract) is None


def test_a_cohort_below_its_completion_rate_has_no_goodput() -> None:
    cohort = [made(1.0), made(1.0), made(reason=None)]
    assert goodput(cohort, Slo(completion_rate=0.6), 2.0) == 1.0
    assert goodput(cohort, Slo(completion_rate=0.7), 2.0) == 0.0


def test_throughput_keeps_hits_and_recomputation_out_of_the_input_rate() -> None:
    cohort = [
        made(1.0, 2.0, prefilled_tokens=30, cached_tokens=10, recomputed_tokens=6),
        made(1.0, reason=FinishReason.CANCELLED, prefilled_tokens=10),
    ]
    rates = throughput(cohort, duration_s=2.0)
    assert (rates.completed_requests, rates.prefilled_tokens, rates.output_tokens) == (0.5, 20.0, 1.5)
    assert (rates.cached_tokens, rates.recomputed_tokens) == (5.0, 3.0)
    assert rates.total_tokens == 21.5


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="a rate over 0"):
        throughput([], 0.0)
    with pytest.raises(ValueError, match="a rate over -1"):
        goodput([], Slo(), -1.0)
    with pytest.raises(ValueError, match="itl_share"):
        Slo(itl_share=0.0)

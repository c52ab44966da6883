"""Service counters: what counts how much, who is lowest, and who is forgotten."""

import numpy as np
import pytest

from headrace.core.fairness import ServiceCounters, ServiceWeights


def test_input_output_cached_tokens_and_memory_are_charged_by_weight_and_share() -> None:
    weights = ServiceWeights(1.0, 2.0, 0.25, kv_block_s=0.5, tenants={"half": 0.5}, default_tenant=2.0)
    service = ServiceCounters(weights)
    half, other = service.enter("half"), service.enter("other")
    service.charge_input(half, 10, cached_tokens=8)
    service.charge_outputs(np.array([half, other, other]))
    service.charge_output(other, 3)
    service.charge_residence(np.array([half, other]), np.array([4.0, 2.0]), 3.0)
    assert service.service() == {"half": 2 * (10 + 2 + 2 + 6), "other": (4 + 6 + 3) / 2}


def test_who_comes_back_is_lifted_to_the_lowest_of_those_with_work() -> None:
    service = ServiceCounters()
    busy, idle = service.enter("busy"), service.enter("idle")
    service.leave(idle)
    service.charge_input(busy, 1000)
    assert service.enter("idle") == idle and service.counter(idle) == 1000.0
    new = service.enter("new")
    assert service.counter(new) == 1000.0
    service.charge_input(busy, 1)
    assert service.lowest() == 1000.0


def test_the_floor_outlives_everybody() -> None:
    service = ServiceCounters()
    only = service.enter("only")
    service.charge_input(only, 50)
    service.leave(only)
    assert service.lowest() == 50.0
    assert service.counter(service.enter("later")) == 50.0


def test_service_elsewhere_raises_a_counter_and_never_lowers_it() -> None:
    service = ServiceCounters()
    a, b = service.enter("a"), service.enter("b")
    service.charge_input(a, 10)
    service.raise_to(a, 4.0)
    service.raise_to(b, 7.0)
    assert (service.counter(a), service.counter(b), service.lowest()) == (10.0, 7.0, 7.0)


def test_idle_tenants_at_the_floor_are_forgotten_and_their_places_used_again() -> None:
    service = ServiceCounters(max_idle_tenants=4)
    busy = service.enter("busy")
    ahead = service.enter("ahead")
    service.charge_input(ahead, 9)
    service.leave(ahead)
    for number in range(200):
        service.leave(service.enter(f"visitor {number}"))
    assert len(service.service()) <= 6
    assert service.service()["ahead"] == 9.0, "who is ahead of the floor stays known"
    assert service.counter(busy) == 0.0


@pytest.mark.parametrize("wrong", [{"output_token": -1.0}, {"tenants": {"a": 0.0}}, {"default_tenant": 0.0}])
def test_weights_that_make_no_sense_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"must (not )?be"):
        ServiceWeights(**wrong)

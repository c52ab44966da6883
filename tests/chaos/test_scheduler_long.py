"""100,000 operations on one worker's scheduler, the same in every run: see `tests.scheduler_machine`.

A failure is not made smaller, which takes minutes: the seed and its number of operations find it again.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.scheduler_machine import SchedulerMachine

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("number", range(5))
def test_no_request_is_lost_and_no_budget_exceeded_in_20_000_operations(number: int) -> None:
    class Machine(SchedulerMachine):
        """A class of its own: the seed stays on it."""

    lengthy = settings(
        max_examples=200,
        stateful_step_count=100,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(number)(Machine), settings=lengthy)

"""Some 10,000 operations on one worker's scheduler, the same ones each time; `make chaos` runs ten times as many."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.scheduler_machine import SchedulerMachine

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

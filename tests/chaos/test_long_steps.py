"""A worker that computes for long is not a dead one: timers watch liveness, never the length of work."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headrace.core.records import Role
from tests.fault_fleet import faulty_fleet
from tests.model_fixtures import tiny_model

P, D = Role.PREFILL, Role.DECODE
STEP_S = 20.0


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("busy", [False, True], ids=["prefill", "compile"])
def test_a_step_of_twenty_seconds_is_not_declared_dead(tmp_path: Path, busy: bool) -> None:
    """In a kernel, which leaves Python to the event loop, and as Python code, which shares it, as a compiler does."""
    prompt = list(range(10, 110))
    with (
        faulty_fleet(tiny_model(tmp_path), P, D, transport="tcp", liveness_s=8.0) as running,
        running.client() as client,
    ):
        options = {"temperature": 0.9, "seed": 1, "max_tokens": 12, "ignore_eos": True}
        expected = list(client.generate(prompt, **options).choices[0].token_ids)
        for victim in ("prefill-0", "decode-0"):
            began = time.monotonic()
            running.workers[victim].ask(do="sleep", seconds=STEP_S, busy=busy)
            answer = client.generate(prompt, cache_salt=victim, timeout_s=120, **options)
            assert time.monotonic() - began > STEP_S
            assert running.workers[victim].ask(do="report")["sleep"] == 1
            assert list(answer.choices[0].token_ids) == expected
            assert running.lost_after(victim, began, within_s=0) is None
        assert client.status().gateway.retries == 0
        running.assert_drained()

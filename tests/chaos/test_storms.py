"""Long fault runs on real processes with a tiny real model: `make chaos`. Their short forms are in tests/integration.

Every run proves that its faults happened and ends with the laws of accounting: each accepted request ended in exactly
one way, each client saw an exact prefix of the run without faults, and at idle every process has given everything back.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.records import Role
from headrace.errors import Code, HeadraceError
from tests.fleet import Fleet, fleet
from tests.model_fixtures import tiny_model

P, D = Role.PREFILL, Role.DECODE
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def pair(model: Path) -> Iterator[Fleet]:
    with fleet(model, P, D, transport="auto", gateway={"max_attempts": 50, "max_worker_crashes": 50}) as running:
        yield running


def requests(count: int, seed: int) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    return [
        ([rng.randrange(3, 500) for _ in range(rng.randrange(1, 500))], rng.randrange(30, 150)) for _ in range(count)
    ]


def stream(running: Fleet, ids: list[int], max_tokens: int, got: list[int], timeout_s: float = 300) -> None:
    with running.client() as client:
        for chunk in client.stream(ids, temperature=0, max_tokens=max_tokens, ignore_eos=True, timeout_s=timeout_s):
            for choice in chunk.choices:
                got += choice.token_ids


class Clients:
    """Keeps `width` streams going until stopped; checks each against the run without faults."""

    def __init__(self, running: Fleet, width: int, seed: int) -> None:
        self.fleet = running
        self.work = requests(40, seed)
        self.expected: list[list[int]] = []
        for ids, max_tokens in self.work:
            got: list[int] = []
            stream(running, ids, max_tokens, got)
            self.expected.append(got)
        self.completed = 0
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._loop, args=(random.Random(seed + i),)) for i in range(width)]
        for thread in self._threads:
            thread.start()

    def _loop(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            i = rng.randrange(len(self.work))
            got: list[int] = []
            try:
                stream(self.fleet, *self.work[i], got)
            except HeadraceError as error:
                if error.code is not Code.UNAVAILABLE or got:
                    self.failures.append(f"{error.code}: {error.message} after {len(got)} tokens")
                time.sleep(0.2)
            if got != self.expected[i][: len(got)]:
                self.failures.append(f"request {i}: the tokens are no prefix of the run without faults")
            elif len(got) == len(self.expected[i]):
                self.completed += 1

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in self._threads), "a request is open past its deadline"


def test_twenty_sigkills_under_load(pair: Fleet) -> None:
    rng = random.Random(1)
    clients = Clients(pair, 12, seed=1)
    kills = 0
    while kills < 20:
        time.sleep(rng.uniform(0.3, 2.5))
        victim = rng.choice(sorted(pair.workers))
        pair.workers[victim].kill()
        assert pair.workers[victim].process.returncode == -signal.SIGKILL
        kills += 1
        pair.restart(victim)
        pair.wait_connected(2)
    clients.stop()
    assert not clients.failures, clients.failures[:5]
    assert clients.completed > 20
    with pair.client() as client:
        gateway = client.status().gateway
    assert gateway.retries > 0, "the kills hit nobody"
    pair.assert_accounts_close()
    pair.assert_drained(settle_s=20)


def test_stops_and_continues_under_load(pair: Fleet) -> None:
    rng = random.Random(2)
    clients = Clients(pair, 12, seed=2)
    for _ in range(10):
        time.sleep(rng.uniform(0.5, 2.0))
        victim = pair.workers[rng.choice(sorted(pair.workers))]
        victim.signal(signal.SIGSTOP)
        time.sleep(0.05)
        assert victim.state() == "T"
        time.sleep(rng.choice([0.5, 2.0, 7.0]))
        victim.signal(signal.SIGCONT)
        pair.wait_connected(2)
    clients.stop()
    assert not clients.failures, clients.failures[:5]
    pair.assert_drained(settle_s=30)


def test_cancel_storms_leave_nothing(pair: Fleet) -> None:
    """300 concurrent requests cancelled at random moments, five times; descriptors, threads and tasks return."""
    rng = random.Random(3)
    canary: list[int] = []
    stream(pair, [5, 6, 7], 4, canary)
    pair.assert_drained()
    before = pair.footprint()

    def leave(ids: list[int], delay_s: float) -> None:
        try:
            stream(pair, ids, 400, [], timeout_s=delay_s)
        except HeadraceError as error:
            assert error.code in (Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.RESOURCE_EXHAUSTED), error

    for round_number in range(5):
        threads = [
            threading.Thread(target=leave, args=(ids, rng.uniform(0.05, 3.0)))
            for ids, _ in requests(300, 30 + round_number)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        pair.assert_drained(settle_s=20)
    pair.assert_accounts_close()
    pair.assert_back_at(before)
    got: list[int] = []
    stream(pair, [5, 6, 7], 4, got)
    assert got == canary

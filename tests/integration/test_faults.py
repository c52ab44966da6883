"""Faults on real processes with a tiny real model: what was promised to the client holds, and nothing stays held.

Each test proves that its fault happened (CASES law g) and compares with the run without it (law b).
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from headrace.client import HeadraceClient
from headrace.core.records import Role
from headrace.errors import Code, HeadraceError
from headrace.v1 import worker_pb2 as pb
from headrace.v1 import worker_pb2_grpc as rpc
from tests.fleet import TOKEN, Fleet, fleet
from tests.model_fixtures import tiny_model

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Fleet]:
    """1P1D that tests may break and must mend."""
    with fleet(model, P, D, gateway={"max_attempts": 20, "max_worker_crashes": 20}) as running:
        yield running


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


def ask(running: Fleet, ids: list[int], max_tokens: int = 64, **options: object) -> list[int]:
    with running.client() as client:
        answer = client.generate(ids, temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)
        return list(answer.choices[0].token_ids)


def retries(running: Fleet) -> int:
    with running.client() as client:
        return client.status().gateway.retries


class Load:
    """Clients in threads that repeat their own request until `join`, so that a fault always meets load.

    How fast the machine is decides how often each is answered, never whether work is running.
    """

    def __init__(self, running: Fleet, requests: list[tuple[list[int], int]]) -> None:
        self.requests = requests
        self.answers: list[list[int] | HeadraceError | None] = [None] * len(requests)
        self._running = running
        self._last_round = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(i,)) for i in range(len(requests))]
        for thread in self._threads:
            thread.start()

    def _repeat(self, i: int) -> None:
        """Stops at the first answer that differs, and leaves that one beside its predecessor."""
        first: list[int] | None = None
        while True:
            last_round = self._last_round.is_set()
            try:
                answer = ask(self._running, *self.requests[i], timeout_s=120)
            except HeadraceError as error:
                if error.reason == "no_worker":  # refused before it began: what a client does then is to ask again
                    time.sleep(0.2)
                    continue
                self.answers[i] = error
                return
            first = answer if first is None else first
            self.answers[i] = answer if answer == first else [*first, -1, *answer]
            if last_round or answer != first:
                return

    def wait_running_on(self, worker_id: str, timeout_s: float = 20.0) -> None:
        end = time.monotonic() + timeout_s
        while not self._running.worker_status(worker_id).live_requests:
            assert time.monotonic() < end, f"no request ever ran on {worker_id}"
            time.sleep(0.002)

    def join(self) -> list[list[int] | HeadraceError | None]:
        """Each client ends what it has running and one request more: the last answers come after the fault."""
        self._last_round.set()
        for thread in self._threads:
            thread.join(250)
        assert not any(t.is_alive() for t in self._threads), "a request is open past its deadline"
        return self.answers


def mixed(count: int, seed: int) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    return [(prompt(1000 * seed + i, rng.randrange(1, 400)), rng.randrange(20, 80)) for i in range(count)]


def test_sixty_four_mixed_streams_end_without_an_error_and_leave_nothing(pair: Fleet) -> None:
    requests = mixed(64, 1)
    answers = Load(pair, requests).join()
    for (_, max_tokens), answer in zip(requests, answers, strict=True):
        assert isinstance(answer, list) and len(answer) == max_tokens, answer
    pair.assert_drained()
    repeat = ask(pair, *requests[5])
    assert repeat == answers[5], "exact mode: the answer does not depend on its batch mates"


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_sigkill_under_load_is_a_pause_not_a_gap(pair: Fleet, victim: str) -> None:
    requests = mixed(16, 2)
    alone = [ask(pair, *request) for request in requests]
    before = retries(pair)
    load = Load(pair, requests)
    for _ in range(5):  # a kill between two requests of a fast worker hits nobody
        load.wait_running_on(victim)
        pair.workers[victim].kill()
        assert pair.workers[victim].process.returncode == -signal.SIGKILL
        killed_at = time.monotonic()
        with pair.client() as client:
            while any(w.connected for w in client.status().workers if w.worker_id == victim):
                assert time.monotonic() - killed_at < 5
                time.sleep(0.02)
        pair.restart(victim)
        if retries(pair) > before:
            break
    assert load.join() == alone
    assert retries(pair) > before, "no kill hit a running request"
    pair.assert_drained()


def test_a_stopped_decode_worker_is_noticed_and_its_late_read_does_no_harm(pair: Fleet) -> None:
    requests = mixed(12, 3)
    alone = [ask(pair, *request) for request in requests]
    load = Load(pair, requests)
    load.wait_running_on("decode-0")
    pair.workers["decode-0"].signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    while pair.workers["decode-0"].state() != "T":
        time.sleep(0.01)
    with pair.client() as client:
        while any(w.connected for w in client.status().workers if w.worker_id == "decode-0"):
            assert time.monotonic() - stopped_at < 10
            time.sleep(0.1)
    assert load.join() == alone, "the prefill worker serves whole requests meanwhile"
    pair.workers["decode-0"].signal(signal.SIGCONT)
    pair.wait_connected(2)
    pair.assert_drained(settle_s=15)
    assert ask(pair, *requests[0]) == alone[0]


def test_a_stopped_prefill_worker_is_noticed_and_continues_harmlessly(pair: Fleet) -> None:
    requests = mixed(12, 4)
    alone = [ask(pair, *request) for request in requests]
    before = retries(pair)
    load = Load(pair, requests)
    load.wait_running_on("prefill-0")
    pair.workers["prefill-0"].signal(signal.SIGSTOP)
    assert load.join() == alone
    assert retries(pair) > before, "the stop hit a running request"
    assert pair.workers["prefill-0"].state() == "T"
    pair.workers["prefill-0"].signal(signal.SIGCONT)
    pair.wait_connected(2)
    pair.assert_drained(settle_s=15)
    assert ask(pair, *requests[1]) == alone[1]


def test_a_gateway_that_is_stopped_loses_its_sessions_and_resumes_its_requests(pair: Fleet) -> None:
    requests = [(ids, 300) for ids, _ in mixed(8, 6)]
    alone = [ask(pair, *request) for request in requests]
    before = retries(pair)
    load = Load(pair, requests)
    load.wait_running_on("decode-0")
    pair.gateway.signal(signal.SIGSTOP)
    deadline = time.monotonic() + 12
    while any(pair.worker_status(name).sessions for name in pair.ready):
        assert time.monotonic() < deadline, "the workers did not notice"
        time.sleep(0.1)
    assert all(pair.worker_status(name).live_requests == 0 for name in pair.ready), "its attempts are cancelled"
    pair.gateway.signal(signal.SIGCONT)
    assert load.join() == alone
    assert retries(pair) > before
    pair.wait_connected(2)
    pair.assert_drained(settle_s=15)


def test_prefill_killed_between_first_token_and_hand_off(pair: Fleet) -> None:
    """The reader is stopped, so the hand-off cannot complete; the first token is already with the client."""
    ids = prompt(77, 300)
    alone = ask(pair, ids, 32)
    got: list[int] = []
    pair.workers["decode-0"].signal(signal.SIGSTOP)
    with pair.client() as client:
        for chunk in client.stream(ids, temperature=0, max_tokens=32, ignore_eos=True, timeout_s=60):
            if not got:
                pair.workers["prefill-0"].kill()
                pair.workers["decode-0"].signal(signal.SIGCONT)
            for choice in chunk.choices:
                got += choice.token_ids
    assert pair.workers["prefill-0"].process.returncode == -signal.SIGKILL
    assert got == alone
    pair.restart("prefill-0")
    pair.assert_drained(settle_s=15)


def test_clients_that_disconnect_at_random_moments(pair: Fleet) -> None:
    rng = random.Random(9)
    ends: list[str] = []
    canary = ask(pair, prompt(1, 20), 8)
    pair.assert_drained()
    before = pair.footprint()

    def client(ids: list[int], delay_s: float) -> None:
        try:
            ask(pair, ids, 200, timeout_s=delay_s)
            ends.append("completed")
        except HeadraceError as error:
            ends.append(error.code.value)

    work = [(prompt(i, rng.randrange(1, 300)), rng.uniform(0.01, 1.0)) for i in range(100)]
    threads = [threading.Thread(target=client, args=args) for args in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ends) == 100 and not any(thread.is_alive() for thread in threads)
    assert set(ends) <= {"completed", "DEADLINE_EXCEEDED", "CANCELLED"} and ends.count("DEADLINE_EXCEEDED") > 30, ends
    pair.assert_drained()
    pair.assert_accounts_close()
    pair.assert_back_at(before)
    assert ask(pair, prompt(1, 20), 8) == canary


def test_a_planted_leak_is_found_and_its_holder_named(pair: Fleet) -> None:
    """A foreign session leaves a finished prefill behind that no gateway knows."""
    metadata = (("x-headrace-cluster", TOKEN),)
    body = pb.RequestBody(
        request_id="req-planted",
        attempt=1,
        prompt_ids=prompt(5, 40),
        sampling=pb.Sampling(max_tokens=8, top_p=1.0),
        time_left_s=60,
        namespace=b"x",
    )
    done = threading.Event()

    def frames() -> Iterator[pb.SessionRequest]:
        yield pb.SessionRequest(hello=pb.SessionHello(gateway_id="rogue"))
        yield pb.SessionRequest(submit=pb.Submit(handle=1, submit_seq=1, body=body, hand_off=True))
        while not done.wait(0.5):
            yield pb.SessionRequest(heartbeat=pb.Heartbeat())

    with grpc.insecure_channel(pair.ready["prefill-0"].address) as channel:
        call = rpc.WorkerStub(channel).Session(frames(), metadata=metadata)
        for frame in call:
            if frame.WhichOneof("kind") == "prefilled":
                break
        audit = pair.audit(settle_s=1.0)
        assert not audit.clean and audit.used_blocks == 3
        assert any("prefill-0" in line and "req-planted" in line for line in audit.findings), list(audit.findings)
        command = [Path(sys.executable).parent / "headrace", "audit", "--settle-s=0.5"]
        said = subprocess.run(
            [*command, f"--address={pair.gateway_ready.grpc_address}"], capture_output=True, text=True, timeout=60
        )
        assert said.returncode == 1 and "req-planted" in said.stdout + said.stderr
        done.set()
        call.cancel()
    pair.assert_drained()


def test_a_worker_wants_the_cluster_token(pair: Fleet) -> None:
    with grpc.insecure_channel(pair.ready["decode-0"].address) as channel:
        for metadata in ((), (("x-headrace-cluster", "wrong"),)):
            with pytest.raises(grpc.RpcError) as error:
                rpc.WorkerStub(channel).WorkerStatus(pb.WorkerStatusRequest(), metadata=metadata, timeout=5)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_request_in_two_crashes_ends_with_an_error(model: Path) -> None:
    with fleet(model, C, C) as running:
        failures: list[HeadraceError] = []

        def one() -> None:
            try:
                ask(running, prompt(1, 30), 3000, timeout_s=60)
            except HeadraceError as error:
                failures.append(error)

        client = threading.Thread(target=one)
        client.start()
        for _ in range(2):
            victim = _busy(running)
            running.workers[victim].kill()
            del running.ready[victim]
        client.join(30)
        assert failures and failures[0].code is Code.ABORTED and "2 worker crashes" in failures[0].message


def _busy(running: Fleet, timeout_s: float = 15.0) -> str:
    """A worker that computes a request right now."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        for name in running.ready:
            if running.worker_status(name).load.running_requests:
                return name
        time.sleep(0.02)
    raise TimeoutError("no worker is busy")


def test_the_client_package_reports_a_dead_gateway_in_one_line() -> None:
    with HeadraceClient("127.0.0.1:1") as client, pytest.raises(HeadraceError) as error:
        client.generate([1, 2, 3], max_tokens=1, timeout_s=3)
    assert error.value.code is Code.UNAVAILABLE

"""Two gateways at one address as a user has them: `headrace serve`, real processes, and one is killed under load."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.client_ports import held
from cluster.config.schema import GatewayConfig
from headrace.client import HeadraceClient, Options, ToolWait
from headrace.errors import Code, HeadraceError
from router.spec import GatewayReady, GatewaySpec
from tests.fleet import Proc
from tests.model_fixtures import tiny_model

ROOT = Path(__file__).parent.parent.parent
PROMPTS = [[7 + 3 * i + j for i in range(40)] for j in range(3)]
MAX_TOKENS = 900
CONFIG = """
model: {{path: {model}, served_model_name: tiny}}
gateway: {{replicas: 2, grpc_port: 0, http_port: 0}}
pools:
  - {{role: prefill, threads: 1, kv_cache_bytes: 64MiB}}
  - {{role: decode, threads: 1, kv_cache_bytes: 64MiB}}
kv_transfer: {{transport: tcp}}
cluster: {{backend: process}}
"""


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.02)
    return value


class Served:
    def __init__(self, folder: Path) -> None:
        self.ready_file, self.log, self.tmp = folder / "ready.json", folder / "serve.log", folder / "tmp"
        self.tmp.mkdir()
        config = folder / "two.yaml"
        self.model = tiny_model(folder / "model")
        config.write_text(CONFIG.format(model=self.model))
        command = [sys.executable, "-m", "headrace.cli", "serve", str(config), "--ready-file", str(self.ready_file)]
        with self.log.open("w") as log:
            env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.tmp)}
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        until(lambda: self.ready_file.exists() or self.process.poll() is not None, 120)
        assert self.process.poll() is None, self.log.read_text()

    def now(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.ready_file.read_text())
        return data

    def pids(self) -> list[int]:
        return [process["pid"] for process in (*self.now()["gateways"], *self.now()["workers"])]

    def met(self, name: str) -> HeadraceClient:
        """A connection to the shared address that this gateway has taken."""

        def try_one() -> HeadraceClient | None:
            client = HeadraceClient(self.now()["grpc"], timeout_s=60)
            if client.status().gateway.gateway_id.startswith(name):
                return client
            client.close()
            return None

        found: HeadraceClient = until(try_one)
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = Served(tmp_path_factory.mktemp("two"))
    yield running
    running.process.send_signal(signal.SIGTERM)
    running.process.wait(30)


class Stream(threading.Thread):
    """Tokens as they come, and how the stream ended."""

    def __init__(self, client: HeadraceClient, prompt: list[int], name: str = "") -> None:
        super().__init__(daemon=True)
        self.tokens: list[int] = []
        self.error: HeadraceError | None = None
        self._client, self._prompt, self._name = client, prompt, name
        self.start()

    def run(self) -> None:
        try:
            for chunk in self._client.stream(
                self._prompt, request_id=self._name, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True
            ):
                for choice in chunk.choices:
                    self.tokens += choice.token_ids
        except HeadraceError as error:
            self.error = error


def test_what_is_asked_about_a_request_is_answered_whichever_gateway_took_the_connection(served: Served) -> None:
    with served.met("gateway-0") as zero, served.met("gateway-1") as one:
        # 1. Why it went where it went, from who does not have it.
        zero.generate(PROMPTS[0], request_id="mine", max_tokens=4)
        assert one.explain("mine") == zero.explain("mine")
        with pytest.raises(HeadraceError) as caught:
            one.explain("nobody's")
        assert caught.value.code is Code.NOT_FOUND
        # 2. Cancelled from there.
        running = Stream(zero, PROMPTS[0], "long")
        until(lambda: running.tokens)
        assert one.audit(0.5).clean and running.is_alive(), "what another gateway has in progress is no leak"
        assert one.cancel("long") and not one.cancel("nobody's")
        running.join(20)
        assert running.error is not None and running.error.code is Code.CANCELLED
        # 3. Status and audit tell of both.
        status = one.status()
        assert [sibling.gateway_id[:9] for sibling in status.siblings] == ["gateway-0"]
        assert status.gateway.accepted == 0 and status.siblings[0].accepted == 2
        assert one.audit(10).clean
        # 4. Each one's metrics have an address of their own; at the shared one are those of both.
        whole = httpx.get(f"{served.now()['http']}/metrics", timeout=20).text
        for number, accepted in enumerate((2.0, 0.0)):
            labels = f'gateway="gateway-{number}",model_name="tiny",outcome="accepted"'
            assert f"headrace_branches_total{{{labels}}} {accepted}" in whole
        for gateway in served.now()["gateways"]:
            accepted = 2.0 if gateway["name"] == "gateway-0" else 0.0
            line = f'headrace_branches_total{{model_name="tiny",outcome="accepted"}} {accepted}'
            assert line in httpx.get(f"{gateway['http']}/metrics", timeout=20).text


def test_a_tool_answers_through_any_gateway(served: Served) -> None:
    with served.met("gateway-0") as zero, served.met("gateway-1") as one:
        paused = 0
        options: Options = {"temperature": 0.8, "seed": 5, "max_tokens": 40, "ignore_eos": True}
        options["logit_bias"] = {zero.tokenize("a")[0]: 100.0}
        wait: ToolWait = {"on": ["a"], "tool": "search"}
        for chunk in zero.stream(PROMPTS[1], request_id="tool", tool_wait=wait, **options):
            for choice in chunk.choices:
                if choice.paused:
                    paused += 1
                    assert one.resume("tool", [9, 8, 7]) == 3
        assert paused
        with pytest.raises(HeadraceError) as caught:
            one.resume("tool", "late")
        assert (caught.value.code, caught.value.reason) == (Code.NOT_FOUND, "unknown_request")


def test_clears_at_all_gateways_at_once_are_all_done(served: Served) -> None:
    with served.met("gateway-0") as zero, served.met("gateway-1") as one:
        zero.generate(PROMPTS[2], max_tokens=4)
        until(lambda: one.generate(PROMPTS[2], max_tokens=4).usage.cached_tokens)
        clears = [threading.Thread(target=client.clear_cache) for client in (zero, one) for _ in range(5)]
        for clear in clears:
            clear.start()
        for clear in clears:
            clear.join()
        (kept,) = served.tmp.glob("headrace-*/generations.json")
        assert json.loads(kept.read_text()) == {"default": 10}
        assert one.generate(PROMPTS[2], max_tokens=4).usage.cached_tokens == 0


def test_a_killed_gateway_comes_back_and_the_others_streams_do_not_notice(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        zero, one = (stack.enter_context(served.met(name)) for name in ("gateway-0", "gateway-1"))
        alone = [
            list(one.generate(ids, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True).choices[0].token_ids)
            for ids in PROMPTS
        ]
        retries = one.status().gateway.retries
        # 1. Both are in the middle of streams.
        lost = [Stream(zero, ids) for ids in PROMPTS]
        kept = [Stream(one, ids) for ids in PROMPTS]
        until(lambda: all(each.tokens for each in (*lost, *kept)))
        victim, other = served.now()["gateways"]
        os.kill(victim["pid"], signal.SIGKILL)
        assert all(len(each.tokens) < MAX_TOKENS for each in kept), "the kill came too late to show anything"
        # 2. Its streams have ended with an error behind an exact prefix; the other's go on to the last token.
        for each in (*lost, *kept):
            each.join(60)
        assert [each.tokens for each in kept] == alone and not any(each.error for each in kept)
        for each, tokens in zip(lost, alone, strict=True):
            assert each.error is not None and each.tokens == tokens[: len(each.tokens)]
        assert one.status().gateway.retries == retries
        # 3. It comes back at the same addresses, sees the workers, and serves who meets it.
        again = until(lambda: next((g for g in served.now()["gateways"] if g["restarts"]), None))
        assert (again["name"], again["grpc"], again["http"]) == (victim["name"], victim["grpc"], victim["http"])
        assert again["pid"] != victim["pid"] and served.now()["gateways"][1] == other
        back = stack.enter_context(served.met("gateway-0"))
        answer = back.generate(PROMPTS[0], temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert list(answer.choices[0].token_ids) == alone[0]
        # 4. Nothing of the lost requests is held.
        audit = one.audit(20)
        assert audit.clean and audit.used_blocks == 0, list(audit.findings)


def test_a_killed_worker_is_replaced_for_all_gateways(served: Served) -> None:
    victim = next(worker for worker in served.now()["workers"] if worker["role"] == "decode")
    os.kill(victim["pid"], signal.SIGKILL)
    again = until(
        lambda: next((w for w in served.now()["workers"] if w["role"] == "decode" and w["restarts"]), None), 60
    )
    for gateway in served.now()["gateways"]:
        with HeadraceClient(gateway["grpc"], timeout_s=60) as client:
            until(
                lambda client=client: {
                    worker.incarnation for worker in client.status().workers if worker.connected
                }.issuperset({again["incarnation"]})
            )
            assert client.generate(PROMPTS[0], max_tokens=4).usage.completion_tokens


def test_a_gateway_that_has_no_worker_says_so_at_the_shared_address_after_a_while(served: Served) -> None:
    ports = GatewayConfig(replicas=2, grpc_port=0, http_port=0)
    with held(ports) as (grpc_port, http_port), contextlib.ExitStack() as stack:
        spec = GatewaySpec(
            gateway_id="gateway-0",
            model_path=str(served.model),
            served_model_name="tiny",
            max_model_len=1024,
            grpc_port=0,
            http_port=0,
            shared_grpc_port=grpc_port,
            shared_http_port=http_port,
            liveness_s=0.5,
            cluster_token="t" * 16,
            controller_pid=os.getpid(),
        )
        alone = Proc("router.main", spec)
        stack.callback(alone.kill)
        ready = GatewayReady.model_validate_json(alone.ready_line())
        assert ready.client_addresses == (f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}")
        client = stack.enter_context(HeadraceClient(ready.grpc_address, timeout_s=20))
        until(lambda: client.status().gateway.open)
        assert httpx.get(f"http://{ready.client_addresses[1]}/health", timeout=20).status_code == 503


def test_a_second_deployment_at_its_ports_is_refused_and_the_end_leaves_nothing(served: Served, tmp_path: Path) -> None:
    grpc_port, http_port = (int(served.now()[name].rpartition(":")[2]) for name in ("grpc", "http"))
    config = tmp_path / "second.yaml"
    config.write_text(f"gateway: {{replicas: 2, grpc_port: {grpc_port}, http_port: {http_port}}}")
    second = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "serve", str(config)], cwd=ROOT, capture_output=True, text=True
    )
    assert second.returncode == 1 and "in use" in second.stderr and len(second.stderr.splitlines()) == 1
    pids = served.pids()
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(30) == 0, served.log.read_text()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
    assert not served.ready_file.exists() and not list(served.tmp.glob("headrace-*"))
    for port in (grpc_port, http_port):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))

"""The product as its users meet it: `headrace serve configs/quickstart.yaml` on Ray with the default model, and the
clients that nobody here wrote. One deployment carries the whole file; its last test ends it with SIGINT and looks for
what is left.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).parent.parent.parent
HEADRACE = Path(sys.executable).parent / "headrace"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
MODEL = "smollm2-135m-instruct"
BUF = "@bufbuild/buf@1.75.0"

pytestmark = [pytest.mark.ray, pytest.mark.real_model, pytest.mark.timeout(300)]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def end_with_parent() -> None:
    """An interrupted test run takes the deployment with it."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class Deployment:
    def __init__(self, folder: Path) -> None:
        self.grpc_port, self.http_port = free_port(), free_port()
        self.ready_file = folder / "ready.json"
        self.log = folder / "serve.log"
        self.shm_before = set(os.listdir("/dev/shm"))
        foreign = set(Path("/tmp").glob("headrace-*"))
        self.began = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    HEADRACE,
                    "serve",
                    "configs/quickstart.yaml",
                    f"--grpc-port={self.grpc_port}",
                    f"--http-port={self.http_port}",
                    f"--ready-file={self.ready_file}",
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        while not self.ready_file.exists():
            assert self.process.poll() is None and time.monotonic() < self.began + 120, self.log.read_text()
            time.sleep(0.1)
        self.run_dirs = set(Path("/tmp").glob("headrace-*")) - foreign
        self.pids = {self.process.pid, self.ready()["gateways"][0]["pid"], *(w["pid"] for w in self.ready()["workers"])}

    def ready(self) -> dict[str, Any]:
        return json.loads(self.ready_file.read_text())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def cli(self, *args: str, timeout_s: float = 60, **kw: Any) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"HEADRACE_ADDRESS": f"127.0.0.1:{self.grpc_port}"}
        return subprocess.run(
            [HEADRACE, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, **kw
        )


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("product"))
    yield deployment
    if deployment.process.poll() is None:
        deployment.process.send_signal(signal.SIGTERM)
        deployment.process.wait(40)


def test_the_command_line_answers_and_explains(product: Deployment) -> None:
    said = product.cli("generate", QUESTION, "--explain")
    assert said.returncode == 0 and said.stdout.strip() == ANSWER
    for word in ("prefill-0", "decode-0", "cached", "bytes over ucx", "transport", "exposed_hand_off", "total"):
        assert word in said.stderr
    answer = json.loads(product.cli("generate", QUESTION, "--json").stdout)
    explanation = answer["explanation"]
    stages = [*explanation["to_first_token"], *explanation["to_end"]]
    assert sum(stage["ms"] for stage in stages) == pytest.approx(explanation["total_ms"], abs=1.0)
    assert explanation["cached_tokens"] > 0 and answer["usage"]["completion_tokens"] == 8


def test_the_openai_package_works_unmodified(product: Deployment) -> None:
    client = openai.OpenAI(base_url=f"{product.url}/v1", api_key="unused")
    assert [m.id for m in client.models.list().data] == [MODEL]
    messages: Any = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert chat.choices[0].message.content == ANSWER and chat.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-1].usage.total_tokens == chat.usage.total_tokens
    completion = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, n=2, seed=1)
    assert len({c.text for c in completion.choices}) == 2
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=messages, temperature=3)
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.chat.completions.create(model="other", messages=messages)


def test_buf_curl_works_unmodified(product: Deployment, tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    installed = subprocess.run([npm, "install", "--silent", "--prefix", tmp_path, BUF], capture_output=True, text=True)
    if installed.returncode != 0:
        pytest.skip(f"buf cannot be installed: {installed.stderr[-200:]}")

    def curl(method: str, body: dict[str, Any]) -> str:
        address = f"http://127.0.0.1:{product.grpc_port}/{method}"
        command = [tmp_path / "node_modules/.bin/buf", "curl", "--http2-prior-knowledge", "--protocol", "grpc"]
        done = subprocess.run(
            [*command, "-d", json.dumps(body), address], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        return done.stdout or done.stderr

    chat = {"messages": [{"role": "user", "content": QUESTION}]}
    request = {"chat": chat, "sampling": {"temperature": 0}}
    assert json.loads(curl("headrace.v1.Inference/Generate", request))["choices"][0]["text"] == ANSWER
    assert '"finishReason": "stop"' in curl("headrace.v1.Inference/GenerateStream", request)
    assert json.loads(curl("grpc.health.v1.Health/Check", {"service": "headrace.v1.Inference"}))["status"] == "SERVING"
    bad = json.loads(curl("headrace.v1.Inference/Generate", {"prompt": "x", "sampling": {"topP": 7}}))
    assert bad["code"] == "invalid_argument" and "top_p" in bad["message"]


def test_bad_requests_are_refused_at_once_and_the_next_one_works(product: Deployment) -> None:
    with httpx.Client(base_url=product.url, timeout=30) as http:
        for body, field in (
            ({"prompt": ""}, "prompt"),
            ({"prompt": "x", "n": 100_000_000}, "n"),
            ({"prompt": [-1]}, "prompt"),
            ({"prompt": [2**63]}, "prompt"),
            ({"prompt": "x", "max_tokens": 10**9}, "max_tokens"),
            ({"prompt": "word " * 9000}, "prompt"),
            ({"prompt": "x", "temprature": 1}, "temprature"),
            ({"prompt": "x", "stop": [""]}, "stop"),
        ):
            refused = http.post("/v1/completions", json={"model": MODEL, **body})
            assert refused.status_code == 400 and field in refused.json()["error"]["message"], refused.text
            assert len(refused.content) < 4096
        assert http.post("/v1/completions", content=b'{"model": ').status_code == 400
        assert http.post("/v1/completions", content=b"[" * 100_000).status_code == 400
    assert product.cli("generate", QUESTION).stdout.strip() == ANSWER


def test_status_and_audit_are_clean(product: Deployment) -> None:
    audit = product.cli("audit", "--json")
    assert audit.returncode == 0 and json.loads(audit.stdout)["clean"] is True
    status = json.loads(product.cli("status", "--json").stdout)
    assert {w["worker_id"] for w in status["workers"]} == {"prefill-0", "decode-0"}
    assert all(w["connected"] for w in status["workers"])


def test_the_controller_replaces_a_killed_worker_while_clients_wait(product: Deployment) -> None:
    before = {w["worker_id"]: w for w in product.ready()["workers"]}
    story = [HEADRACE, "generate", "Tell me a long story.", "--max-tokens", "120", "--address"]
    command = [*story, f"127.0.0.1:{product.grpc_port}"]
    alone = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120).stdout
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    time.sleep(3)
    os.kill(before["decode-0"]["pid"], signal.SIGKILL)
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 0 and out == alone
    deadline = time.monotonic() + 60
    while (now := {w["worker_id"]: w for w in product.ready()["workers"]}).get("decode-0", {}).get("restarts", 0) == 0:
        assert time.monotonic() < deadline, product.log.read_text()
        time.sleep(0.2)
    assert now["decode-0"]["incarnation"] != before["decode-0"]["incarnation"]
    product.pids |= {w["pid"] for w in now.values()}
    answer = json.loads(product.cli("generate", QUESTION, "--json").stdout)
    assert answer["choices"][0]["text"] == ANSWER and answer["explanation"]["mode"] == "disaggregated"
    assert product.cli("audit", "--settle-s", "10").returncode == 0


def test_start_up_faults_are_one_clear_line(product: Deployment, tmp_path: Path) -> None:
    truncated = tmp_path / "bad.gguf"
    truncated.write_bytes(b"GGUF" + bytes(20))
    free = f"--http-port={free_port()}"
    for args, words in (
        (["serve", "configs/quickstart.yaml", free, f"--grpc-port={product.grpc_port}"], "in use"),
        (["serve", "/no/such/model", free, f"--grpc-port={free_port()}"], "no such model"),
        (["serve", str(truncated), free, f"--grpc-port={free_port()}", "--backend=process"], "bad.gguf"),
    ):
        failed = product.cli(*args)
        lines = failed.stderr.strip().splitlines()
        assert failed.returncode != 0 and len(lines) == 1 and words in lines[0], failed.stderr


def test_interrupt_leaves_nothing_behind(product: Deployment) -> None:
    assert product.run_dirs
    os.killpg(product.process.pid, signal.SIGINT)
    assert product.process.wait(40) == 0, product.log.read_text()
    deadline = time.monotonic() + 10
    while (left := [pid for pid in product.pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    assert not product.ready_file.exists()
    assert set(os.listdir("/dev/shm")) <= product.shm_before
    assert not [p for p in product.run_dirs if p.exists()]
    for port in (product.grpc_port, product.http_port):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))

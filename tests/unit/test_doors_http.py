"""The HTTP door on a real socket, with the real `openai` package: answers, streams, refusals, disconnects.

Over 400 lines: most of it is the table of bad bodies.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from headrace.errors import Code, HeadraceError
from tests.doors_fixtures import Doors

UNICODE = "hello 👨‍👩‍👧 é漢 wor"


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    with Doors(max_body_bytes=100_000) as opened:
        yield opened


@pytest.fixture
def client(doors: Doors) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=doors.http, timeout=10) as opened:
        yield opened
    doors.gateway.pause_s, doors.gateway.fail_after, doors.gateway.refuse = 0.0, None, None
    doors.gateway.is_ready = True
    doors.wait_idle()


@pytest.fixture
def sdk(doors: Doors, client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=doors.http + "/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def events(response: httpx.Response) -> list[object]:
    """The data of each event; [DONE] as itself."""
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def canary(client: httpx.Client) -> str:
    body = {"prompt": "canary wor", "max_tokens": 9, "seed": 1}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


# -- the openai package


def test_openai_completions_and_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="tiny", prompt="hello world", max_tokens=4)
    assert answer.choices[0].text == "hello world"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 4, 8)
    chat = sdk.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        max_completion_tokens=5,
    )
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content
    assert chat.id.startswith("chatcmpl-")


def test_openai_penalties_and_bias_reach_the_engine(sdk: openai.OpenAI, doors: Doors) -> None:
    own = {"presence_penalty": 0.5, "frequency_penalty": -0.25}
    extra = {"repetition_penalty": 1.5, "min_p": 0.1, "top_k": 7}
    chat = [{"role": "user", "content": "hello"}]
    for create, prompt in (
        (sdk.completions.create, {"prompt": "a"}),
        (sdk.chat.completions.create, {"messages": chat}),
    ):
        create(model="tiny", max_tokens=1, logit_bias={"5": -100, "6": 1}, extra_body=extra, **own, **prompt)
        params = doors.gateway.specs[-1].sampling[0]
        assert {name: getattr(params, name) for name in own | extra} == own | extra
        assert params.logit_bias == ((5, -100.0), (6, 1.0))


def test_openai_streams_equal_the_whole_answers(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(model="tiny", prompt=UNICODE, max_tokens=60).choices[0].text
    chunks = list(sdk.completions.create(model="tiny", prompt=UNICODE, max_tokens=60, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert whole.startswith(UNICODE)
    messages = [{"role": "user", "content": UNICODE}]
    told = sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=90).choices[0].message.content
    stream = list(sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=90, stream=True))
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == told
    assert [c.choices[0].finish_reason for c in stream if c.choices[0].finish_reason] == ["length"]


def test_openai_models_and_errors(sdk: openai.OpenAI, doors: Doors) -> None:
    assert [model.id for model in sdk.models.list()] == ["tiny"]
    assert sdk.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="serves tiny"):
        sdk.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model="tiny", prompt="a", temperature=9)
    assert caught.value.param == "temperature"
    doors.gateway.refuse = HeadraceError(Code.RESOURCE_EXHAUSTED, "the queue is full", retry_after_s=1.5)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as full:
            sdk.completions.create(model="tiny", prompt="a", stream=stream)
        assert full.value.response.headers["retry-after"] == "2"
        assert full.value.response.headers["retry-after-ms"] == "1500"


def test_a_stream_that_breaks_is_an_error_without_a_fake_end(sdk: openai.OpenAI, doors: Doors) -> None:
    doors.gateway.fail_after = 3
    seen = []
    with pytest.raises(openai.APIError, match="the transfer failed"):
        for chunk in sdk.completions.create(model="tiny", prompt="hello wor", max_tokens=9, stream=True):
            seen.append(chunk)
    assert len(seen) == 3
    assert all(chunk.choices[0].finish_reason is None for chunk in seen)


# -- the stream's contract


def test_a_broken_stream_ends_with_the_error_event_and_nothing_after(client: httpx.Client, doors: Doors) -> None:
    doors.gateway.fail_after = 2
    response = client.post("/v1/completions", json={"prompt": "hello wor", "stream": True})
    assert response.status_code == 200
    *_, last = events(response)
    assert last["error"]["code"] == "aborted"
    assert "[DONE]" not in response.text
    whole = client.post("/v1/completions", json={"prompt": "hello wor"})
    assert whole.status_code == 503


def test_usage_comes_once_last_and_sums_all_choices(client: httpx.Client) -> None:
    body = {"prompt": ["hello", "wor ld"], "n": 2, "max_tokens": 5, "stream": True}
    response = client.post("/v1/completions", json=body | {"stream_options": {"include_usage": True}})
    *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    prompt_tokens = sum(
        client.post("/tokenize", json={"prompt": prompt}).json()["count"] for prompt in ("hello", "wor ld")
    )
    assert usage["usage"]["prompt_tokens"] == prompt_tokens
    assert usage["usage"]["completion_tokens"] == 20
    ends = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1, 2, 3]
    plain = client.post("/v1/completions", json=body)
    assert "usage" not in plain.text


def test_continuous_usage_counts_up(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", "max_tokens": 3, "stream": True, "stream_options": options}
    *chunks, _ = events(client.post("/v1/completions", json=body))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


def test_choices_come_in_the_order_of_prompts_and_branches(client: httpx.Client) -> None:
    ids = [client.post("/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in ("hello wor", "DEwor")]
    texts = client.post("/v1/completions", json={"prompt": ["hello wor", "DEwor"], "n": 2, "max_tokens": 4}).json()
    by_ids = client.post("/v1/completions", json={"prompt": ids, "n": 2, "max_tokens": 4}).json()
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in texts["choices"]] == [c["text"] for c in by_ids["choices"]]
    one = client.post("/v1/completions", json={"prompt": ids[1], "max_tokens": 4}).json()
    assert one["choices"][0]["text"] == texts["choices"][2]["text"]


def test_token_ids_come_back_when_asked_for(client: httpx.Client) -> None:
    body = {"prompt": "hello é", "max_tokens": 6, "return_token_ids": True}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert len(choice["token_ids"]) == 6
    chunks = [c for c in events(client.post("/v1/completions", json=body | {"stream": True})) if c != "[DONE]"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    streamed = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert streamed == choice["token_ids"]


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_the_same_in_both_forms(client: httpx.Client, include: bool) -> None:
    body = {"prompt": "hello world", "max_tokens": 20, "stop": ["o wor", "zz"], "include_stop_str_in_output": include}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    assert whole["text"] == ("hello wor" if include else "hell")
    assert whole["finish_reason"] == "stop"
    chunks = events(client.post("/v1/completions", json=body | {"stream": True}))[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


def test_no_chunk_shows_half_a_character(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"prompt": "👩‍🚀漢é", "max_tokens": 19, "stream": True})
    chunks = events(response)[:-1]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text.startswith("👩‍🚀漢é")
    assert "\ufffd" not in text[:-1]
    assert all(chunk["choices"][0]["text"] or chunk["choices"][0]["finish_reason"] for chunk in chunks)


# -- refusals

BAD_BODIES: list[tuple[str, bytes, int, str | None]] = [
    ("/v1/completions", b"", 400, "body"),
    ("/v1/completions", b"{", 400, "body"),
    ("/v1/completions", b"[]", 400, "body"),
    ("/v1/completions", b'"x"', 400, "body"),
    ("/v1/completions", b"\xff\xfe", 400, "body"),
    ("/v1/completions", b'{"prompt": "a\\ud800"}', 400, "body"),
    ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', 400, "body"),
    ("/v1/completions", b'{"prompt": "a", "temperature": 1e999}', 400, "body"),
    ("/v1/completions", b'{"prompt": "a", "repetition_penalty": 0}', 400, "repetition_penalty"),
    ("/v1/completions", b'{"prompt": "a", "presence_penalty": 3}', 400, "presence_penalty"),
    ("/v1/completions", b'{"prompt": "a", "frequency_penalty": -3}', 400, "frequency_penalty"),
    ("/v1/completions", b'{"prompt": "a", "min_p": 2}', 400, "min_p"),
    ("/v1/completions", b'{"prompt": "a", "logit_bias": {"267": 1}}', 400, "logit_bias"),
    ("/v1/completions", b'{"prompt": "a", "logit_bias": {"1": 1, "01": 2}}', 400, "logit_bias"),
    ("/v1/completions", b'{"prompt": "a", "n": 100000000}', 400, "n"),
    ("/v1/completions", b'{"prompt": [18446744073709551616]}', 400, "prompt"),
    ("/v1/completions", b'{"prompt": [9223372036854775808]}', 400, "prompt"),
    ("/v1/completions", b'{"prompt": [-1]}', 400, "prompt"),
    ("/v1/completions", b'{"prompt": ""}', 400, "prompt"),
    ("/v1/completions", b'{"prompt": "a", "model": 5}', 400, "model"),
    ("/v1/completions", b'{"prompt": "a", "model": "nope"}', 404, "model"),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 0}', 400, "max_tokens"),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 256}', 400, "max_tokens"),
    ("/v1/completions", b'{"prompt": "' + b"a" * 256 + b'"}', 400, "prompt"),
    ("/v1/completions", b'{"prompt": "' + b"a" * 50_000 + b'"}', 400, "prompt"),
    ("/v1/completions", b'{"prompt": "a", "logprobs": 21}', 400, "logprobs"),
    ("/v1/completions", b'{"prompt": "a", "logprobs": 1, "echo": true}', 501, "echo"),
    ("/v1/completions", b'{"prompt": "a", "bootstrap_room": 5}', 400, "bootstrap_room"),
    ("/v1/completions", b'{"prompt": "a", "stop": [""]}', 400, "stop"),
    ("/v1/completions", b"[" * 100_001, 413, "body"),
    ("/v1/completions", b"[" * 50_000, 400, "body"),
    ("/v1/chat/completions", b'{"messages": []}', 400, "messages"),
    ("/v1/chat/completions", b'{"messages": [{"role": "tool", "content": "x"}]}', 400, "messages"),
    ("/v1/chat/completions", b'{"messages": [{"role": "tool", "content": "x"}], "stream": true}', 400, "messages"),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "' + b"a" * 300 + b'"}]}', 400, "messages"),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', 501, "tools"),
    (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}',
        400,
        "chat_template",
    ),
    ("/tokenize", b"{}", 400, "prompt"),
    ("/tokenize", b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', 400, "prompt"),
    ("/detokenize", b'{"tokens": [-1]}', 400, "tokens"),
    ("/detokenize", b'{"tokens": [4294967296]}', 400, "tokens"),
    ("/detokenize", b'{"tokens": "x"}', 400, "tokens"),
    ("/detokenize", b'{"tokens": [1], "x": 1}', 400, "x"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    BAD_BODIES,
    ids=lambda value: repr(value)[:40] if isinstance(value, bytes) else "",
)
def test_a_bad_body_is_refused_and_the_next_request_works(
    client: httpx.Client, path: str, body: bytes, status: int, field: str | None
) -> None:
    before = canary(client)
    response = client.post(path, content=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert set(error) == {"message", "type", "param", "code"}
    assert len(response.content) < 4096
    assert not re.search(r"Error\b|Traceback|router|/work|object at", error["message"])
    assert canary(client) == before


def test_deep_json_inside_fields_is_refused(client: httpx.Client) -> None:
    for depth in (900, 1_000, 3_000, 30_000):
        nested = "[" * depth + "]" * depth
        for name in ("tools", "response_format", "metadata", "prompt", "stop", "logit_bias", "structured_outputs"):
            body = f'{{"messages": [{{"role": "user", "content": "a"}}], "{name}": {nested}}}'
            assert client.post("/v1/chat/completions", content=body).status_code in (400, 501)


def test_a_body_over_the_limit_is_refused_while_it_arrives(client: httpx.Client) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 50_000_000:
            sent += 10_000
            yield b" " * 10_000

    # The server may close the connection while the client still writes.
    with contextlib.suppress(httpx.TransportError):
        assert client.post("/v1/completions", content=endless()).status_code == 413
    assert sent < 50_000_000
    assert canary(client)


def test_any_content_type_will_do(client: httpx.Client) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=utf-16"):
        response = client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": content_type})
        assert response.status_code == 200


def test_labels_are_bounded_and_never_keys(client: httpx.Client) -> None:
    for value in ("x" * 129, "a\tb"):
        response = client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-request-id"
    response = client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "x" * 70_000})
    assert response.status_code in (400, 431)
    with ThreadPoolExecutor(2) as pool:
        body = {"max_tokens": 20}
        post = lambda prompt: client.post(  # noqa: E731
            "/v1/completions", json=body | {"prompt": prompt}, headers={"x-request-id": "same"}
        )
        first, second = pool.map(post, ["hello wor", "DEDE"])
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "same"
    assert first.json()["id"] != second.json()["id"]
    assert first.json()["choices"][0]["text"].startswith("hello")
    assert second.json()["choices"][0]["text"].startswith("DEDE")


def test_the_deadline_header_reaches_the_gateway(client: httpx.Client, doors: Doors) -> None:
    client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout-s": "2.5"})
    assert doors.gateway.specs[-1].deadline_s == 2.5
    response = client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout-s": "-1"})
    assert response.status_code == 400


def test_unknown_paths_and_methods_are_json_errors(client: httpx.Client) -> None:
    assert client.get("/v1/nope").status_code == 404
    assert client.get("/v1/completions").json()["error"]["message"] == "this path does not take this method"
    assert client.get("/v1/models/").status_code == 404


# -- people and machines that watch


def test_health_follows_readiness(client: httpx.Client, doors: Doors) -> None:
    assert client.get("/health").status_code == 200
    doors.gateway.is_ready = False
    response = client.get("/health")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_tokenize_and_detokenize_are_inverse(client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"prompt": UNICODE, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": UNICODE}
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "hello"}]}).json()
    assert client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"].endswith("assistant\n")


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_metrics_count_what_went_out(client: httpx.Client) -> None:
    names = ["headrace_generation_tokens_total", "headrace_prompt_tokens_total", 'headrace_requests_total{code="OK"']
    before = [metric(client, name) for name in names]
    gaps = metric(client, "headrace_inter_token_latency_seconds_count")
    client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 7, "n": 2})
    assert [metric(client, name) - old for name, old in zip(names, before, strict=True)] == [14, 1, 1]
    assert metric(client, "headrace_inter_token_latency_seconds_count") - gaps == 12
    assert metric(client, "headrace_num_requests_live") == 0


def test_keys_are_asked_for_everywhere_but_on_open_paths() -> None:
    with Doors(api_keys=("acme=secret",)) as doors, httpx.Client(base_url=doors.http) as client:
        for path in ("/health", "/metrics", "/version", "/ping"):
            assert client.get(path).status_code == 200
        for path in ("/v1/models", "/tokenize", "/docs", "/", "/health/", "/v1/completions"):
            response = client.get(path)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        client.headers["authorization"] = "Bearer secret"
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert doors.gateway.specs[-1].tenant == "acme"


# -- clients that leave


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_closes_its_request(client: httpx.Client, doors: Doors, stream: bool) -> None:
    doors.gateway.pause_s = 0.02
    cancelled = doors.gateway.cancelled
    body = json.dumps({"prompt": ["hello", "wor"], "n": 2, "max_tokens": 250, "stream": stream}).encode()
    host, port = doors.http.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    if stream:
        assert b"200 OK" in sock.recv(4096)
    end = time.monotonic() + 3
    while not doors.gateway.running and time.monotonic() < end:
        time.sleep(0.005)
    assert doors.gateway.running
    sock.close()
    doors.wait_idle(1.0)
    assert doors.gateway.cancelled == cancelled + 2
    assert metric(client, "headrace_num_requests_live") == 0


def test_a_client_that_leaves_in_mid_body_disturbs_nobody(client: httpx.Client, doors: Doors) -> None:
    host, port = doors.http.removeprefix("http://").split(":")
    for _ in range(5):
        sock = socket.create_connection((host, int(port)))
        sock.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{"prompt": "a')
        sock.close()
    assert canary(client)


def test_many_streams_at_once_stay_apart(doors: Doors, client: httpx.Client) -> None:
    prompts = [f"hello {i} wor {i}" for i in range(32)]

    def ask(prompt: str) -> str:
        response = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 40, "stream": True})
        return "".join(chunk["choices"][0]["text"] for chunk in events(response)[:-1])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, prompts))
    assert all(answer.startswith(prompt) for answer, prompt in zip(answers, prompts, strict=True))
    assert threading.active_count() < 100

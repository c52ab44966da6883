"""The gRPC door on a real socket, with the project's client, raw stubs, health and reflection.

Over 400 lines: one door is one suite, on one server.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.client import HeadraceClient, chat
from headrace.errors import Code, HeadraceError
from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc
from tests.doors_fixtures import Doors

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNICODE = "hello 👨‍👩‍👧 é漢 wor"


@pytest.fixture(scope="module")
def opened() -> Iterator[Doors]:
    with Doors() as doors:
        yield doors


@pytest.fixture
def doors(opened: Doors) -> Iterator[Doors]:
    yield opened
    opened.gateway.pause_s, opened.gateway.fail_after, opened.gateway.refuse = 0.0, None, None
    opened.gateway.is_ready = True
    opened.wait_idle()


@pytest.fixture
def client(doors: Doors) -> Iterator[HeadraceClient]:
    with HeadraceClient(doors.grpc, timeout_s=10) as made:
        yield made


@pytest.fixture
def channel(doors: Doors) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(doors.grpc) as made:
        yield made


def test_text_ids_and_chat_give_answers(client: HeadraceClient) -> None:
    text = client.generate("hello world", max_tokens=4)
    assert text.choices[0].text == "hello world"
    assert text.choices[0].finish_reason == "length"
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (4, 4)
    assert text.model == "tiny"
    ids = client.generate(client.tokenize("hello world"), max_tokens=4)
    assert ids.choices[0].text == text.choices[0].text
    assert list(ids.choices[0].token_ids) == client.tokenize("hello world")
    assert client.generate(chat("hi", system="s"), max_tokens=4).choices[0].text
    assert client.generate("hello", max_tokens=2, explain=True).explanation.mode == "colocated"


def test_a_stream_equals_the_whole_answer(client: HeadraceClient) -> None:
    whole = client.generate(UNICODE, max_tokens=60, n=2, seed=3)
    texts, ends, usages = ["", ""], [], []
    for chunk in client.stream(UNICODE, max_tokens=60, n=2, seed=3, request_id="mine"):
        assert chunk.request_id == "mine"
        usages += [chunk.usage] if chunk.HasField("usage") else []
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert sorted(ends) == [0, 1]
    assert usages == [whole.usage]


def test_zero_is_a_value_and_unset_is_the_default(client: HeadraceClient, doors: Doors) -> None:
    client.generate("hello", temperature=0, max_tokens=1)
    assert doors.gateway.specs[-1].sampling[0].greedy
    client.generate("hello", max_tokens=1)
    assert doors.gateway.specs[-1].sampling[0].temperature == 1.0
    client.generate("hello", max_tokens=2, stop=["x"], stop_token_ids=[5], no_cache=True, cache_salt="s", timeout_s=5)
    spec = doors.gateway.specs[-1]
    assert (spec.stop, spec.sampling[0].stop_token_ids, spec.no_cache, spec.cache_salt) == (("x",), (5,), True, "s")
    assert spec.deadline_s is not None
    assert 4 < spec.deadline_s < 5.5  # gRPC rounds timeouts up


def test_penalties_bias_and_min_p_reach_the_engine(client: HeadraceClient, doors: Doors) -> None:
    options = {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 2, "min_p": 0.25}
    client.generate("hello", max_tokens=1, logit_bias={5: -1.5, 266: 100}, **options)
    params = doors.gateway.specs[-1].sampling[0]
    assert {name: getattr(params, name) for name in options} == options
    assert dict(params.logit_bias) == {5: -1.5, 266: 100.0}
    client.generate("hello", max_tokens=1)
    assert not doors.gateway.specs[-1].sampling[0].needs_history


def test_one_stop_string_is_one_stop(client: HeadraceClient) -> None:
    answer = client.generate("hello world", max_tokens=20, stop=" wor").choices[0]
    assert (answer.text, answer.finish_reason) == ("hello", "stop")


def test_the_client_refuses_what_cannot_be_sent(client: HeadraceClient) -> None:
    for wrong in ({"temperature": "hot"}, {"nothing": 1}, {"max_tokens": 2**70}):
        with pytest.raises(HeadraceError) as caught:
            client.generate("a", **wrong)
        assert caught.value.code is Code.INVALID_ARGUMENT


BAD_CALLS: list[tuple[dict[str, object], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "token_ids"),
    ({"prompt": [-1]}, "token_ids"),
    ({"prompt": [2**32]}, "token_ids"),
    ({"prompt": [2**63 - 1]}, "token_ids"),
    ({"prompt": [1] * 256}, "token_ids"),
    ({"prompt": [1] * 10**6}, "token_ids"),
    ({"prompt": "a" * 300}, "prompt"),
    ({"prompt": "a" * 10**6}, "prompt"),
    ({"prompt": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"prompt": [{"role": "root", "content": "x"}]}, "messages[0].role"),
    ({"prompt": "a", "n": 10**8}, "n"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**12}, "max_tokens"),
    ({"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature"),
    ({"prompt": "a", "temperature": float("inf")}, "temperature"),
    ({"prompt": "a", "temperature": 1e30}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 1.5}, "min_p"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": float("nan")}, "frequency_penalty"),
    ({"prompt": "a", "logit_bias": {2**40: 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {-1: 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {5: 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": dict.fromkeys(range(100_000), 1)}, "logit_bias"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 1000}, "stop"),
    ({"prompt": "a", "stop": ["x" * 10**6]}, "stop"),
    ({"prompt": "a", "stop_token_ids": [2**40]}, "stop_token_ids"),
    ({"prompt": "a", "request_id": "x" * 129}, "request_id"),
    ({"prompt": "a", "cache_salt": "x" * 257}, "cache_salt"),
]


@pytest.mark.parametrize(("call", "field"), BAD_CALLS, ids=lambda value: repr(value)[:40])
def test_a_bad_value_is_refused_by_its_field_and_the_next_call_works(
    client: HeadraceClient, call: dict[str, object], field: str
) -> None:
    for ask in (client.generate, lambda **kwargs: list(client.stream(**kwargs))):
        with pytest.raises(HeadraceError) as caught:
            ask(**call)
        assert caught.value.code is Code.INVALID_ARGUMENT
        assert caught.value.field == field
        assert len(caught.value.message) < 300
    assert client.generate("hello", max_tokens=1).choices[0].text == "hello"


def test_a_request_without_input_and_unknown_options_are_refused(channel: grpc.Channel) -> None:
    stub = inference_pb2_grpc.InferenceStub(channel)
    with pytest.raises(grpc.RpcError, match="one of prompt, token_ids or chat"):
        stub.Generate(pb.GenerateRequest())
    newer = pb.GenerateRequest.FromString(pb.GenerateRequest(prompt="a").SerializeToString() + b"\xf8\x07\x01")
    with pytest.raises(grpc.RpcError, match="field number 127 is unknown"):
        stub.Generate(newer)


def test_errors_carry_code_field_and_retry(client: HeadraceClient, doors: Doors) -> None:
    with pytest.raises(HeadraceError) as unknown:
        client.generate("a", model="other")
    assert (unknown.value.code, unknown.value.field) == (Code.NOT_FOUND, "model")
    doors.gateway.refuse = HeadraceError(Code.UNAVAILABLE, "no worker is ready", retry_after_s=1.5)
    with pytest.raises(HeadraceError) as busy:
        client.generate("a")
    assert (busy.value.code, busy.value.retry_after_s) == (Code.UNAVAILABLE, 1.5)
    assert busy.value.message == "no worker is ready"


def test_a_stream_that_breaks_raises_after_what_was_sent(client: HeadraceClient, doors: Doors) -> None:
    doors.gateway.fail_after = 3
    seen = []
    with pytest.raises(HeadraceError, match="the transfer failed") as caught:
        for chunk in client.stream("hello wor", max_tokens=9):
            seen.append(chunk)
    assert caught.value.code is Code.ABORTED
    assert len(seen) == 3
    assert not any(chunk.choices[0].finish_reason for chunk in seen)


def test_an_unexpected_fault_says_nothing_about_itself(client: HeadraceClient, doors: Doors) -> None:
    doors.gateway.refuse = KeyError("secret path")  # type: ignore[assignment]
    with pytest.raises(HeadraceError) as caught:
        client.generate("a")
    assert (caught.value.code, caught.value.message) == (Code.INTERNAL, "internal error")


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("unary", [True, False])
def test_a_call_that_ends_early_closes_its_request(channel: grpc.Channel, doors: Doors, how: str, unary: bool) -> None:
    doors.gateway.pause_s = 0.02
    cancelled = doors.gateway.cancelled
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = pb.GenerateRequest(prompt="hello", sampling=pb.SamplingOptions(max_tokens=250))
    timeout = 0.3 if how == "deadline" else None
    call = stub.Generate.future(request, timeout=timeout) if unary else stub.GenerateStream(request, timeout=timeout)
    if how == "cancel":
        end = time.monotonic() + 3
        while not doors.gateway.running and time.monotonic() < end:
            time.sleep(0.005)
        call.cancel()
    with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
        call.result() if unary else list(call)
    doors.wait_idle(1.0)
    assert doors.gateway.cancelled == cancelled + 1


def test_leaving_a_stream_cancels_it(client: HeadraceClient, doors: Doors) -> None:
    doors.gateway.pause_s = 0.02
    cancelled = doors.gateway.cancelled
    stream = client.stream("hello", max_tokens=250)
    next(stream)
    stream.close()
    doors.wait_idle(1.0)
    assert doors.gateway.cancelled == cancelled + 1


def test_cancel_by_label_is_idempotent(client: HeadraceClient, doors: Doors) -> None:
    doors.gateway.pause_s = 0.02
    stream = client.stream("hello", max_tokens=250, request_id="job-1")
    next(stream)
    assert client.cancel("job-1")
    stream.close()
    doors.wait_idle()
    assert not client.cancel("job-1")
    with pytest.raises(HeadraceError, match="request_id"):
        client.cancel("")


def test_model_info(client: HeadraceClient) -> None:
    info = client.model_info()
    assert (info.model, info.architecture, info.dtype, info.block_size) == ("tiny", "TinyForCausalLM", "float32", 16)
    assert (info.vocab_size, info.max_model_len, list(info.eos_token_ids)) == (267, 256, [0])
    assert info.fingerprint == "ab" * 16


def test_health_follows_readiness_and_drain(channel: grpc.Channel, doors: Doors) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", "headrace.v1.Inference", "headrace.v1.Admin"):
        assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == SERVING
    doors.gateway.is_ready = False
    assert next(watch).status == NOT_SERVING
    doors.gateway.is_ready = True
    assert next(watch).status == SERVING
    assert doors.grpc_door is not None
    assert doors.loop is not None
    doors.loop.call_soon_threadsafe(doors.grpc_door.set_serving, False)
    start = time.monotonic()
    assert next(watch).status == NOT_SERVING
    assert time.monotonic() - start < 0.5
    doors.loop.call_soon_threadsafe(doors.grpc_door.set_serving, True)
    assert next(watch).status == SERVING
    watch.cancel()


def test_reflection_lists_the_services(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (answer,) = stub.ServerReflectionInfo(asked)
    names = {service.name for service in answer.list_services_response.service}
    assert {"headrace.v1.Inference", "headrace.v1.Admin", "grpc.health.v1.Health"} <= names


def test_keys_guard_every_method() -> None:
    with Doors(api_keys=("acme=secret",)) as doors:
        with HeadraceClient(doors.grpc) as anonymous:
            calls = [
                lambda: anonymous.generate("a"),
                lambda: list(anonymous.stream("a")),
                lambda: anonymous.tokenize("a"),
                anonymous.model_info,
                lambda: anonymous.cancel("x"),
            ]
            for call in calls:
                with pytest.raises(HeadraceError) as caught:
                    call()
                assert caught.value.code is Code.UNAUTHENTICATED
        with HeadraceClient(doors.grpc, api_key="secret") as known:
            known.generate("a", max_tokens=1)
        assert [spec.tenant for spec in doors.gateway.specs] == ["acme"]


def test_messages_beyond_4_mb_arrive_and_beyond_the_limit_fail_cleanly(doors: Doors, client: HeadraceClient) -> None:
    with pytest.raises(HeadraceError) as long:
        client.generate("a" * (4 << 20) + "b")
    assert (long.value.code, long.value.field) == (Code.INVALID_ARGUMENT, "prompt")
    with pytest.raises(HeadraceError) as huge:
        client.generate("a" * (33 << 20))
    assert huge.value.code is Code.RESOURCE_EXHAUSTED
    assert client.generate("hello", max_tokens=1).choices[0].text == "hello"


def frame(kind: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame of the connection itself (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, 0]) + bytes(4) + payload


def frames_after_pings(address: str, count: int, gap_s: float) -> set[int]:
    """The kinds of frames that a server sends to a client that only pings: no call, no data."""
    host, port = address.split(":")
    seen = b""
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4))
        sock.settimeout(0.3)
        for number in range(count):
            try:
                sock.sendall(frame(6, number.to_bytes(8, "big")))
            except OSError:
                break
            time.sleep(gap_s)
            try:
                seen += sock.recv(65536)
            except OSError:
                continue
    kinds = set()
    while len(seen) >= 9:
        kinds.add(seen[3])
        seen = seen[9 + int.from_bytes(seen[:3], "big") :]
    return kinds


def test_a_client_may_ping_while_nothing_happens_but_not_flood(doors: Doors) -> None:
    """By default a gRPC server ends a connection at the third ping within two hours without a call."""
    ping, goaway = 6, 7
    assert frames_after_pings(doors.grpc, 5, 1.1) & {ping, goaway} == {ping}
    assert goaway in frames_after_pings(doors.grpc, 8, 0.01)


def test_streams_opened_and_reset_at_once_leave_nothing(doors: Doors, channel: grpc.Channel) -> None:
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = pb.GenerateRequest(prompt="hello", sampling=pb.SamplingOptions(max_tokens=200))
    doors.gateway.pause_s = 0.005
    for _ in range(500):
        stub.GenerateStream(request).cancel()
    doors.wait_idle(5.0)
    assert (
        stub.Generate(pb.GenerateRequest(prompt="a", sampling=pb.SamplingOptions(max_tokens=1))).choices[0].text == "a"
    )
    assert threading.active_count() < 100


def waiting(**changes: object) -> pb.GenerateRequest:
    fields: dict[str, object] = {"on": ["</call>"], "tool": "search"}
    return pb.GenerateRequest(prompt="a", request_id="job", tool_wait=pb.ToolWait(**(fields | changes)))


def test_a_call_that_waits_for_tools_says_where_and_for_which(client: HeadraceClient, doors: Doors) -> None:
    wait = {"on": ["</call>", "END"], "tool": "search"}
    list(client.stream("a", max_tokens=1, request_id="job", tool_wait=wait))
    asked = doors.gateway.specs[-1].tool_wait
    assert asked is not None and (asked.on, asked.tool) == (("</call>", "END"), "search")
    list(client.stream("a", max_tokens=1))
    assert doors.gateway.specs[-1].tool_wait is None


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (waiting(on=[]), "tool_wait.on"),
        (waiting(on=[""]), "tool_wait.on"),
        (waiting(on=["a", "b", "c", "d", "e"]), "tool_wait.on"),
        (waiting(on=["x" * 1025]), "tool_wait.on"),
        (waiting(on=["é" * 513]), "tool_wait.on"),
        (waiting(tool="a b"), "tool_wait.tool"),
        (waiting(tool="x" * 65), "tool_wait.tool"),
        (pb.GenerateRequest(prompt="a", tool_wait=pb.ToolWait(on=["x"])), "request_id"),
    ],
)
def test_waits_for_tools_that_cannot_be_are_refused_by_field(
    doors: Doors, request_: pb.GenerateRequest, field: str
) -> None:
    with grpc.insecure_channel(doors.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.GenerateStream(request_, timeout=5))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata())["headrace-field"] == field


def test_one_answer_in_one_message_cannot_wait_for_a_tool(doors: Doors) -> None:
    with grpc.insecure_channel(doors.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        inference_pb2_grpc.InferenceStub(channel).Generate(waiting(), timeout=5)
    assert dict(caught.value.trailing_metadata())["headrace-field"] == "tool_wait"


def test_an_answer_is_text_without_special_tokens_or_token_ids(client: HeadraceClient, doors: Doors) -> None:
    doors.gateway.answers.clear()
    assert client.resume("job", "hello world") == len(client.tokenize("hello world"))
    assert client.resume("job", [5, 6, 7], index=1) == 3
    assert client.resume("job", "") == client.resume("job", []) == 0
    ids = client.tokenize("hello world")
    assert [(label, index, answer, field) for _, label, index, answer, field in doors.gateway.answers] == [
        ("job", 0, ids, "text"),
        ("job", 1, [5, 6, 7], "token_ids"),
        ("job", 0, [], "text"),
        ("job", 0, [], "token_ids"),
    ]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (pb.ResumeRequest(text="a"), "request_id"),
        (pb.ResumeRequest(request_id="job"), "text"),
        (pb.ResumeRequest(request_id="job", text="a" * 10**5), "text"),
        (pb.ResumeRequest(request_id="job", token_ids=pb.TokenIds(ids=[2**40])), "token_ids"),
        (pb.ResumeRequest(request_id="job", token_ids=pb.TokenIds(ids=[1] * 10**5)), "token_ids"),
    ],
)
def test_answers_that_cannot_be_are_refused_by_field(doors: Doors, call: pb.ResumeRequest, field: str) -> None:
    with grpc.insecure_channel(doors.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        inference_pb2_grpc.InferenceStub(channel).Resume(call, timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["headrace-field"] == field


def test_a_refused_answer_keeps_its_reason(client: HeadraceClient, doors: Doors) -> None:
    doors.gateway.refuse = HeadraceError(Code.FAILED_PRECONDITION, "no", field="index", reason="not_paused")
    try:
        with pytest.raises(HeadraceError) as caught:
            client.resume("job", "x")
    finally:
        doors.gateway.refuse = None
    error = caught.value
    assert (error.code, error.field, error.reason) == (Code.FAILED_PRECONDITION, "index", "not_paused")

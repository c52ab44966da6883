"""Every bad value is refused by the name of its field and its limit; neutral values of options not served pass.

Over 400 lines: one table for each door's fields.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from headrace.errors import Code, HeadraceError
from router.auth import Authenticator, cluster_token_ok
from router.fields import NOT_SERVED, NOT_SERVED_CHAT
from router.messages import parse_messages
from router.openai_models import parse_chat, parse_completion
from router.validate import (
    Caller,
    Limits,
    build_spec,
    check_length,
    deadline,
    parse_options,
    steps_left,
    task_label,
    token_ids,
)

LIMITS = Limits(
    vocab_size=100, max_model_len=50, default_max_tokens=None, max_n=4, max_stop_strings=4, max_stop_bytes=16
)
CALLER = Caller("default", "", None, 0.0)
INF, NAN = float("inf"), float("nan")
BAD = Code.INVALID_ARGUMENT
NOT_BUILT = Code.UNIMPLEMENTED

OPTION_ERRORS = [
    ("temperature", [-0.1, 2.1, 1e30, INF, -INF, NAN, "1", True, [], {}]),
    ("top_p", [0, -1, 1.01, NAN, INF, "0.5", False]),
    ("top_k", [-2, 101, 1.5, 10**9, NAN, "5", True]),
    ("n", [0, -1, 5, 10**8, 1.5, "2", True, 2**63]),
    ("max_tokens", [0, -1, 2**63, 1.5, NAN, INF, "16", True]),
    ("min_tokens", [-1, 51, 1.5, "1", True]),
    ("seed", [2**63, -(2**63) - 1, 1.5, "7", True, 1e300]),
    ("ignore_eos", [1, 0, "true"]),
    ("stop", [[""], "", ["a"] * 5, ["a"] * 1000, "x" * 17, "x" * 10**6, "é" * 9, [1], 5, {}, [None], "\ud800"]),
    ("stop_token_ids", [[100], [-1], [2**32], [True], ["1"], [1.5], list(range(65)), 5, "1"]),
    ("cache_salt", [5, "x" * 257, [], "\udc00"]),
    ("no_cache", [1, "false"]),
    ("priority", [2**31, -(2**31), 0.5, "1", True, NAN]),
    ("include_stop_str_in_output", [1, "yes"]),
    ("stream", [1, "true"]),
    ("return_token_ids", ["x"]),
    ("request_id", [5, "x" * 129, "a\nb", "\x00"]),
    ("stream_options", [5, [], {"include_usage": True}, {"nothing": 1}, {"include_usage": 1}]),
    ("repetition_penalty", [0, -1, NAN, INF, 2.5, "1", True]),
    ("presence_penalty", [-2.1, 2.1, NAN, "0"]),
    ("frequency_penalty", [-2.1, 2.1, NAN, "0"]),
    ("min_p", [-0.1, 1.1, NAN, True]),
    ("logprobs", [-1, 21, 10**9, 0.5, "5", True]),
    ("best_of", [0, -1, 10**9, True]),
    ("logit_bias", [{"100": 1}, {"-1": 1}, {"x": 1}, {"5": 101}, {"5": NAN}, {"5": "1"}, {"5": True}, [], 5]),
    ("logit_bias", [{"05": 1}, {"": 1}, {"9" * 5000: 1}, {"٣": 1}, {"1.0": 1}, {str(i): 0 for i in range(301)}]),
    ("response_format", [{"type": "nothing"}, {}, 5, "json"]),
    ("kv_transfer_params", [{}, {"do_remote_prefill": True}, 1]),
    ("bootstrap_host", ["10.0.0.1"]),
    ("remote_engine_id", ["x"]),
    ("metadata", [5, {str(i): "" for i in range(17)}]),
    ("user", [5, "x" * 513]),
]
NOT_BUILT_VALUES = [
    ("best_of", 2),
    ("prompt_logprobs", 1),
    ("echo", True),
    ("suffix", "end"),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("structured_outputs", {"regex": "(a+)+"}),
    ("guided_json", {}),
    ("skip_special_tokens", False),
    ("use_beam_search", True),
    ("allowed_token_ids", [1]),
    ("bad_words", ["x"]),
    ("truncate_prompt_tokens", 5),
    ("store", True),
]
NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "min_p": 0,
    "best_of": 1,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": {},
    "echo": False,
    "suffix": "",
    "response_format": {"type": "text"},
    "structured_outputs": None,
    "kv_transfer_params": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": False,
    "user": "me",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "stop": None,
    "stop_token_ids": [],
    "top_k": -1,
    "seed": None,
    "stream_options": None,
    "priority": 0,
}


def refused(field: str, value: object, chat: bool = False) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        if chat:
            parse_chat({"messages": [{"role": "user", "content": "a"}], field: value}, LIMITS, 1000)
        else:
            parse_completion({"prompt": "a", field: value}, LIMITS)
    error = caught.value
    assert len(error.message) < 300
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in OPTION_ERRORS for value in values],
    ids=lambda v: repr(v)[:30],
)
def test_a_bad_value_is_refused_by_its_field(field: str, value: object) -> None:
    error = refused(field, value)
    assert error.code is BAD
    assert error.field is not None
    assert error.field.startswith(field)
    assert error.message.startswith(field)


@pytest.mark.parametrize(("field", "value"), NOT_BUILT_VALUES, ids=lambda v: repr(v)[:30])
def test_an_option_that_is_not_served_says_so(field: str, value: object) -> None:
    error = refused(field, value)
    assert error.code is NOT_BUILT
    assert error.field is not None
    assert error.field.startswith(field)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("tools", [{"type": "function"}], NOT_BUILT),
        ("tools", {"a": 1}, BAD),
        ("tool_choice", "required", NOT_BUILT),
        ("tool_choice", {"type": "function"}, NOT_BUILT),
        ("tool_choice", "x", BAD),
        ("logprobs", 3, BAD),
        ("logprobs", "true", BAD),
        ("top_logprobs", 3, BAD),
        ("top_logprobs", 21, BAD),
        ("top_logprobs", True, BAD),
        ("chat_template", "{{ 1 }}", BAD),
        ("chat_template_kwargs", {"x": 1}, BAD),
        ("modalities", ["audio"], NOT_BUILT),
        ("max_completion_tokens", 0, BAD),
        ("max_completion_tokens", True, BAD),
        ("prompt", "x", BAD),
        ("reasoning_effort", "high", NOT_BUILT),
    ],
)
def test_chat_options(field: str, value: object, code: Code) -> None:
    error = refused(field, value, chat=True)
    assert error.code is code
    assert error.field == field


def test_neutral_values_pass_on_both_endpoints() -> None:
    assert parse_completion({"prompt": "a", **NEUTRAL}, LIMITS).options.n == 1
    chat = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "logprobs": False, "top_logprobs": 0}
    body = {"messages": [{"role": "user", "content": "a"}], **NEUTRAL, **chat, "chat_template_kwargs": {}}
    assert parse_chat(body, LIMITS, 1000).options.top_k == 0


def test_null_is_the_absence_of_every_known_option() -> None:
    parse_completion({"prompt": "a"} | dict.fromkeys(NOT_SERVED), LIMITS)
    body = {"messages": [{"role": "user", "content": "a"}]} | dict.fromkeys([*NOT_SERVED, *NOT_SERVED_CHAT])
    parse_chat(body, LIMITS, 1000)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_token", "did you mean max_tokens?"), ("temprature", "did you mean temperature?"), ("zzzz", "unknown field")],
)
def test_an_unknown_field_is_named_with_its_neighbour(name: str, hint: str) -> None:
    error = refused(name, 1)
    assert error.field == name
    assert error.message.endswith(hint)


@pytest.mark.parametrize("name", ["x" * 10**6, "<script>", "a b", "", "kv_transfer" + "x" * 10**5, "bootstrap_\n"])
def test_a_strange_field_name_is_not_repeated(name: str) -> None:
    error = refused(name, 1)
    assert error.field == "body"
    assert name == "" or name not in error.message


BAD_PROMPTS = ["", [], [""], ["a", ""], None, 5, {}, [[]], ["a", 1], [1, "a"], [[1], "a"], [None], [{}], ["a"] * 257]
BAD_IDS = [
    True,
    [True],
    [-1],
    [100],
    [2**32],
    [2**63],
    [1.0],
    [1.5],
    [NAN],
    [1, True],
    [0] * 50,
    [0] * 10**6,
    [[5], [100]],
]


@pytest.mark.parametrize("prompt", [*BAD_PROMPTS, *BAD_IDS], ids=lambda v: repr(v)[:30])
def test_bad_prompts(prompt: object) -> None:
    with pytest.raises(HeadraceError) as caught:
        for item in parse_completion({"prompt": prompt}, LIMITS).prompts:
            ids = item.ids if item.ids is not None else [1]
            check_length("prompt", len(ids), LIMITS)
            token_ids("prompt", ids, LIMITS.vocab_size, LIMITS.max_model_len)
    assert caught.value.code is BAD
    assert caught.value.field == "prompt"


def test_prompts_times_n_are_bounded() -> None:
    with pytest.raises(HeadraceError, match="prompts times n must be at most 256"):
        parse_completion({"prompt": ["a"] * 65, "n": 4}, LIMITS)
    assert len(parse_completion({"prompt": ["a"] * 64, "n": 4}, LIMITS).prompts) == 64


def spec(num_prompt: int, limits: Limits = LIMITS, **raw: object):  # type: ignore[no-untyped-def]
    options = parse_options(raw, limits)
    return build_spec("prompt", [1] * num_prompt, options, CALLER, limits, lambda: 77, tokenized_at=0.0)


def test_lengths_name_the_true_limit_and_both_numbers() -> None:
    with pytest.raises(HeadraceError) as caught:
        spec(30, max_tokens=21)
    assert caught.value.field == "max_tokens"
    for number in ("50", "30", "21", "51"):
        assert number in caught.value.message
    assert spec(30, max_tokens=20).sampling[0].max_tokens == 20
    with pytest.raises(HeadraceError, match=r"prompt: .*maximum context length is 50 tokens; the prompt has 50"):
        spec(50)
    with pytest.raises(HeadraceError, match="max_completion_tokens: this model's maximum context length is 50"):
        spec(30, max_completion_tokens=10**12)


def test_max_tokens_defaults_to_the_room_or_to_the_deployments_number() -> None:
    assert spec(30).sampling[0].max_tokens == 20
    assert spec(49).sampling[0].max_tokens == 1
    capped = replace(LIMITS, default_max_tokens=8)
    assert spec(30, capped).sampling[0].max_tokens == 8
    assert spec(45, capped).sampling[0].max_tokens == 5
    assert spec(30, capped, max_tokens=15).sampling[0].max_tokens == 15


def test_of_both_names_of_max_tokens_the_newer_one_is_meant() -> None:
    assert spec(5, max_tokens=7, max_completion_tokens=9).sampling[0].max_tokens == 9
    with pytest.raises(HeadraceError, match="max_tokens"):
        spec(5, max_tokens=0, max_completion_tokens=9)


def test_min_tokens_is_at_most_max_tokens_after_defaults() -> None:
    assert spec(5, min_tokens=4, max_tokens=4).sampling[0].min_tokens == 4
    for raw in ({"min_tokens": 5, "max_tokens": 4}, {"min_tokens": 46}):
        with pytest.raises(HeadraceError) as caught:
            spec(5, **raw)
        assert caught.value.field == "min_tokens"


def test_branches_share_one_seed_and_differ_by_number() -> None:
    given = spec(5, n=3, seed=-9)
    assert [(p.seed, p.branch) for p in given.sampling] == [(-9, 0), (-9, 1), (-9, 2)]
    assert {p.seed for p in spec(5, n=2).sampling} == {77}


def test_tiny_temperatures_are_greedy_and_whole_floats_are_integers() -> None:
    for temperature in (1e-6, 1e-45, 0):
        assert spec(5, temperature=temperature).sampling[0].greedy
    assert spec(5, temperature=1e-4).sampling[0].temperature == 1e-4
    assert spec(5, max_tokens=5.0).sampling[0].max_tokens == 5


def test_defaults_are_openais_and_equal_stops_count_once() -> None:
    params = spec(5).sampling[0]
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert spec(5, stop=["a", "a", "b"]).stop == ("a", "b")
    assert spec(5, stop="a").stop == ("a",)


MESSAGE_ERRORS = [
    (None, "messages"),
    ([], "messages"),
    ("hi", "messages"),
    ([5], "messages[0]"),
    ([{"role": "root", "content": "a"}], "messages[0].role"),
    ([{"role": ["user"], "content": "a"}], "messages[0].role"),
    ([{"content": "a"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "a", "nmae": "x"}], "messages[0].nmae"),
    ([{"role": "user", "content": "a", "name": 5}], "messages[0].name"),
    ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages[0].tool_calls"),
    ([{"role": "user", "content": "x" * 101}], "messages"),
    ([{"role": "user", "content": "a"}] * 2049, "messages"),
]


@pytest.mark.parametrize(("messages", "field"), MESSAGE_ERRORS, ids=lambda v: repr(v)[:30])
def test_bad_messages(messages: object, field: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        parse_messages(messages, 100)
    assert caught.value.field == field
    assert len(caught.value.message) < 300


def test_messages_that_clients_send_back_are_accepted() -> None:
    parsed = parse_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "q", "name": "bob"},
            {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "audio": None, "annotations": []},
            {"role": "tool", "content": "result", "tool_call_id": "call-1"},
            {"role": "user", "content": []},
        ],
        100,
    )
    assert parsed == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "q", "name": "bob"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "result", "tool_call_id": "call-1"},
        {"role": "user", "content": ""},
    ]


def test_absurd_requests_cost_nothing() -> None:
    start = time.perf_counter()
    for field, value in [("n", 10**8), ("stop", ["x"] * 10**6), ("stop", "x" * 10**7), ("stop_token_ids", [1] * 10**6)]:
        refused(field, value)
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize("value", ["0", "-1", "3601", "nan", "inf", "x", "", 0, True])
def test_bad_deadlines(value: object) -> None:
    with pytest.raises(HeadraceError, match="x-request-timeout-s"):
        deadline("x-request-timeout-s", value)


def test_deadlines_are_optional_seconds() -> None:
    assert deadline("t", None) is None
    assert deadline("t", "2.5") == 2.5


def test_keys_name_their_tenants() -> None:
    auth = Authenticator(["plain", "acme=k1", "acme=k2", "beta=a=b", "c2VjcmV0=="])
    for key, tenant in {"plain": "default", "k1": "acme", "k2": "acme", "a=b": "beta", "c2VjcmV0==": "default"}.items():
        assert auth.tenant(f"Bearer {key}") == tenant
    for presented in (
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer k3",
        "Basic k1",
        "k1",
        "Bearer acme=k1",
        "Bearer " + "k" * 10**6,
    ):
        with pytest.raises(HeadraceError) as caught:
            auth.tenant(presented)
        assert caught.value.code is Code.UNAUTHENTICATED
    assert Authenticator([]).tenant(None) == "default"


def test_the_cluster_token_opens_only_to_itself() -> None:
    assert cluster_token_ok([("x-headrace-cluster", "t")], "t")
    assert not cluster_token_ok([("x-headrace-cluster", "u")], "t")
    assert not cluster_token_ok(None, "t")
    assert not cluster_token_ok([("x-headrace-cluster", "")], "")


def test_priority_task_steps_and_parent_are_part_of_the_call() -> None:
    caller = replace(CALLER, endpoint="chat", task="sum", steps_left=0, parent="root")
    options = parse_options({"priority": -5}, LIMITS)
    spec = build_spec("prompt", [1, 2], options, caller, LIMITS, lambda: 1, tokenized_at=0.0)
    assert (spec.endpoint, spec.task, spec.priority, spec.steps_left, spec.parent) == ("chat", "sum", -5, 0, "root")
    assert parse_options({}, LIMITS).priority == 0


@pytest.mark.parametrize("value", ["a b", "x" * 65, "é", "a\n", "\x00", "a,b"])
def test_a_task_is_a_short_plain_label(value: str) -> None:
    assert task_label("task", "Sum/long:v1.2_a-b") == "Sum/long:v1.2_a-b"
    assert task_label("task", None) == task_label("task", "") == ""
    with pytest.raises(HeadraceError) as caught:
        task_label("task", value)
    assert (caught.value.code, caught.value.field) == (BAD, "task")


@pytest.mark.parametrize("value", [-1, 1_000_001, "-1", "+1", "1.5", "", "٣", "1e3", "9" * 5000])
def test_steps_left_is_a_whole_number(value: int | str) -> None:
    assert (steps_left("s", None), steps_left("s", 0), steps_left("s", "12")) == (None, 0, 12)
    with pytest.raises(HeadraceError) as caught:
        steps_left("s", value)
    assert (caught.value.code, caught.value.field) == (BAD, "s")

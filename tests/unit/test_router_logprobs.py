"""Log-probabilities at the doors: which token has an entry, when it goes out, and how it is written."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.client import HeadraceClient
from headrace.core.records import TokenLogprobs
from headrace.sampling import SamplingParams
from router.api import LogprobEntry
from router.branch_text import BranchText
from router.openai_logprobs import LogprobWriter
from tests.doors_fixtures import EOS, Doors, text_model
from workers.runner.fake import fake_logprobs

TEXT = text_model()
UNICODE = "hello 👨‍👩‍👧 é漢 wor"


def ids(text: str) -> list[int]:
    return TEXT.encode(text, add_special_tokens=False)


def told(number: int) -> TokenLogprobs:
    return TokenLogprobs(-float(number))


def pushed(
    tokens: list[int], cuts: list[int], stop: tuple[str, ...] = (), include: bool = False, by_token: bool = False
) -> tuple[str, list[LogprobEntry]]:
    """The text and the entries of tokens that are pushed in pieces; the piece's entries never run ahead of its text."""
    params = SamplingParams(len(tokens), ignore_eos=not by_token, logprobs=0)
    branch = BranchText(TEXT, stop, include, params)
    text, entries = "", []
    bounds = [0, *sorted(cuts), len(tokens)]
    for begin, end in pairwise(bounds):
        piece, _ = branch.push(tokens[begin:end], [told(number) for number in range(begin, end)])
        text += piece
        entries += branch.take_entries()
        assert all(entry.text_offset < len(text) for entry in entries)
        if branch.stopped:
            break
    text += branch.flush()
    entries += branch.take_entries(ended=True, by_token=by_token)
    return text, entries


@given(
    st.lists(st.integers(0, TEXT.vocab_size - 1), min_size=1, max_size=24),
    st.lists(st.integers(0, 24), max_size=6),
    st.sampled_from([(), ("lo",), ("he", "é"), ("\ufffd",)]),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_entries_are_those_of_the_text_in_order_however_tokens_come(
    tokens: list[int], cuts: list[int], stop: tuple[str, ...], include: bool
) -> None:
    text, entries = pushed(tokens, [min(cut, len(tokens)) for cut in cuts], stop, include)
    one_by_one = pushed(tokens, list(range(len(tokens))), stop, include)
    assert (text, entries) == one_by_one
    numbers = [int(-entry.logprobs.logprob) for entry in entries]
    assert numbers == list(range(len(numbers))), "a beginning of the tokens, each once"
    assert [entry.token_id for entry in entries] == tokens[: len(numbers)]
    offsets = [entry.text_offset for entry in entries]
    assert offsets == sorted(offsets)
    if not stop:
        assert len(entries) == len(tokens)


def test_what_a_stop_string_cuts_whole_has_no_entry_and_what_it_cuts_in_the_middle_has_one() -> None:
    tokens = ids("hello wor!")
    assert [TEXT.token_text(token) for token in tokens] == ["hello", "Ġwor", "!"]
    text, entries = pushed(tokens, [], stop=(" wor",))
    assert text == "hello" and [entry.token_id for entry in entries] == tokens[:1]
    text, entries = pushed(tokens, [], stop=("or!",))
    assert text == "hello w" and [entry.token_id for entry in entries] == tokens[:2]
    text, entries = pushed(tokens, [], stop=("or!",), include=True)
    assert text == "hello wor!" and [entry.token_id for entry in entries] == tokens


def test_the_token_that_ends_the_answer_has_no_entry_and_special_tokens_before_it_have() -> None:
    tokens = [*ids("hello"), 2, *ids(" wor"), EOS]
    text, entries = pushed(tokens, [1, 2, 3], by_token=True)
    assert text == "hello wor"
    assert [(entry.token_id, entry.text_offset) for entry in entries] == list(zip(tokens[:3], [0, 5, 5], strict=True))
    _, entries = pushed(tokens, [1, 2, 3])
    assert [entry.token_id for entry in entries] == tokens, "it ended by length: all of them are the answer"


def test_parts_of_a_character_wait_for_it_and_go_out_together() -> None:
    tokens = ids("é漢")
    branch = BranchText(TEXT, (), False, SamplingParams(9, logprobs=0))
    sizes = []
    for number, token in enumerate(tokens):
        branch.push([token], [told(number)])
        sizes.append(len(branch.take_entries()))
    assert sizes == [0, 2, 0, 0, 3]


def test_each_alternative_has_its_own_name_and_its_true_bytes() -> None:
    first, second = ids("é")
    merged = ids("hello")[0]
    entry = LogprobEntry(first, 0, TokenLogprobs(-0.5, (merged, first, second, 266), (-0.25, -0.5, -2.0, -3.0)))
    chat = LogprobWriter(TEXT, chat=True).body([entry])["content"]
    assert chat == [
        {
            "token": "bytes:\\xc3",
            "logprob": -0.5,
            "bytes": [0xC3],
            "top_logprobs": [
                {"token": "hello", "logprob": -0.25, "bytes": list(b"hello")},
                {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3]},
                {"token": "bytes:\\xa9", "logprob": -2.0, "bytes": [0xA9]},
                {"token": "DE", "logprob": -3.0, "bytes": list(b"DE")},
            ],
        }
    ]
    completion = LogprobWriter(TEXT, chat=False).body([entry])
    assert completion["top_logprobs"] == [{"hello": -0.25, "bytes:\\xc3": -0.5, "bytes:\\xa9": -2.0, "DE": -3.0}]
    unknown = LogprobWriter(TEXT, chat=False).body([LogprobEntry(9999, 0, TokenLogprobs(-9999.0))])
    assert unknown["tokens"] == ["token_id:9999"] and unknown["top_logprobs"] == [{"token_id:9999": -9999.0}]


# -- both doors, with the real clients


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    with Doors() as opened:
        yield opened


@pytest.fixture
def sdk(doors: Doors) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=doors.http + "/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def wanted(prompt: str, num_tokens: int, num_top: int) -> list[tuple[int, TokenLogprobs]]:
    """The door fixture answers with the prompt's own tokens, over and over."""
    prompt_ids = ids(prompt)
    out: list[int] = []
    pairs = []
    for at in range(num_tokens):
        token = prompt_ids[at % len(prompt_ids)]
        pairs.append((token, fake_logprobs([*prompt_ids, *out], token, num_top, TEXT.vocab_size)))
        out.append(token)
    return pairs


def test_openai_completions_tell_tokens_offsets_and_alternatives(sdk: openai.OpenAI) -> None:
    num_tokens = len(ids(UNICODE)) + 3
    pairs = wanted(UNICODE, num_tokens, 3)
    for num_top in (3, 0):
        answer = sdk.completions.create(model="tiny", prompt=UNICODE, max_tokens=num_tokens, logprobs=num_top)
        choice, logprobs = answer.choices[0], answer.choices[0].logprobs
        assert logprobs.token_logprobs == [told.logprob for _, told in pairs]
        assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.top_logprobs) == num_tokens
        for name, offset, top in zip(logprobs.tokens, logprobs.text_offset, logprobs.top_logprobs, strict=True):
            assert name.startswith("bytes:") or choice.text[offset:].startswith(name)
            assert name in top and num_top <= len(top) <= num_top + 1
    assert sdk.completions.create(model="tiny", prompt="hello", max_tokens=2).choices[0].logprobs is None


def test_openai_chat_tells_bytes_that_are_the_answer(sdk: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": UNICODE}]
    answer = sdk.chat.completions.create(
        model="tiny", messages=messages, max_tokens=60, logprobs=True, top_logprobs=2, extra_body={"stop": ["漢"]}
    )
    choice = answer.choices[0]
    said = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    # The special tokens of the template that the fixture echoes have bytes and no text.
    for special in (b"<|im_start|>", b"<|im_end|>"):
        said = said.replace(special, b"")
    assert said.decode() == choice.message.content and choice.message.content.endswith("é")
    assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {2}
    plain = sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=60, logprobs=True)
    assert {len(entry.top_logprobs) for entry in plain.choices[0].logprobs.content} == {0}
    assert sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=3).choices[0].logprobs is None


@pytest.mark.parametrize("stop", [None, "漢 w", "nothing of the kind"])
def test_openai_streams_tell_what_the_whole_answers_tell(sdk: openai.OpenAI, stop: str | None) -> None:
    options = {"model": "tiny", "max_tokens": 50, "n": 2, "extra_body": {"stop": stop}}
    whole = sdk.completions.create(prompt=UNICODE, logprobs=2, **options)
    parts: dict[int, dict[str, list[object]]] = {0: {}, 1: {}}
    for chunk in sdk.completions.create(prompt=UNICODE, logprobs=2, stream=True, **options):
        for choice in chunk.choices:
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                parts[choice.index].setdefault(name, []).extend(values)
    assert [parts[choice.index] for choice in whole.choices] == [c.logprobs.model_dump() for c in whole.choices]
    messages = [{"role": "user", "content": UNICODE}]
    told = sdk.chat.completions.create(messages=messages, logprobs=True, top_logprobs=1, **options)
    streamed: dict[int, list[object]] = {0: [], 1: []}
    stream = sdk.chat.completions.create(messages=messages, logprobs=True, top_logprobs=1, stream=True, **options)
    for chunk in stream:
        for choice in chunk.choices:
            if choice.logprobs is not None:
                assert choice.delta.content or choice.finish_reason, "no entry without its text"
                streamed[choice.index] += choice.logprobs.content
    assert [streamed[choice.index] for choice in told.choices] == [c.logprobs.content for c in told.choices]


def test_grpc_tells_one_for_each_token_whole_and_streamed(doors: Doors) -> None:
    with HeadraceClient(doors.grpc) as client:
        whole = client.generate("hello wor", max_tokens=7, logprobs=2, stop="wor").choices[0]
        pairs = wanted("hello wor", 7, 2)[: len(whole.token_ids)]
        assert list(whole.token_ids) == [token for token, _ in pairs] and len(pairs) == 2
        told = [TokenLogprobs(e.logprob, tuple(e.top_ids), tuple(e.top_logprobs)) for e in whole.logprobs]
        assert told == [each for _, each in pairs]
        chunks = list(client.stream("hello wor", max_tokens=7, logprobs=2, stop="wor"))
        assert [e for chunk in chunks for e in chunk.choices[0].logprobs] == list(whole.logprobs)
        assert not client.generate("hello", max_tokens=2).choices[0].logprobs


@pytest.mark.parametrize(
    ("path", "body", "field", "limit"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs", "20"),
        ("/v1/completions", {"prompt": "a", "logprobs": True}, "logprobs", "integer"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ("/v1/chat/completions", {"top_logprobs": 1}, "top_logprobs", "logprobs: true"),
        ("/v1/chat/completions", {"logprobs": 1}, "logprobs", "true or false"),
    ],
)
def test_a_bad_wish_is_refused_with_its_field_and_limit(
    doors: Doors, path: str, body: dict[str, object], field: str, limit: str
) -> None:
    messages = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {}
    response = httpx.post(doors.http + path, json={**messages, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field and limit in error["message"]

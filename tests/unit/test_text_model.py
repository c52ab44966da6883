"""The model folder's text side: templates, special tokens, defaults, identity."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.errors import Code, HeadraceError, StartupError
from router.text import TextModel
from tests.doors_fixtures import EOS, TEMPLATE, byte_level_tokenizer, text_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path / "config.json",
        {"architectures": ["Tiny"], "eos_token_id": EOS, "vocab_size": 320, "dtype": "bfloat16"},
    )
    write(tmp_path / "tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": {"content": "<|im_end|>"}})
    return tmp_path


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def test_a_folder_gives_everything_that_requests_need(folder: Path) -> None:
    write(folder / "generation_config.json", {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "eos_token_id": [0, 1]})
    text = TextModel.load(str(folder))
    assert text.vocab_size == 320
    assert text.tokenizer_size == 267
    assert text.eos_token_ids == (0, 1, 2)
    assert text.special_ids == {0, 1, 2}
    assert (text.architecture, text.dtype) == ("Tiny", "bfloat16")
    assert text.default_sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 40}
    assert text.max_token_chars == len("<|endoftext|>")


def test_the_template_comes_from_the_override_then_the_file_then_the_config(folder: Path) -> None:
    def rendered(override: str | None = None) -> str:
        return TextModel.load(str(folder), override).render_chat([{"role": "user", "content": "x"}])

    assert rendered() == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    (folder / "chat_template.jinja").write_text("file {{ messages[0].content }} {{ eos_token }}")
    assert rendered() == "file x <|im_end|>"
    (folder / "own.jinja").write_text("own {{ messages[0]['content'] }}")
    assert rendered(str(folder / "own.jinja")) == "own x"


def test_of_several_named_templates_the_default_is_taken(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(folder / "tokenizer_config.json", {"chat_template": named})
    assert TextModel.load(str(folder)).render_chat([]) == "plain"


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{"), ("config.json", "[1]"), ("tokenizer_config.json", "nonsense")]
)
def test_a_broken_file_is_one_clear_line(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(StartupError, match=name):
        TextModel.load(str(folder))


def test_a_missing_tokenizer_or_template_is_one_clear_line(folder: Path) -> None:
    with pytest.raises(StartupError, match="no chat template"):
        TextModel.load(str(folder), str(folder / "none.jinja"))
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(StartupError, match="does not compile"):
        TextModel.load(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        TextModel.load(str(folder))


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        ("{{ raise_exception('roles must alternate') }}", [], "messages: roles must alternate"),
        ("{{ messages[0].nothing.more }}", [{}], "messages: the model's chat template cannot render these messages"),
        ("{{ 1 + messages }}", [], "messages: the model's chat template cannot render these messages"),
        ("{{ ''.__class__.__mro__ }}", [], "messages: the model's chat template cannot render these messages"),
        ("{{ dict.__mro__[0] }}", [], "messages: the model's chat template cannot render these messages"),
        ("{{ namespace(__class__=1) }}", [], "messages: the model's chat template cannot render these messages"),
        ("{{ lipsum.__globals__ }}", [], "messages: the model's chat template cannot render these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", [], "messages: the model's chat template cannot render"),
    ],
)
def test_template_errors_are_the_callers_and_leak_nothing(template: str, messages: list, expected: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        text_model(template).render_chat(messages)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.field == "messages"
    assert caught.value.message.startswith(expected)
    assert len(caught.value.message) < 600


def test_a_long_template_refusal_is_cut() -> None:
    with pytest.raises(HeadraceError) as caught:
        text_model("{{ raise_exception(messages[0].content) }}").render_chat([{"content": "x" * 10**6}])
    assert len(caught.value.message) < 600


def test_templates_have_what_hugging_face_templates_expect() -> None:
    template = (
        "{%- for m in messages -%}{% generation %}{{ m.content | tojson }}{% endgeneration %}"
        "{% if loop.first %}{% continue %}{% endif %}{% break %}{%- endfor -%}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}|{{ ns.n }}"
        "|{{ dict(a=1).a }}|{{ dict.fromkeys(['k'], 2).k }}"
        "|{{ strftime_now('%Y') | length }}|{{ tools is none }}|{{ {'b': '<é>'} | tojson(indent=1) }}"
    )
    messages = [{"role": "user", "content": "<&é"}, {"role": "user", "content": "b"}, {"role": "user", "content": "c"}]
    assert text_model(template).render_chat(messages) == '"<&é""b"|3|1|2|4|True|{\n "b": "<é>"\n}'


def test_templates_cannot_change_the_messages() -> None:
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(HeadraceError):
        text_model("{{ messages.append(1) }}").render_chat(messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_without_a_template_chat_is_refused_by_name() -> None:
    with pytest.raises(HeadraceError, match="no chat template"):
        text_model(None).render_chat([{"role": "user", "content": "x"}])


def test_a_lone_surrogate_is_refused_with_its_offset() -> None:
    text = text_model()
    with pytest.raises(HeadraceError, match="at character 3"):
        text.encode("abc\ud800")
    with pytest.raises(HeadraceError, match=r"messages\[1\].*at character 0"):
        text.render_chat([{"content": "ok"}, {"content": "\udfff"}])


def test_encoding_in_threads_equals_encoding_inline() -> None:
    text = text_model()
    long = "hello wor " * 1000

    async def both() -> list[list[int]]:
        return await asyncio.gather(*(text.encode_async(long) for _ in range(4)), text.encode_async("hello"))

    *ids, short = asyncio.run(both())
    assert all(found == text.encode(long) for found in ids)
    assert short == text.encode("hello")


def test_the_digest_names_tokenizer_template_and_special_tokens() -> None:
    digests = {
        text_model().identity_digest(),
        text_model(None).identity_digest(),
        text_model("other").identity_digest(),
        TextModel(byte_level_tokenizer(), chat_template=TEMPLATE, special_tokens={"bos_token": "x"}).identity_digest(),
    }
    assert len(digests) == 4
    assert text_model().identity_digest() == text_model().identity_digest()
    assert all(len(digest) == 16 for digest in digests)

"""OpenAI-compatible request bodies to checked calls. Pure: no pydantic object a request, no field silently ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import invalid
from router.door import Prompt
from router.fields import NOT_SERVED, NOT_SERVED_CHAT, check_fields
from router.messages import parse_messages
from router.scalars import array, boolean, integer, json_object, unknown_field
from router.validate import MAX_LOGPROBS, Limits, Options, parse_options, request_label, token_ids

MAX_CHOICES = 256
"""Prompts times n of one call."""
MAX_DETOKENIZE = 1 << 17

_COMMON = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "cache_salt",
        "prompt_cache_key",
        "no_cache",
        "priority",
        "request_id",
        "return_token_ids",
        "add_special_tokens",
    }
)
_COMPLETION = _COMMON | {"prompt"}
_CHAT = _COMMON | {"messages", "add_generation_prompt", "top_logprobs"}
_TOKENIZE = frozenset(
    {"model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "return_token_strs"}
)
_DETOKENIZE = frozenset({"model", "tokens"})
_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats", "include_obfuscation"})
_CHAT_NOT_SERVED = {**NOT_SERVED, **NOT_SERVED_CHAT}


@dataclass(frozen=True, slots=True)
class Call:
    """A checked completions or chat body."""

    chat: bool
    model: object
    prompts: list[Prompt]
    options: Options
    label: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


def parse_completion(raw: Mapping[str, object], limits: Limits) -> Call:
    """Body of /v1/completions. Raises HeadraceError naming the first bad field."""
    check_fields(raw, _COMPLETION, NOT_SERVED)
    if raw.get("logprobs") is False:
        raw = {**raw, "logprobs": None}  # what it is to chat, and sent by clients of both
    options = parse_options(raw, limits)
    special = _flag(raw, "add_special_tokens", True)
    prompts = completion_prompts(raw.get("prompt"), special)
    if len(prompts) * options.n > MAX_CHOICES:
        raise invalid("prompt", f"prompts times n must be at most {MAX_CHOICES}")
    return _call(raw, False, prompts, options)


def parse_chat(raw: Mapping[str, object], limits: Limits, max_chars: int) -> Call:
    """Body of /v1/chat/completions. `max_chars` bounds the contents before the template runs."""
    check_fields(raw, _CHAT, _CHAT_NOT_SERVED)
    options = parse_options({**raw, "logprobs": _chat_logprobs(raw)}, limits)
    return _call(raw, True, [_chat_prompt(raw, max_chars)], options)


def parse_tokenize(raw: Mapping[str, object], limits: Limits, max_chars: int) -> tuple[Prompt, bool]:
    """Body of /tokenize (vLLM's form): the prompt, and whether token strings are wanted."""
    check_fields(raw, _TOKENIZE, _CHAT_NOT_SERVED)
    strings = _flag(raw, "return_token_strs", False)
    if raw.get("messages") is not None:
        if raw.get("prompt") is not None:
            raise invalid("prompt", "send either prompt or messages")
        return _chat_prompt(raw, max_chars), strings
    text = raw.get("prompt")
    if not isinstance(text, str):
        raise invalid("prompt", "must be a string")
    return Prompt("prompt", text=text, add_special_tokens=_flag(raw, "add_special_tokens", True)), strings


def parse_detokenize(raw: Mapping[str, object], limits: Limits) -> list[int]:
    """Body of /detokenize: the ids."""
    check_fields(raw, _DETOKENIZE, {})
    return token_ids("tokens", array("tokens", raw.get("tokens"), MAX_DETOKENIZE), limits.vocab_size, MAX_DETOKENIZE)


def completion_prompts(value: object, add_special_tokens: bool) -> list[Prompt]:
    """string | [string] | [id] | [[id]]: one Prompt each."""

    def text(item: str) -> Prompt:
        if not item:
            raise invalid("prompt", "must have at least 1 character")
        return Prompt("prompt", text=item, add_special_tokens=add_special_tokens)

    if isinstance(value, str):
        return [text(value)]
    if not isinstance(value, list):
        raise invalid("prompt", "must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise invalid("prompt", "must have at least 1 token")
    if type(value[0]) in (int, float, bool):
        return [Prompt("prompt", ids=value)]
    if len(value) > MAX_CHOICES:
        raise invalid("prompt", f"must have at most {MAX_CHOICES} prompts")
    prompts = []
    for item in value:
        if isinstance(item, str) and isinstance(value[0], str):
            prompts.append(text(item))
        elif isinstance(item, list) and isinstance(value[0], list):
            prompts.append(Prompt("prompt", ids=item))
        else:
            raise invalid("prompt", "must be a list of strings or of lists of token ids, not a mix")
    return prompts


def _chat_logprobs(raw: Mapping[str, object]) -> int | None:
    """Chat says in two fields what a completion says in one number."""
    top = raw.get("top_logprobs")
    num_top = 0 if top is None else integer("top_logprobs", top, 0, MAX_LOGPROBS)
    asked = _flag(raw, "logprobs", False)
    if num_top and not asked:
        raise invalid("top_logprobs", "needs logprobs: true")
    return num_top if asked else None


def _chat_prompt(raw: Mapping[str, object], max_chars: int) -> Prompt:
    return Prompt(
        "messages",
        messages=parse_messages(raw.get("messages"), max_chars),
        # The template writes the special tokens itself.
        add_special_tokens=_flag(raw, "add_special_tokens", False),
        add_generation_prompt=_flag(raw, "add_generation_prompt", True),
    )


def _call(raw: Mapping[str, object], chat: bool, prompts: list[Prompt], options: Options) -> Call:
    stream = _flag(raw, "stream", False)
    include_usage, continuous = _stream_options(raw.get("stream_options"), stream)
    return Call(
        chat=chat,
        model=raw.get("model"),
        prompts=prompts,
        options=options,
        label=request_label("request_id", raw.get("request_id")),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous,
        return_token_ids=_flag(raw, "return_token_ids", False),
    )


def _stream_options(value: object | None, stream: bool) -> tuple[bool, bool]:
    if value is None:
        return False, False
    options = json_object("stream_options", value)
    for name in options:
        if name not in _STREAM_OPTIONS:
            raise unknown_field(name, _STREAM_OPTIONS, "stream_options.")
    flags = {name: _flag(options, name, False, "stream_options.") for name in _STREAM_OPTIONS}
    if not stream:
        raise invalid("stream_options", "needs stream: true")
    return flags["include_usage"], flags["include_usage"] and flags["continuous_usage_stats"]


def _flag(raw: Mapping[str, object], name: str, default: bool, where: str = "") -> bool:
    value = raw.get(name)
    return default if value is None else boolean(where + name, value)

"""What the public edge says to options that this server knows but does not serve: neutral values pass, others are
refused.

A value of the wrong type or out of range is the caller's mistake (INVALID_ARGUMENT); a proper one that would change the
output is UNIMPLEMENTED; one that only other servers' insides may set is INVALID_ARGUMENT. Nothing is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from headrace.errors import Code, HeadraceError, invalid
from router.scalars import array, boolean, integer, json_object, number, one_of, string, unknown_field
from router.validate import MAX_LOGPROBS

Check = Callable[[str, object], None]

_MAX_BEST_OF = 1024


def unimplemented(field: str, message: str = "this option is not supported by this server") -> HeadraceError:
    return HeadraceError(Code.UNIMPLEMENTED, f"{field}: {message}", field=field)


def _number(low: float, high: float, neutral: float, *, above_low: bool = False) -> Check:
    def check(field: str, value: object) -> None:
        if number(field, value, low, high, above_low=above_low) != neutral:
            raise unimplemented(field)

    return check


def _integer(low: int, high: int, neutral: int | None) -> Check:
    def check(field: str, value: object) -> None:
        if integer(field, value, low, high) != neutral:
            raise unimplemented(field)

    return check


def _boolean(neutral: bool | None) -> Check:
    """None: both values are neutral here."""

    def check(field: str, value: object) -> None:
        if boolean(field, value) is not neutral and neutral is not None:
            raise unimplemented(field)

    return check


def _only(*neutral: str, known: Iterable[str] = ()) -> Check:
    def check(field: str, value: object) -> None:
        if one_of(field, value, {*neutral, *known}) not in neutral:
            raise unimplemented(field)

    return check


def _note(max_chars: int) -> Check:
    """A remark for the provider's books; it changes nothing."""

    def check(field: str, value: object) -> None:
        string(field, value, max_chars)

    return check


def _empty_string(field: str, value: object) -> None:
    if string(field, value, 1 << 20):
        raise unimplemented(field)


def _empty_list(field: str, value: object) -> None:
    if array(field, value, 1024):
        raise unimplemented(field)


def _empty_object(field: str, value: object) -> None:
    if json_object(field, value):
        raise unimplemented(field)


def _refused(reason: str) -> Check:
    def check(field: str, value: object) -> None:
        raise invalid(field, reason)

    return check


def _unbuilt(field: str, value: object) -> None:
    raise unimplemented(field)


def _notes(field: str, value: object) -> None:
    if len(json_object(field, value)) > 16:
        raise invalid(field, "must have at most 16 entries")


def _response_format(field: str, value: object) -> None:
    kind = json_object(field, value).get("type")
    _only("text", known=("json_object", "json_schema", "structural_tag"))(f"{field}.type", kind)


def _tool_choice(field: str, value: object) -> None:
    if isinstance(value, str):
        _only("none", "auto", known=("required",))(field, value)
    else:
        json_object(field, value)
        raise unimplemented(field)


_INTERNAL = _refused("this field is internal to a server and cannot be set by a client")
_TEMPLATE = _refused("the server's own chat template is used; a client cannot send one or arguments to it")
_TEXT_ONLY = _refused("this server takes text only")

NOT_SERVED: Mapping[str, Check] = {
    "best_of": _integer(1, _MAX_BEST_OF, 1),
    "top_logprobs": _integer(0, MAX_LOGPROBS, 0),
    "prompt_logprobs": _integer(-1, MAX_LOGPROBS, None),
    "length_penalty": _number(-10, 10, 1),
    "typical_p": _number(0, 1, 1, above_low=True),
    "use_beam_search": _boolean(False),
    "early_stopping": _boolean(False),
    "echo": _boolean(False),
    "suffix": _empty_string,
    "skip_special_tokens": _boolean(True),
    "spaces_between_special_tokens": _boolean(None),
    "truncate_prompt_tokens": _unbuilt,
    "allowed_token_ids": _empty_list,
    "bad_words": _empty_list,
    "logits_processors": _empty_list,
    "prompt_embeds": _TEXT_ONLY,
    "response_format": _response_format,
    "structured_outputs": _unbuilt,
    "guided_json": _unbuilt,
    "guided_regex": _unbuilt,
    "guided_choice": _unbuilt,
    "guided_grammar": _unbuilt,
    "lora": _unbuilt,
    "adapter": _unbuilt,
    "user": _note(512),
    "metadata": _notes,
    "store": _boolean(False),
    "service_tier": _only("auto", "default", known=("flex", "priority", "scale")),
    "safety_identifier": _note(512),
}
NOT_SERVED_CHAT: Mapping[str, Check] = {
    "tools": _empty_list,
    "tool_choice": _tool_choice,
    "parallel_tool_calls": _boolean(None),
    "functions": _empty_list,
    "function_call": _tool_choice,
    "modalities": lambda field, value: _texts(field, value),
    "audio": _TEXT_ONLY,
    "prediction": _unbuilt,
    "web_search_options": _unbuilt,
    "reasoning_effort": _unbuilt,
    "verbosity": _only("medium", known=("low", "high")),
    "chat_template": _TEMPLATE,
    "chat_template_kwargs": lambda field, value: _template_arguments(field, value),
    "documents": _empty_list,
    "continue_final_message": _boolean(False),
    "mm_processor_kwargs": _empty_object,
    "include_reasoning": _boolean(None),
}
_INTERNAL_PREFIXES = ("kv_transfer", "bootstrap_", "remote_", "disagg")


def check_fields(raw: Mapping[str, object], served: frozenset[str], not_served: Mapping[str, Check]) -> None:
    """Every field of `raw` is served, or known and neutral; else the refusal names it."""
    for name, value in raw.items():
        if name in served:
            continue
        if name.startswith(_INTERNAL_PREFIXES):
            if value is not None:
                _INTERNAL(name if len(name) <= 64 and name.isidentifier() else "body", value)
        elif (check := not_served.get(name)) is not None:
            # null is the absence of an option in every OpenAI client.
            if value is not None:
                check(name, value)
        else:
            raise unknown_field(name, served | not_served.keys())


def _texts(field: str, value: object) -> None:
    if array(field, value, 8) != ["text"]:
        raise unimplemented(field)


def _template_arguments(field: str, value: object) -> None:
    if json_object(field, value):
        _TEMPLATE(field, value)

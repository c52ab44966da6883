"""Chat messages from outside to what the model's template reads: role and content, text only. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import invalid
from router.fields import unimplemented
from router.scalars import array, json_object, string, unknown_field

MAX_MESSAGES = 2048
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_CONTENT_OPTIONAL = frozenset({"assistant"})
_NEUTRAL_WHEN_EMPTY = ("tool_calls", "function_call", "audio", "annotations")
"""What OpenAI clients send back of an earlier answer; empty means that it held none."""
_KNOWN = frozenset({"role", "content", "name", "refusal", "tool_call_id", "reasoning_content", *_NEUTRAL_WHEN_EMPTY})


def parse_messages(value: object, max_chars: int) -> list[dict[str, str]]:
    """`[{role, content}, ...]` of at most `max_chars` characters of content together.

    Content is a string or a list of text parts; an assistant's may be null. `developer` is the newer name of `system`.
    """
    items = array("messages", value, MAX_MESSAGES)
    if not items:
        raise invalid("messages", "must have at least 1 message")
    messages = []
    left = max_chars
    for index, item in enumerate(items):
        message = _message(f"messages[{index}]", json_object(f"messages[{index}]", item))
        left -= len(message["content"])
        if left < 0:
            raise invalid("messages", f"the contents must have at most {max_chars} characters together")
        messages.append(message)
    return messages


def _message(where: str, raw: Mapping[str, object]) -> dict[str, str]:
    for name, value in raw.items():
        if name not in _KNOWN:
            raise unknown_field(name, _KNOWN, f"{where}.")
        if name in _NEUTRAL_WHEN_EMPTY and value:
            raise unimplemented(f"{where}.{name}")
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(sorted(ROLES))}")
    message = {
        "role": "system" if role == "developer" else role,
        "content": _content(f"{where}.content", raw.get("content"), role in _CONTENT_OPTIONAL),
    }
    for name, limit in (("name", 128), ("tool_call_id", 128)):
        if (extra := raw.get(name)) is not None:
            message[name] = string(f"{where}.{name}", extra, limit)
    return message


def _content(where: str, value: object, optional: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and optional:
        return ""
    if not isinstance(value, list):
        raise invalid(where, "must be a string or a list of text parts")
    return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(array(where, value, 1024)))


def _part(where: str, value: object) -> str:
    part = json_object(where, value)
    if part.get("type") not in ("text", "input_text"):
        raise invalid(f"{where}.type", "must be text: this server takes no images, audio or files")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text", "must be a string")
    return text

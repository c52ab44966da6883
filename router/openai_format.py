"""OpenAI-compatible answers: whole bodies and SSE chunks, as plain dicts dumped once each.

The contract of a stream: HTTP 200 only after the first delta exists, so a refusal is always a status. Each choice has
exactly one chunk with finish_reason. With include_usage every chunk has `usage` (null but for the last, whose choices
are []). A stream that ends well ends with `data: [DONE]`; one that breaks ends with `data: {"error": ...}` and
neither a finish_reason for the unfinished choices nor [DONE].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import orjson

from router.api import Delta, LogprobEntry, Usage
from router.openai_logprobs import LogprobWriter

DONE = b"data: [DONE]\n\n"


def sse(body: object) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def usage_body(usages: Iterable[Usage]) -> dict[str, object]:
    """Sums over the prompts of a call."""
    prompt = completion = cached = 0
    for usage in usages:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        cached += usage.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None


class WholeAnswer:
    """Collects the deltas of a call with `n` choices a prompt; `body()` is the answer."""

    def __init__(
        self,
        head: dict[str, object],
        chat: bool,
        prompts: Sequence[Sequence[int]],
        n: int,
        ids: bool,
        logprobs: LogprobWriter | None = None,
    ) -> None:
        self._head = head
        self._chat = chat
        self._prompts = prompts
        self._n = n
        self._ids = ids
        self._logprobs = logprobs
        self._choices = [_Choice() for _ in range(len(prompts) * n)]
        self._usages: list[Usage] = []

    def add(self, prompt: int, delta: Delta) -> None:
        choice = self._choices[prompt * self._n + delta.index]
        choice.text.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.entries += delta.entries
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
        if delta.usage is not None:
            self._usages.append(delta.usage)

    def body(self) -> dict[str, object]:
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        body = {**self._head, "choices": choices, "usage": usage_body(self._usages)}
        if self._ids and self._chat:
            body["prompt_token_ids"] = list(self._prompts[0])
        return body

    def _choice(self, index: int, choice: _Choice) -> dict[str, object]:
        text = "".join(choice.text)
        logprobs = None if self._logprobs is None else self._logprobs.body(choice.entries)
        body: dict[str, object] = {"index": index, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        if self._chat:
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            body["text"] = text
        if self._ids:
            body["token_ids"] = choice.token_ids
            if not self._chat:
                body["prompt_token_ids"] = list(self._prompts[index // self._n])
        return body


class ChunkWriter:
    """Turns deltas into SSE bytes; one dump a delta. Keeps what a chunk must know of earlier ones."""

    def __init__(
        self,
        head: dict[str, object],
        chat: bool,
        prompts: Sequence[Sequence[int]],
        n: int,
        *,
        include_usage: bool,
        continuous_usage: bool,
        token_ids: bool,
        logprobs: LogprobWriter | None = None,
    ) -> None:
        self._head = {**head, "usage": None} if include_usage else head
        self._chat = chat
        self._prompts = prompts
        self._n = n
        self._include_usage = include_usage
        self._continuous = continuous_usage
        self._ids = token_ids
        self._logprobs = logprobs
        self._begun: set[int] = set()
        self._usages: list[Usage] = []
        self._num_out = [0] * len(prompts)

    def chunk(self, prompt: int, delta: Delta) -> bytes:
        """b'' for a delta that shows nothing: its text is still held back."""
        if delta.usage is not None:
            self._usages.append(delta.usage)
        self._num_out[prompt] += len(delta.token_ids)
        index = prompt * self._n + delta.index
        opening = b"" if index in self._begun else self._open(prompt, index)
        if not (delta.text or delta.finish_reason is not None or (self._ids and delta.token_ids)):
            return opening
        logprobs = None if self._logprobs is None or not delta.entries else self._logprobs.body(delta.entries)
        choice: dict[str, object] = {"index": index, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        if self._chat:
            choice["delta"] = {"content": delta.text} if delta.text else {}
        else:
            choice["text"] = delta.text
        if self._ids:
            choice["token_ids"] = delta.token_ids
        return opening + self._dump(prompt, choice)

    def end(self) -> bytes:
        """The usage chunk where it was asked for, and [DONE]."""
        if not self._include_usage:
            return DONE
        return sse({**self._head, "choices": [], "usage": usage_body(self._usages)}) + DONE

    def _open(self, prompt: int, index: int) -> bytes:
        """Chat: the role, once a choice. Prompt ids where they were asked for."""
        self._begun.add(index)
        ids: dict[str, object] = {"prompt_token_ids": list(self._prompts[prompt])} if self._ids else {}
        if self._chat:
            choice: dict[str, object] = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            return self._dump(prompt, choice, ids)
        if not ids:
            return b""
        return self._dump(prompt, {"index": index, "text": "", "logprobs": None, "finish_reason": None, **ids})

    def _dump(self, prompt: int, choice: dict[str, object], extra: dict[str, object] | None = None) -> bytes:
        body = {**self._head, **(extra or {}), "choices": [choice]}
        if self._continuous:
            body["usage"] = usage_body([Usage(len(self._prompts[prompt]), self._num_out[prompt])])
        return sse(body)

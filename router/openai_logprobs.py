"""Log-probabilities as the OpenAI-compatible answers show them: `logprobs` of a chat choice and of a completion.

Bytes are the token's own. A token that is no whole characters has no text: its name is `bytes:` and its bytes, each as
`\\xf0`, as in OpenAI's completions, so that alternatives stay apart; an id that the tokenizer does not know is
`token_id:` and its number, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.api import LogprobEntry
from router.text import TextModel


class LogprobWriter:
    def __init__(self, text: TextModel, chat: bool) -> None:
        self._text = text
        self._chat = chat

    def body(self, entries: Sequence[LogprobEntry]) -> dict[str, object]:
        """Of a choice or, in a stream, of a piece of one."""
        return self._chat_body(entries) if self._chat else self._completion_body(entries)

    def _chat_body(self, entries: Sequence[LogprobEntry]) -> dict[str, object]:
        content = []
        for entry in entries:
            told = entry.logprobs
            top = [self._token(*pair) for pair in zip(told.top_ids, told.top_logprobs, strict=True)]
            content.append({**self._token(entry.token_id, told.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _completion_body(self, entries: Sequence[LogprobEntry]) -> dict[str, object]:
        tokens = [self._name(entry.token_id) for entry in entries]
        top = []
        for name, entry in zip(tokens, entries, strict=True):
            told = entry.logprobs
            named: dict[str, float] = {}
            for token_id, value in zip(told.top_ids, told.top_logprobs, strict=True):
                named.setdefault(self._name(token_id), value)
            named.setdefault(name, told.logprob)
            top.append(named)
        return {
            "text_offset": [entry.text_offset for entry in entries],
            "token_logprobs": [entry.logprobs.logprob for entry in entries],
            "tokens": tokens,
            "top_logprobs": top,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, object]:
        data = self._text.token_bytes(token_id)
        return {"token": self._name(token_id), "logprob": logprob, "bytes": list(data)}

    def _name(self, token_id: int) -> str:
        data = self._text.token_bytes(token_id)
        if not data:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

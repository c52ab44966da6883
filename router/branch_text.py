"""One branch's way from tokens to text: detokenizer, ends of tool calls, stop strings, which count beyond min_tokens.

What comes first in the text wins; where both end at one character, the stop string. What a token says behind the end of
a call is cut, as behind a stop string, while the token stays in the model's context; nothing that begins before a tool
answers (a stop string, a call, half a character) goes on behind its answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.sampling import SamplingParams
from router.text import IncrementalDetokenizer, StopMatcher, TextModel


class BranchText:
    """`push` gives the text that may go out now and whether a stop string has ended the branch."""

    def __init__(
        self,
        model: TextModel,
        stop: Sequence[str],
        include_stop: bool,
        params: SamplingParams,
        calls: Sequence[str] = (),
    ) -> None:
        """calls: texts that end a call of a tool."""
        self._detokenizer = IncrementalDetokenizer(model, skip_special_tokens=True)
        self._matcher = StopMatcher(tuple(stop), include_stop)
        self._calls = tuple(calls)
        self._call = StopMatcher(self._calls, include=True)
        self._params = params
        self._count = 0
        self.stopped = False
        self.call_ended = False
        """A call ends with the last token pushed."""

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        released = ""
        for token_id in token_ids:
            self._count += 1
            self.call_ended = False
            armed = self._count > self._params.min_tokens
            if armed and token_id in self._params.stop_token_ids:
                continue
            text, call_ended = self._call.push(self._detokenizer.push([token_id]))
            text, self.stopped = self._matcher.push(text, armed=armed)
            released += text
            if self.stopped:
                break
            if call_ended:
                released += self._end_call()
        return released, self.stopped

    def flush(self) -> str:
        """What was held back, once the branch has ended without a stop string."""
        if self.stopped:
            return ""
        text, stopped = self._matcher.push(self._detokenizer.flush())
        return text if stopped else text + self._matcher.flush()

    def _end_call(self) -> str:
        self.call_ended = True
        self._call = StopMatcher(self._calls, include=True)
        self._detokenizer.flush()
        return self._matcher.release()

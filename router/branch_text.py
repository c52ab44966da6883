"""One branch's way from tokens to text: detokenizer, ends of tool calls, stop strings, which count beyond min_tokens.

What comes first in the text wins; where both end at one character, the stop string. What a token says behind the end of
a call is cut, as behind a stop string, while the token stays in the model's context; nothing that begins before a tool
answers (a stop string, a call, half a character) goes on behind its answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.records import TokenLogprobs
from headrace.sampling import SamplingParams
from router.api import LogprobEntry
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
        self._chars_said = 0
        """By the tokens so far, without what a call's end has cut."""
        self._chars_out = 0
        self._last_is_silent = False
        self._waiting: list[LogprobEntry] = []
        """Of tokens no part of whose text is out."""
        self.stopped = False
        self.call_ended = False
        """A call ends with the last token pushed."""

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> tuple[str, bool]:
        """`logprobs`: of each of the tokens, or none."""
        released = ""
        for index, token_id in enumerate(token_ids):
            self._count += 1
            self.call_ended = False
            if logprobs:
                self._waiting.append(LogprobEntry(token_id, self._chars_said, logprobs[index]))
            armed = self._count > self._params.min_tokens
            self._last_is_silent = armed and token_id in self._params.stop_token_ids
            if self._last_is_silent:
                continue
            text, call_ended = self._call.push(self._detokenizer.push([token_id]))
            self._last_is_silent = not text
            self._chars_said += len(text)
            text, self.stopped = self._matcher.push(text, armed=armed)
            released += text
            if self.stopped:
                break
            if call_ended:
                released += self._end_call()
        self._chars_out += len(released)
        return released, self.stopped

    def flush(self) -> str:
        """What was held back, once the branch has ended without a stop string."""
        if self.stopped:
            return ""
        text, self.stopped = self._matcher.push(self._detokenizer.flush())
        if not self.stopped:
            text += self._matcher.flush()
        self._chars_out += len(text)
        return text

    def take_entries(self, *, ended: bool = False, by_token: bool = False) -> tuple[LogprobEntry, ...]:
        """Of the tokens whose text has begun to go out; each once, in order.

        ended: after `flush`, also of those without text, but of the last one not where it has ended the branch
        (`by_token`). What is behind a stop string has none.
        """
        if ended and not self.stopped:
            done, self._waiting = self._waiting, []
            return tuple(done[:-1] if by_token and self._last_is_silent else done)
        done = [entry for entry in self._waiting if entry.text_offset < self._chars_out]
        self._waiting = [] if ended else self._waiting[len(done) :]
        return tuple(done)

    def _end_call(self) -> str:
        self.call_ended = True
        self._call = StopMatcher(self._calls, include=True)
        self._detokenizer.flush()
        return self._matcher.release()

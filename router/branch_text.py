"""One branch's way from tokens to text: detokenizer, then stop strings, which count beyond min_tokens."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.sampling import SamplingParams
from router.text import IncrementalDetokenizer, StopMatcher, TextModel


class BranchText:
    """`push` gives the text that may go out now and whether a stop string has ended the branch."""

    def __init__(self, model: TextModel, stop: Sequence[str], include_stop: bool, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(model, skip_special_tokens=True)
        self._matcher = StopMatcher(tuple(stop), include_stop)
        self._params = params
        self._count = 0
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        released = ""
        for token_id in token_ids:
            self._count += 1
            armed = self._count > self._params.min_tokens
            if armed and token_id in self._params.stop_token_ids:
                continue
            text, self.stopped = self._matcher.push(self._detokenizer.push([token_id]), armed=armed)
            released += text
            if self.stopped:
                break
        return released, self.stopped

    def flush(self) -> str:
        """What was held back, once the branch has ended without a stop string."""
        if self.stopped:
            return ""
        text, stopped = self._matcher.push(self._detokenizer.flush())
        return text if stopped else text + self._matcher.flush()

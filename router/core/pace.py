"""How fast the workers have been of late, and what that promises for a request: averages over completed requests.

Each average forgets (weight `_NEW` for the newest); beside it stands the mean distance of the samples from it, which
becomes the forecast's margin. Does not: know batches or contexts; a crowded worker shows only after its requests.
"""

from __future__ import annotations

from headrace.core.admission_records import Forecast
from router.core.latency import Timeline

_NEW = 0.1


class _Average:
    __slots__ = ("distance", "known", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self.distance = 0.0
        self.known = False

    def add(self, value: float) -> None:
        if not self.known:
            self.known, self.mean = True, value
            return
        self.distance += _NEW * (abs(value - self.mean) - self.distance)
        self.mean += _NEW * (value - self.mean)


class Pace:
    """Seconds a computed prompt token, an exposed hand-off and an output token."""

    def __init__(self) -> None:
        self._prefill_s = _Average()
        self._transfer_s = _Average()
        self._decode_s = _Average()

    def completed(self, line: Timeline, prompt_tokens: int, output_tokens: int) -> None:
        """Takes a request that ended in good order. One whose workers' account never came tells nothing of prefill."""
        first, end = dict(line.to_first_token()), dict(line.to_end())
        computed = prompt_tokens - line.cached_tokens
        if first.get("prefill", 0.0) > 0.0 and computed > 0:
            self._prefill_s.add((first["prefill"] + first["sampling"]) / computed)
        if output_tokens > 1 and end:
            self._transfer_s.add(end["exposed_hand_off"])
            self._decode_s.add((end["decode"] + end["decode_queue"]) / (output_tokens - 1))

    def prefill_s(self, tokens: int) -> float:
        """Predicted engine time of so many prompt tokens; 0.0 while nothing is known."""
        return tokens * self._prefill_s.mean

    def forecast(
        self, queued_tokens: int, prompt_tokens: int, shortest_tokens: int, longest_tokens: int
    ) -> Forecast | None:
        """For an output between two lengths, which widen the margin: the short end decides what is lost, the long end
        what is attainable. None until requests with a second token have completed.
        """
        if not (self._prefill_s.known and self._decode_s.known):
            return None
        output_tokens = (shortest_tokens + longest_tokens) / 2
        margin_s = (
            (queued_tokens + prompt_tokens) * self._prefill_s.distance
            + self._transfer_s.distance
            + output_tokens * self._decode_s.distance
            + (longest_tokens - shortest_tokens) / 2 * self._decode_s.mean
        )
        return Forecast(
            queue_s=queued_tokens * self._prefill_s.mean,
            prefill_s=prompt_tokens * self._prefill_s.mean,
            transfer_s=self._transfer_s.mean,
            decode_s=output_tokens * self._decode_s.mean,
            margin_s=margin_s,
        )

"""What admission is told of a request before it comes in: how long its cheapest plan takes, and how wrong that may be.

There is one predictor, the columns that plans are chosen by; `Router.outlook` reads them for a request that may not
come in at all. A `Foresight` remembers what became of late outlooks, of the first token and of the rest apart: the
delay and the ratio by which they were off, and their spread, the distance from that as a share.

    forecast = delay + ratio * foreseen
    margin   = spread * forecast, and half of what the output's lengths leave open

All come from sums, so that long requests, which deadlines are about, count more than short ones. Who missed its
deadline took at least so long. Does not: choose, book, or change the predictor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.admission_records import Forecast
from router.core.cost import (
    FETCH,
    MEMORY_WAIT,
    PAIR_KIND,
    PREFILL_WORK,
    RESTORE,
    TRANSFER,
    WHOLE_KIND,
    Parts,
    Prefix,
    Priced,
    Work,
)
from router.core.fleet_table import FleetTable
from router.core.prefix_index import PrefixIndex

_KEEP = 0.9
"""What each request leaves of the weight of those before it."""
_UNKNOWN_SPREAD = 0.5
"""Until a request has ended: its workers have told what steps cost, but nobody has seen whether that is all."""
_MOST_RATIO = 3.0
"""A request counts as at most so many times what was expected, or foreseen: one hiccup must not close the door."""
_SHORT_S = 0.1


@dataclass(frozen=True, slots=True)
class Outlook:
    """The cheapest plan of a request, in milliseconds at face value."""

    queue_ms: float
    """Work ahead of its prefill, and waiting for room."""
    prefill_ms: float
    """Computing what is not cached."""
    fetch_ms: float
    """Bringing cached blocks there, as far as it waits for them."""
    transfer_ms: float
    """Exposed part of the hand-off."""
    token_ms: float
    """Each token after the first."""
    cached_tokens: int
    """Of the prompt, not to be computed."""
    is_told: bool
    """By step costs of workers, not by generic ones."""

    @property
    def first_ms(self) -> float:
        """Until the first token."""
        return self.queue_ms + self.prefill_ms + self.fetch_ms

    def rest_ms(self, output_tokens: int) -> float:
        """From the first to the last of so many tokens."""
        return self.transfer_ms + (output_tokens - 1) * self.token_ms if output_tokens > 1 else 0.0


def cheapest(table: FleetTable, parts: Parts, prefix: Prefix, priced: Priced, work: Work) -> Outlook:
    """The plan that would be sent, but for chance among equals."""
    n = len(prefix.depths)
    way, slot = divmod(int(priced.costs.argmin()), n)
    terms, steps = priced.terms[way, slot], table.steps
    token_ms = steps.next_step_ms[:n] + steps.context_ms[:n] * (work.num_tokens + work.output_tokens // 2)
    decodes_at = parts.decode & (table.lane[:n] == table.lane[slot])
    elsewhere = PAIR_KIND <= priced.kinds[way, slot] < WHOLE_KIND and bool(decodes_at.any())
    cached = int(prefix.depths[slot] + priced.fetched[way, slot]) * int(table.block_size[slot])
    return Outlook(
        queue_ms=float(table.queue_ms[slot] + terms[MEMORY_WAIT]),
        prefill_ms=float(terms[PREFILL_WORK]),
        fetch_ms=float(terms[RESTORE] + terms[FETCH]),
        transfer_ms=float(terms[TRANSFER]),
        token_ms=float(token_ms[decodes_at].min() if elsewhere else token_ms[slot]),
        cached_tokens=min(cached, work.num_tokens - 1),
        is_told=bool(steps.has_own.any()),
    )


def known_tokens(table: FleetTable, index: PrefixIndex, keys: Sequence[int], num_tokens: int) -> int:
    """Of a prompt, the most that a worker has cached, or is about to; its last token is computed in any case.

    keys: of its full blocks.
    """
    if not keys:
        return 0
    held = index.lookup(keys, table.num_slots) * table.block_size[: table.num_slots]
    return min(int(held.max(initial=0)), num_tokens - 1)


class Foresight:
    """See the module's docstring. Seconds are from when the request came in to its first token, and from that to the
    last one without what a client or a failure took."""

    def __init__(self) -> None:
        self._first = _Record()
        self._rest = _Record()

    def completed(self, outlook: Outlook, output_tokens: int, first_s: float, rest_s: float) -> None:
        """Takes a request that ended in good order in its first attempt, with what was foreseen when it came."""
        self._first.add(outlook.first_ms / 1e3, first_s)
        if output_tokens > 1:
            self._rest.add(outlook.rest_ms(output_tokens) / 1e3, rest_s)

    def missed(self, outlook: Outlook, waited_s: float) -> None:
        """Takes one that lost its deadline after so long without a first token."""
        self._first.add_least(outlook.first_ms / 1e3, waited_s)

    def forecast(self, outlook: Outlook | None, shortest_tokens: int, longest_tokens: int) -> Forecast | None:
        """For an output between two lengths, which widen the margin: the short end decides what is lost, the long end
        what is attainable. None while neither a worker has told its costs nor a request has ended.
        """
        if outlook is None or not (outlook.is_told or self._first.is_known):
            return None
        first, rest = self._first, self._rest
        hand_off_s = (rest.delay_s + rest.ratio * outlook.transfer_ms / 1e3) if longest_tokens > 1 else 0.0
        shortest_s, longest_s = (
            rest.ratio * max(tokens - 1, 0) * outlook.token_ms / 1e3 for tokens in (shortest_tokens, longest_tokens)
        )
        decode_s = (shortest_s + longest_s) / 2
        margin_s = (
            first.spread * first.expected_s(outlook.first_ms / 1e3)
            + rest.spread * (hand_off_s + decode_s)
            + (longest_s - shortest_s) / 2
        )
        return Forecast(
            queue_s=first.delay_s + first.ratio * outlook.queue_ms / 1e3,
            prefill_s=first.ratio * outlook.prefill_ms / 1e3,
            transfer_s=first.ratio * outlook.fetch_ms / 1e3 + hand_off_s,
            decode_s=decode_s,
            margin_s=margin_s,
        )


class _Record:
    """Foreseen and realised seconds of late requests, as decayed sums, and the line delay + ratio * foreseen through
    them: ridge regression (Hoerl and Kennard 1970) towards no delay and a ratio of 1.

    What a request that is foreseen to take less than `_SHORT_S` is off by counts as a delay, what a longer one is off
    by as a ratio. So a day of short requests with their fixed delay leaves the forecast of a long one alone.
    """

    __slots__ = ("_distance_s", "_n", "_realised_s", "_x", "_xx", "_xy", "_y", "delay_s", "ratio")

    def __init__(self) -> None:
        self.delay_s, self.ratio = 0.0, 1.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._distance_s = 0.0

    @property
    def is_known(self) -> bool:
        return self._n > 0.0

    @property
    def spread(self) -> float:
        """Distance of the realised from the expected, as a share. What short requests show leaves it open."""
        return (self._distance_s + _UNKNOWN_SPREAD * _SHORT_S) / (self._y + _SHORT_S)

    def expected_s(self, foreseen_s: float) -> float:
        return self.delay_s + self.ratio * foreseen_s

    def add(self, foreseen_s: float, realised_s: float) -> None:
        expected_s = self.expected_s(foreseen_s)
        realised_s = min(realised_s, _MOST_RATIO * max(expected_s, foreseen_s))
        # Of the first one there is nothing to be far from.
        distance_s = abs(realised_s - expected_s) if self.is_known else _UNKNOWN_SPREAD * realised_s
        self._distance_s = _KEEP * self._distance_s + distance_s
        self._n = _KEEP * self._n + 1.0
        self._x = _KEEP * self._x + foreseen_s
        self._y = _KEEP * self._y + realised_s
        self._xx = _KEEP * self._xx + foreseen_s**2
        self._xy = _KEEP * self._xy + foreseen_s * realised_s
        # Beside those seen: what one request of `_SHORT_S` would say for no delay and a ratio of 1.
        n, xx, xy = self._n + 1.0, self._xx + _SHORT_S**2, self._xy + _SHORT_S**2
        self.delay_s = max(0.0, (self._y * xx - self._x * xy) / (n * xx - self._x**2))
        self.ratio = max(0.0, (xy - self.delay_s * self._x) / xx)

    def add_least(self, foreseen_s: float, realised_s: float) -> None:
        """It took that, or longer: news only when more was not foreseen."""
        if realised_s > self.expected_s(foreseen_s):
            self.add(foreseen_s, realised_s)

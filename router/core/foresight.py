"""What admission is told of a request before it comes in: how long its cheapest plan takes, and how wrong that may be.

There is one predictor, the columns that plans are chosen by; `Router.outlook` reads them for a request that may not
come in at all. A `Foresight` remembers what became of late outlooks, of the first token and of the rest apart: their
bias, realised over foreseen seconds, and their spread, the distance from that as a share.

    forecast = bias * foreseen        margin = spread * forecast, and half of what the output's lengths leave open

Both are quotients of sums, so that long requests, which deadlines are about, count more than short ones with their
fixed delays. Who missed its deadline took at least so long. Does not: choose, book, or change the predictor.
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
"""A request counts as at most so many times what was foreseen: one hiccup must not close the door, or leave it open."""


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
        first, rest = self._first.bias / 1e3, self._rest.bias / 1e3
        hand_off_s = rest * outlook.transfer_ms if longest_tokens > 1 else 0.0
        shortest_s, longest_s = (
            rest * max(tokens - 1, 0) * outlook.token_ms for tokens in (shortest_tokens, longest_tokens)
        )
        decode_s = (shortest_s + longest_s) / 2
        margin_s = (
            self._first.spread * first * outlook.first_ms
            + self._rest.spread * (hand_off_s + decode_s)
            + (longest_s - shortest_s) / 2
        )
        return Forecast(
            queue_s=first * outlook.queue_ms,
            prefill_s=first * outlook.prefill_ms,
            transfer_s=first * outlook.fetch_ms + hand_off_s,
            decode_s=decode_s,
            margin_s=margin_s,
        )


class _Record:
    """Foreseen and realised seconds of late requests."""

    __slots__ = ("_distance_s", "_foreseen_s", "_realised_s")

    def __init__(self) -> None:
        self._foreseen_s = 0.0
        self._realised_s = 0.0
        self._distance_s = 0.0

    @property
    def is_known(self) -> bool:
        return self._foreseen_s > 0.0

    @property
    def bias(self) -> float:
        return self._realised_s / self._foreseen_s if self.is_known else 1.0

    @property
    def spread(self) -> float:
        return self._distance_s / self._realised_s if self._realised_s > 0.0 else _UNKNOWN_SPREAD

    def add(self, foreseen_s: float, realised_s: float) -> None:
        realised_s = min(realised_s, _MOST_RATIO * foreseen_s)
        # Of the first one there is nothing to be far from.
        distance_s = abs(realised_s - self.bias * foreseen_s) if self.is_known else _UNKNOWN_SPREAD * realised_s
        self._foreseen_s = _KEEP * self._foreseen_s + foreseen_s
        self._realised_s = _KEEP * self._realised_s + realised_s
        self._distance_s = _KEEP * self._distance_s + distance_s

    def add_least(self, foreseen_s: float, realised_s: float) -> None:
        """It took that, or longer: news only when more was not foreseen."""
        if realised_s > self.bias * foreseen_s:
            self.add(foreseen_s, realised_s)

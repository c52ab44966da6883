"""Whether one more request may wait here: bounds of what waits and of what is held, in every unit, and when to ask
again.

    prefills    requests, uncomputed tokens and predicted seconds of those that have not started
    adoptions   requests that have not started
    both        tokens of KV, expected output included, of all that is here; nobody while it is closed, nor whom the
                blocks that are in use just now can never hold

The accounts are those of `headrace.core.accounts`, which the gateway's admission is made of too: the time to wait is
what is over a bound, by the pace at which the account has been drained. What the gateway's decision knows beside them
(tenants, forecasts, choices of one call) has been decided there, before the request came.

Does not: look at the pool, order anybody, or read a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.accounts import Account
from headrace.errors import InvariantError, Rejected
from headrace.ids import RequestKey
from workers.core.limits import peak_tokens
from workers.core.request import Request
from workers.core.settings import SchedulerSettings

_RETRY_S = 5.0
"""When to ask again for room that the pool does not have just now."""


@dataclass(slots=True)
class _Booked:
    """One request's part of the accounts."""

    adopted: bool
    tokens: int
    engine_us: int
    kv_tokens: int
    waits: bool = True


class QueueAdmission:
    """`refusal` asks, `enter` books; `started` and `left` give back, and may be repeated."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.closed: Rejected | None = None
        """The answer to everybody; None: open."""
        self.usable_tokens: int | None = None
        """That the pool has room for just now; None: as always."""
        self._settings = settings
        self._max_queue_us = None if settings.max_queue_s is None else round(settings.max_queue_s * 1e6)
        self._waiting = Account()
        self._tokens = Account()
        self._engine_us = Account()
        self._adopting = Account()
        self._kv_tokens = Account()
        self._booked: dict[RequestKey, _Booked] = {}

    def refusal(self, request: Request, engine_s: float, now: float) -> Rejected | None:
        """That of `closed`, `memory_pressure`, or `queue_full` | `queue_seconds` | `reserved_kv` with the longest of
        the times that bounds ask for.

        `engine_s`: predicted seconds of the request's prefill.
        """
        settings, booked = self._settings, _part_of(request, engine_s)
        if self.closed is not None:
            return self.closed
        if self.usable_tokens is not None and peak_tokens(request, settings) > self.usable_tokens:
            return Rejected("memory_pressure", _RETRY_S)
        if request.adopted:
            waits = {"queue_full": self._adopting.wait_s(1, settings.max_waiting_requests, now)}
        else:
            requests_s = self._waiting.wait_s(1, settings.max_waiting_requests, now)
            tokens_s = self._tokens.wait_s(booked.tokens, settings.max_waiting_tokens, now, may_exceed_alone=True)
            waits = {
                "queue_full": max(requests_s, tokens_s),
                "queue_seconds": self._engine_us.wait_s(
                    booked.engine_us, self._max_queue_us, now, may_exceed_alone=True
                ),
            }
        waits["reserved_kv"] = self._kv_tokens.wait_s(
            booked.kv_tokens, settings.max_reserved_kv_tokens, now, may_exceed_alone=True
        )
        over = [reason for reason, wait_s in waits.items() if wait_s]
        return Rejected(over[0], max(waits.values())) if over else None

    def enter(self, request: Request, engine_s: float, now: float) -> None:
        booked = self._booked[request.key] = _part_of(request, engine_s)
        self._kv_tokens.book(booked.kv_tokens, now)
        if booked.adopted:
            self._adopting.book(1, now)
        else:
            self._waiting.book(1, now)
            self._tokens.book(booked.tokens, now)
            self._engine_us.book(booked.engine_us, now)

    def started(self, key: RequestKey, now: float) -> None:
        """It waits no longer."""
        booked = self._booked.get(key)
        if booked is None or not booked.waits:
            return
        booked.waits = False
        if booked.adopted:
            self._adopting.release(1, now)
        else:
            self._waiting.release(1, now)
            self._tokens.release(booked.tokens, now)
            self._engine_us.release(booked.engine_us, now)

    def left(self, key: RequestKey, now: float) -> None:
        """It has ended, whatever the reason."""
        self.started(key, now)
        if (booked := self._booked.pop(key, None)) is not None:
            self._kv_tokens.release(booked.kv_tokens, now)

    def rebook(self, key: RequestKey, kv_tokens: int, now: float) -> None:
        """What it keeps of the memory from now on."""
        booked = self._booked[key]
        if kv_tokens > booked.kv_tokens:
            self._kv_tokens.book(kv_tokens - booked.kv_tokens, now)
        else:
            self._kv_tokens.release(booked.kv_tokens - kv_tokens, now)
        booked.kv_tokens = kv_tokens

    @property
    def reserved_kv_tokens(self) -> int:
        return self._kv_tokens.held

    @property
    def queue_s(self) -> float:
        """Predicted seconds of the prefills that wait."""
        return self._engine_us.held / 1e6

    def check_integrity(self, waiting: int, adopting: int, live: int) -> None:
        """Raises InvariantError unless so many prefills and adoptions wait, of so many requests in all."""
        if (self._waiting.held, self._adopting.held, len(self._booked)) != (waiting, adopting, live):
            raise InvariantError("admission counts other requests than those that are here")


def _part_of(request: Request, engine_s: float) -> _Booked:
    return _Booked(
        adopted=request.adopted,
        tokens=request.num_tokens,
        engine_us=round(engine_s * 1e6),
        kv_tokens=request.num_tokens + (0 if request.hand_off else request.expected_output_tokens),
    )

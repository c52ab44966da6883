"""What is held, how fast it drains, and whose it is: the books below `headrace.core.admission`.

Does not: decide, or read a clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from math import ceil, exp

from headrace.errors import InvariantError

DRAIN_TAU_S = 30.0
MIN_RETRY_S = 0.05
MAX_RETRY_S = 60.0
UNKNOWN_RETRY_S = 1.0
"""Answered while nothing has left yet."""
IDLE_TENANT_S = 60.0
"""A tenant without requests is forgotten after so long, and not before its bucket is full."""
_BUCKET_SLACK_TOKENS = 1e-3
"""Far above what a clock rounds away, so that an exact Retry-After is exact."""


class Account:
    """An amount in one unit, and its drain: how much leaves a second, and in how many pieces, as exponential averages
    over the time in which something is held. Idle time is no slow drain and does not count.
    """

    __slots__ = ("_at", "_busy_s", "_drain_per_s", "_pieces_per_s", "held")

    def __init__(self) -> None:
        self.held = 0
        self._drain_per_s = 0.0
        self._pieces_per_s = 0.0
        self._busy_s = 0.0
        self._at = 0.0

    def book(self, amount: int, now: float) -> None:
        if self.held == 0:
            self._at = now
        self.held += amount

    def release(self, amount: int, now: float) -> None:
        """Raises InvariantError below zero."""
        if amount > self.held:
            raise InvariantError(f"an account of {self.held} cannot release {amount}")
        elapsed_s = now - self._at if self.held else 0.0
        self._busy_s += elapsed_s
        kept = exp(-elapsed_s / DRAIN_TAU_S)
        self._drain_per_s = self._drain_per_s * kept + amount / DRAIN_TAU_S
        self._pieces_per_s = self._pieces_per_s * kept + 1.0 / DRAIN_TAU_S
        self._at = now
        self.held -= amount

    def wait_s(self, amount: int, limit: int | None, now: float, may_exceed_alone: bool = False) -> float:
        """0.0: `amount` fits below `limit` now. Otherwise when it is expected to, MIN_RETRY_S to MAX_RETRY_S."""
        if limit is None or self.held + amount <= limit or (may_exceed_alone and self.held == 0):
            return 0.0
        if self._drain_per_s <= 0.0:
            return UNKNOWN_RETRY_S
        excess = min(self.held + amount - limit, self.held)
        # A part of a request never leaves: whole ones of the mean size do.
        pieces = ceil(excess * self._pieces_per_s / self._drain_per_s - 1e-9)
        elapsed_s = now - self._at
        # The average began at zero: what is missing of it is known.
        seen = 1.0 - exp(-(self._busy_s + elapsed_s) / DRAIN_TAU_S)
        pieces_per_s = self._pieces_per_s * exp(-elapsed_s / DRAIN_TAU_S)
        if pieces_per_s <= 0.0:
            return MAX_RETRY_S
        return min(max(pieces * seen / pieces_per_s, MIN_RETRY_S), MAX_RETRY_S)


class Bucket:
    """A token bucket, full at first. `tokens_per_s` None: without bound."""

    __slots__ = ("_at", "_burst_tokens", "_level", "_tokens_per_s")

    def __init__(self, tokens_per_s: float | None, burst_tokens: int, now: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._burst_tokens = burst_tokens
        self._level = float(burst_tokens)
        self._at = now

    def wait_s(self, tokens: int, now: float) -> float:
        """0.0: enough is there now. Otherwise the exact time; more than a full bucket is never waited for."""
        if self._tokens_per_s is None:
            return 0.0
        missing = min(tokens, self._burst_tokens) - self._level_at(now)
        return missing / self._tokens_per_s if missing > _BUCKET_SLACK_TOKENS else 0.0

    def take(self, tokens: int, now: float) -> None:
        """Below zero it is a debt. A negative amount is given back; what does not fit is lost."""
        self._level = min(self._level_at(now) - tokens, float(self._burst_tokens))
        self._at = now

    def _level_at(self, now: float) -> float:
        if self._tokens_per_s is None:
            return self._level
        return min(self._level + (now - self._at) * self._tokens_per_s, float(self._burst_tokens))

    def full_in_s(self, now: float) -> float:
        return self.wait_s(self._burst_tokens, now)


class TenantBook:
    """One tenant's accounts."""

    __slots__ = ("bucket", "kv_bytes", "last_left_at", "live", "paused", "watched")

    def __init__(self, bucket: Bucket) -> None:
        self.live = Account()
        self.paused = Account()
        self.kv_bytes = Account()
        self.bucket = bucket
        self.last_left_at = 0.0
        self.watched = False

    @property
    def is_empty(self) -> bool:
        return self.live.held == 0 and self.paused.held == 0


class TenantBooks:
    """Books of the tenants that have something booked, or had it lately; `open` makes a new one."""

    def __init__(self, make_bucket: Callable[[str, float], Bucket]) -> None:
        self._make_bucket = make_bucket
        self._books: dict[str, TenantBook] = {}
        self._idle: list[tuple[float, int, str]] = []
        """Heap of (look again at, order, tenant): at most one entry a tenant."""
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._books)

    def open(self, tenant: str, now: float) -> TenantBook:
        """The tenant's book; a new one is remembered by `keep` only, so that a refusal leaves nothing."""
        self._forget_idle(now)
        return self._books.get(tenant) or TenantBook(self._make_bucket(tenant, now))

    def keep(self, tenant: str, book: TenantBook) -> None:
        self._books[tenant] = book

    def known(self, tenant: str) -> TenantBook:
        return self._books[tenant]

    def left(self, tenant: str, now: float) -> None:
        """One of the tenant's requests has left."""
        book = self._books[tenant]
        book.last_left_at = now
        if book.is_empty and not book.watched:
            self._watch(tenant, book, now)

    def _watch(self, tenant: str, book: TenantBook, now: float) -> None:
        book.watched = True
        heapq.heappush(self._idle, (now + max(IDLE_TENANT_S, book.bucket.full_in_s(now)), next(self._order), tenant))

    def _forget_idle(self, now: float) -> None:
        """Two looks a call: at most one tenant a call is new, so what is due is worked off in the end."""
        for _ in range(2):
            if not self._idle or self._idle[0][0] > now:
                return
            _, _, tenant = heapq.heappop(self._idle)
            book = self._books[tenant]
            book.watched = False
            if not book.is_empty:
                continue
            if now - book.last_left_at >= IDLE_TENANT_S and book.bucket.full_in_s(now) == 0.0:
                del self._books[tenant]
            else:
                self._watch(tenant, book, now)

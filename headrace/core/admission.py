"""May this request come in now? Accept, queue, route or reject, apart from scheduling (scheduler article, section 19).

One `enter` books a whole ask (all choices of a call) or nothing, so that two half-admitted asks cannot wait for each
other. Each request of it gets a `Ticket`: `started` takes it out of the queue's accounts, `leave` out of all of them;
both may be repeated. Every decision costs the same, however many requests and tenants there are.

The order of a decision; the first line that holds gives the reason:

| # | holds when | action | reason | retry_after_s |
| --- | --- | --- | --- | --- |
| 1 | prompt + max_tokens of one request > max_model_len | reject | too_long | 0: asking again does not help |
| 2 | one request > the largest pool, or the ask > a bound that holds for it alone | reject | too_large | 0 |
| 3 | the uncached part of the prompt > max_uncached_tokens | reject | uncached_tokens | 0: it helps to ask for less |
| 4 | tenant: live requests + ask > its cap | reject | tenant_concurrency | excess / drain |
| 5 | tenant: KV bytes held + ask > its cap | reject | tenant_kv_bytes | excess / drain |
| 6 | tenant: its bucket has too few tokens | reject | tenant_rate | exact |
| 7 | live requests + ask > limit | reject, route | concurrency | excess / drain |
| 8 | waiting requests + ask > limit | reject, route | queue_full | excess / drain |
| 9 | waiting prompt tokens + ask > limit, unless none wait | reject, route | waiting_tokens | excess / drain |
| 10 | KV tokens reserved + ask > limit | reject, route | reserved_kv | excess / drain |
| 11 | engine time queued + ask > limit, unless none waits | reject, route | queue_seconds | excess / drain |
| 12 | the deadline is lost, and such are not taken | reject, route | deadline_lost | what the queue must shrink, or 0 |
| 13 | the deadline is doubtful, or lost | accept, queue | deadline_doubtful, deadline_lost | best effort |
| 14 | the caller has no room to start it | queue | no_room | booked: the caller keeps it |
| 15 | else | accept | ok | |

`route` stands for `reject` in lines 7 to 12 when the caller has another place for what is refused for that reason; a
tenant's own caps are the same everywhere. A retry time of 0 says that waiting does not help; else it is the longest of
all lines that hold, so that it is not answered by the next refusal.

*Drain* is what left the account a second, averaged over the busy time with the time constant `accounts.DRAIN_TAU_S`.
*Bucket*: fills with tokens_per_s up to burst_tokens. An ask takes its prompt and reserved output; `leave` gives back
what was not used and takes what came on top. One above burst_tokens waits for a full bucket and leaves a debt.

Does not: predict (the caller brings seconds), order, know workers, or read a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.core.accounts import Account, Bucket, TenantBook, TenantBooks
from headrace.core.admission_records import (
    Action,
    Ask,
    Attainment,
    Decision,
    Held,
    QueueLimits,
    Reason,
    Room,
    TenantLimits,
    Ticket,
    TicketState,
    attainment,
)

_ORDER = {reason: place for place, reason in enumerate(Reason)}
_TENANTS_OWN = frozenset({Reason.TENANT_CONCURRENCY, Reason.TENANT_KV_BYTES, Reason.TENANT_RATE})
_BEST_EFFORT = {Attainment.DOUBTFUL: Reason.DEADLINE_DOUBTFUL, Attainment.LOST: Reason.DEADLINE_LOST}
_MAY_EXCEED_ALONE = frozenset({Reason.WAITING_TOKENS, Reason.QUEUE_SECONDS})


@dataclass(frozen=True, slots=True)
class _Check:
    """One account against its limit."""

    reason: Reason
    account: Account
    amount: int
    limit: int | None

    @property
    def never_fits(self) -> bool:
        return self.limit is not None and self.amount > self.limit and self.reason not in _MAY_EXCEED_ALONE

    def wait_s(self, now: float) -> float:
        return self.account.wait_s(self.amount, self.limit, now, self.reason in _MAY_EXCEED_ALONE)


class Admission:
    """The accounts and the decision. `default` holds for tenants without an entry of their own in `tenants`."""

    def __init__(
        self,
        queue: QueueLimits,
        default: TenantLimits | None = None,
        tenants: Mapping[str, TenantLimits] | None = None,
        kv_bytes_per_token: int = 0,
    ) -> None:
        self._queue = queue
        self._default = default or TenantLimits()
        self._limits = dict(tenants or {})
        self._kv_bytes_per_token = kv_bytes_per_token
        self._live = Account()
        self._paused = Account()
        self._waiting = Account()
        self._waiting_tokens = Account()
        self._kv_tokens = Account()
        self._engine_us = Account()
        self._tenants = TenantBooks(self._bucket)

    @property
    def held(self) -> Held:
        return Held(
            live_requests=self._live.held,
            waiting_requests=self._waiting.held,
            waiting_tokens=self._waiting_tokens.held,
            reserved_kv_tokens=self._kv_tokens.held,
            queue_s=self._engine_us.held / 1_000_000,
            paused_requests=self._paused.held,
        )

    @property
    def num_tenants(self) -> int:
        """Tenants remembered."""
        return len(self._tenants)

    def enter(self, ask: Ask, room: Room, now: float) -> Decision:
        """Decides, and books when it admits. Raises ValueError when nothing is asked for."""
        if min(ask.num_requests, ask.prompt_tokens, ask.reserved_output_tokens) < 1:
            raise ValueError("an ask has at least 1 request, 1 prompt token and 1 reserved output token")
        book = self._tenants.open(ask.tenant, now)
        ticket = self._ticket(ask)
        checks = list(self._checks(ask, ticket, book))
        if (never := _never(ask, room, checks)) is not None:
            return Decision(Action.REJECT, never)
        waits = {check.reason: wait_s for check in checks if (wait_s := check.wait_s(now))}
        if wait_s := book.bucket.wait_s(ask.num_requests * ticket.rate_tokens, now):
            waits[Reason.TENANT_RATE] = wait_s
        chance = attainment(ask.forecast, ask.time_left_s)
        if chance is Attainment.LOST and not room.takes_lost:
            waits[Reason.DEADLINE_LOST] = _lost_wait_s(ask)
        if waits:
            reason = min(waits, key=_ORDER.__getitem__)
            action = Action.ROUTE if reason in room.routed and reason not in _TENANTS_OWN else Action.REJECT
            return Decision(action, reason, max(waits.values()))
        tickets = (ticket, *(self._ticket(ask) for _ in range(ask.num_requests - 1)))
        self._tenants.keep(ask.tenant, book)
        for booked in tickets:
            self._book(booked, book, now)
        reason = _BEST_EFFORT.get(chance) or (Reason.OK if room.can_start else Reason.NO_ROOM)
        action = Action.ACCEPT if room.can_start else Action.QUEUE
        return Decision(action, reason, 0.0, chance in _BEST_EFFORT, tickets)

    def started(self, ticket: Ticket, now: float) -> None:
        """The engine has begun with it: it waits no longer. Idempotent."""
        if ticket.state is TicketState.WAITING:
            ticket.state = TicketState.RUNNING
            self._waiting.release(1, now)
            self._waiting_tokens.release(ticket.waiting_tokens, now)
            self._engine_us.release(ticket.engine_us, now)

    def pause(self, ticket: Ticket, keeps_kv: bool, now: float) -> None:
        """It waits for a tool. It computes nothing and so counts as no request in progress, of its tenant or of all,
        until `resume`; but not more wait so than may be in progress, since each costs something too. Its KV counts as
        long as it is kept. May be repeated, with `keeps_kv` false from some time on.
        """
        if ticket.state is not TicketState.RUNNING:
            return
        book, tenant = self._tenants.known(ticket.tenant), self._tenant_limits(ticket.tenant)
        if not ticket.paused:
            bounds = ((self._paused, self._queue.max_live_requests), (book.paused, tenant.max_concurrent_requests))
            if all(limit is None or account.held < limit for account, limit in bounds):
                ticket.paused = True
                self._move(self._live, self._paused, now)
                self._move(book.live, book.paused, now)
        if not keeps_kv and not ticket.vacated:
            self._release_kv(ticket, book, now)
            ticket.vacated = True

    def resume(self, ticket: Ticket, more_tokens: int, now: float) -> None:
        """The tool has answered with so many tokens: all is booked again, whatever the bounds say."""
        if ticket.state is not TicketState.RUNNING:
            return
        book = self._tenants.known(ticket.tenant)
        if ticket.paused:
            ticket.paused = False
            self._move(self._paused, self._live, now)
            self._move(book.paused, book.live, now)
        if not ticket.vacated:
            self._release_kv(ticket, book, now)
        ticket.vacated = False
        ticket.added_tokens += more_tokens
        self._kv_tokens.book(ticket.kv_tokens + ticket.added_tokens, now)
        book.kv_bytes.book((ticket.kv_tokens + ticket.added_tokens) * self._kv_bytes_per_token, now)

    def leave(self, ticket: Ticket, now: float, output_tokens: int = 0) -> None:
        """It is over, whatever the reason, with so many tokens of output. Idempotent."""
        if ticket.state is TicketState.LEFT:
            return
        input_tokens = ticket.prompt_tokens + ticket.added_tokens
        used_tokens = output_tokens if ticket.state is TicketState.WAITING else input_tokens + output_tokens
        self.started(ticket, now)
        ticket.state = TicketState.LEFT
        book = self._tenants.known(ticket.tenant)
        (self._paused if ticket.paused else self._live).release(1, now)
        (book.paused if ticket.paused else book.live).release(1, now)
        if not ticket.vacated:
            self._release_kv(ticket, book, now)
        book.bucket.take(used_tokens - ticket.rate_tokens, now)
        self._tenants.left(ticket.tenant, now)

    # ---- parts

    def _release_kv(self, ticket: Ticket, book: TenantBook, now: float) -> None:
        tokens = ticket.kv_tokens + ticket.added_tokens
        self._kv_tokens.release(tokens, now)
        book.kv_bytes.release(tokens * self._kv_bytes_per_token, now)

    @staticmethod
    def _move(source: Account, target: Account, now: float) -> None:
        source.release(1, now)
        target.book(1, now)

    def _tenant_limits(self, tenant: str) -> TenantLimits:
        return self._limits.get(tenant, self._default)

    def _bucket(self, tenant: str, now: float) -> Bucket:
        limits = self._tenant_limits(tenant)
        return Bucket(limits.tokens_per_s, limits.burst_tokens, now)

    @staticmethod
    def _ticket(ask: Ask) -> Ticket:
        return Ticket(
            tenant=ask.tenant,
            prompt_tokens=ask.prompt_tokens,
            waiting_tokens=max(ask.prompt_tokens - ask.cached_tokens, 1),
            kv_tokens=ask.prompt_tokens + ask.reserved_output_tokens,
            engine_us=round(ask.engine_s * 1_000_000),
        )

    def _checks(self, ask: Ask, ticket: Ticket, book: TenantBook) -> Iterator[_Check]:
        n, queue, tenant = ask.num_requests, self._queue, self._tenant_limits(ask.tenant)
        kv_tokens = n * ticket.kv_tokens
        max_queue_us = None if queue.max_queue_s is None else round(queue.max_queue_s * 1_000_000)
        yield _Check(Reason.TENANT_CONCURRENCY, book.live, n, tenant.max_concurrent_requests)
        yield _Check(
            Reason.TENANT_KV_BYTES, book.kv_bytes, kv_tokens * self._kv_bytes_per_token, tenant.max_live_kv_bytes
        )
        yield _Check(Reason.CONCURRENCY, self._live, n, queue.max_live_requests)
        yield _Check(Reason.QUEUE_FULL, self._waiting, n, queue.max_waiting_requests)
        yield _Check(Reason.WAITING_TOKENS, self._waiting_tokens, n * ticket.waiting_tokens, queue.max_waiting_tokens)
        yield _Check(Reason.RESERVED_KV, self._kv_tokens, kv_tokens, queue.max_reserved_kv_tokens)
        yield _Check(Reason.QUEUE_SECONDS, self._engine_us, n * ticket.engine_us, max_queue_us)

    def _book(self, ticket: Ticket, book: TenantBook, now: float) -> None:
        self._live.book(1, now)
        self._waiting.book(1, now)
        self._waiting_tokens.book(ticket.waiting_tokens, now)
        self._kv_tokens.book(ticket.kv_tokens, now)
        self._engine_us.book(ticket.engine_us, now)
        book.live.book(1, now)
        book.kv_bytes.book(ticket.kv_tokens * self._kv_bytes_per_token, now)
        book.bucket.take(ticket.rate_tokens, now)


def _never(ask: Ask, room: Room, checks: list[_Check]) -> Reason | None:
    most_tokens = ask.prompt_tokens + ask.max_tokens
    if room.max_model_len is not None and most_tokens > room.max_model_len:
        return Reason.TOO_LONG
    if room.capacity_tokens is not None and most_tokens > room.capacity_tokens:
        return Reason.TOO_LARGE
    if any(check.never_fits for check in checks):
        return Reason.TOO_LARGE
    most_uncached = room.max_uncached_tokens
    is_over = most_uncached is not None and ask.prompt_tokens - ask.cached_tokens > most_uncached
    return Reason.UNCACHED_TOKENS if is_over else None


def _lost_wait_s(ask: Ask) -> float:
    """The queue gets shorter by a second a second: how long until the deadline could be kept; 0.0 when never."""
    if ask.forecast is None or ask.time_left_s is None or ask.time_left_s <= 0:
        return 0.0
    late_s = ask.forecast.total_s - ask.forecast.margin_s - ask.time_left_s
    return late_s if late_s <= ask.forecast.queue_s else 0.0

"""What an admission is asked and what it answers: asks, limits, forecasts, decisions. One rule: `attainment`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    ACCEPT = "accept"
    QUEUE = "queue"
    ROUTE = "route"
    REJECT = "reject"


class Reason(StrEnum):
    """In the order in which they are looked for; the table stands in `headrace.core.admission`."""

    TOO_LONG = "too_long"
    TOO_LARGE = "too_large"
    UNCACHED_TOKENS = "uncached_tokens"
    TENANT_CONCURRENCY = "tenant_concurrency"
    TENANT_KV_BYTES = "tenant_kv_bytes"
    TENANT_RATE = "tenant_rate"
    CONCURRENCY = "concurrency"
    QUEUE_FULL = "queue_full"
    WAITING_TOKENS = "waiting_tokens"
    RESERVED_KV = "reserved_kv"
    QUEUE_SECONDS = "queue_seconds"
    DEADLINE_LOST = "deadline_lost"
    DEADLINE_DOUBTFUL = "deadline_doubtful"
    NO_ROOM = "no_room"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds over all tenants; None: none."""

    max_live_requests: int | None = None
    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    """Prompt tokens to compute of requests that have not started."""
    max_reserved_kv_tokens: int | None = None
    """Prompt and reserved output of all live requests."""
    max_queue_s: float | None = None
    """Engine time of requests that have not started."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Bounds of one tenant; None: none."""

    max_concurrent_requests: int | None = None
    max_live_kv_bytes: int | None = None
    tokens_per_s: float | None = None
    burst_tokens: int = 0

    def __post_init__(self) -> None:
        if self.tokens_per_s is not None and (self.tokens_per_s <= 0 or self.burst_tokens < 1):
            raise ValueError("tokens_per_s needs a positive rate and burst_tokens of at least 1")


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted seconds of one request. `margin_s`: how wrong the sum may be, either way."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    margin_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s + self.transfer_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Ask:
    """`num_requests` equal requests (the choices of a call); sizes in tokens, of one of them."""

    tenant: str
    prompt_tokens: int
    max_tokens: int
    reserved_output_tokens: int
    """Predicted output, at most max_tokens."""
    num_requests: int = 1
    cached_tokens: int = 0
    """Of the prompt, known not to be computed."""
    engine_s: float = 0.0
    """Engine time that one takes from those behind it in the queue."""
    time_left_s: float | None = None
    """Until the deadline; None: there is none."""
    forecast: Forecast | None = None
    """None: nobody can say; the deadline is not judged."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the engines behind the caller can do, as far as it knows."""

    max_model_len: int | None = None
    capacity_tokens: int | None = None
    """The largest KV pool."""
    max_uncached_tokens: int | None = None
    """Of one prompt; None: no bound."""
    can_start: bool = True
    routed: Collection[str] = ()
    """Reasons of refusals after which another replica or a fallback may take the ask."""
    takes_lost: bool = False
    """A lost deadline is no reason to refuse: the request is served as well as can be."""


class Attainment(StrEnum):
    ATTAINABLE = "attainable"
    DOUBTFUL = "doubtful"
    LOST = "lost"


def attainment(forecast: Forecast | None, time_left_s: float | None) -> Attainment:
    """SPEC B7: slack above the margin, within it, or below it."""
    if time_left_s is None:
        return Attainment.ATTAINABLE
    if time_left_s <= 0:
        return Attainment.LOST
    if forecast is None:
        return Attainment.ATTAINABLE
    slack_s = time_left_s - forecast.total_s
    if slack_s >= forecast.margin_s:
        return Attainment.ATTAINABLE
    return Attainment.DOUBTFUL if slack_s >= -forecast.margin_s else Attainment.LOST


class TicketState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    LEFT = "left"


@dataclass(slots=True, eq=False)
class Ticket:
    """One admitted request's part of the accounts. Opaque; equals only itself."""

    tenant: str
    prompt_tokens: int
    waiting_tokens: int
    kv_tokens: int
    engine_us: int
    state: TicketState = TicketState.WAITING
    added_tokens: int = 0
    """Input that tools have added."""
    paused: bool = False
    """Waits for a tool, and counts as no request in progress."""
    vacated: bool = False
    """Waits for a tool, and holds no KV."""

    @property
    def rate_tokens(self) -> int:
        """What the tenant's bucket pays at first."""
        return self.kv_tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """ACCEPT and QUEUE are booked and have one ticket a request; ROUTE and REJECT have booked nothing."""

    action: Action
    reason: Reason
    retry_after_s: float = 0.0
    best_effort: bool = False
    tickets: tuple[Ticket, ...] = ()

    @property
    def admitted(self) -> bool:
        return self.action in (Action.ACCEPT, Action.QUEUE)


@dataclass(frozen=True, slots=True)
class Held:
    """What is booked now; all zero when every ticket has left."""

    live_requests: int
    waiting_requests: int
    waiting_tokens: int
    reserved_kv_tokens: int
    queue_s: float
    paused_requests: int = 0
    """Those that wait for tools; not among the live ones."""

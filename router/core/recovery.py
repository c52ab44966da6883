"""What becomes of a request whose hand-off failed: one way back, by policy, deadline and predicted time (SPEC D8).

    retry            the prefill worker still has the KV: another reader adopts it from there. While its leg lives, its
                     lease was not revoked, and a decode worker is there with which it has failed at most once.
    other_prefill    a prefill worker that has not failed this request computes it again: another hand-off.
    local_recompute  one worker computes everything so far and goes on with it: nothing moves.
    fail             the client gets an error at once.

`auto` takes the first that is predicted to end before the deadline, in this order, else the quickest; the last attempt
goes to one worker where there is one, since another failure would be the end. Any other policy names what is tried
first; where that is not possible the others follow in order, and the deadline is not looked at.

What ends in good order is not judged here, nor what fails behind the hand-off: a request that loses its worker while it
decodes gets a new plan, whatever the policy. Does not: send, book, count attempts, or change the flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from router.core.cost import MEMORY_WAIT, TRANSFER
from router.core.decision import Decision, RouteAsk
from router.core.fleet_table import PREFILL
from router.core.placement import Mode, WorkerKey
from router.core.router import Router


class OnFailure(StrEnum):
    AUTO = "auto"
    RETRY = "retry"
    OTHER_PREFILL = "other_prefill"
    LOCAL_RECOMPUTE = "local_recompute"
    FAIL = "fail"


ORDER = (OnFailure.RETRY, OnFailure.OTHER_PREFILL, OnFailure.LOCAL_RECOMPUTE)
MOST_OF_ONE_PAIR = 2
"""Hand-offs of one request between the same two workers that may fail."""
REVOKED = "lease_revoked"
LEASE_FAILURES = frozenset({"lease_broken", REVOKED, "lease_refused", "transfer_failed"})
"""The worker is fine, the hand-off is not."""
DECODE_LOST = "decode_lost"
MOVED = "moved"
"""Nothing has failed: a worker was to be left."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A hand-off that is over without its reader having the KV."""

    cause: str
    """One of LEASE_FAILURES, DECODE_LOST or MOVED."""
    source: WorkerKey
    """Where the prompt was computed."""
    has_kv: bool
    """Its leg lives, and another reader may have what it has computed."""
    prefill_left_ms: float
    """Predicted, until it has the first token."""


@dataclass(frozen=True, slots=True)
class Option:
    """A way that is possible. Milliseconds, predicted: to the next token without the transfer, the transfer, and from
    the next token to the end."""

    way: OnFailure
    plan: Decision
    first_ms: float
    transfer_ms: float
    rest_ms: float

    @property
    def predicted_ms(self) -> float:
        return self.first_ms + self.transfer_ms + self.rest_ms


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was chosen, and enough to say why."""

    policy: OnFailure
    cause: str
    options: tuple[Option, ...]
    """In the order in which they were looked at."""
    chosen: Option
    time_left_ms: float


def order_of(policy: OnFailure) -> tuple[OnFailure, ...]:
    """FAIL is not among them: who wants that has failed already, unless nothing has."""
    first = (policy,) if policy in ORDER else ()
    return (*first, *(way for way in ORDER if way not in first))


def recover(
    policy: OnFailure,
    failure: Failure,
    failed_pairs: Mapping[tuple[WorkerKey, WorkerKey], int],
    ask: RouteAsk,
    router: Router,
    now: float,
    attempts_left: int,
) -> Recovery | None:
    """The way to go; None while no worker can take the request. `ask`: of the request as it stands, with its time left.

    failed_pairs: how often a hand-off of this request failed, by (prefill worker, decode worker). attempts_left: this
    one included, at least 1.
    """
    ask = replace(ask, may_wait=False)
    made = (_option(way, failure, failed_pairs, ask, router, now) for way in order_of(policy))
    options = tuple(option for option in made if option is not None)
    if not options:
        return None
    time_left_ms = float("inf") if ask.time_left_s is None else ask.time_left_s * 1e3
    chosen = choose(policy, options, time_left_ms, attempts_left)
    return Recovery(policy, failure.cause, options, chosen, time_left_ms)


def choose(policy: OnFailure, options: tuple[Option, ...], time_left_ms: float, attempts_left: int) -> Option:
    """One of at least one, which are in the policy's order."""
    if policy in ORDER:
        return options[0]
    local = next((option for option in options if option.way is OnFailure.LOCAL_RECOMPUTE), None)
    if attempts_left <= 1 and local is not None:
        return local
    in_time = (option for option in options if option.predicted_ms <= time_left_ms)
    return next(in_time, None) or min(options, key=lambda option: option.predicted_ms)


def _option(
    way: OnFailure,
    failure: Failure,
    failed_pairs: Mapping[tuple[WorkerKey, WorkerKey], int],
    ask: RouteAsk,
    router: Router,
    now: float,
) -> Option | None:
    if way is OnFailure.RETRY:
        is_there = failure.has_kv and router.table.slot(failure.source) is not None
        return _retry(failure, failed_pairs, ask, router, now) if is_there else None
    if way is OnFailure.OTHER_PREFILL:
        failed = {source for source, _ in failed_pairs}
        ask = replace(ask, mode=Mode.DISAGGREGATED, excluded={*ask.excluded, *failed})
    else:
        # Who took a lease back was short of memory.
        short = {failure.source} if failure.cause == REVOKED else set()
        ask = replace(ask, mode=Mode.COLOCATED, avoided={*ask.avoided, *short})
    plan = router.choose(ask, now)
    if plan is None:
        return None
    rest_ms = _rest_ms(ask, router, plan.worker if plan.whole else None)
    return Option(way, plan, plan.predicted_ttft_ms, plan.terms[TRANSFER], rest_ms)


def _retry(
    failure: Failure,
    failed_pairs: Mapping[tuple[WorkerKey, WorkerKey], int],
    ask: RouteAsk,
    router: Router,
    now: float,
) -> Option | None:
    """Rather with a decode worker that has not failed. All that it lacks moves, and nothing is computed beside it."""
    times = {reader: n for (source, reader), n in failed_pairs.items() if source == failure.source}
    worn = {reader for reader, n in times.items() if n >= MOST_OF_ONE_PAIR}
    ask = replace(ask, excluded={*ask.excluded, *worn}, avoided={*ask.avoided, *times})
    plan = router.choose_decode(ask, failure.source, now)
    if plan is None:
        return None
    table = router.table
    slot = table.slot(plan.worker)
    assert slot is not None
    missing = max(-(-ask.num_tokens // max(1, int(table.block_size[slot]))) - plan.held_blocks, 1)
    block_ms = float(router.lanes.block_ms(table.lane[slot : slot + 1], table.num_lanes)[0])
    first_ms = failure.prefill_left_ms + plan.terms[MEMORY_WAIT]
    return Option(OnFailure.RETRY, plan, first_ms, missing * block_ms, _rest_ms(ask, router, plan.worker))


def _rest_ms(ask: RouteAsk, router: Router, worker: WorkerKey | None) -> float:
    """Of the tokens behind the next one, at that worker; None: at the quickest that may decode for a pair."""
    table, n = router.table, router.table.num_slots
    context = ask.num_tokens + ask.expected_output_tokens // 2
    token_ms = table.steps.next_step_ms[:n] + table.steps.context_ms[:n] * context
    if worker is None:
        token_ms = token_ms[table.live[:n] & ~table.by_role[PREFILL]]
        each = float(token_ms.min()) if len(token_ms) else 0.0
    else:
        slot = table.slot(worker)
        each = 0.0 if slot is None else float(token_ms[slot])
    return each * (ask.expected_output_tokens - 1)

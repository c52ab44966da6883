"""The gateway's gate: what it asks `headrace.core.admission`, with which predictions, and the words of a refusal."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from headrace.core.admission import Admission
from headrace.core.admission_records import Ask, Decision, QueueLimits, Reason, Room, TenantLimits, Ticket
from headrace.core.fairness import ServiceCounters
from headrace.core.lengths import OutputLengths
from headrace.core.records import FinishReason
from headrace.errors import Code, HeadraceError, invalid
from router.answer import FINISH_NAMES
from router.api import GenerationSpec
from router.core.decision import RouteAsk
from router.core.flight import Flight
from router.core.foresight import Foresight, Outlook, known_tokens
from router.core.placement import Mode
from router.core.router import Router
from router.spec import EVERY_OTHER, GatewaySpec, TenantSpec

log = logging.getLogger("headrace.router.gate")

_TEXTS = {
    Reason.TENANT_CONCURRENCY: "at most {tenant.max_concurrent_requests} requests of a tenant may be in progress",
    Reason.TENANT_KV_BYTES: "a tenant's requests may hold at most {tenant.max_live_kv_bytes} bytes of KV",
    Reason.TENANT_RATE: "a tenant may use {tenant.tokens_per_s:g} tokens a second",
    Reason.CONCURRENCY: "at most {gateway.max_live_requests} requests may be in progress",
    Reason.QUEUE_FULL: "at most {gateway.max_waiting_requests} requests may wait",
    Reason.WAITING_TOKENS: "at most {gateway.max_waiting_tokens} prompt tokens may wait",
    Reason.RESERVED_KV: "at most {gateway.max_reserved_kv_tokens} tokens of KV may be reserved",
    Reason.QUEUE_SECONDS: "the queue may be at most {gateway.max_queue_s:g} s of prefill long",
    Reason.DEADLINE_LOST: "the deadline cannot be kept with the work that is ahead",
}


@dataclass(frozen=True, slots=True)
class Admitted:
    """One ticket a choice; give each back with `Gate.left`."""

    tickets: tuple[Ticket, ...]
    reserved_output_tokens: int
    """Predicted length of each choice's output."""
    tenant_indices: tuple[int, ...] = ()
    """One a choice, of `Gate.service`; `Gate.left` gives each back."""
    outlook: Outlook | None = None
    """What was foreseen of a choice, where anything asks for that."""
    best_effort: bool = False
    """Its deadline is doubtful, or lost."""


class Gate:
    """Limits, accounts and what was learned of outputs and speed, of one gateway."""

    def __init__(self, spec: GatewaySpec) -> None:
        self.lengths = OutputLengths()
        self.service = ServiceCounters(spec.service)
        """What each tenant has had of prefill and decode workers together; workers are told with each request."""
        self.decisions: Counter[tuple[str, str]] = Counter()
        """Choices by (action, reason) since the start."""
        self.foresight = Foresight()
        self._spec = spec
        self._mode = Mode(spec.mode)
        self._routed = spec.degradation.routed
        self._foresees = spec.refuse_lost_deadlines or spec.max_queue_s is not None
        limits = {name: _limits(tenant) for name, tenant in spec.tenants.items()}
        queue = QueueLimits(
            max_live_requests=spec.max_live_requests,
            max_waiting_requests=spec.max_waiting_requests,
            max_waiting_tokens=spec.max_waiting_tokens,
            max_reserved_kv_tokens=spec.max_reserved_kv_tokens,
            max_queue_s=spec.max_queue_s,
        )
        self.admission = Admission(queue, limits.get(EVERY_OTHER), limits, spec.kv_bytes_per_token)

    def enter(
        self,
        spec: GenerationSpec,
        keys: tuple[int, ...],
        router: Router,
        can_start: bool,
        time_left_s: float,
        now: float,
    ) -> Admitted:
        """Books the whole call. Raises HeadraceError, having booked nothing, with reason and retry time.

        keys: of the prompt's full blocks, as the router has them.
        """
        max_tokens = max(params.max_tokens for params in spec.sampling)
        num_prompt = len(spec.prompt_ids)
        shortest, reserved = self._output_range(spec, max_tokens)
        room = Room(
            max_model_len=self._spec.max_model_len,
            capacity_tokens=router.most_capacity_tokens,
            max_uncached_tokens=self._spec.endpoint(spec.endpoint).max_uncached_tokens,
            can_start=can_start,
            routed=self._routed if spec.may_fall_back else (),
            takes_lost=self._spec.degradation.lost_deadline == "best_effort",
        )
        outlook = None
        if self._foresees:
            outlook = router.outlook(self._route_ask(spec, keys, max_tokens, reserved, time_left_s), now)
        forecast = self.foresight.forecast(outlook, shortest, reserved)
        # A request alone delays nobody. Letting it in is also the way out of forecasts from worse times, whose errors
        # only completed requests can show.
        judged = self._spec.refuse_lost_deadlines and self.admission.held.live_requests > 0
        ask = Ask(
            tenant=spec.tenant,
            prompt_tokens=num_prompt,
            max_tokens=max_tokens,
            reserved_output_tokens=reserved,
            num_requests=len(spec.sampling),
            cached_tokens=known_tokens(router.table, router.index, keys, num_prompt),
            engine_s=0.0 if forecast is None else forecast.prefill_s,
            time_left_s=time_left_s if judged else None,
            forecast=forecast,
        )
        decision = self.admission.enter(ask, room, now)
        self.decisions[decision.action, decision.reason] += ask.num_requests
        if not decision.admitted:
            log.info(
                "refused tenant=%s reason=%s retry_after_s=%.3f", spec.tenant, decision.reason, decision.retry_after_s
            )
            raise self._refusal(spec, ask, room, decision)
        if decision.best_effort:
            log.info("best_effort tenant=%s time_left_s=%.3f", spec.tenant, time_left_s)
        indices = tuple(self.service.enter(spec.tenant) for _ in spec.sampling)
        return Admitted(decision.tickets, reserved, indices, outlook, decision.best_effort)

    def refused(self, reason: str, num_requests: int) -> None:
        """Counts a refusal that needed no account."""
        self.decisions["reject", reason] += num_requests

    def started(self, ticket: Ticket, now: float) -> None:
        self.admission.started(ticket, now)

    def paused(self, ticket: Ticket, keeps_kv: bool, now: float) -> None:
        """It waits for a tool."""
        self.admission.pause(ticket, keeps_kv, now)

    def resumed(self, ticket: Ticket, more_tokens: int, now: float) -> None:
        self.admission.resume(ticket, more_tokens, now)

    def left(self, ticket: Ticket, tenant_index: int, output_tokens: int, now: float) -> None:
        self.admission.leave(ticket, now, output_tokens)
        self.service.leave(tenant_index)

    def ended(self, spec: GenerationSpec, flight: Flight, outlook: Outlook | None, reason: FinishReason) -> None:
        """Learns from a choice: from one that ended in good order, and of times from one that missed its deadline."""
        num_output, line = len(flight.output_ids), flight.timeline
        is_good = reason in FINISH_NAMES
        if is_good:
            capped = reason is FinishReason.LENGTH
            self.lengths.observe(spec.endpoint, spec.tenant, spec.task, num_output, capped=capped)
        if outlook is None or flight.attempt > 1:
            return
        if is_good and line.first_token is not None:
            end = dict(line.to_end())
            rest_s = end["exposed_hand_off"] + end["decode_queue"] + end["decode"]
            self.foresight.completed(outlook, num_output, line.first_token - line.accepted, rest_s)
        elif reason is FinishReason.DEADLINE and line.first_token is None and line.complete is not None:
            self.foresight.missed(outlook, line.complete - line.accepted)

    def _route_ask(
        self, spec: GenerationSpec, keys: tuple[int, ...], max_tokens: int, output_tokens: int, time_left_s: float
    ) -> RouteAsk:
        """What its first plan will be asked for."""
        return RouteAsk(
            request_id="",
            num_tokens=len(spec.prompt_ids),
            keys=keys,
            max_tokens=max_tokens,
            expected_output_tokens=output_tokens,
            mode=self._mode,
            tenant=spec.tenant,
            session=spec.session,
            time_left_s=time_left_s,
            no_cache=spec.no_cache,
            may_wait=True,
        )

    def _output_range(self, spec: GenerationSpec, max_tokens: int) -> tuple[int, int]:
        """Shortest and longest output that is likely, in tokens; the longest is what is reserved."""
        params = spec.sampling[0]
        if params.ignore_eos and not (spec.stop or params.stop_token_ids):
            return max_tokens, max_tokens
        quantile, key = self._spec.output_quantile, (spec.endpoint, spec.tenant, spec.task)
        longest = max(self.lengths.predict(*key, max_tokens, quantile), params.min_tokens)
        shortest = max(self.lengths.quantile(*key, 1.0 - quantile) or 1, params.min_tokens)
        return min(shortest, longest), longest

    def _refusal(self, spec: GenerationSpec, ask: Ask, room: Room, decision: Decision) -> HeadraceError:
        reason = decision.reason
        if reason is Reason.UNCACHED_TOKENS:
            return invalid(
                spec.prompt_field,
                f"{ask.prompt_tokens - ask.cached_tokens} of its {ask.prompt_tokens} tokens are not cached; this "
                f"endpoint takes at most {room.max_uncached_tokens} such tokens",
                reason=reason,
            )
        if reason is Reason.TOO_LONG:
            return invalid(
                "max_tokens",
                f"this model's maximum context length is {room.max_model_len} tokens; the prompt has "
                f"{ask.prompt_tokens} and {ask.max_tokens} of output were asked for",
                reason=reason,
            )
        if reason is Reason.TOO_LARGE:
            over = ask.prompt_tokens + ask.max_tokens - (room.capacity_tokens or 0)
            text = (
                f"prompt ({ask.prompt_tokens} tokens) + max_tokens exceed the KV pool of {room.capacity_tokens} tokens "
                f"by {over}"
                if room.capacity_tokens is not None and over > 0
                else "this call alone is more than the tenant, or the deployment, may have in progress; lower "
                "max_tokens or n"
            )
            return invalid("max_tokens", text, reason=reason)
        tenant = self._spec.tenants.get(ask.tenant) or self._spec.tenants.get(EVERY_OTHER)
        return HeadraceError(
            Code.RESOURCE_EXHAUSTED,
            _TEXTS[reason].format(gateway=self._spec, tenant=tenant),
            retry_after_s=decision.retry_after_s or None,
            reason=reason,
        )


def _limits(tenant: TenantSpec) -> TenantLimits:
    return TenantLimits(**tenant.model_dump())

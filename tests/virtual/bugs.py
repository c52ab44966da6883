"""Positive controls (CASES law i): one bug a law, each put into production's code for a while."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import PropertyMock, patch

from headrace.core.records import FinishReason
from kvtransfer import adoption
from kvtransfer.core.handoff import Handoff
from kvtransfer.core.lease import Lease
from router import answer
from router.api import Usage
from router.core.flight import Flight
from router.core.legs import Action, Deliver, Leg
from router.gateway import Gateway
from tests.virtual.wire import Wire
from workers.core.plan import StepPlan, StepResult
from workers.core.request import Request
from workers.core.scheduler import Scheduler
from workers.hub import Hub
from workers.runner.fake import FakeRunner

Plant = Callable[[], AbstractContextManager[Any]]


def deadlines_that_are_forgotten() -> AbstractContextManager[Any]:
    return patch.object(Flight, "deadline", lambda self, now: [])


def blocks_that_are_announced_before_they_are_complete() -> AbstractContextManager[Any]:
    def early(hub: Hub, request: Request) -> list[int]:
        done = hub._scheduler.complete_tokens(request)
        return request.block_ids[: -(-done // hub._block_size)]

    return patch.object(Hub, "_complete_blocks", early)


def targets_of_abandoned_reads_that_are_freed_at_once() -> AbstractContextManager[Any]:
    return patch.object(Handoff, "quarantined", PropertyMock(return_value=()))


def digests_that_nobody_compares() -> AbstractContextManager[Any]:
    return patch.object(adoption, "changed_blocks", lambda *_: [])


def repeats_that_are_delivered() -> AbstractContextManager[Any]:
    token = Flight.token

    def careless(self: Flight, leg: Leg, offset: int, token_id: int, now: float, *rest: Any) -> list[Action]:
        if leg.live and offset < len(self.output_ids):
            return [Deliver((token_id,))]
        return token(self, leg, offset, token_id, now, *rest)

    return patch.object(Flight, "token", careless)


def quarantine_that_never_ends() -> AbstractContextManager[Any]:
    return patch.object(Scheduler, "release_quarantine", lambda self, key: None)


def bookings_that_are_not_undone() -> AbstractContextManager[Any]:
    left = Gateway._forget

    def forgetful(self: Gateway, branch: Any) -> None:
        if branch.flight.attempt > 1:
            self._live.pop(branch.flight.request_id, None)
        else:
            left(self, branch)

    return patch.object(Gateway, "_forget", forgetful)


def usage_that_is_one_too_high() -> AbstractContextManager[Any]:
    return patch.object(answer, "Usage", lambda prompt, output, cached: Usage(prompt, output + 1, cached))


def cancellations_that_hit_a_neighbour() -> AbstractContextManager[Any]:
    ended = Gateway._ended

    def contagious(self: Gateway, branch: Any, reason: FinishReason, error: Any) -> None:
        ended(self, branch, reason, error)
        if reason is FinishReason.CANCELLED:
            for other in list(self._live.values()):
                if other is not branch and other.spec.tenant != branch.spec.tenant:
                    self._act(other, other.flight.cancel(self._clock()))
                    break

    return patch.object(Gateway, "_ended", contagious)


def a_runner_that_rots() -> AbstractContextManager[Any]:
    run = FakeRunner.run

    def rotten(self: FakeRunner, plan: StepPlan) -> StepResult:
        result = run(self, plan)
        if plan.step_id > 30:
            result.token_ids[:] = [(token + 1) % self.vocab_size for token in result.token_ids]
        return result

    return patch.object(FakeRunner, "run", rotten)


def a_cut_that_breaks_nothing() -> AbstractContextManager[Any]:
    return patch.object(Wire, "cut", lambda self, link: 0)


def queued_requests_that_nobody_looks_at() -> AbstractContextManager[Any]:
    return patch.object(Gateway, "_place_queued", lambda self: None)


def holders_that_do_not_say_held() -> AbstractContextManager[Any]:
    return patch.object(Lease, "verify", lambda self, lease_id, incarnation: [])


BUGS: dict[str, list[Plant]] = {
    "a": [deadlines_that_are_forgotten],
    "b": [
        blocks_that_are_announced_before_they_are_complete,
        targets_of_abandoned_reads_that_are_freed_at_once,
        digests_that_nobody_compares,
        repeats_that_are_delivered,
    ],
    "c": [quarantine_that_never_ends, bookings_that_are_not_undone],
    "d": [usage_that_is_one_too_high],
    "e": [cancellations_that_hit_a_neighbour],
    "f": [a_runner_that_rots],
    "g": [a_cut_that_breaks_nothing],
    "h": [queued_requests_that_nobody_looks_at, holders_that_do_not_say_held],
}

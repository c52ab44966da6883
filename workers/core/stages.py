"""Where a request's time goes on one worker: one stage runs at any moment, so that the stages sum to the time passed.

    not adopted:  queue -> prefill -> (sampling) -> decode       first token of a hand_off request: the clock stops
    adopted:      (stopped until activated) -> queue -> decode
    any stage after queue -> preempted -> back to the stage that it left
    decode -> tool_wait -> queue

Identity, kept by construction (a stage ends at the instant at which the next one begins):

    queue_s + prefill_s + sampling_s + decode_s + preempted_s + tool_wait_s = stop - start
        start: accepted, or activated when adopted
        stop:  end of the request here, or first token of a hand_off request

`hand_off_s` (hand-off record received -> activated) lies before an adopted request's start; the shell fills it.
Does not read a clock: every call takes `now`, monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.records import WorkerLedger


class Stage(StrEnum):
    """Each value is the name of the ledger's field that the stage adds to."""

    QUEUE = "queue_s"
    PREFILL = "prefill_s"
    DECODE = "decode_s"
    PREEMPTED = "preempted_s"
    TOOL_WAIT = "tool_wait_s"


@dataclass(slots=True)
class StageClock:
    """Adds durations to `ledger`. Instants that lie before the last one count as equal to it: callers read the time
    before they take the worker's lock, so `now` may arrive out of order."""

    ledger: WorkerLedger = field(default_factory=WorkerLedger)
    stage: Stage | None = None
    """None: stopped."""
    since: float = 0.0

    def enter(self, stage: Stage | None, now: float, sampling_s: float = 0.0) -> None:
        """End the running stage at `now` and begin `stage`. `sampling_s` of it goes to `ledger.sampling_s` instead."""
        if self.stage is not None:
            now = max(now, self.since)
            spent = now - self.since
            sampling = min(sampling_s, spent)
            self.ledger.sampling_s += sampling
            setattr(self.ledger, self.stage, getattr(self.ledger, self.stage) + spent - sampling)
        self.stage = stage
        self.since = now

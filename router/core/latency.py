"""The two latency ledgers of one branch (SPEC A5): where the time to the first token went, and from it to the end.

Workers report durations, the gateway knows instants. What the stages of the workers do not explain is the way between
the processes: `transport` before the first token, `detokenize_and_stream` after it. So each ledger sums to its interval
by construction, and a negative rest would show that a worker counted time twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.core.records import WorkerLedger

Stages = list[tuple[str, float]]


@dataclass(slots=True)
class Timeline:
    """Instants in seconds on the gateway's clock; None until they happen."""

    received: float = 0.0
    tokenized: float = 0.0
    accepted: float = 0.0
    first_submit: float | None = None
    last_submit: float | None = None
    first_token: float | None = None
    second_token: float | None = None
    last_token: float | None = None
    complete: float | None = None
    lost_s: float = 0.0
    """Time of plans given up after the first token, up to the next plan's Submit."""
    paused_at: float | None = None
    """While a tool runs."""
    tool_wait_s: float = 0.0
    _lost_at: float | None = None
    _hand_off_at: float = 0.0
    """When the current hand-off began, if one failed before it."""
    _plan_wait_s: float = 0.0
    """Part of `tool_wait_s` that lies in the current plan."""
    _past_wait_s: float = 0.0
    """The part in plans whose workers' accounts do not count."""
    _past_decode_s: float = 0.0
    """What plans decoded that a tool's answer ended."""
    _past_again: tuple[float, float] = (0.0, 0.0)
    """Queue and prefill of such plans, but for the first."""
    ended_paused: bool = False
    _goes_on: bool = False
    """The current plan was made to go on behind a tool's answer; nothing had failed."""
    _first_here: WorkerLedger | None = None
    """The current plan's account up to its first token."""
    _first_submit_of_token: float | None = None
    _prefill: WorkerLedger = field(default_factory=WorkerLedger)
    _decode: WorkerLedger = field(default_factory=WorkerLedger)
    _has_decode: bool = False
    _recompute_s: float = 0.0

    # ---- facts

    def submitted(self, now: float) -> None:
        if self.first_submit is None:
            self.first_submit = now
        if self._lost_at is not None:
            self.lost_s += now - self._lost_at
            self._lost_at = None
        self.last_submit = now
        self._first_here = None

    def attempt_lost(self, now: float) -> None:
        """The plan was given up; what it did after the first token shows as `preempted`."""
        if self.first_token is not None and self.last_submit is not None:
            self._lost_at = max(self.last_submit, self.first_token, self._hand_off_at)
            # All of it is computed again, what went on behind an answer too; but a tool's time was not lost.
            self.lost_s -= self._plan_wait_s
            self._past_wait_s += self._plan_wait_s
            self._plan_wait_s = 0.0
        self._goes_on, self._first_here = False, None

    def hand_off_lost(self, now: float) -> None:
        """It begins anew, with what the plan's prefill has; the time of the one that failed shows as `preempted`."""
        if self.first_token is not None and self.last_submit is not None:
            self.lost_s += now - max(self.last_submit, self.first_token, self._hand_off_at)
            self._hand_off_at = now

    def paused(self, now: float) -> None:
        self.paused_at = now

    def resumed(self, now: float) -> None:
        """The tool's answer is here."""
        if self.paused_at is not None:
            self.tool_wait_s += now - self.paused_at
            self._plan_wait_s += now - self.paused_at
            self.paused_at = None

    def replaced(self, now: float) -> None:
        """Behind a tool's answer a new plan goes on: the last one's worker is gone, with its account."""
        began = max(self.last_submit or 0.0, self.first_token or 0.0)
        again = self._again
        self._past_again = (self._past_again[0] + again[0], self._past_again[1] + again[1])
        recomputed_s = 0.0 if self._is_first_attempt() or self._goes_on else self._recompute_s
        self._past_decode_s += max(0.0, now - began - self._plan_wait_s - sum(again) - recomputed_s)
        self._past_wait_s += self._plan_wait_s
        self._plan_wait_s = 0.0
        self._lost_at = now
        self._goes_on, self._first_here = True, None

    def token(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
            self._first_submit_of_token = self.last_submit
        elif self.second_token is None:
            self.second_token = now
        self.last_token = now

    def first_ledger(self, ledger: WorkerLedger) -> None:
        """The prefill worker's part, of the attempt that gave the first token; a later attempt's is recomputation."""
        self._first_here = ledger
        if self._is_first_attempt():
            self._prefill = ledger
        elif not self._goes_on:
            self._recompute_s = ledger.queue_s + ledger.prefill_s + ledger.sampling_s + ledger.preempted_s

    def last_ledger(self, ledger: WorkerLedger) -> None:
        """The decode worker's part."""
        self._decode = ledger
        self._has_decode = True

    def whole_ledger(self, ledger: WorkerLedger) -> None:
        """One worker did both. Without an account of its first token, all of its queue and prefill was before that, and
        its preemptions after, where they nearly always are.
        """
        first = self._first_here
        if first is None:
            first = WorkerLedger(
                queue_s=ledger.queue_s,
                prefill_s=ledger.prefill_s,
                sampling_s=ledger.sampling_s,
                cached_tokens=ledger.cached_tokens,
                computed_tokens=ledger.computed_tokens,
            )
            self.first_ledger(first)
        self.last_ledger(
            WorkerLedger(
                queue_s=ledger.queue_s - first.queue_s,
                prefill_s=ledger.prefill_s - first.prefill_s,
                decode_s=ledger.decode_s,
                preempted_s=ledger.preempted_s - first.preempted_s,
                tool_wait_s=ledger.tool_wait_s,
            )
        )

    def ended(self, now: float) -> None:
        if self.complete is None:
            self.ended_paused = self.paused_at is not None
            self.resumed(now)
            self.complete = now

    @property
    def _again(self) -> tuple[float, float]:
        """Queue and prefill of the current plan, which goes on behind a tool's answer."""
        p = self._first_here
        if p is None or not self._goes_on:
            return 0.0, 0.0
        return p.queue_s, p.prefill_s + p.sampling_s + p.preempted_s

    def _is_first_attempt(self) -> bool:
        return self.first_token is None or self.last_submit == self._first_submit_of_token

    # ---- ledgers, in seconds

    def to_first_token(self) -> Stages:
        """Stages from received to the first token; [] when there was none."""
        if self.first_token is None or self.first_submit is None:
            return []
        submit = self._first_submit_of_token or self.first_submit
        p = self._prefill
        spent = p.queue_s + p.prefill_s + p.sampling_s + p.preempted_s
        return [
            ("tokenize", self.tokenized - self.received),
            ("gateway", self.accepted - self.tokenized),
            ("router_queue", self.first_submit - self.accepted),
            ("prefill_queue", p.queue_s),
            ("prefill", p.prefill_s),
            ("preempted", p.preempted_s + (submit - self.first_submit)),
            ("sampling", p.sampling_s),
            ("transport", (self.first_token - submit) - spent),
        ]

    def to_end(self) -> Stages:
        """Stages from the first token to the end; [] when there was none."""
        if self.first_token is None or self.complete is None:
            return []
        d = self._decode
        preempted = d.preempted_s + self.lost_s + self._recompute_s
        queue_s, prefill_s = (now + past for now, past in zip(self._again, self._past_again, strict=True))
        # A tool's answer is computed behind the first token: its prefill counts as what comes out of it.
        decode_s = d.decode_s + d.prefill_s + prefill_s + self._past_decode_s
        tool_wait_s = d.tool_wait_s + self._past_wait_s
        if not self._has_decode and self.last_token is not None:
            # Ended by the gateway (stop string): the worker's account never came.
            tool_wait_s = self.tool_wait_s
            waited_s = tool_wait_s - (self.complete - self.last_token if self.ended_paused else 0.0)
            decode_s = max(0.0, self.last_token - self.first_token - preempted - queue_s - waited_s)
        stages = [
            ("exposed_hand_off", d.hand_off_s),
            ("decode_queue", d.queue_s + queue_s),
            ("decode", decode_s),
            ("preempted", preempted),
            ("tool_wait", tool_wait_s),
        ]
        rest = (self.complete - self.first_token) - sum(seconds for _, seconds in stages)
        return [*_after_first_token(stages, -rest), ("detokenize_and_stream", max(rest, 0.0))]

    @property
    def cached_tokens(self) -> int:
        return self._prefill.cached_tokens

    @property
    def bytes_moved(self) -> int:
        return self._decode.bytes_moved

    @property
    def lane(self) -> str:
        return self._decode.lane


def _after_first_token(stages: Stages, overlap: float) -> Stages:
    """Workers begin to count when the token is sampled, the client's ledger when the gateway has it: what they count
    more than the interval holds lies before it, in the earliest stages, and is in `transport` already.
    """
    kept = []
    for name, seconds in stages:
        cut = min(seconds, max(overlap, 0.0))
        overlap -= cut
        kept.append((name, seconds - cut))
    return kept

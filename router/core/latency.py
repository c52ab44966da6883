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
    _lost_at: float | None = None
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

    def attempt_lost(self, now: float) -> None:
        """The plan was given up; what it did after the first token shows as `preempted`."""
        if self.first_token is not None and self.last_submit is not None:
            self._lost_at = max(self.last_submit, self.first_token)

    def token(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
            self._first_submit_of_token = self.last_submit
        elif self.second_token is None:
            self.second_token = now
        self.last_token = now

    def first_ledger(self, ledger: WorkerLedger) -> None:
        """The prefill worker's part, of the attempt that gave the first token; a later attempt's is recomputation."""
        if self._is_first_attempt():
            self._prefill = ledger
        else:
            self._recompute_s = ledger.queue_s + ledger.prefill_s + ledger.sampling_s + ledger.preempted_s

    def last_ledger(self, ledger: WorkerLedger) -> None:
        """The decode worker's part."""
        self._decode = ledger
        self._has_decode = True

    def whole_ledger(self, ledger: WorkerLedger) -> None:
        """One worker did both. Its preemptions are counted after the first token, where they nearly always are."""
        self.first_ledger(
            WorkerLedger(
                queue_s=ledger.queue_s,
                prefill_s=ledger.prefill_s,
                sampling_s=ledger.sampling_s,
                cached_tokens=ledger.cached_tokens,
                computed_tokens=ledger.computed_tokens,
            )
        )
        self.last_ledger(
            WorkerLedger(decode_s=ledger.decode_s, preempted_s=ledger.preempted_s, tool_wait_s=ledger.tool_wait_s)
        )

    def ended(self, now: float) -> None:
        if self.complete is None:
            self.complete = now

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
        decode_s = d.decode_s
        if not self._has_decode and self.last_token is not None:
            # Ended by the gateway (stop string): the worker's account never came.
            decode_s = self.last_token - self.first_token - preempted
        stages = [
            ("exposed_hand_off", d.hand_off_s),
            ("decode_queue", d.queue_s),
            ("decode", decode_s),
            ("preempted", preempted),
            ("tool_wait", d.tool_wait_s),
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

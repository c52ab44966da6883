"""One adopted request, or one fetch of a cached prefix, at its reader. Facts in, actions out.

    QUEUED --reserved--> OPENING --opened--> PULLING --record, all read--> VERIFYING --held--> ACTIVE
      |                     |                   |                             |
      +---------------------+-------------------+-----------------------------+-- cancel --> CANCELLED
                            +-------------------+-----------------------------+-- refused, revoked, broken, unreachable,
                                                                   pull_failed, protocol fault --> FAILED

At most one read is in flight; each takes everything announced since the last one. Reads before `Held` are bytes, not
KV: only the holder's answer after the last read makes them usable. A read that failed, and can write no more, is made
again up to `max_retries` times in all (perhaps on another lane: the shell's choice). One given up while the transport
still may write quarantines its target blocks; `End` names them, and `ReleaseQuarantine` follows when that read is
terminal. All other reserved blocks are the request's (ACTIVE) or free (`End`).

A fetch differs in the record alone: it has no output, and whole blocks, perhaps fewer than were reserved. ACTIVE means
that these blocks are verified.

A local contradiction raises InvariantError; one from the holder fails this hand-off only. Does not: know time or
sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from headrace.errors import InvariantError
from kvtransfer.core.lease import HandOffRecord, whole_blocks


@dataclass(frozen=True, slots=True)
class OpenLease:
    pass


@dataclass(frozen=True, slots=True)
class Pull:
    """Read holder's blocks into own ones, pairwise."""

    action_id: int
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    digests: tuple[int, ...] = ()
    """What the holder has said of the bytes of each block; none: it did not."""
    retry: int = 0
    """0: the first read of these blocks."""


@dataclass(frozen=True, slots=True)
class AbandonPull:
    action_id: int


@dataclass(frozen=True, slots=True)
class SendPulled:
    num_blocks: int
    """Announced blocks that need no more reading, from the first on."""


@dataclass(frozen=True, slots=True)
class SendVerify:
    lease_id: str


@dataclass(frozen=True, slots=True)
class Activate:
    record: HandOffRecord


@dataclass(frozen=True, slots=True)
class CloseLease:
    completed: bool


@dataclass(frozen=True, slots=True)
class End:
    """The hand-off is over without a request: free its blocks except the quarantined ones."""

    failed: bool
    reason: str
    """lease_refused | lease_revoked | lease_broken | transfer_failed; or finished | what `cancel` was given, which
    nobody need hear of.
    """
    detail: str
    quarantined: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseQuarantine:
    action_id: int


HandoffAction = (
    OpenLease | Pull | AbandonPull | SendPulled | SendVerify | Activate | CloseLease | End | ReleaseQuarantine
)


class HandoffState(Enum):
    QUEUED = "queued"
    OPENING = "opening"
    PULLING = "pulling"
    VERIFYING = "verifying"
    ACTIVE = "active"
    CANCELLED = "cancelled"
    FAILED = "failed"


_ENDS = frozenset({HandoffState.CANCELLED, HandoffState.FAILED})
TRANSITIONS: dict[HandoffState, frozenset[HandoffState]] = {
    HandoffState.QUEUED: frozenset({HandoffState.OPENING, HandoffState.CANCELLED}),
    HandoffState.OPENING: frozenset({HandoffState.PULLING}) | _ENDS,
    HandoffState.PULLING: frozenset({HandoffState.VERIFYING}) | _ENDS,
    HandoffState.VERIFYING: frozenset({HandoffState.ACTIVE}) | _ENDS,
    HandoffState.ACTIVE: frozenset(),
    HandoffState.CANCELLED: frozenset(),
    HandoffState.FAILED: frozenset(),
}
LEASED = frozenset({HandoffState.OPENING, HandoffState.PULLING, HandoffState.VERIFYING})


class Handoff:
    """Methods are the facts and return what to do, in order. Facts after the end are no-ops (but for
    `read_terminal`). `is_fetch`: of a prefix; else of a request.
    """

    def __init__(self, block_size: int, *, is_fetch: bool = False, max_retries: int = 0) -> None:
        self.state = HandoffState.QUEUED
        self.record: HandOffRecord | None = None
        self._block_size = block_size
        self._is_fetch = is_fetch
        self._local: tuple[int, ...] = ()
        self._skip = 0
        self._lease_id = ""
        self._remote: list[int] = []
        self._digests: list[int] = []
        """Of all of `_remote`, or empty."""
        self._retries_left = max_retries
        self._requested = 0
        """Announced blocks, from the first on, that a read was started for (or that were skipped before it)."""
        self._reported = 0
        self._in_flight: Pull | None = None
        self._next_id = 1
        self._terminal: set[int] = set()
        self._quarantine: Pull | None = None

    @property
    def ended(self) -> bool:
        return not TRANSITIONS[self.state]

    @property
    def quarantined(self) -> tuple[int, ...]:
        """Own blocks that an abandoned read may still write."""
        return self._quarantine.local_blocks if self._quarantine else ()

    # --- facts of this worker

    def reserved(self, local_blocks: Sequence[int], skip_blocks: int) -> list[HandoffAction]:
        """`local_blocks`: the request's own blocks in logical order; the first `skip_blocks` already hold their KV."""
        if self.ended or (self._local == tuple(local_blocks) and self._skip == skip_blocks and self._local):
            return []
        if self.state is not HandoffState.QUEUED or not 0 <= skip_blocks <= len(local_blocks):
            raise InvariantError(f"hand-off reserved twice or wrongly ({self.state.value})")
        self._local, self._skip = tuple(local_blocks), skip_blocks
        _advance(self, HandoffState.OPENING)
        return [OpenLease()]

    def cancel(self, reason: str = "cancelled") -> list[HandoffAction]:
        return self._end(HandoffState.CANCELLED, reason)

    # --- facts of the transport

    def pull_done(self, action_id: int) -> list[HandoffAction]:
        if not self._is_current(action_id):
            return []
        self._in_flight = None
        return self._go_on()

    def pull_failed(self, action_id: int, kind: str, terminal: bool) -> list[HandoffAction]:
        """`terminal`: the read can write nothing any more."""
        if not self._is_current(action_id):
            return []
        if terminal:
            self._terminal.add(action_id)
            if self._retries_left:
                self._retries_left -= 1
                return [self._again()]
        return self._end(HandoffState.FAILED, "transfer_failed", kind)

    def read_terminal(self, action_id: int) -> list[HandoffAction]:
        if not 0 < action_id < self._next_id:
            raise InvariantError(f"hand-off never started read {action_id}")
        self._terminal.add(action_id)
        if self._quarantine is None or self._quarantine.action_id != action_id:
            return []
        self._quarantine = None
        return [ReleaseQuarantine(action_id)]

    # --- facts of the holder

    def refused(self, reason: str) -> list[HandoffAction]:
        return self._lease_over("lease_refused", reason)

    def unreachable(self, detail: str) -> list[HandoffAction]:
        """The holder's pool cannot be connected to."""
        return self._lease_over("transfer_failed", detail)

    def revoked(self, reason: str) -> list[HandoffAction]:
        return self._lease_over("lease_revoked", reason)

    def broken(self, detail: str = "") -> list[HandoffAction]:
        return self._lease_over("lease_broken", detail)

    def opened(self, lease_id: str) -> list[HandoffAction]:
        if self.ended or self._lease_id == lease_id:
            return []
        if self.state is not HandoffState.OPENING:
            return self._protocol_fault("opened twice")
        self._lease_id = lease_id
        _advance(self, HandoffState.PULLING)
        return []

    def announced(self, first: int, blocks: Sequence[int], digests: Sequence[int] = ()) -> list[HandoffAction]:
        """`digests`: one a block, or none at all in the life of a lease."""
        if self.ended:
            return []
        if len(digests) != (len(blocks) if self._digests or (not self._remote and digests) else 0):
            return self._protocol_fault("digests do not fit the announced blocks")
        known, seen = self._remote[first : first + len(blocks)], self._digests[first : first + len(blocks)]
        if first > len(self._remote) or list(blocks[: len(known)]) != known or list(digests[: len(seen)]) != seen:
            return self._protocol_fault("announced blocks contradict earlier ones")
        new = blocks[len(known) :]
        if not new:
            return []
        if self.state is not HandoffState.PULLING or self.record is not None:
            return self._protocol_fault("announce out of turn")
        if len(self._remote) + len(new) > len(self._local):
            return self._protocol_fault("more blocks than reserved")
        self._remote += new
        self._digests += digests[len(seen) :]
        return self._go_on()

    def handed_off(self, record: HandOffRecord) -> list[HandoffAction]:
        if self.ended or record == self.record:
            return []
        if self.state is not HandoffState.PULLING or self.record is not None:
            return self._protocol_fault("hand-off record out of turn")
        if record.finished and not self._is_fetch:
            return self._end(HandoffState.CANCELLED, "finished")
        if not self._fits(record):
            return self._protocol_fault("hand-off record does not fit the announced blocks")
        self.record = record
        return self._go_on()

    def held(self) -> list[HandoffAction]:
        if self.ended:
            return []
        if self.state is not HandoffState.VERIFYING or self.record is None:
            return self._protocol_fault("held out of turn")
        _advance(self, HandoffState.ACTIVE)
        return [Activate(self.record), CloseLease(True)]

    # --- decisions

    def _go_on(self) -> list[HandoffAction]:
        """Reports progress, then starts the next read or, when nothing is left to read, verifies."""
        if self._in_flight is not None:
            return []
        actions: list[HandoffAction] = []
        announced = len(self._remote)
        have = max(self._requested, min(self._skip, announced))
        if have > self._reported:
            self._reported = have
            actions.append(SendPulled(have))
        if have < announced:
            blocks = tuple(self._remote[have:]), self._local[have:announced]
            pull = Pull(self._next_id, *blocks, tuple(self._digests[have:]))
            self._next_id += 1
            self._requested = announced
            self._in_flight = pull
            actions.append(pull)
        elif self.record is not None:
            _advance(self, HandoffState.VERIFYING)
            actions.append(SendVerify(self._lease_id))
        return actions

    def _again(self) -> Pull:
        """The read that has just failed, once more."""
        if self._in_flight is None:
            raise InvariantError("hand-off has no read to repeat")
        failed = self._in_flight
        self._in_flight = replace(failed, action_id=self._next_id, retry=failed.retry + 1)
        self._next_id += 1
        return self._in_flight

    def _fits(self, record: HandOffRecord) -> bool:
        if self._is_fetch:
            return record == whole_blocks(len(self._remote), self._block_size)
        covers = -(-record.num_tokens // self._block_size) == len(self._remote)
        return covers and bool(record.output_ids) and len(record.logprobs) <= len(record.output_ids)

    def _lease_over(self, reason: str, detail: str) -> list[HandoffAction]:
        if self.state is HandoffState.QUEUED:
            raise InvariantError(f"{reason} before a lease was asked for")
        return self._end(HandoffState.FAILED, reason, detail)

    def _protocol_fault(self, detail: str) -> list[HandoffAction]:
        return self._lease_over("lease_broken", f"protocol: {detail}")

    def _end(self, to: HandoffState, reason: str, detail: str = "") -> list[HandoffAction]:
        if self.ended:
            return []
        leased = self.state in LEASED
        _advance(self, to)
        actions: list[HandoffAction] = []
        if self._in_flight is not None:
            actions.append(AbandonPull(self._in_flight.action_id))
            if self._in_flight.action_id not in self._terminal:
                self._quarantine = self._in_flight
            self._in_flight = None
        if leased:
            actions.append(CloseLease(False))
        return [*actions, End(to is HandoffState.FAILED, reason, detail, self.quarantined)]

    def _is_current(self, action_id: int) -> bool:
        if not 0 < action_id < self._next_id:
            raise InvariantError(f"hand-off never started read {action_id}")
        return self._in_flight is not None and self._in_flight.action_id == action_id


def _advance(handoff: Handoff, to: HandoffState) -> None:
    if to not in TRANSITIONS[handoff.state]:
        raise InvariantError(f"hand-off: {handoff.state.value} -> {to.value}")
    handoff.state = to

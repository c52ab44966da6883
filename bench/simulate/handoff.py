"""A hand-off in a virtual cluster: the machines of production at both ends, and between them wires and lanes with their
time. What they decide is `kvtransfer.core`'s; here actions only become events.

Does not: lose messages or change bytes (`tests/virtual` does).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from headrace.ids import Incarnation, LeaseId
from kvtransfer.core.handoff import (
    AbandonPull,
    Activate,
    CloseLease,
    End,
    Handoff,
    HandoffAction,
    OpenLease,
    Pull,
    ReleaseQuarantine,
    SendPulled,
    SendVerify,
)
from kvtransfer.core.lease import (
    Announce,
    HandOffRecord,
    Lease,
    LeaseAction,
    Release,
    SendHandOff,
    SendHeld,
    SendRevoked,
)
from workers.core.request import State

if TYPE_CHECKING:
    from bench.simulate.calls import Leg
    from bench.simulate.cluster import Cluster

INCARNATION = Incarnation("0")


class HandOff:
    """From the leg `source`, a prefill, to the leg `target`, a decode."""

    def __init__(self, cluster: Cluster, source: Leg, target: Leg) -> None:
        self._cluster, self._source, self._target = cluster, source, target
        self._size = source.worker.pool.block_size
        self._reader = Handoff(self._size)
        self._lease: Lease | None = None

    # ---- facts

    def reserved(self) -> None:
        """The reader has room."""
        request = self._target.request
        self._read(self._reader.reserved(request.block_ids, request.computed_tokens // self._size))

    def computed(self) -> None:
        """A step at the holder is over."""
        lease, request = self._lease, self._source.request
        if lease is None or not self._source.live:
            return
        sampled = request.state is State.TRANSFERRING
        complete = -(-request.computed_tokens // self._size) if sampled else request.computed_tokens // self._size
        self._hold(lease.computed(request.block_ids[:complete]))
        if sampled:
            self._hold(lease.handed_off(HandOffRecord(tuple(request.output_ids), request.computed_tokens)))

    def cancelled(self) -> None:
        """The reader's gateway does not want it any more."""
        self._read(self._reader.cancel())

    def source_ended(self) -> None:
        """The holder's request is over."""
        if self._lease is not None:
            self._hold(self._lease.request_ended("request_ended"))

    # ---- the holder

    def _open(self) -> None:
        source = self._source
        if not source.worker.alive or not source.worker.scheduler.pin(source.request.key):
            self._tell(partial(self._reader.refused, "unknown_request"))
            return
        request = source.request
        self._lease = Lease(LeaseId(f"{request.request_id}/{request.key}"), request.key, INCARNATION)
        self._tell(partial(self._reader.opened, self._lease.lease_id))
        self.computed()

    def _hold(self, actions: list[LeaseAction]) -> None:
        for action in actions:
            match action:
                case Announce(first, blocks):
                    self._tell(partial(self._reader.announced, first, blocks))
                case SendHandOff(record):
                    self._tell(partial(self._reader.handed_off, record))
                case SendHeld():
                    self._tell(self._reader.held)
                case SendRevoked(reason):
                    self._tell(partial(self._reader.revoked, reason))
                case Release(completed):
                    if completed:
                        self._cluster.released(self._source)
                    else:
                        self._source.worker.scheduler.unpin(self._source.request.key)

    # ---- the reader

    def _tell(self, fact: Callable[[], list[HandoffAction]]) -> None:
        def hear() -> None:
            if self._target.worker.alive:
                self._read(fact())

        self._cluster.on_the_wire(hear)

    def _read(self, actions: list[HandoffAction]) -> None:
        for action in actions:
            match action:
                case OpenLease():
                    self._cluster.on_the_wire(self._open)
                case Pull():
                    came = partial(self._came, action)
                    self._cluster.over_the_lane(self._source.worker, len(action.local_blocks), came)
                case AbandonPull():
                    pass  # it is terminal when it would have been done
                case SendPulled(num_blocks):
                    self._answer(partial(Lease.reader_pulled, num_blocks=num_blocks))
                case SendVerify(lease_id):
                    self._answer(partial(Lease.verify, lease_id=lease_id, incarnation=INCARNATION))
                case Activate(record):
                    self._cluster.activated(self._target, record)
                case CloseLease(completed):
                    self._answer(partial(Lease.close, completed=completed))
                case End():
                    self._cluster.hand_off_ended(self._target, action)
                case ReleaseQuarantine():
                    self._target.worker.scheduler.release_quarantine(self._target.request.key)

    def _came(self, pull: Pull) -> None:
        if self._target.worker.alive:
            self._read(self._reader.pull_done(pull.action_id))
            self._read(self._reader.read_terminal(pull.action_id))

    def _answer(self, fact: Callable[[Lease], list[LeaseAction]]) -> None:
        def hear() -> None:
            if self._lease is not None and self._source.worker.alive:
                self._hold(fact(self._lease))

        self._cluster.on_the_wire(hear)

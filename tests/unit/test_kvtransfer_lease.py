"""The holder's side of one lease, and the table of them."""

from __future__ import annotations

import pytest

from headrace.errors import InvariantError
from headrace.ids import Incarnation, LeaseId, RequestKey
from kvtransfer.core.lease import (
    Announce,
    HandOffRecord,
    Lease,
    LeaseState,
    LeaseTable,
    Release,
    SendHandOff,
    SendHeld,
    SendRevoked,
)

RECORD = HandOffRecord((42,), 8)


def open_lease(name: str = "lease-1", key: int = 1) -> Lease:
    return Lease(LeaseId(name), RequestKey(key), Incarnation("inc-1"))


def sealed_lease(pulled: int = 2) -> Lease:
    lease = open_lease()
    lease.computed([10, 11])
    lease.handed_off(RECORD)
    lease.reader_pulled(pulled)
    return lease


def test_a_lease_announces_what_is_new_and_answers_held_after_the_last_read() -> None:
    lease = open_lease()
    # 1. chunks finish
    assert lease.computed([10]) == [Announce(0, (10,))]
    assert lease.computed([10]) == [] == lease.computed([])
    assert lease.computed([10, 11, 12]) == [Announce(1, (11, 12))]
    assert lease.read_in_flight
    # 2. first token
    assert lease.handed_off(RECORD) == [SendHandOff(RECORD)]
    assert lease.handed_off(RECORD) == []
    # 3. reads end, verify
    assert lease.reader_pulled(3) == [] and not lease.read_in_flight
    assert lease.verify("lease-1", "inc-1") == [SendHeld()]
    assert lease.verify("lease-1", "inc-1") == []
    # 4. close
    assert lease.close(True) == [Release(True)]
    assert lease.close(True) == [] == lease.broken()


@pytest.mark.parametrize(("lease_id", "incarnation"), [("lease-2", "inc-1"), ("lease-1", "inc-0")])
def test_a_stale_verify_is_never_held(lease_id: str, incarnation: str) -> None:
    assert sealed_lease().verify(lease_id, incarnation) == [SendRevoked("stale"), Release(False)]


def test_verify_with_a_read_in_flight_or_before_the_hand_off_ends_the_lease() -> None:
    assert sealed_lease(pulled=1).verify("lease-1", "inc-1") == [SendRevoked("protocol"), Release(False)]
    assert open_lease().verify("lease-1", "inc-1") == [SendRevoked("protocol"), Release(False)]


def test_revoke_waits_for_reads_and_never_follows_held() -> None:
    lease = sealed_lease(pulled=1)
    assert lease.revoke("pressure") == []
    lease.reader_pulled(2)
    assert lease.can_revoke
    assert lease.revoke("pressure") == [SendRevoked("pressure"), Release(False)]
    held = sealed_lease()
    held.verify("lease-1", "inc-1")
    assert held.revoke("pressure") == [] and held.state is LeaseState.HELD
    assert held.request_ended("cancelled") == [Release(False)]


def test_a_closing_reader_completes_only_what_was_held() -> None:
    assert sealed_lease().close(True) == [Release(False)]


def test_a_reader_that_claims_more_than_was_announced_loses_its_lease() -> None:
    assert sealed_lease().reader_pulled(3) == [SendRevoked("protocol"), Release(False)]


def test_the_holders_own_contradictions_raise() -> None:
    with pytest.raises(InvariantError):
        sealed_lease().computed([10, 99])
    with pytest.raises(InvariantError):
        sealed_lease().computed([10, 11, 12])
    with pytest.raises(InvariantError):
        sealed_lease().handed_off(HandOffRecord((43,), 8))


def test_the_table_gives_each_request_one_reader_and_forgets_ended_leases() -> None:
    table = LeaseTable()
    first, second = open_lease(), open_lease("lease-2", key=1)
    assert table.open(first) and not table.open(second)
    assert table.get(LeaseId("lease-1")) is first is table.of(RequestKey(1))
    first.computed([1])
    assert table.reads_in_flight == 1
    with pytest.raises(InvariantError):
        table.remove(first)
    first.broken()
    table.remove(first)
    table.remove(first)
    assert len(table) == 0 and table.of(RequestKey(1)) is None and table.reads_in_flight == 0

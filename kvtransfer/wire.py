"""Our records as protocol messages and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from headrace.core.records import WorkerLedger
from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.identity import DIGEST_BYTES
from kvtransfer.core.lease import HandOffRecord


def join_hashes(hashes: Sequence[bytes]) -> bytes:
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[bytes] | None:
    """None when it is no row of whole hashes."""
    if len(joined) % DIGEST_BYTES:
        return None
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


def ledger_to_proto(ledger: WorkerLedger) -> pb.WorkerLedger:
    return pb.WorkerLedger(**asdict(ledger))


def ledger_from_proto(message: pb.WorkerLedger) -> WorkerLedger:
    return WorkerLedger(**{field.name: getattr(message, field.name) for field in fields(WorkerLedger)})


def record_to_proto(record: HandOffRecord) -> pb.HandOff:
    return pb.HandOff(
        output_ids=record.output_ids,
        num_tokens=record.num_tokens,
        finished=record.finished,
        ledger=ledger_to_proto(record.ledger),
    )


def record_from_proto(message: pb.HandOff) -> HandOffRecord:
    return HandOffRecord(
        tuple(message.output_ids), message.num_tokens, message.finished, ledger_from_proto(message.ledger)
    )

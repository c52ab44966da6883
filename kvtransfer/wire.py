"""Our records as protocol messages and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

from headrace.core.records import TokenLogprobs, WorkerLedger
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


def logprobs_to_proto(logprobs: Mapping[int, TokenLogprobs]) -> pb.Logprobs:
    """`logprobs` by row."""
    told = list(logprobs.values())
    return pb.Logprobs(
        row=list(logprobs),
        logprob=[each.logprob for each in told],
        num_top=[len(each.top_ids) for each in told],
        top_id=[token_id for each in told for token_id in each.top_ids],
        top_logprob=[value for each in told for value in each.top_logprobs],
    )


def logprobs_from_proto(message: pb.Logprobs) -> dict[int, TokenLogprobs]:
    """By row. Raises ValueError when the columns do not fit each other."""
    told: dict[int, TokenLogprobs] = {}
    begin, ids, values = 0, tuple(message.top_id), tuple(message.top_logprob)
    for row, logprob, num_top in zip(message.row, message.logprob, message.num_top, strict=True):
        end = begin + num_top
        told[row] = TokenLogprobs(logprob, ids[begin:end], values[begin:end])
        begin = end
    if not begin == len(ids) == len(values):
        raise ValueError("log-probabilities whose columns differ in length")
    return told


def record_to_proto(record: HandOffRecord) -> pb.HandOff:
    return pb.HandOff(
        output_ids=record.output_ids,
        num_tokens=record.num_tokens,
        finished=record.finished,
        ledger=ledger_to_proto(record.ledger),
        logprobs=logprobs_to_proto(dict(enumerate(record.logprobs, len(record.output_ids) - len(record.logprobs)))),
    )


def record_from_proto(message: pb.HandOff) -> HandOffRecord:
    """Raises ValueError as `logprobs_from_proto` does."""
    return HandOffRecord(
        tuple(message.output_ids),
        message.num_tokens,
        message.finished,
        ledger_from_proto(message.ledger),
        tuple(logprobs_from_proto(message.logprobs).values()),
    )

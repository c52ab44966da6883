"""Log-probabilities in the hand-off record, over a real lease: they arrive, or the lease breaks."""

from __future__ import annotations

import pytest

from headrace.core.records import TokenLogprobs
from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.lease import HandOffRecord
from kvtransfer.wire import record_to_proto
from tests.unit.test_kvtransfer_service import in_loop, world


@in_loop
async def test_log_probabilities_travel_with_the_first_token() -> None:
    told = (TokenLogprobs(-0.5, (42, 7), (-0.5, -1.5)),)
    async with world() as w:
        w.compute(2)
        w.first_token(logprobs=told)
        w.adopt().reserved([1, 2, 3], skip_blocks=0)
        await w.over()
        assert w.sink.record is not None and w.sink.record.logprobs == told


@pytest.mark.parametrize("logprobs", [[], [-1.0, -2.0]], ids=["columns that do not fit", "more than tokens"])
def test_a_record_that_contradicts_itself_breaks_the_lease(
    monkeypatch: pytest.MonkeyPatch, logprobs: list[float]
) -> None:
    def unfit(record: HandOffRecord) -> pb.HandOff:
        message = record_to_proto(record)
        told = pb.Logprobs(row=[0, 1], logprob=logprobs, num_top=[0, 0])
        message.logprobs.CopyFrom(told)
        return message

    monkeypatch.setattr("kvtransfer.holder.record_to_proto", unfit)

    async def main() -> None:
        async with world() as w:
            w.compute(2)
            w.first_token()
            w.adopt().reserved([1, 2, 3], skip_blocks=0)
            await w.over()
            assert w.sink.end is not None and w.sink.end.reason == "lease_broken"

    in_loop(main)()

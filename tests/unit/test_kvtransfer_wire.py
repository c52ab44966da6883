"""Records as protocol messages: what comes out is what went in, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.records import TokenLogprobs, WorkerLedger
from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.lease import HandOffRecord
from kvtransfer.wire import logprobs_from_proto, logprobs_to_proto, record_from_proto, record_to_proto

values = st.floats(-9999.0, 0.0, width=32)


@st.composite
def token_logprobs(draw: st.DrawFn) -> TokenLogprobs:
    top = draw(st.lists(st.tuples(st.integers(0, 2**32 - 1), values), max_size=20))
    return TokenLogprobs(draw(values), tuple(i for i, _ in top), tuple(value for _, value in top))


@given(st.dictionaries(st.integers(0, 300), token_logprobs(), max_size=6))
def test_sparse_columns_come_back_by_row(told: dict[int, TokenLogprobs]) -> None:
    message = pb.Logprobs.FromString(logprobs_to_proto(told).SerializeToString())
    assert logprobs_from_proto(message) == told


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5), st.lists(token_logprobs(), max_size=1))
def test_a_hand_off_record_comes_back_whole(output_ids: list[int], told: list[TokenLogprobs]) -> None:
    ledger = WorkerLedger(queue_s=0.5, lane="tcp", cached_tokens=3)
    record = HandOffRecord(tuple(output_ids), 7, False, ledger, tuple(told))
    message = pb.HandOff.FromString(record_to_proto(record).SerializeToString())
    assert record_from_proto(message) == record


@pytest.mark.parametrize(
    "message",
    [
        pb.Logprobs(row=[0], logprob=[-1.0], num_top=[2], top_id=[1], top_logprob=[-1.0]),
        pb.Logprobs(row=[0], logprob=[-1.0], num_top=[1], top_id=[1, 2], top_logprob=[-1.0, -2.0]),
        pb.Logprobs(row=[0], logprob=[-1.0], num_top=[1], top_id=[1], top_logprob=[]),
        pb.Logprobs(row=[0, 1], logprob=[-1.0], num_top=[0]),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(message: pb.Logprobs) -> None:
    with pytest.raises(ValueError):
        logprobs_from_proto(message)

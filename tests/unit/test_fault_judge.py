"""What long fault runs count as lost, twice and wrong."""

from __future__ import annotations

import pytest

from tests.fault_requests import Answer, Streams, distinct_requests

EXPECTED = [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("got", "error", "verdict"),
    [
        ([5, 6, 7, 8], "", ""),
        ([5, 6], "", "lost"),
        ([5, 6, 7, 8], "ABORTED", "lost"),
        ([], "UNAVAILABLE", "lost"),
        ([5, 6, 6, 7, 8], "", "duplicate"),
        ([5, 6, 7, 8, 8], "", "duplicate"),
        ([5, 9, 7, 8], "", "wrong"),
        ([5, 7, 8], "", "wrong"),
    ],
    ids=str,
)
def test_an_answer_is_right_lost_twice_or_wrong(got: list[int], error: str, verdict: str) -> None:
    streams = Streams(distinct_requests(1, seed=1, vocabulary=100))
    streams.expected = [EXPECTED]
    assert streams.judge(0, Answer(got, error, 0.0, 0)).partition(":")[0] == verdict

"""Log-probabilities in a flight: delivered once with their token, none missing, and a repeat is what was delivered."""

from __future__ import annotations

import pytest

from headrace.core.records import TokenLogprobs
from headrace.errors import Code, HeadraceError
from headrace.sampling import SamplingParams
from router.core.flight import Flight
from router.core.legs import Deliver, Ended
from router.core.recovery import OnFailure
from tests.unit.test_router_core import D0, P0, P1, flight, fly

TOLD = TokenLogprobs(-0.5, (11, 3), (-0.5, -1.5))
OTHER = TokenLogprobs(-0.5, (11, 3), (-0.5, -1.25))


def asking(**options: object) -> Flight:
    made = flight(**options)
    made.sampling = SamplingParams(max_tokens=8, logprobs=2)
    return made


def failed(actions: list) -> bool:
    return isinstance(actions[-1], Ended) and actions[-1].error.code is Code.INTERNAL


@pytest.mark.parametrize("reader_first", [False, True])
def test_a_repeat_must_be_equal_where_the_deployment_is_exact(reader_first: bool) -> None:
    for exact, repeat, fails in ((True, TOLD, False), (True, OTHER, True), (True, None, True), (False, OTHER, False)):
        f = asking(exact=exact)
        first, second = reversed(fly(f, [P0, D0])) if reader_first else fly(f, [P0, D0])
        assert f.token(first, 0, 11, 2.0, TOLD) == [Deliver((11,), logprobs=(TOLD,))]
        actions = f.token(second, 0, 11, 2.1, repeat)
        assert failed(actions) if fails else actions == []


def test_a_token_without_them_fails_the_request_that_asked() -> None:
    f = asking()
    p, _ = fly(f, [P0, D0])
    assert failed(f.token(p, 0, 11, 2.0))
    f = flight()
    p, _ = fly(f, [P0, D0])
    assert f.token(p, 0, 11, 2.0) == [Deliver((11,))]


def test_another_attempt_goes_on_and_its_own_first_token_is_what_repeats() -> None:
    f = asking(exact=True, on_failure=OnFailure.OTHER_PREFILL)
    p, d = fly(f, [P0, P1, D0])
    f.token(p, 0, 11, 2.0, TOLD)
    f.lost(p.worker, dead=True, now=3.0)
    f.failed(d, HeadraceError(Code.ABORTED, "broken"), "lease_broken", 3.1)
    p2, d2 = fly(f, [P0, P1, D0])
    assert f.token(p2, 1, 12, 4.0, OTHER) == [Deliver((12,), logprobs=(OTHER,))]
    assert f.token(d2, 1, 12, 4.1, OTHER) == []
    assert failed(f.token(d2, 1, 12, 4.2, TOLD))

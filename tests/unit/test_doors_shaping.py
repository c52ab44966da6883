"""Penalties, bias and min-p at the edge: ranges with their ends, limits told by name, every branch the same."""

from __future__ import annotations

import pytest

from headrace.errors import Code, HeadraceError
from router.api import GenerationSpec
from router.openai_models import parse_chat, parse_completion
from router.validate import Caller, Limits, build_spec, parse_options

LIMITS = Limits(
    vocab_size=100, max_model_len=50, default_max_tokens=None, max_n=4, max_stop_strings=4, max_stop_bytes=16
)


def spec(**raw: object) -> GenerationSpec:
    options = parse_options(raw, LIMITS)
    return build_spec("prompt", [1] * 5, options, Caller("t", "", None, 0.0), LIMITS, lambda: 77, tokenized_at=0.0)


def test_penalties_bias_and_min_p_reach_every_branch_and_the_ends_of_their_ranges_are_inside() -> None:
    for low, high in ((-2, 2), (2, -2)):
        given = spec(n=2, presence_penalty=low, frequency_penalty=high, logit_bias={"99": -100, "0": 100})
        for params in given.sampling:
            assert (params.presence_penalty, params.frequency_penalty) == (low, high)
            assert params.logit_bias == ((99, -100.0), (0, 100.0))
            assert params.needs_history
    for repetition, min_p in ((2, 1), (0.01, 0.5)):
        params = spec(repetition_penalty=repetition, min_p=min_p).sampling[0]
        assert (params.repetition_penalty, params.min_p) == (repetition, min_p)
    plain = spec(repetition_penalty=1, presence_penalty=0, frequency_penalty=None, min_p=0, logit_bias={})
    assert plain == spec()
    assert not plain.sampling[0].needs_history


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("presence_penalty", 2.5, "between -2 and 2"),
        ("frequency_penalty", -2.5, "between -2 and 2"),
        ("repetition_penalty", 0, "greater than 0 and at most 2"),
        ("min_p", 1.5, "between 0 and 1"),
        ("logit_bias", {"5": 101}, "between -100 and 100"),
        ("logit_bias", {"100": 1}, "token ids between 0 and 99"),
        ("logit_bias", dict.fromkeys(map(str, range(301)), 1), "at most 300 entries"),
    ],
)
def test_a_refusal_tells_the_limit(field: str, value: object, limit: str) -> None:
    message = {"role": "user", "content": "a"}
    for parse in (
        lambda: parse_completion({"prompt": "a", field: value}, LIMITS),
        lambda: parse_chat({"messages": [message], field: value}, LIMITS, 1000),
        lambda: parse_options({field: value}, LIMITS),
    ):
        with pytest.raises(HeadraceError) as caught:
            parse()
        assert caught.value.code is Code.INVALID_ARGUMENT
        assert caught.value.field == field
        assert limit in caught.value.message

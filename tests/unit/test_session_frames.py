"""What a gateway's session frame says is what the worker reads."""

from __future__ import annotations

import asyncio
from dataclasses import fields

import pytest

from headrace.core.admission_records import Ticket
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from headrace.v1 import worker_pb2 as pb
from router import frames
from router.answer import Branch
from router.api import GenerationSpec
from router.core.flight import Flight
from router.core.placement import Mode
from workers.intake import request_from

EVERYTHING = SamplingParams(
    max_tokens=9,
    min_tokens=2,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    seed=2**63 - 1,
    branch=3,
    ignore_eos=True,
    stop_token_ids=(4, 5),
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=-0.3,
    frequency_penalty=2.0,
    logit_bias=((9, -100.0), (3, 0.1)),
    logprobs=5,
)


@pytest.mark.parametrize("params", [EVERYTHING, SamplingParams(max_tokens=1)], ids=["everything", "defaults"])
def test_every_sampling_parameter_arrives_bit_for_bit(params: SamplingParams) -> None:
    flight = Flight(RequestId("req-1"), (5, 6, 7), params, Mode.AUTO, lambda: 1, eos_token_ids=(0,))
    flight.output_ids = [8, 8]
    call = GenerationSpec("tenant", "", flight.prompt_ids, (params,), priority=-2, task="t", steps_left=3)
    branch = Branch(
        flight, 0, call, b"namespace", 9.0, asyncio.Queue(), Ticket("tenant", 3, 3, 9, 0), reserved_output_tokens=7
    )
    sent = frames.body(branch, 5.0, tenant_service=11.0).SerializeToString()
    request = request_from(pb.RequestBody.FromString(sent), RequestKey(1), b"root")
    assert request.sampling == params
    assert (request.prompt_ids, request.output_ids) == ([5, 6, 7], [8, 8])
    assert (request.tenant, request.priority, request.task, request.steps_left) == ("tenant", -2, "t", 3)
    assert (request.predicted_output_tokens, request.tenant_service) == (7, 11.0)


def test_everything_differs_from_the_defaults() -> None:
    """Otherwise a field that is forgotten on the way would not be seen."""
    defaults = SamplingParams(max_tokens=1)
    assert all(getattr(EVERYTHING, f.name) != getattr(defaults, f.name) for f in fields(SamplingParams))


def test_a_frame_without_penalties_has_none() -> None:
    body = pb.RequestBody(request_id="r", prompt_ids=[1], sampling=pb.Sampling(max_tokens=8, top_p=1.0))
    assert not request_from(body, RequestKey(1), b"root").sampling.needs_history

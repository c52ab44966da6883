"""What a gateway sends becomes a request here: the entry that the hub keeps, and the words of a refusal."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import Code
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from headrace.v1 import worker_pb2 as pb
from kvtransfer.service import Adoption
from workers.core.request import Request
from workers.core.tool_wait import UNKNOWN_WAIT_S, Call
from workers.sessions import GatewaySession

REFUSAL_CODES = {
    "queue_full": Code.RESOURCE_EXHAUSTED,
    "queue_seconds": Code.RESOURCE_EXHAUSTED,
    "reserved_kv": Code.RESOURCE_EXHAUSTED,
    "memory_pressure": Code.RESOURCE_EXHAUSTED,
    "complete": Code.FAILED_PRECONDITION,
    "deadline_lost": Code.DEADLINE_EXCEEDED,
    "preempted": Code.UNAVAILABLE,
}
REFUSAL_TEXTS = {
    "queue_full": "the worker's queue is full",
    "queue_seconds": "the worker's queue is too long",
    "reserved_kv": "the worker's KV pool is spoken for",
    "memory_pressure": "the worker is short of memory",
    "too_large": "prompt + max_tokens exceed the worker's KV pool",
    "too_long": "prompt + max_tokens exceed max_model_len",
    "empty_prompt": "prompt: must not be empty",
    "complete": "nothing is left to generate",
    "deadline_lost": "the request cannot be completed before its deadline any more",
    "preempted": "the worker needed the room for others",
}


@dataclass(slots=True, eq=False)
class Entry:
    """A request here with its gateway session; outlives the scheduler's record by the time its last frames take."""

    request: Request
    session: GatewaySession
    handle: int
    first_offset: int
    deadline: float
    adoption: Adoption | None = None
    """Set while the request's KV is on its way here."""
    leased: bool = False
    """A reader has a lease on the request's blocks."""
    lease_number: int = -1
    """Of the adoption that had the latest lease; -1: there was none."""
    revoking: bool = False


def request_from(
    body: pb.RequestBody, key: RequestKey, root: bytes, *, hand_off: bool = False, adopted: bool = False
) -> Request:
    """`root`: h_0 of the request's block chain."""
    s = body.sampling
    return Request(
        key=key,
        request_id=RequestId(body.request_id),
        attempt=body.attempt,
        prompt_ids=list(body.prompt_ids),
        resumed_ids=list(body.output_ids),
        sampling=SamplingParams(
            max_tokens=s.max_tokens,
            min_tokens=s.min_tokens,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            seed=s.seed,
            branch=s.branch,
            ignore_eos=s.ignore_eos,
            stop_token_ids=tuple(s.stop_token_ids),
            min_p=s.min_p,
            repetition_penalty=s.repetition_penalty or 1.0,
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            logit_bias=tuple(zip(s.bias_ids, s.bias_amounts, strict=True)),
            logprobs=s.logprobs if s.HasField("logprobs") else None,
        ),
        root=root,
        no_cache=body.no_cache,
        hand_off=hand_off,
        adopted=adopted,
        tenant=body.tenant,
        priority=body.priority,
        endpoint=body.endpoint,
        task=body.task,
        steps_left=body.steps_left if body.HasField("steps_left") else None,
        predicted_output_tokens=body.reserved_output_tokens,
        tenant_service=body.tenant_service,
        resumed_inserts=[(insert.position, list(insert.token_ids)) for insert in body.inserts],
    )


def call_from(message: pb.Pause) -> Call:
    return Call(message.num_output, tuple(message.wait_s) or UNKNOWN_WAIT_S, message.lost_share, message.tool)

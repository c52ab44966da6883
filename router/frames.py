"""Session frames from and to the gateway's own types: nothing but field copying."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.core.records import CacheChange, WorkerLoad
from headrace.core.tool_latency import Outlook
from headrace.errors import Code, HeadraceError
from headrace.v1 import worker_pb2 as pb
from router.answer import Branch
from router.core.decision import Fetch
from router.core.legs import Leg

_MOMENT = Outlook((0.1,), 0.0)


def body(branch: Branch, time_left_s: float, tenant_service: float = 0.0) -> pb.RequestBody:
    flight, spec, params = branch.flight, branch.spec, branch.flight.sampling
    return pb.RequestBody(
        request_id=flight.request_id,
        attempt=flight.attempt,
        prompt_ids=flight.prompt_ids,
        output_ids=flight.output_ids,
        sampling=pb.Sampling(
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.seed,
            branch=params.branch,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bias_ids=[token_id for token_id, _ in params.logit_bias],
            bias_amounts=[amount for _, amount in params.logit_bias],
            logprobs=params.logprobs,
        ),
        time_left_s=time_left_s,
        namespace=branch.namespace,
        no_cache=spec.no_cache,
        tenant=spec.tenant,
        priority=spec.priority,
        endpoint=spec.endpoint,
        task=spec.task,
        reserved_output_tokens=branch.reserved_output_tokens,
        steps_left=spec.steps_left,
        tenant_service=tenant_service,
        inserts=[pb.Insert(position=position, token_ids=token_ids) for position, token_ids in flight.inserts],
    )


def submit(
    leg: Leg, seq: int, request: pb.RequestBody, hand_off: bool, fetch: pb.Fetch | None = None
) -> pb.SessionRequest:
    message = pb.Submit(handle=leg.handle, submit_seq=seq, body=request, hand_off=hand_off, fetch=fetch)
    return pb.SessionRequest(submit=message)


def fetch(wanted: Fetch, address: str) -> pb.Fetch:
    source = pb.PeerAddress(worker_id=wanted.source.worker_id, incarnation=wanted.source.incarnation, address=address)
    return pb.Fetch(source=source, num_blocks=wanted.num_blocks)


def adopt(leg: Leg, seq: int, request: pb.RequestBody, source: Leg, number: int) -> pb.SessionRequest:
    peer = pb.PeerAddress(
        worker_id=source.worker.worker_id, incarnation=source.worker.incarnation, address=source.address
    )
    message = pb.Adopt(handle=leg.handle, submit_seq=seq, body=request, source=peer, number=number)
    return pb.SessionRequest(adopt=message)


def pause(leg: Leg, num_output: int, tool: str, outlook: Outlook) -> pb.SessionRequest:
    message = pb.Pause(
        handle=leg.handle, num_output=num_output, tool=tool, wait_s=outlook.wait_s, lost_share=outlook.lost_share
    )
    return pb.SessionRequest(pause=message)


def hold(leg: Leg, num_output: int) -> pb.SessionRequest:
    """A pause for a moment, in which another worker reads the KV."""
    return pause(leg, num_output, "", _MOMENT)


def resume(leg: Leg, token_ids: Sequence[int]) -> pb.SessionRequest:
    return pb.SessionRequest(resume=pb.Resume(handle=leg.handle, token_ids=token_ids))


def finish(handle: int, reason: str) -> pb.SessionRequest:
    return pb.SessionRequest(finish=pb.Finish(handle=handle, reason=reason))


def load(message: pb.LoadReport) -> WorkerLoad:
    return WorkerLoad(
        submit_seq=message.submit_seq,
        waiting_requests=message.waiting_requests,
        waiting_tokens=message.waiting_tokens,
        running_requests=message.running_requests,
        adopting_requests=message.adopting_requests,
        free_blocks=message.free_blocks,
        evictable_blocks=message.evictable_blocks,
        total_blocks=message.total_blocks,
        step_age_s=message.step_age_s,
        step_s=message.step_s,
        cache_epoch=message.cache_epoch,
        cache_seq=message.cache_seq,
        queue_s=message.queue_s,
        decode_rows=message.decode_rows,
        decode_context=message.decode_context,
        expected_output_tokens=message.expected_output_tokens,
        step_costs=tuple(message.step_costs),
        eviction_ms_per_block=message.eviction_ms_per_block,
        restore_block_s=message.restore_block_s,
        closed=message.closed,
    )


def cache_change(message: pb.CacheEvents) -> CacheChange:
    """Raises ValueError for keys that are no whole number of 8 bytes."""
    stored, removed = (tuple(np.frombuffer(keys, "<u8").tolist()) for keys in (message.stored, message.removed))
    return CacheChange(message.epoch, message.from_seq, message.to_seq, stored, removed, message.snapshot)


def error(message: pb.Failed) -> HeadraceError:
    """A worker's refusal as the client will see it."""
    code = Code(message.code) if message.code in Code.__members__ else Code.INTERNAL
    return HeadraceError(
        code,
        message.message or message.reason,
        retry_after_s=message.retry_after_s or None,
        # Other reasons name what happened inside, which is not the client's to know.
        reason=message.reason if code is Code.RESOURCE_EXHAUSTED else None,
    )

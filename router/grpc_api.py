"""The gRPC door: headrace.v1.Inference, health and reflection on one port.

An error is a status with a message for people and trailing metadata for programs: `headrace-field`,
`headrace-reason`, `retry-after-ms`.
Handlers write with `context.write` in their own task, so that a cancelled RPC closes its `generate()` iterator at once.
Longer than others because it has one short handler for each method of the service.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Self

import grpc
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.client import MAX_MESSAGE_BYTES
from headrace.errors import Code, HeadraceError, InvariantError, invalid
from headrace.process import end_process
from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc
from router.api import Delta, GatewayService, GenerationSpec, ToolWait
from router.auth import Authenticator, metadata_value
from router.door import Door, Prompt
from router.grpc_answer import Answer, chunk
from router.grpc_health import ReadinessHealth
from router.messages import parse_messages
from router.metrics import DoorMetrics
from router.scalars import label
from router.siblings import Siblings
from router.spec import GatewaySpec
from router.validate import (
    MAX_BIASES,
    Caller,
    Options,
    on_transfer_failure,
    parse_options,
    steps_left,
    task_label,
    tool_wait,
)

log = logging.getLogger("headrace.router.grpc")

SERVICE = "headrace.v1.Inference"
FIELD_KEY = "headrace-field"
RETRY_KEY = "retry-after-ms"
REASON_KEY = "headrace-reason"
_SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs"),
)
"""Scalars of SamplingOptions; each is `optional`, so presence tells."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What ModelInfo says beyond the text side and the spec."""

    block_size: int = 0
    dtype: str = ""


class GrpcDoor:
    """A grpc.aio server with Inference, health and reflection. More services may be added to `server` before
    `start`.
    """

    def __init__(self, server: grpc.aio.Server, health_service: ReadinessHealth) -> None:
        self.server = server
        self.health = health_service

    def bind(self, address: str) -> int:
        """The bound port. Raises RuntimeError when the address is in use."""
        return int(self.server.add_insecure_port(address))

    async def start(self) -> None:
        await self.server.start()

    def set_serving(self, serving: bool) -> None:
        """False announces a drain: health answers NOT_SERVING at once, calls go on."""
        self.health.set_serving(serving)

    async def stop(self, grace: float | None) -> None:
        """No new calls; running ones have `grace` seconds and are cancelled then."""
        await self.server.stop(grace)


def build_server(
    gateway: GatewayService,
    spec: GatewaySpec,
    authenticator: Authenticator | None = None,
    *,
    metrics: DoorMetrics | None = None,
    facts: ModelFacts | None = None,
    siblings: Siblings | None = None,
    is_shared: bool = False,
    more_services: Sequence[str] = ("headrace.v1.Admin",),
) -> GrpcDoor:
    """The door without a port yet. `is_shared`: other gateways may listen on the same port. `more_services`: full
    names, for health and reflection, of what the caller adds.
    """
    server = grpc.aio.server(options=server_options(spec, is_shared))
    names = (SERVICE, *more_services)
    health_service = ReadinessHealth(gateway.ready, names)
    door = Door(gateway, spec, metrics, authenticator)
    servicer = InferenceServicer(door, facts or ModelFacts(), siblings or Siblings())
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return GrpcDoor(server, health_service)


def server_options(spec: GatewaySpec, is_shared: bool = False) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Clients may ping often, also while a long prefill sends nothing or no call is open.
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.max_concurrent_streams", 2 * spec.max_live_requests),
        # A second server on a port that is not shared must fail.
        ("grpc.so_reuseport", int(is_shared)),
    ]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Of one gateway; what is asked about a request that it does not have, its siblings are asked."""

    def __init__(self, door: Door, facts: ModelFacts, siblings: Siblings) -> None:
        self._door = door
        self._facts = facts
        self._siblings = siblings

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        async with _Call(self._door, context, "Generate") as call:
            if request.HasField("tool_wait"):
                raise invalid("tool_wait", "needs GenerateStream")
            spec, request_id = await self._prepare(request, context, call.tenant)
            answer = Answer(request_id, self._door.spec.served_model_name, len(spec.sampling))
            async with call.deltas(spec) as source:
                async for delta in source:
                    answer.add(delta)
            return answer.message()

    async def GenerateStream(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async with _Call(self._door, context, "GenerateStream") as call:
            spec, request_id = await self._prepare(request, context, call.tenant)
            async with call.deltas(spec) as source:
                async for delta in source:
                    await context.write(chunk(request_id, delta))

    async def Cancel(self, request: pb.CancelRequest, context: grpc.aio.ServicerContext) -> pb.CancelResponse:
        async with _Call(self._door, context, "Cancel") as call:
            _check_unknown(request)
            name = label("request_id", request.request_id)
            if not name:
                raise invalid("request_id", "must have at least 1 character")
            cancelled = await self._door.gateway.cancel(call.tenant, name)
            return pb.CancelResponse(cancelled=await self._siblings.cancel(request, context) or cancelled)

    async def Resume(self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext) -> pb.ResumeResponse:
        async with _Call(self._door, context, "Resume") as call:
            _check_unknown(request)
            name = label("request_id", request.request_id)
            if not name:
                raise invalid("request_id", "must have at least 1 character")
            match request.WhichOneof("answer"):
                case "text":
                    answer = Prompt("text", text=request.text, add_special_tokens=False)
                case "token_ids":
                    answer = Prompt("token_ids", ids=request.token_ids.ids)
                case _:
                    raise invalid("text", "one of text or token_ids is needed")
            ids = await self._door.encode(answer)
            try:
                self._door.gateway.resume(call.tenant, name, request.index, ids, answer.field)
            except HeadraceError as error:
                if error.code is not Code.NOT_FOUND or (done := await self._siblings.resume(request, context)) is None:
                    raise
                return done
            return pb.ResumeResponse(num_tokens=len(ids))

    async def Explain(self, request: pb.ExplainRequest, context: grpc.aio.ServicerContext) -> pb.ExplainResponse:
        async with _Call(self._door, context, "Explain") as call:
            _check_unknown(request)
            name = label("request_id", request.request_id)
            if not name:
                raise invalid("request_id", "must have at least 1 character")
            decisions = self._door.gateway.explain(call.tenant, name)
            if decisions is None:
                if (found := await self._siblings.explain(request, context)) is not None:
                    return found
                raise HeadraceError(
                    Code.NOT_FOUND, "request_id: no request of this id is remembered", field="request_id"
                )
            return pb.ExplainResponse(request_id=name, decisions=decisions)

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        async with _Call(self._door, context, "Tokenize"):
            _check_unknown(request)
            self._door.check_model(request.model)
            kind = request.WhichOneof("input")
            if kind == "chat":
                prompt = self._chat_prompt(request.chat)
            elif kind == "prompt":
                prompt = Prompt("prompt", text=request.prompt)
            else:
                raise invalid("prompt", "one of prompt or chat is needed")
            ids = await self._door.encode(prompt)
            return pb.TokenizeResponse(token_ids=ids, max_model_len=self._door.spec.max_model_len)

    async def ModelInfo(self, request: pb.ModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfoResponse:
        async with _Call(self._door, context, "ModelInfo"):
            _check_unknown(request)
            door = self._door
            door.check_model(request.model)
            return pb.ModelInfoResponse(
                model=door.spec.served_model_name,
                architecture=door.text.architecture,
                vocab_size=door.text.vocab_size,
                max_model_len=door.spec.max_model_len,
                block_size=self._facts.block_size,
                dtype=self._facts.dtype or door.text.dtype,
                fingerprint=door.gateway.fingerprint(),
                eos_token_ids=door.text.eos_token_ids,
            )

    async def _prepare(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, tenant: str
    ) -> tuple[GenerationSpec, str]:
        """The checked call, and the id that its messages carry: the client's label or a random name."""
        door = self._door
        received_at = door.clock()
        _check_unknown(request)
        door.check_model(request.model)
        name = label("request_id", request.request_id)
        options = self._options(request)
        left = context.time_remaining()
        if left is not None and left <= 0:
            raise HeadraceError(Code.DEADLINE_EXCEEDED, "the deadline is over")
        answer_id = name or f"gen-{secrets.token_hex(12)}"
        caller = Caller(
            tenant=tenant,
            label=name,
            answer_id=answer_id,
            deadline_s=left,
            received_at=received_at,
            endpoint="generate",
            task=task_label("task", request.task),
            steps_left=steps_left("steps_left", request.steps_left if request.HasField("steps_left") else None),
            parent=label("parent", request.parent),
            tool_wait=self._tool_wait(request, name),
            on_transfer_failure=on_transfer_failure("on_transfer_failure", request.on_transfer_failure),
        )
        spec = await door.prepare(self._prompt(request), options, caller, explain=request.explain)
        return spec, answer_id

    def _options(self, request: pb.GenerateRequest) -> Options:
        sampling = request.sampling
        raw: dict[str, object] = {name: getattr(sampling, name) for name in _SAMPLING if sampling.HasField(name)}
        if len(sampling.stop):
            # A slice one longer than the limit is enough to be refused by it.
            raw["stop"] = list(sampling.stop[: self._door.limits.max_stop_strings + 1])
        if len(sampling.stop_token_ids):
            raw["stop_token_ids"] = list(sampling.stop_token_ids)
        if len(sampling.logit_bias):
            some = islice(sampling.logit_bias.items(), MAX_BIASES + 1)
            raw["logit_bias"] = {str(token_id): amount for token_id, amount in some}
        if request.session:
            raw["session"] = request.session
        if request.cache_salt:
            raw["cache_salt"] = request.cache_salt
        raw["no_cache"] = request.no_cache
        raw["priority"] = request.priority
        return parse_options(raw, self._door.limits)

    def _tool_wait(self, request: pb.GenerateRequest, name: str) -> ToolWait | None:
        if not request.HasField("tool_wait"):
            return None
        wait, limits = request.tool_wait, self._door.limits
        # A slice one longer than the limit is enough to be refused by it.
        return tool_wait(wait.on[: limits.max_stop_strings + 1], wait.tool, name, limits)

    def _prompt(self, request: pb.GenerateRequest) -> Prompt:
        match request.WhichOneof("input"):
            case "prompt":
                if not request.prompt:
                    raise invalid("prompt", "must have at least 1 character")
                return Prompt("prompt", text=request.prompt)
            case "token_ids":
                return Prompt("token_ids", ids=request.token_ids.ids)
            case "chat":
                return self._chat_prompt(request.chat)
            case _:
                raise invalid("prompt", "one of prompt, token_ids or chat is needed")

    def _chat_prompt(self, chat: pb.ChatMessages) -> Prompt:
        raw = [{"role": message.role, "content": message.content} for message in chat.messages]
        messages = parse_messages(raw, self._door.max_prompt_chars)
        return Prompt("messages", messages=messages, add_special_tokens=False)


class _Call:
    """Around every handler: knows the tenant, turns an error inside into the RPC's status."""

    tenant: str

    def __init__(self, door: Door, context: grpc.aio.ServicerContext, method: str) -> None:
        self._door = door
        self._context = context
        self._method = method
        self._running = False

    async def __aenter__(self) -> Self:
        try:
            self.tenant = self._door.auth.tenant(metadata_value(self._context.invocation_metadata(), "authorization"))
        except HeadraceError as error:
            await self._refuse(error)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, HeadraceError):
            await self._refuse(error)
        elif isinstance(error, InvariantError):
            end_process(error)
        elif isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            log.error("a call of %s failed", self._method, exc_info=error)
            await self._context.abort(grpc.StatusCode.INTERNAL, "internal error")

    def deltas(self, spec: GenerationSpec) -> aclosing[AsyncGenerator[Delta, None]]:
        """The running call; from here on its meter counts how it ends."""
        self._running = True
        return aclosing(self._door.deltas(self._method, spec))

    async def _refuse(self, error: HeadraceError) -> None:
        if not self._running:
            self._door.metrics.refused(self._method, error.code)
        trailers = []
        if error.field is not None:
            trailers.append((FIELD_KEY, error.field.encode("ascii", "replace").decode()))
        if error.retry_after_s is not None:
            trailers.append((RETRY_KEY, str(math.ceil(error.retry_after_s * 1000))))
        if error.reason is not None:
            trailers.append((REASON_KEY, error.reason))
        await self._context.abort(grpc.StatusCode[error.code.name], error.message, tuple(trailers))


def _check_unknown(message: Message) -> None:
    """An option of a newer protocol must not be ignored, at any depth: it would change the answer."""
    for unknown in UnknownFieldSet(message):
        raise invalid(message.DESCRIPTOR.name, f"field number {unknown.field_number} is unknown to this server")
    for field, value in message.ListFields():
        # A map's values are scalars here.
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in [value] if isinstance(value, Message) else value:
                _check_unknown(part)

"""The OpenAI-compatible HTTP door. It parses, calls the gateway and writes; what a stream promises stands in
`openai_format`.

Every path needs a key except those in `OPEN_PATHS`. A client that goes away, streaming or not, closes its `generate()`
iterators at once.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace import __version__
from headrace.errors import Code, HeadraceError, InvariantError
from headrace.process import end_process
from router.api import Delta, GatewayService, GenerationSpec
from router.auth import Authenticator
from router.door import Door, merged
from router.http_io import (
    Disconnected,
    HttpRefusal,
    error_body,
    error_response,
    json_response,
    read_json,
    run_until_disconnect,
)
from router.metrics import CONTENT_TYPE, DoorMetrics
from router.openai_format import ChunkWriter, WholeAnswer, sse
from router.openai_logprobs import LogprobWriter
from router.openai_models import Call, parse_chat, parse_completion, parse_detokenize, parse_tokenize
from router.scalars import label
from router.spec import GatewaySpec
from router.validate import Caller, deadline, on_transfer_failure, request_label, steps_left, task_label

if TYPE_CHECKING:
    from router.fallback import Fallback, Rescue

log = logging.getLogger("headrace.router.http")

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
MAX_HEADER_BYTES = 64 << 10
DEADLINE_HEADER = "x-request-timeout-s"
TASK_HEADER = "x-headrace-task"
STEPS_HEADER = "x-headrace-steps-left"
PARENT_HEADER = "x-headrace-parent"
TRANSFER_FAILURE_HEADER = "x-headrace-on-transfer-failure"
_INTERNAL = HeadraceError(Code.INTERNAL, "internal error; the server's log has it under this request's id")


def build_app(
    gateway: GatewayService,
    spec: GatewaySpec,
    authenticator: Authenticator | None = None,
    *,
    metrics: DoorMetrics | None = None,
    scrape: Callable[[], Awaitable[bytes]] | None = None,
    fallback: Fallback | None = None,
) -> ASGIApp:
    """The ASGI application of one gateway. Share `metrics` with the gRPC door, and `fallback`, by default the one that
    `spec` has, with the gateway's other applications. `scrape`: what /metrics answers, by default this gateway's own.
    """
    api = _Api(Door(gateway, spec, metrics, authenticator), scrape, fallback or build_fallback(spec))
    routes = [
        Route("/health", api.health, methods=["GET"]),
        Route("/ping", api.health, methods=["GET", "POST"]),
        Route("/version", api.version, methods=["GET"]),
        Route("/metrics", api.metrics, methods=["GET"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{model:path}", api.model, methods=["GET"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            HeadraceError: api.refused,
            HTTPException: api.not_routed,
            Disconnected: api.gone,
            Exception: api.broken,
        },
    )
    app.router.redirect_slashes = False
    return _Guard(app, api.door)


def build_fallback(spec: GatewaySpec) -> Fallback | None:
    """None where none is configured."""
    there = spec.degradation.fallback
    if there is None:
        return None
    # Its HTTP client takes half a second to import.
    from router.fallback import Fallback

    return Fallback(there, spec.served_model_name)


class _Guard:
    """Before any handler: header size, then the key. Default is deny."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = scope["headers"]
            if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
                raise HttpRefusal(431, f"the headers must have at most {MAX_HEADER_BYTES} bytes together")
            if scope["path"] not in OPEN_PATHS:
                presented = next((value.decode("latin-1") for name, value in headers if name == b"authorization"), None)
                scope.setdefault("state", {})["tenant"] = self._door.auth.tenant(presented)
        except HeadraceError as error:
            self._door.metrics.refused("http", error.code)
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _Api:
    def __init__(self, door: Door, scrape: Callable[[], Awaitable[bytes]] | None, fallback: Fallback | None) -> None:
        self.door = door
        self._scrape = scrape or door.metrics.scrape
        self._spec = door.spec
        self._started = int(time.time())
        self._fallback = fallback
        self._routed = self._spec.degradation.routed

    # -- what is open to everybody

    async def health(self, request: Request) -> Response:
        """200 only while a request could be served."""
        if self.door.gateway.ready():
            return Response(status_code=200)
        return error_response(HeadraceError(Code.UNAVAILABLE, "no worker is ready", retry_after_s=1.0))

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        return Response(await self._scrape(), media_type=CONTENT_TYPE)

    # -- models and tokens

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self.door.check_model(request.path_params["model"] or "(none)")
        return json_response(self._model_card())

    def _model_card(self) -> dict[str, object]:
        return {
            "id": self._spec.served_model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "headrace",
            "root": self._spec.served_model_name,
            "parent": None,
            "max_model_len": self._spec.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        door = self.door
        raw = await read_json(request, self._spec.max_body_bytes)
        door.check_model(raw.get("model"))
        prompt, strings = parse_tokenize(raw, door.limits, door.max_prompt_chars)
        ids = await door.encode(prompt)
        return json_response(
            {
                "count": len(ids),
                "max_model_len": self._spec.max_model_len,
                "tokens": ids,
                "token_strs": [door.text.token_text(token_id) for token_id in ids] if strings else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        raw = await read_json(request, self._spec.max_body_bytes)
        self.door.check_model(raw.get("model"))
        ids = parse_detokenize(raw, self.door.limits)
        return json_response({"prompt": self.door.text.decode(ids, skip_special_tokens=False)})

    # -- generation

    async def completions(self, request: Request) -> Response:
        raw = await self._generation_body(request)
        return await self._generate(request, raw, parse_completion(raw, self.door.limits), "cmpl", "text_completion")

    async def chat(self, request: Request) -> Response:
        raw = await self._generation_body(request)
        call = parse_chat(raw, self.door.limits, self.door.max_prompt_chars)
        return await self._generate(request, raw, call, "chatcmpl", "chat.completion")

    async def _generation_body(self, request: Request) -> dict[str, object]:
        request.state.received_at = self.door.clock()
        raw = await read_json(request, self._spec.max_body_bytes)
        self.door.check_model(raw.get("model"))
        return raw

    async def _generate(self, request: Request, raw: dict[str, object], call: Call, prefix: str, kind: str) -> Response:
        answer_id = f"{prefix}-{secrets.token_hex(12)}"
        specs = await self._prepare(request, call, answer_id)
        rescue = self._rescue(request, raw, call, specs[0])
        if rescue is not None:
            specs = [replace(spec, may_fall_back=True) for spec in specs]
        head: dict[str, object] = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._spec.served_model_name,
        }
        # From here on the deltas' own meter counts how the call ended.
        request.state.running = True
        prompts = [spec.prompt_ids for spec in specs]
        endpoint = request.url.path
        source = merged([self.door.deltas(endpoint, spec) for spec in specs])
        headers = {"x-request-id": specs[0].label} if specs[0].label.isascii() and specs[0].label else {}
        logprobs = None if call.options.logprobs is None else LogprobWriter(self.door.text, call.chat)
        if call.stream:
            if call.chat:
                head["object"] = "chat.completion.chunk"
            writer = ChunkWriter(
                head,
                call.chat,
                prompts,
                call.options.n,
                include_usage=call.include_usage,
                continuous_usage=call.continuous_usage,
                token_ids=call.return_token_ids,
                logprobs=logprobs,
            )
            return _EventStream(source, writer, headers, rescue, self._routed)
        answer = WholeAnswer(head, call.chat, prompts, call.options.n, call.return_token_ids, logprobs)
        try:
            await run_until_disconnect(request.receive, _collect(source, answer))
        except HeadraceError as error:
            if rescue is None or error.reason not in self._routed:
                raise
            return rescue.response(error)
        return json_response(answer.body(), headers=headers)

    async def _prepare(self, request: Request, call: Call, answer_id: str) -> list[GenerationSpec]:
        headers = request.headers
        header = headers.get("x-request-id")
        caller = Caller(
            tenant=request.state.tenant,
            label=call.label if header is None else label("x-request-id", header),
            deadline_s=deadline(DEADLINE_HEADER, headers.get(DEADLINE_HEADER)),
            received_at=request.state.received_at,
            endpoint="chat" if call.chat else "completions",
            task=task_label(TASK_HEADER, headers.get(TASK_HEADER)),
            steps_left=steps_left(STEPS_HEADER, headers.get(STEPS_HEADER)),
            parent=request_label(PARENT_HEADER, headers.get(PARENT_HEADER)),
            on_transfer_failure=on_transfer_failure(TRANSFER_FAILURE_HEADER, headers.get(TRANSFER_FAILURE_HEADER)),
            answer_id=answer_id,
        )
        return [await self.door.prepare(prompt, call.options, caller) for prompt in call.prompts]

    def _rescue(self, request: Request, raw: dict[str, object], call: Call, spec: GenerationSpec) -> Rescue | None:
        """What to do with the call when it is refused for want of room or time; None: only tell."""
        if self._fallback is None or not self._fallback.may_take(call, request.headers):
            return None
        door = self.door
        left_s = door.spec.default_deadline_s if spec.deadline_s is None else spec.deadline_s
        return self._fallback.rescue(
            path=request.url.path,
            body=raw,
            label=spec.label,
            stream=call.stream,
            deadline=spec.received_at + left_s,
            clock=door.clock,
            metrics=door.metrics,
        )

    # -- errors

    async def refused(self, request: Request, error: Exception) -> Response:
        if not isinstance(error, HeadraceError):
            raise error
        if not getattr(request.state, "running", False):
            self.door.metrics.refused(_endpoint(request), error.code)
        return error_response(error)

    async def not_routed(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        reason = {404: "no such path", 405: "this path does not take this method"}.get(status, "bad request")
        return error_response(HttpRefusal(status, reason))

    async def gone(self, request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def broken(self, request: Request, error: Exception) -> Response:
        # Starlette re-raises after this answer, so the traceback reaches the log.
        return error_response(_INTERNAL)


def _endpoint(request: Request) -> str:
    route = request.scope.get("route")
    return getattr(route, "path", "other")


async def _collect(source: AsyncGenerator[tuple[int, Delta], None], answer: WholeAnswer) -> None:
    async with aclosing(source):
        async for prompt, delta in source:
            answer.add(prompt, delta)


class _EventStream(Response):
    """Server-sent events. The status is decided by the first delta: a refusal before it is an ordinary error answer."""

    def __init__(
        self,
        source: AsyncGenerator[tuple[int, Delta], None],
        writer: ChunkWriter,
        headers: dict[str, str],
        rescue: Rescue | None,
        routed: Collection[str],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._source = source
        self._writer = writer
        self._rescue = rescue
        self._routed = routed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Nobody is left to tell when the client is gone.
        try:
            await run_until_disconnect(receive, self._run(scope, receive, send))
        except Disconnected:
            log.info("client went away during a stream")

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source) as source:
            try:
                first = await anext(source)
            except HeadraceError as error:
                if self._rescue is not None and error.reason in self._routed:
                    await self._rescue.answer(error, scope, receive, send)
                else:
                    await error_response(error)(scope, receive, send)
                return
            await send(self._start())
            await self._send_body(send, first, source)

    async def _send_body(
        self, send: Send, first: tuple[int, Delta], source: AsyncGenerator[tuple[int, Delta], None]
    ) -> None:
        chunk = self._writer.chunk
        try:
            await send(_piece(chunk(*first)))
            async for prompt, delta in source:
                if data := chunk(prompt, delta):
                    await send(_piece(data))
            last = self._writer.end()
        except HeadraceError as error:
            last = sse(error_body(error))
        except InvariantError as error:
            end_process(error)
        except Exception:
            log.exception("a stream failed")
            last = sse(error_body(_INTERNAL))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _start(self) -> Message:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        headers.append((b"content-type", b"text/event-stream; charset=utf-8"))
        return {"type": "http.response.start", "status": 200, "headers": headers}


def _piece(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}

"""The fallback deployment: a call that was refused here for want of room or time is sent to another OpenAI-compatible
server, and its answer passed through as it comes.

The client's own key and headers stay here. What is sent says `X-Headrace-No-Fallback`, and a call that came with it is
never sent on. Nothing of an answer reaches the client before its first byte is here, so that until then the refusal can
still be told, with both reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from dataclasses import dataclass

import aiohttp
import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace.clock import Clock
from headrace.errors import Code, HeadraceError
from router.http_io import Disconnected, error_body, error_response, run_until_disconnect
from router.metrics import DoorMetrics
from router.openai_format import sse
from router.openai_models import Call
from router.spec import FallbackSpec

log = logging.getLogger("headrace.router.fallback")

NO_FALLBACK_HEADER = "x-headrace-no-fallback"
FALLBACK_HEADER = "x-headrace-fallback"
MAX_WHOLE_BYTES = 32 << 20
"""Of an answer that is no stream: it is held until its end is here, so that the refusal can be told until then."""
_CONNECT_S = 5.0
_TEXTS = {
    "busy": "and as many calls as may be are at the fallback already",
    "unreachable": "and the fallback cannot be reached",
    "refused": "and the fallback did not take it",
    "timeout": "and the fallback did not answer in time",
    "broken": "and the fallback's answer broke off or was too long",
    "failed": "and sending it to the fallback failed",
}


class FallbackError(Exception):
    """No answer from there: a word of `_TEXTS`."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Answer:
    """What came from there: the first bytes are here, `chunks` has them and the rest, and raises FallbackError."""

    content_type: str
    chunks: AsyncGenerator[bytes, None]


class Fallback:
    """See the module's docstring. Lives on one event loop, and serves all doors of a gateway, so that `max_requests`
    holds for them together; every call has a connection of its own.
    """

    def __init__(self, spec: FallbackSpec, served_model_name: str) -> None:
        self.model = spec.model or served_model_name
        self._spec = spec
        self._num_sent = 0

    def may_take(self, call: Call, headers: Mapping[str, str]) -> bool:
        """Whether the call means the same there. Token ids do only where the model is the same."""
        if NO_FALLBACK_HEADER in headers:
            return False
        return self._spec.model is None or not _has_token_ids(call)

    def rescue(
        self,
        *,
        path: str,
        body: Mapping[str, object],
        label: str,
        stream: bool,
        deadline: float,
        clock: Clock,
        metrics: DoorMetrics,
    ) -> Rescue:
        """One call: its path (with `/v1`) and body as they came; `deadline` is on `clock`."""
        return Rescue(self, path, body, label, stream, deadline, clock, metrics)

    @asynccontextmanager
    async def send(
        self, path: str, body: Mapping[str, object], label: str, time_left_s: float
    ) -> AsyncIterator[Answer]:
        """The answer to the call, which ends with the context. Raises FallbackError before there is any of it.

        path: as it came, with `/v1`; time_left_s: until the call's deadline.
        """
        spec = self._spec
        if time_left_s <= 0:
            raise FallbackError("timeout")
        if self._num_sent >= spec.max_requests:
            raise FallbackError("busy")
        headers = {"content-type": "application/json", NO_FALLBACK_HEADER: "1"}
        headers["x-request-timeout-s"] = f"{time_left_s:.3f}"
        if spec.api_key:
            headers["authorization"] = f"Bearer {spec.api_key}"
        if label.isascii() and label:
            headers["x-request-id"] = label
        try:
            data = orjson.dumps({**body, "model": self.model})
        except orjson.JSONEncodeError:
            # What can be read may be nested more deeply than what can be written.
            raise FallbackError("refused") from None
        url = spec.url + path.removeprefix("/v1")
        limits = aiohttp.ClientTimeout(total=time_left_s, sock_connect=_CONNECT_S)
        self._num_sent += 1
        try:
            async with AsyncExitStack() as opened:
                session = await opened.enter_async_context(aiohttp.ClientSession(timeout=limits))
                try:
                    async with asyncio.timeout(spec.timeout_s):
                        response = await session.post(url, data=data, headers=headers, allow_redirects=False)
                        # Released instead, it would wait until all of the body is sent.
                        opened.enter_context(closing(response))
                        if response.status != 200:
                            raise FallbackError("refused")
                        first = await response.content.readany()
                except TimeoutError:
                    raise FallbackError("timeout") from None
                except (aiohttp.ClientError, OSError):
                    raise FallbackError("unreachable") from None
                if not first:
                    raise FallbackError("broken")
                yield Answer(response.headers.get("content-type", "application/json"), _chunks(first, response))
        finally:
            self._num_sent -= 1


async def _whole(chunks: AsyncIterator[bytes]) -> bytes:
    pieces, num_bytes = [], 0
    async for chunk in chunks:
        num_bytes += len(chunk)
        if num_bytes > MAX_WHOLE_BYTES:
            raise FallbackError("broken")
        pieces.append(chunk)
    return b"".join(pieces)


async def _chunks(first: bytes, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    yield first
    try:
        async for chunk in response.content.iter_any():
            yield chunk
    except TimeoutError:
        raise FallbackError("timeout") from None
    except (aiohttp.ClientError, OSError):
        raise FallbackError("broken") from None


@dataclass(frozen=True, slots=True)
class Rescue:
    """One call that may be sent on when it is refused."""

    fallback: Fallback
    path: str
    body: Mapping[str, object]
    """As the client sent it."""
    label: str
    stream: bool
    deadline: float
    """On `clock`."""
    clock: Clock
    metrics: DoorMetrics

    def response(self, error: HeadraceError) -> Response:
        """To a call that was refused as a whole."""
        return _Rescued(self, error)

    async def answer(self, error: HeadraceError, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the fallback's answer as the response; without one, the refusal with both reasons."""
        outcome, started = "cancelled", False
        try:
            sent = self.fallback.send(self.path, self.body, self.label, self.deadline - self.clock())
            async with sent as answer, aclosing(answer.chunks) as chunks:
                if self.stream:
                    async for chunk in chunks:
                        if not started:
                            started = True
                            await send(self._start(answer))
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                else:
                    whole = await _whole(chunks)
                    started = True
                    await send(self._start(answer))
                    await send({"type": "http.response.body", "body": whole, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            outcome = "answered"
        except FallbackError as failed:
            outcome = failed.outcome
            await self._end(error, outcome, started, scope, receive, send)
        except Exception:
            log.exception("a call could not be sent to the fallback")
            outcome = "failed"
            await self._end(error, outcome, started, scope, receive, send)
        finally:
            self.metrics.fell_back(outcome)
            log.info("fallback reason=%s outcome=%s", error.reason, outcome)

    async def _end(
        self, error: HeadraceError, outcome: str, started: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not started:
            await error_response(with_both_reasons(error, outcome))(scope, receive, send)
            return
        # An empty line first: it may have broken off in the middle of an event.
        last = b"\n\n" + sse(error_body(HeadraceError(Code.ABORTED, "the answer of the fallback broke off")))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _start(self, answer: Answer) -> Message:
        headers = {
            "content-type": answer.content_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            FALLBACK_HEADER: self.fallback.model,
        }
        if self.label.isascii() and self.label:
            headers["x-request-id"] = self.label
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}


class _Rescued(Response):
    def __init__(self, rescue: Rescue, error: HeadraceError) -> None:
        super().__init__()
        self._rescue = rescue
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(Disconnected):
            await run_until_disconnect(receive, self._rescue.answer(self._error, scope, receive, send))


def with_both_reasons(error: HeadraceError, outcome: str) -> HeadraceError:
    """The refusal as it was, and why the fallback did not help."""
    return HeadraceError(
        error.code,
        f"{error.message}; {_TEXTS[outcome]}",
        field=error.field,
        retry_after_s=error.retry_after_s,
        reason=error.reason,
        fallback=outcome,
    )


def _has_token_ids(call: Call) -> bool:
    options = call.options
    named = options.stop_token_ids or options.logit_bias or call.return_token_ids
    return bool(named) or any(prompt.ids is not None for prompt in call.prompts)

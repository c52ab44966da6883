"""HTTP mechanics below the API: bounded bodies, errors in OpenAI's form, work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping
from typing import TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from headrace.errors import HTTP_STATUS, Code, HeadraceError, invalid

T = TypeVar("T")

BODY_TIMEOUT_S = 60.0
"""A body that is not here by then is given up: a slow sender holds memory and a connection."""
_MAX_ERROR_CHARS = 2000
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class HttpRefusal(HeadraceError):
    """A refusal whose HTTP status has no gRPC twin (413, 408, 405, ...)."""

    def __init__(self, status: int, message: str, field: str | None = None, *, close: bool = False) -> None:
        super().__init__(Code.INVALID_ARGUMENT, message, field=field)
        self.status = status
        self.close = close
        """End the connection: more of an unwanted body would follow."""


class Disconnected(Exception):
    """The client went away; there is nobody to answer."""


def http_status(error: HeadraceError) -> int:
    return error.status if isinstance(error, HttpRefusal) else HTTP_STATUS[error.code]


def error_body(error: HeadraceError) -> dict[str, object]:
    """`{"error": {message, type, param, code}}`; type and code as OpenAI's clients know them, else the code's name. A
    refusal by admission has `reason` too, and `fallback` when the fallback did not help.
    """
    status = http_status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = "model_not_found" if error.code is Code.NOT_FOUND and error.field == "model" else error.code.lower()
    body: dict[str, object] = {
        "message": error.message[:_MAX_ERROR_CHARS],
        "type": kind,
        "param": error.field,
        "code": code,
    }
    if error.reason is not None:
        body["reason"] = error.reason
    if error.fallback is not None:
        body["fallback"] = error.fallback
    return {"error": body}


def error_headers(error: HeadraceError) -> dict[str, str]:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    if isinstance(error, HttpRefusal) and error.close:
        headers["connection"] = "close"
    if error.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: HeadraceError) -> Response:
    return json_response(error_body(error), http_status(error), error_headers(error))


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, dict(headers or {}), "application/json")


async def read_json(request: Request, max_bytes: int) -> dict[str, object]:
    """The body as a JSON object, whatever its content type. Refused while it arrives once it exceeds `max_bytes`."""
    body = await _read_body(request, max_bytes)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # `msg` is the parser's own phrase; the document itself is never repeated.
        raise invalid("body", f"not valid JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise invalid("body", "must be a JSON object")
    return value


async def _read_body(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        # A client that is still writing reads no answer; a little more is swallowed so that it gets one.
        raise _too_large(max_bytes, close=int(declared) > 8 * max_bytes)
    chunks = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes, close=True)
                chunks.append(chunk)
    except TimeoutError:
        raise HttpRefusal(408, f"body: did not arrive within {BODY_TIMEOUT_S:g} s", "body", close=True) from None
    except ClientDisconnect:
        raise Disconnected from None
    return b"".join(chunks)


def _too_large(max_bytes: int, close: bool) -> HttpRefusal:
    return HttpRefusal(413, f"body: must have at most {max_bytes} bytes", "body", close=close)


async def run_until_disconnect(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which is cancelled, and waited for, as soon as the client disconnects (raises
    Disconnected).

    The request's body must have been read before.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

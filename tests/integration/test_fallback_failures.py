"""A fallback deployment that does not help: the client gets the original rejection with both reasons, or a stream that
ends with an error, and nothing stays open.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Send

from router import fallback
from tests.both_doors import Doors, run
from tests.integration.test_fallback import Stub, busy, chat, hangs, refused_with, says, served


def breaks(*chunks: bytes) -> Callable[[Send], Awaitable[None]]:
    async def behave(send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        raise ConnectionAbortedError

    return behave


async def outcomes(d: Doors) -> dict[str, float]:
    """Calls that were to be sent on, by what came of it."""
    scraped = (await d.http.get("/metrics")).text
    pattern = r'^headrace_fallback_requests_total\{model_name="tiny",outcome="(\w+)"\} (.+)$'
    return {outcome: float(count) for outcome, count in re.findall(pattern, scraped, re.MULTILINE)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("behave", "outcome"),
    [
        (says(503, b"{}"), "refused"),
        (says(400, b"{}"), "refused"),
        (says(307, b""), "refused"),
        (says(200), "broken"),
        (hangs, "timeout"),
        (says(200, then=60.0), "timeout"),
    ],
    ids=["full", "bad", "moved", "empty", "hangs", "hangs behind its headers"],
)
def test_a_bad_fallback_is_the_original_rejection_with_both_reasons(
    behave: Callable[[Send], Awaitable[None]], outcome: str, stream: bool
) -> None:
    async def main() -> None:
        async with served(stub := Stub(behave)) as url, busy(url) as (w, d):
            refused_with(await chat(d, stream=stream), outcome)
            assert len(stub.bodies) == 1
            assert await outcomes(d) == {outcome: 1.0}
            assert w.gateway.gate.decisions["route", "concurrency"] == 1

    run(main())


def test_a_fallback_that_is_down_is_the_original_rejection() -> None:
    async def main() -> None:
        async with served(Stub(hangs)) as url:
            pass
        async with busy(url) as (_, d):
            refused_with(await chat(d), "unreachable")

    run(main())


@pytest.mark.parametrize(
    "chunk", ["data: {}\n\n", "data: {}\n", 'data: {"choices'], ids=["event", "line", "half a line"]
)
def test_an_answer_that_breaks_off_in_its_middle_ends_with_an_error_or_was_never_begun(chunk: str) -> None:
    async def main() -> None:
        async with served(Stub(breaks(chunk.encode()))) as url, busy(url) as (_, d):
            response = await chat(d, stream=True)
            assert response.status_code == 200
            first, last = (event.strip() for event in response.text.split("\n\n") if event.strip())
            assert first == chunk.strip() and json.loads(last.removeprefix("data: "))["error"]["code"] == "aborted"
            refused_with(await chat(d), "broken")

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_sent_on_is_the_original_rejection_with_both_reasons(stream: bool) -> None:
    async def main() -> None:
        deep: list[object] = []
        for _ in range(300):
            deep = [deep]
        for key, asked, outcome in (("k", {"metadata": {"a": deep}}, "refused"), ("k\n", {}, "failed")):
            async with served(stub := Stub(says(200, b"yes"))) as url, busy(url, api_key=key) as (_, d):
                refused_with(await chat(d, stream=stream, **asked), outcome)
                assert not stub.bodies
                assert await outcomes(d) == {outcome: 1.0}

    run(main())


def test_an_answer_in_one_piece_is_held_up_to_a_size_and_a_stream_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "MAX_WHOLE_BYTES", 8)

    async def main() -> None:
        async with served(stub := Stub(says(200, b"12345", b"678"))) as url, busy(url) as (_, d):
            assert (await chat(d)).text == "12345678"
            stub.behave = says(200, b"12345", b"6789")
            refused_with(await chat(d), "broken")
            assert (await chat(d, stream=True)).text == "123456789"

    run(main())


def test_no_connection_is_left_open_whatever_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    """aiohttp tells of a response that was never closed when it is collected."""

    async def main() -> None:
        async with served(stub := Stub(says(503, b"abc", then=60.0))) as url, busy(url) as (_, d):
            for behave in (stub.behave, says(200, then=60.0), says(200, b"abc", then=60.0), breaks(b"abc")):
                stub.behave = behave
                for stream in (False, True):
                    await chat(d, {"x-request-timeout-s": "0.5"}, stream=stream)
            gc.collect()
            assert not [record.message for record in caplog.records if "Unclosed" in record.message]

    run(main())

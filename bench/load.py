"""A closed burst of streaming completions against any OpenAI-compatible server, measured from outside.

The client shares the machine with what it measures, so it does as little as it can: one event loop, raw sockets, events
counted in the bytes as they come, no JSON but the request and the last chunk.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

TIMEOUT_S = 600.0
_EVENT = b"data: {"


@dataclass(slots=True)
class Stream:
    """One request: seconds from its start to its first and last event, gaps between, tokens by the server's count."""

    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Burst:
    """All requests of one burst, sent at once."""

    wall_s: float
    streams: tuple[Stream, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(stream.tokens for stream in self.streams) / self.wall_s

    @property
    def ttft_s(self) -> float:
        return statistics.median(stream.first_s for stream in self.streams)

    def gap_s(self, share: float) -> float:
        """The gap between tokens that `share` of all gaps stay below."""
        gaps = sorted(gap for stream in self.streams for gap in stream.gaps_s) or [0.0]
        return gaps[min(len(gaps) - 1, int(len(gaps) * share))]


def model_of(url: str) -> str:
    """The one model that a server serves."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def burst(url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Burst:
    """Stream `max_tokens` greedy tokens for each prompt (token ids). Raises RuntimeError when a request fails."""

    async def all_streams() -> Burst:
        began = time.perf_counter()
        async with asyncio.timeout(TIMEOUT_S):
            streams = await asyncio.gather(*(_stream(url, model, prompt, max_tokens) for prompt in prompts))
        return Burst(time.perf_counter() - began, tuple(streams))

    return asyncio.run(all_streams())


async def _stream(url: str, model: str, prompt: Sequence[int], max_tokens: int) -> Stream:
    parts = urlsplit(url)
    body = json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: _Client(request), parts.hostname, parts.port)
    await client.ended
    return client.result()


class _Client(asyncio.Protocol):
    """Notes when bytes with an event in them arrive; reads nothing else until the end."""

    def __init__(self, request: bytes) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._began = time.perf_counter()
        self._times: list[float] = []
        self._first = b""
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        # Events that arrive together are one time and gaps of 0.
        self._times += [time.perf_counter() - self._began] * data.count(_EVENT)
        self._first = self._first or data
        self._tail = (self._tail + data)[-4096:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def result(self) -> Stream:
        """Raises RuntimeError when this was not a stream that ended well."""
        found = self._tail.rfind(b'"usage"')
        if b" 200 " not in self._first[:20] or b"data: [DONE]" not in self._tail or found < 0:
            raise RuntimeError(f"a request failed: {(self._first[:300] + self._tail[-500:]).decode(errors='replace')}")
        start = self._tail.rindex(_EVENT, 0, found) + len(_EVENT) - 1
        usage, _ = json.JSONDecoder().raw_decode(self._tail[start:].decode())
        # The last event carries the usage alone.
        times = self._times[:-1] if len(self._times) > 2 else self._times
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return Stream(times[0], times[-1], gaps, int(usage["usage"]["completion_tokens"]))

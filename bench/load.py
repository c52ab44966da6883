"""A closed burst of streaming completions against any OpenAI-compatible server, measured from outside.

The client shares the machine with what it measures, so it does as little as it can: one event loop, raw sockets, no
JSON but the request and the last chunk.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

TIMEOUT_S = 600.0


@dataclass(slots=True)
class Stream:
    """One request: seconds from its start to its first and last event, gaps between, tokens by the server's count."""

    first_s: float
    last_s: float
    gaps_s: list[float]
    tokens: int


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
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    try:
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        async with asyncio.timeout(TIMEOUT_S):
            return await _events(reader, began)
    finally:
        writer.close()


async def _events(reader: asyncio.StreamReader, began: float) -> Stream:
    first_s = last_s = 0.0
    gaps: list[float] = []
    usage = b""
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(
            f"the server answered {status.decode().strip()}: {(await reader.read(2000)).decode()[-500:]}"
        )
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b'data: {"error"'):
            raise RuntimeError(line.decode())
        if b'"choices":[]' in line.replace(b" ", b""):
            usage = line
            continue
        now_s = time.perf_counter() - began
        if first_s == 0.0:
            first_s = now_s
        else:
            gaps.append(now_s - last_s)
        last_s = now_s
    if not usage:
        raise RuntimeError("the stream ended without usage")
    return Stream(first_s, last_s, gaps, int(json.loads(usage[6:])["usage"]["completion_tokens"]))

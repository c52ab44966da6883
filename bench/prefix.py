"""What a shared prefix saves on a running deployment, measured from outside over gRPC.

    reuse    a prompt of thousands of tokens, then another one with the same beginning: time to the first token of both
    fetch    the same while the worker that holds the beginning is busy with a long prompt: where the request goes, and
             its time beside that of an equal one that may not use any cache
    tenants  the same prompt by a second tenant, which must be as slow as a new one: what timing tells of others

Each round has prompts of its own. Prompts are token ids, so that all lengths are exact.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from headrace.client import HeadraceClient
from headrace.errors import Code, HeadraceError
from headrace.v1 import inference_pb2 as pb

SUFFIX_TOKENS = 16
MOST_TRIES = 8
SETTLE_S = 0.5
"""Between requests: load reports and cache events travel every 20 ms, and the last request's blocks are published."""


@dataclass(frozen=True, slots=True)
class Timed:
    ttft_s: float
    cached_tokens: int
    explanation: pb.Explanation


def run(address: str, api_keys: Sequence[str], prefix_tokens: int, busy_tokens: int, rounds: int, seed: int) -> None:
    """`api_keys`: of up to two tenants; with two of them `tenants` is measured too."""
    rng = random.Random(seed)
    print(f"{rounds} rounds, prefix of {prefix_tokens} tokens, seed {seed}; medians, least and most in brackets")
    with ExitStack() as stack:
        clients = [stack.enter_context(HeadraceClient(address, api_key=key)) for key in api_keys or (None,)]
        client = clients[0]
        _ask(client, _ids(rng, 64))
        cold, warm, ratios, hits = [], [], [], []
        for _ in range(rounds):
            prefix = _ids(rng, prefix_tokens)
            first, second = (_ask(client, prefix + _ids(rng, SUFFIX_TOKENS)) for _ in range(2))
            cold.append(first.ttft_s)
            warm.append(second.ttft_s)
            ratios.append(second.ttft_s / first.ttft_s)
            hits.append(second.cached_tokens)
        print(
            f"reuse: first {_ms(cold)}, second {_ms(warm)}, second by first {_plain(ratios)}; hit tokens {min(hits)}+"
        )
        _fetch(client, rng, prefix_tokens, busy_tokens, rounds)
        if len(clients) > 1:
            _tenants(clients, rng, prefix_tokens, rounds)


def _fetch(client: HeadraceClient, rng: random.Random, prefix_tokens: int, busy_tokens: int, rounds: int) -> None:
    fetched, computed, kinds = [], [], []
    for number in range(rounds):
        for may_use_cache in (True, False) if number % 2 else (False, True):
            prefix = _ids(rng, prefix_tokens)
            holder = _ask(client, prefix + _ids(rng, SUFFIX_TOKENS)).explanation.prefill_worker
            name = f"bench-{time.time_ns()}"
            with _Busy(client, holder, rng, busy_tokens):
                got = _ask(client, prefix + _ids(rng, SUFFIX_TOKENS), name, no_cache=not may_use_cache)
            (fetched if may_use_cache else computed).append(got.ttft_s)
            if may_use_cache:
                chosen = next(row for row in client.explain(name).decisions[0].candidates if row.chosen)
                kinds.append(f"{chosen.kind} at {'the holder' if chosen.worker == holder else 'another'}")
    ratios = [a / b for a, b in zip(fetched, computed, strict=True)]
    print(f"fetch: holder busy with {busy_tokens} tokens; {_ms(fetched)} against {_ms(computed)} without any cache")
    print(f"       ratio {_plain(ratios)}; plans: {', '.join(f'{kinds.count(k)} x {k}' for k in sorted(set(kinds)))}")


def _tenants(clients: Sequence[HeadraceClient], rng: random.Random, prefix_tokens: int, rounds: int) -> None:
    own, foreign, cold, hits = [], [], [], 0
    for _ in range(rounds):
        prefix = _ids(rng, prefix_tokens)
        cold.append(_ask(clients[0], prefix + _ids(rng, SUFFIX_TOKENS)).ttft_s)
        own.append(_ask(clients[0], prefix + _ids(rng, SUFFIX_TOKENS)).ttft_s)
        other = _ask(clients[1], prefix + _ids(rng, SUFFIX_TOKENS))
        foreign.append(other.ttft_s)
        hits += other.cached_tokens
    print(f"tenants: new {_ms(cold)}, again {_ms(own)}, by the other tenant {_ms(foreign)}; its hit tokens: {hits}")
    print(f"         other tenant by new {_plain([a / b for a, b in zip(foreign, cold, strict=True)])}")


class _Busy:
    """A long prompt of its own runs on the worker `holder`, and on no other, from before the block to its end.

    Where a prompt goes is the router's choice: prompts are sent until one has gone there, the others are cancelled.
    """

    def __init__(self, client: HeadraceClient, holder: str, rng: random.Random, tokens: int) -> None:
        self._client = client
        self._holder = holder
        self._rng = rng
        self._tokens = tokens
        self._running: dict[str, threading.Thread] = {}

    def __enter__(self) -> None:
        for number in range(MOST_TRIES):
            name = f"busy-{time.time_ns()}-{number}"
            thread = threading.Thread(target=_drain, args=(self._client, _ids(self._rng, self._tokens), name))
            self._running[name] = thread
            thread.start()
            time.sleep(SETTLE_S)
            rows = self._client.explain(name).decisions[0].candidates
            if any(row.chosen and row.worker == self._holder for row in rows):
                self._stop(other for other in list(self._running) if other != name)
                return
        raise SystemExit(f"none of {MOST_TRIES} prompts went to {self._holder}")

    def __exit__(self, *exc: object) -> None:
        self._stop(list(self._running))

    def _stop(self, names: Iterable[str]) -> None:
        for name in names:
            self._client.cancel(name)
            self._running.pop(name).join()
        time.sleep(SETTLE_S)


def _drain(client: HeadraceClient, prompt: list[int], name: str) -> None:
    try:
        for _ in client.stream(prompt, request_id=name, max_tokens=2, ignore_eos=True):
            pass
    except HeadraceError as error:
        if error.code is not Code.CANCELLED:
            raise


def _ask(client: HeadraceClient, prompt: list[int], name: str = "", no_cache: bool = False) -> Timed:
    began = time.perf_counter()
    chunks = client.stream(
        prompt, request_id=name, explain=True, no_cache=no_cache, max_tokens=2, ignore_eos=True, temperature=0.0
    )
    last = next(chunks)
    first_s = time.perf_counter() - began
    for chunk in chunks:
        last = chunk
    time.sleep(SETTLE_S)
    return Timed(first_s, last.usage.cached_tokens, last.explanation)


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(count)]


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.0f} ms ({min(seconds) * 1e3:.0f}-{max(seconds) * 1e3:.0f})"


def _plain(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"

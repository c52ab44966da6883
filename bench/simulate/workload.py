"""What arrives: seeded instants, joint prompt and output lengths, tenants, priorities, deadlines; or a recorded trace.

A job is drawn as a whole, so that long prompts keep their own output lengths. Open loop: instants do not depend on how
fast anything is answered.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from itertools import islice
from math import exp
from pathlib import Path
from random import Random
from typing import TypeVar

PIECE_TOKENS = 512
"""Tokens of one entry of `Job.pieces`; Mooncake's block."""

_T = TypeVar("_T")

Lengths = Callable[[Random], tuple[int, int]]
"""Draws (prompt tokens, output tokens) of one request."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request before anybody has seen it."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    """Its true output length, which no scheduler is told when `declared_max_tokens` is set."""
    declared_max_tokens: int | None = None
    """The caller's max_tokens; the answer then ends with an end-of-sequence token. None: exactly `output_tokens`."""
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    """From arrival."""
    pieces: tuple[int, ...] = ()
    """Names of consecutive pieces of the prompt: equal leading names are a shared prefix. () is a prompt of its own."""


# ---- instants, in seconds


def poisson(rng: Random, rate: float, count: int) -> list[float]:
    """`count` arrivals at `rate` a second."""
    return ramp(rng, rate, rate, 1.0, count)


def burst(rng: Random, rate: float, count: int, every_s: float, size: int) -> list[float]:
    """Poisson arrivals at `rate` and, every `every_s` seconds, `size` more at one instant; `count` in all."""
    steady = poisson(rng, rate, count)
    together = [every_s * (1 + n // size) for n in range(count)]
    return sorted(steady + together)[:count]


def ramp(rng: Random, rate: float, to_rate: float, over_s: float, count: int) -> list[float]:
    """Poisson arrivals whose rate goes from `rate` to `to_rate` in `over_s` seconds and stays there (by thinning)."""
    most = max(rate, to_rate)
    instants: list[float] = []
    now = 0.0
    while len(instants) < count:
        now += rng.expovariate(most)
        at_now = rate + (to_rate - rate) * min(1.0, now / over_s)
        if rate == to_rate or rng.random() * most < at_now:
            instants.append(now)
    return instants


# ---- lengths, in tokens


def mixed(short: tuple[int, int], long: tuple[int, int], long_share: float) -> Lengths:
    """Two kinds of request, each within a third of its own (prompt, output) lengths."""

    def draw(rng: Random) -> tuple[int, int]:
        prompt, output = long if rng.random() < long_share else short
        return _around(rng, prompt), _around(rng, output)

    return draw


def lognormal(prompt: float, output: float, sigma: float, most: int, correlation: float = 0.0) -> Lengths:
    """Medians `prompt` and `output`, spread `sigma` of the logarithms, correlated; both cut to [1, most]."""

    def draw(rng: Random) -> tuple[int, int]:
        a, b = rng.gauss(0, 1), rng.gauss(0, 1)
        b = correlation * a + (1 - correlation**2) ** 0.5 * b
        return _cut(prompt * exp(sigma * a), most), _cut(output * exp(sigma * b), most)

    return draw


def sampled(jobs: Sequence[Job], most: int) -> Lengths:
    """Pairs of lengths as they occur in `jobs` (a trace), both cut to [1, most]."""

    def draw(rng: Random) -> tuple[int, int]:
        job = rng.choice(jobs)
        return _cut(job.prompt_tokens, most), _cut(job.output_tokens, most)

    return draw


def _around(rng: Random, tokens: int) -> int:
    return max(1, rng.randint(tokens - tokens // 3, tokens + tokens // 3))


def _cut(tokens: float, most: int) -> int:
    return min(most, max(1, round(tokens)))


# ---- jobs


def skewed(num_tenants: int, skew: float) -> dict[str, float]:
    """Tenants t0, t1, ... with weights by Zipf's law: 1, 1 / 2**skew, 1 / 3**skew, ..."""
    return {f"t{n}": (n + 1) ** -skew for n in range(num_tenants)}


def make(
    rng: Random,
    instants: Sequence[float],
    lengths: Lengths,
    *,
    tenants: Mapping[str, float] | None = None,
    priorities: Mapping[int, float] | None = None,
    deadline_s: float | None = None,
    declared_max_tokens: int | None = None,
) -> list[Job]:
    """A job at each instant. `tenants`, `priorities`: weights of each value.

    `declared_max_tokens` is raised to the true length of an answer that is longer.
    """
    jobs = []
    for at_s in instants:
        prompt, output = lengths(rng)
        declared = None if declared_max_tokens is None else max(declared_max_tokens, output)
        tenant = "" if tenants is None else _pick(rng, tenants)
        priority = 0 if priorities is None else _pick(rng, priorities)
        jobs.append(Job(at_s, prompt, output, declared, tenant, priority, deadline_s))
    return jobs


def trace(path: Path, count: int, first: int = 0, speed: float = 1.0) -> list[Job]:
    """`count` requests of a recorded trace from the `first` on, with their own instants, `speed` times as fast.

    Reads Azure's LLM inference traces (csv.gz) and Mooncake's (jsonl.gz). Raises OSError when the file is not there.
    """
    jobs = _recorded(path, first, count)
    begin_s = jobs[0].at_s if jobs else 0.0
    return [replace(job, at_s=(job.at_s - begin_s) / speed) for job in jobs]


@cache
def _recorded(path: Path, first: int, count: int) -> tuple[Job, ...]:
    with gzip.open(path, "rt") as lines:
        read = _azure if path.name.endswith(".csv.gz") else _mooncake
        return tuple(islice(read(lines), first, first + count))


def _azure(lines: Iterator[str]) -> Iterator[Job]:
    for row in csv.DictReader(lines):
        # Seven digits of a second are one more than datetime reads.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        yield Job(at.timestamp(), int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))


def _mooncake(lines: Iterator[str]) -> Iterator[Job]:
    for line in lines:
        row = json.loads(line)
        output = max(1, row["output_length"])
        yield Job(row["timestamp"] / 1e3, row["input_length"], output, pieces=tuple(row["hash_ids"]))


def _pick(rng: Random, weights: Mapping[_T, float]) -> _T:
    return rng.choices(list(weights), list(weights.values()))[0]

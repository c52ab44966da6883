"""What arrives at a virtual cluster: five seeded workloads that reuse prefixes in different ways, and recorded traces.

A prompt is a row of named pieces, one a block; equal leading names are a shared prefix. An answer's pieces are named
anew where a later prompt repeats it, so that only what was a prompt before is found again, as in recorded traces.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random

from bench.simulate import workload
from bench.simulate.workload import Job

BLOCK_TOKENS = 64
"""Of the five workloads."""
TRACE_BLOCK_TOKENS = 512
SIBLINGS = 64
TRACES = {
    "mooncake_conversation": "mooncake_conversation.jsonl.gz",
    "mooncake_synthetic": "mooncake_synthetic.jsonl.gz",
    "azure_conv": "azure2023_conv.csv.gz",
    "azure_code": "azure2023_code.csv.gz",
}

Draw = Callable[[Random, Sequence[float]], list[Job]]
"""Jobs at the given instants."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    draw: Draw
    rate: float
    """Requests a second that load eight workers to 70-80 %."""
    requests: int = 400
    slowest: float = 1.0
    """The first worker takes so many times as long."""
    siblings: bool = False
    """Every request of a tenant named `b...` belongs to that burst."""

    def jobs(self, seed: int) -> list[Job]:
        rng = Random(seed)
        return self.draw(rng, workload.poisson(rng, self.rate, self.requests))


class _Pieces:
    """Names of pieces that nobody else has."""

    def __init__(self) -> None:
        self._names = count()

    def new(self, tokens: int) -> tuple[int, ...]:
        return tuple(next(self._names) for _ in range(-(-tokens // BLOCK_TOKENS)))


def _job(rng: Random, at_s: float, pieces: tuple[int, ...], output: int, tenant: str = "") -> Job:
    return Job(at_s, BLOCK_TOKENS * len(pieces), _around(rng, output), tenant=tenant, pieces=pieces)


def _around(rng: Random, tokens: int) -> int:
    return rng.randint(tokens // 2, tokens + tokens // 2)


def zipf(rng: Random, instants: Sequence[float]) -> list[Job]:
    """200 prefixes of 1,024 to 4,096 tokens, drawn by Zipf's law; own parts of 64 to 256 tokens."""
    pieces = _Pieces()
    prefixes = [pieces.new(rng.randint(1_024, 4_096)) for _ in range(200)]
    weights = [1 / (n + 1) for n in range(len(prefixes))]
    return [_job(rng, at, rng.choices(prefixes, weights)[0] + pieces.new(rng.randint(64, 256)), 50) for at in instants]


def system_prompt(rng: Random, instants: Sequence[float]) -> list[Job]:
    """One prefix of 2,048 tokens; own parts of 256 to 1,024."""
    pieces = _Pieces()
    prefix = pieces.new(2_048)
    return [_job(rng, at, prefix + pieces.new(rng.randint(256, 1_024)), 50) for at in instants]


def chats(rng: Random, instants: Sequence[float]) -> list[Job]:
    """Chats of 1 to 9 turns, 1 to 4 s apart: each prompt is all that was said before and 64 to 512 tokens."""
    pieces = _Pieces()
    turns: list[tuple[float, tuple[int, ...]]] = []
    for at in instants[: -(-len(instants) // 5)]:
        prompt = pieces.new(rng.randint(512, 2_048))
        # As many chats a second as all instants would give if each had five turns.
        begin = at * 5
        for _ in range(rng.randint(1, 9)):
            turns.append((begin, prompt))
            begin += rng.uniform(1.0, 4.0)
            prompt += pieces.new(100) + pieces.new(rng.randint(64, 512))
    turns.sort()
    return [_job(rng, at, prompt, 50) for at, prompt in turns]


def bursts(rng: Random, instants: Sequence[float]) -> list[Job]:
    """Half of all requests come alone, prompts of 512 to 2,048 tokens of their own; the others in bursts of 64 with a
    prefix of 4,096 tokens and 64 of their own, evenly spread.
    """
    pieces = _Pieces()
    alone = instants[::2]
    jobs = [_job(rng, at, pieces.new(rng.randint(512, 2_048)), 50) for at in alone]
    num_bursts = len(instants) // 2 // SIBLINGS
    for n in range(num_bursts):
        at, prefix = instants[-1] * (n + 0.5) / num_bursts, pieces.new(4_096)
        jobs += [_job(rng, at, prefix + pieces.new(64), 50, tenant=f"b{n}") for _ in range(SIBLINGS)]
    return sorted(jobs, key=lambda job: job.at_s)


WORKLOADS = {
    "zipf": Workload("zipf", zipf, 30.0),
    "system_prompt": Workload("system_prompt", system_prompt, 45.0),
    "chats": Workload("chats", chats, 60.0),
    "bursts": Workload("bursts", bursts, 30.0, siblings=True),
    "slow_worker": Workload("slow_worker", zipf, 27.0, slowest=3.0),
}


def trace(folder: Path, name: str, count: int | None = None, speed: float = 1.0) -> list[Job]:
    """The first `count` requests of a recorded trace, `speed` times as fast. Raises OSError when it is not there."""
    jobs = workload.trace(folder / TRACES[name], 10**9 if count is None else count, speed=speed)
    return [replace(job, prompt_tokens=max(1, job.prompt_tokens)) for job in jobs]


def pooled_hits(jobs: Sequence[Job], num_blocks: int, block_tokens: int) -> int:
    """Full prompt blocks that one LRU cache of `num_blocks` would have had, over the jobs in order of arrival: what one
    memory of all workers together could save, with nothing in it but prompts.
    """
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for job in jobs:
        # The last token is always computed, see `workers.core.residency`.
        names = job.pieces[: job.prompt_tokens // block_tokens]
        most = (job.prompt_tokens - 1) // block_tokens
        run = 0
        while run < min(most, len(names)) and names[run] in cached:
            run += 1
        hits += run
        for name in reversed(names):
            cached[name] = None
            cached.move_to_end(name)
        while len(cached) > num_blocks:
            cached.popitem(last=False)
    return hits

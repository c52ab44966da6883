"""Any number of OpenAI-compatible servers under the same bursts in turn: medians, and ratios paired round by round.

Absolute figures on a shared machine drift by a third within minutes; what is compared must alternate.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from bench.load import Burst, burst, model_of


def run(
    servers: dict[str, str], concurrency: Sequence[int], num_in: int, num_out: int, rounds: int, vocab: int, seed: int
) -> None:
    """servers: name -> base URL; the first is what the others are compared with.

    A seed used before on the same server meets its prefix cache.
    """
    try:
        models = {name: model_of(url) for name, url in servers.items()}
    except OSError as error:
        raise SystemExit(f"a server does not answer: {error}") from error
    rng = random.Random(seed)
    base = next(iter(servers))
    for width in concurrency:
        results: dict[str, list[Burst]] = {name: [] for name in servers}
        for turn in range(rounds + 1):
            prompts = [[rng.randrange(100, vocab) for _ in range(num_in)] for _ in range(width)]
            order = list(servers) if turn % 2 else list(reversed(servers))
            for name in order:
                result = burst(servers[name], models[name], prompts, num_out)
                if turn:  # the first round warms up
                    results[name].append(result)
        for name in servers:
            _print(width, name, base, results[base], results[name], num_in)


def _print(width: int, name: str, base: str, ours: list[Burst], theirs: list[Burst], num_in: int) -> None:
    rate = statistics.median(b.tokens_per_s for b in theirs)
    ttft = statistics.median(b.ttft_s for b in theirs)
    gap50 = statistics.median(b.gap_s(0.5) for b in theirs)
    gap99 = statistics.median(b.gap_s(0.99) for b in theirs)
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, theirs, strict=True)]
    first = [b.ttft_s / a.ttft_s for a, b in zip(ours, theirs, strict=True)]
    print(
        f"c={width:<4d} {name:12s} out {rate:7.1f} tok/s  ttft {ttft * 1e3:8.1f} ms ({num_in / ttft:7.1f} tok/s in)  "
        f"itl p50 {gap50 * 1e3:6.1f} p99 {gap99 * 1e3:7.1f} ms  "
        f"{base}/{name}: out {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}), "
        f"ttft {statistics.median(first):.2f} ({min(first):.2f}-{max(first):.2f})",
        flush=True,
    )

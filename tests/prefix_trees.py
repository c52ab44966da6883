"""Random trees of prompts, for tests of what requests share."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


def random_tree(rng: Random, block_size: int, longest: int, words: Sequence[int]) -> list[list[int]]:
    """Prompts of `words`; each but the first goes on from a cut of an earlier one, often at the edge of a block."""
    prompts: list[list[int]] = []
    for _ in range(rng.randrange(3, 12)):
        stem = rng.choice(prompts) if prompts and rng.random() < 0.9 else []
        edge = block_size * rng.randrange(1, 5) + rng.choice([-1, 0, 1])
        cut = min(len(stem), rng.choice([edge, len(stem), rng.randrange(len(stem) + 1)]))
        near = [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size]
        tail = [rng.choice(words) for _ in range(rng.choice([*near, rng.randrange(1, 2 * block_size + 2)]))]
        prompts.append((stem[:cut] + tail)[:longest] or [words[0]])
    return prompts

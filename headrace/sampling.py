"""Sampling parameters and the one source of randomness: a function of (seed, branch, position, purpose).

Nothing here keeps state, so batch mates, placement, preemption and migration cannot change a draw (DESIGN law 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from struct import pack, unpack


class Purpose(IntEnum):
    """What a draw is for; two purposes at one position are independent."""

    TOKEN = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a worker needs to choose tokens. Built by the gateway after validation; `seed` is always set.

    temperature 0 is greedy; top_k 0 and top_p 1 are off. max_tokens and min_tokens count output tokens of the whole
    request (over all attempts). Stop strings are the gateway's business and are not here.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    branch: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def uniform(seed: int, branch: int, position: int, purpose: Purpose = Purpose.TOKEN) -> float:
    """A draw in [0, 1) with 53 random bits: the same value in every process for the same four numbers.

    `position` is absolute: the index of the token to be sampled in prompt + output.
    """
    key = pack("<QIQI", seed & (2**64 - 1), branch, position, int(purpose))
    (bits,) = unpack("<Q", blake2b(key, digest_size=8, person=b"headrace/draw").digest())
    return float(bits >> 11) * 2.0**-53

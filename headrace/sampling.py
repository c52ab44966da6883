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

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. repetition_penalty (1 is off) counts the tokens of
    prompt and output, presence_penalty and frequency_penalty (0 is off) those of the output alone; logit_bias is pairs
    of a token id and what is added to its logit. Greedy requests use these four too. max_tokens and min_tokens count
    output tokens. Output is that of the whole request (over all attempts). Stop strings are the gateway's business and
    are not here.
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
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """How many of the likeliest tokens are told with each token's own log-probability; None: nothing is told."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether a penalty is on: choosing a token takes the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def uniform(seed: int, branch: int, position: int, purpose: Purpose = Purpose.TOKEN) -> float:
    """A draw in [0, 1) with 53 random bits: the same value in every process for the same four numbers.

    `position` is absolute: the index of the token to be sampled in prompt + output.
    """
    key = pack("<QIQI", seed & (2**64 - 1), branch, position, int(purpose))
    (bits,) = unpack("<Q", blake2b(key, digest_size=8, person=b"headrace/draw").digest())
    return float(bits >> 11) * 2.0**-53

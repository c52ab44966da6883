"""Records that both siblings (router, workers) read: load, outcome and latency. No logic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from struct import pack


def token_hash(token_ids: Sequence[int]) -> bytes:
    """8 bytes that name a whole output: equal at the worker that made it and the gateway that sent it (SPEC A7)."""
    packed = pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(packed, digest_size=8, person=b"headrace/output").digest()


def cache_key(block_hash: bytes) -> int:
    """A block hash as the prefix index and cache events name it: its first 8 bytes.

    Two blocks with one key cost a wrong guess of where a prefix is, never a wrong block.
    """
    return int.from_bytes(block_hash[:8], "little")


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Net changes of a worker's cache from change number `from_seq` to `to_seq` of an epoch; keys of `cache_key`.

    A block is stored when any tier has it, removed when none has it any more; `stored` and `removed` have no key in
    common. A new epoch begins when everything was dropped; within a worker's incarnation epochs only grow.
    """

    epoch: int
    from_seq: int
    to_seq: int
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_snapshot: bool = False
    """`stored` is everything that is cached."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one sampled token: natural logarithms under the model's own distribution, finite, each a float32's value."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    """The likeliest tokens in its place, the likeliest first, ties by lowest id."""
    top_logprobs: tuple[float, ...] = ()


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class FinishReason(StrEnum):
    """Why a request ended. `handed_off` ends only the prefill worker's part of it."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    HANDED_OFF = "handed_off"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load as it last reported it to one gateway.

    `submit_seq` is the last Submit/Adopt of that gateway that the numbers include; the gateway adds its later bookings.
    Times in seconds, tokens are prompt tokens not yet computed.
    """

    submit_seq: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    running_requests: int = 0
    adopting_requests: int = 0
    free_blocks: int = 0
    evictable_blocks: int = 0
    total_blocks: int = 0
    step_age_s: float = 0.0
    step_s: float = 0.0
    cache_epoch: int = 0
    cache_seq: int = 0
    """Where the cache's changes stand, see `CacheChange`."""
    queue_s: float = 0.0
    """Predicted time of the prefills that wait or run."""
    decode_rows: int = 0
    decode_context: int = 0
    """Tokens that those rows attend to."""
    expected_output_tokens: int = 0
    """Still to come, of all that decodes."""
    step_costs: tuple[float, ...] = ()
    """Seconds of each of `headrace.core.step_shape.FEATURES`; empty: not known."""
    eviction_ms_per_block: float = 0.0
    """Prefill time that the next evictions give up, each."""
    restore_block_s: float = 0.0
    """To bring a block back from host memory; 0: no such tier."""
    closed: str = ""
    """Why no new request is let in; empty: open."""


@dataclass(slots=True)
class WorkerLedger:
    """Where a request's time went on one worker: durations in seconds, and what was computed and moved."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    sampling_s: float = 0.0
    hand_off_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    tool_wait_s: float = 0.0
    cached_tokens: int = 0
    computed_tokens: int = 0
    bytes_moved: int = 0
    transfer_s: float = 0.0
    lane: str = "none"

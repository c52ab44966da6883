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

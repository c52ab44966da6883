"""The numbers a scheduler obeys, and what follows for one request: may it come in, must it end, what may it not say."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.records import FinishReason
from headrace.errors import Rejected
from workers.core.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Raises ValueError when a step could have room for decodes alone, or none at all."""

    max_num_batched_tokens: int
    """Tokens computed in one step."""
    max_num_seqs: int
    """Rows in one step, and requests that compute here at the same time."""
    long_prefill_token_threshold: int
    """Most prompt tokens of one request in one step."""
    block_size: int
    max_waiting_requests: int
    """Bound of the queue of prefills, and of the queue of adoptions."""
    max_waiting_tokens: int
    """Bound of uncomputed tokens in the queue of prefills; a single request may be longer."""
    watermark_blocks: int
    """Blocks left available at an admission while others run, so that their next growth preempts nobody."""
    max_model_len: int
    """Longest prompt + output, in tokens."""
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.long_prefill_token_threshold, self.block_size) < 1:
            raise ValueError("max_num_seqs, long_prefill_token_threshold and block_size must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")


def refusal(request: Request, settings: SchedulerSettings, num_blocks: int) -> Rejected | None:
    """Why the request can never run here, whatever ends before it; retry_after_s is 0: waiting does not help.

    empty_prompt | complete (nothing left to generate) | too_long (max_model_len) | too_large (for the whole pool)
    """
    if not request.prompt_ids:
        return Rejected("empty_prompt", 0.0)
    if request.reserved_output_tokens == 0:
        return Rejected("complete", 0.0)
    if request.num_tokens >= settings.max_model_len:
        return Rejected("too_long", 0.0)
    if -(-peak_tokens(request, settings) // settings.block_size) > num_blocks:
        return Rejected("too_large", 0.0)
    return None


def peak_tokens(request: Request, settings: SchedulerSettings) -> int:
    """Most tokens that the request may ever have room for here. A hand_off request never grows."""
    if request.hand_off:
        return request.num_tokens
    return min(len(request.prompt_ids) + request.sampling.max_tokens, settings.max_model_len)


def admission_tokens(request: Request) -> int:
    """Tokens that the request needs room for before it starts: all it has and, unless it leaves, the next one."""
    return request.num_tokens if request.hand_off else request.num_tokens + 1


def banned_ids(request: Request, settings: SchedulerSettings) -> tuple[int, ...]:
    """What may not be sampled next: whatever would end the request before it has min_tokens."""
    sampling = request.sampling
    if len(request.output_ids) >= sampling.min_tokens:
        return ()
    return sampling.stop_token_ids if sampling.ignore_eos else settings.eos_token_ids + sampling.stop_token_ids


def end_reason(request: Request, settings: SchedulerSettings) -> FinishReason | None:
    """Whether the last output token ends the request. It is part of the output in every case."""
    sampling, token = request.sampling, request.output_ids[-1]
    num_output = len(request.output_ids)
    if num_output > sampling.min_tokens:
        if token in settings.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.EOS
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
    if num_output >= sampling.max_tokens or request.num_tokens >= settings.max_model_len:
        return FinishReason.LENGTH
    return None

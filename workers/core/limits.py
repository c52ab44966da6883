"""What follows from a scheduler's settings for one request: may it come in, must it end, what may it not say."""

from __future__ import annotations

from headrace.core.records import FinishReason
from headrace.errors import Rejected
from workers.core.request import Request
from workers.core.settings import SchedulerSettings


def refusal(request: Request, settings: SchedulerSettings, num_blocks: int, more_tokens: int = 0) -> Rejected | None:
    """Why the request can never run here, whatever ends before it; retry_after_s is 0: waiting does not help.

    more_tokens: input that a tool is about to add.
    empty_prompt | complete (nothing left to generate) | too_long (max_model_len) | too_large (for the whole pool)
    """
    if not request.prompt_ids:
        return Rejected("empty_prompt", 0.0)
    if request.reserved_output_tokens == 0:
        return Rejected("complete", 0.0)
    if request.num_tokens + more_tokens >= settings.max_model_len:
        return Rejected("too_long", 0.0)
    peak = min(peak_tokens(request, settings) + more_tokens, settings.max_model_len)
    if -(-peak // settings.block_size) > num_blocks:
        return Rejected("too_large", 0.0)
    return None


def peak_tokens(request: Request, settings: SchedulerSettings) -> int:
    """Most tokens that the request may ever have room for here. A hand_off request never grows."""
    if request.hand_off:
        return request.num_tokens
    return min(request.num_input + request.sampling.max_tokens, settings.max_model_len)


def admission_tokens(request: Request) -> int:
    """Tokens that the request needs room for before it starts: all it has and, unless it leaves, the next one."""
    return request.num_tokens if request.hand_off else request.num_tokens + 1


def banned_ids(request: Request, settings: SchedulerSettings) -> tuple[int, ...]:
    """What may not be sampled next: whatever would end the request before it has min_tokens."""
    sampling = request.sampling
    if request.num_output >= sampling.min_tokens:
        return ()
    return sampling.stop_token_ids if sampling.ignore_eos else settings.eos_token_ids + sampling.stop_token_ids


def end_reason(request: Request, settings: SchedulerSettings) -> FinishReason | None:
    """Whether the last output token ends the request. It is part of the output in every case."""
    sampling, token = request.sampling, request.token_ids[-1]
    num_output = request.num_output
    if num_output > sampling.min_tokens:
        if token in settings.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.EOS
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
    if num_output >= sampling.max_tokens or request.num_tokens >= settings.max_model_len:
        return FinishReason.LENGTH
    return None

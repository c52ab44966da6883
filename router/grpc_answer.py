"""Deltas as the messages of the gRPC door."""

from __future__ import annotations

from headrace.core.records import TokenLogprobs
from headrace.v1 import inference_pb2 as pb
from router.api import Delta, Explanation


class Answer:
    """Collects the deltas of one unary call."""

    def __init__(self, request_id: str, model: str, n: int) -> None:
        self._message = pb.GenerateResponse(request_id=request_id, model=model)
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._choices = [self._message.choices.add(index=index) for index in range(n)]

    def add(self, delta: Delta) -> None:
        choice = self._choices[delta.index]
        self._texts[delta.index].append(delta.text)
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(map(_logprobs, delta.logprobs))
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
        _close(self._message, delta)

    def message(self) -> pb.GenerateResponse:
        for choice, texts in zip(self._choices, self._texts, strict=True):
            choice.text = "".join(texts)
        return self._message


def chunk(request_id: str, delta: Delta) -> pb.GenerateStreamResponse:
    message = pb.GenerateStreamResponse(
        request_id=request_id,
        choices=[
            pb.Choice(
                index=delta.index,
                text=delta.text,
                token_ids=delta.token_ids,
                finish_reason=delta.finish_reason or "",
                paused=delta.paused,
                logprobs=map(_logprobs, delta.logprobs),
            )
        ],
    )
    _close(message, delta)
    return message


def _logprobs(told: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(logprob=told.logprob, top_ids=told.top_ids, top_logprobs=told.top_logprobs)


def _close(message: pb.GenerateResponse | pb.GenerateStreamResponse, delta: Delta) -> None:
    if delta.usage is not None:
        message.usage.prompt_tokens = delta.usage.prompt_tokens
        message.usage.completion_tokens = delta.usage.completion_tokens
        message.usage.cached_tokens = delta.usage.cached_tokens
    if delta.explanation is not None:
        message.explanation.CopyFrom(_explanation(delta.explanation))


def _explanation(explanation: Explanation) -> pb.Explanation:
    return pb.Explanation(
        mode=explanation.mode,
        prefill_worker=explanation.prefill_worker,
        decode_worker=explanation.decode_worker,
        attempts=explanation.attempts,
        cached_tokens=explanation.cached_tokens,
        bytes_moved=explanation.bytes_moved,
        lane=explanation.lane,
        ttft_ms=explanation.ttft_ms,
        total_ms=explanation.total_ms,
        second_token_gap_ms=explanation.second_token_gap_ms,
        to_first_token=[pb.Stage(name=name, ms=ms) for name, ms in explanation.to_first_token],
        to_end=[pb.Stage(name=name, ms=ms) for name, ms in explanation.to_end],
    )

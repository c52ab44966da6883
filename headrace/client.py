"""The Python client of a deployment: `HeadraceClient("host:port")`, synchronous, over gRPC.

    with HeadraceClient("127.0.0.1:50051") as client:
        print(client.generate("What is the capital of France?", max_tokens=16).choices[0].text)
        for chunk in client.stream(chat("Tell a story")):
            ...

Every failure is a HeadraceError with the server's code, message, field, retry time and reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, TypedDict, TypeVar, Unpack

import grpc

from headrace.errors import Code, HeadraceError, invalid
from headrace.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

T = TypeVar("T")
_OF_REQUEST = frozenset({"priority", "task", "steps_left", "parent", "session", "on_transfer_failure"})
Input = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A prompt, token ids, or chat messages `{"role": ..., "content": ...}`."""

MAX_MESSAGE_BYTES = 32 << 20
_FIELD_KEY = "headrace-field"
_RETRY_KEY = "retry-after-ms"
_REASON_KEY = "headrace-reason"
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A stopped server is noticed although the connection stays open. The server tolerates a ping a second.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # A connection of its own: gateways that share an address share clients by connection.
    ("grpc.use_local_subchannel_pool", 1),
]


class Sampling(TypedDict, total=False):
    """Options of one call; what is absent is the deployment's default. temperature 0 is greedy."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    n: int
    ignore_eos: bool
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int
    """Each token's log-probability, and those of so many of the likeliest: `.choices[i].logprobs`, as token_ids."""


class Options(Sampling, total=False):
    """Sampling, and what the request is to its caller.

    A lower priority is earlier, 0 is ordinary; `task` labels the kind of work; `steps_left` are the steps that an agent
    may still take; `parent` is the request_id of a request in progress whose cancellation ends this one too;
    `session` labels the conversation that it is a part of, for routing; `on_transfer_failure` is auto, retry,
    other_prefill, local_recompute or fail.
    """

    priority: int
    task: str
    steps_left: int
    parent: str
    session: str
    on_transfer_failure: str


class ToolWait(TypedDict, total=False):
    """The client runs tools: each choice waits where its text ends with one of `on` (required), until `resume`.

    `tool` labels what is called; how long it takes is learned by it.
    """

    on: Sequence[str]
    tool: str


def chat(text: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of one user turn."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": text}]


class HeadraceClient:
    """One channel to one gateway. Thread-safe. `timeout_s` is each call's deadline unless the call gives its own."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        cluster_token: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
        self._timeout_s = timeout_s
        self._metadata: list[tuple[str, str]] = []
        if api_key is not None:
            self._metadata.append(("authorization", f"Bearer {api_key}"))
        if cluster_token is not None:
            self._metadata.append(("x-headrace-cluster", cluster_token))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self,
        prompt: Input,
        *,
        model: str = "",
        request_id: str = "",
        explain: bool = False,
        cache_salt: str = "",
        no_cache: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> inference_pb2.GenerateResponse:
        """The whole answer: `.choices[i].text`, `.usage`, `.explanation` when asked for."""
        request = _request(prompt, model, request_id, explain, cache_salt, no_cache, options)
        return self._call(self._inference.Generate, request, timeout_s)

    def stream(
        self,
        prompt: Input,
        *,
        model: str = "",
        request_id: str = "",
        explain: bool = False,
        cache_salt: str = "",
        no_cache: bool = False,
        tool_wait: ToolWait | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Iterator[inference_pb2.GenerateStreamResponse]:
        """Deltas as they come. Closing the iterator, or leaving it, cancels the request on the server.

        With `tool_wait` (and a `request_id` that is not in use) a choice whose delta has `paused` waits for `resume`,
        which may come from here or from another thread. `timeout_s` goes on meanwhile.
        """
        request = _request(prompt, model, request_id, explain, cache_salt, no_cache, options)
        if tool_wait is not None:
            request.tool_wait.on.extend(tool_wait["on"])
            request.tool_wait.tool = tool_wait.get("tool", "")
            request.tool_wait.SetInParent()
        call = self._inference.GenerateStream(request, timeout=self._timeout(timeout_s), metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    def resume(self, request_id: str, answer: str | Sequence[int], *, index: int = 0) -> int:
        """What the tool has answered that a paused choice of `stream` waits for, as text or token ids; perhaps nothing.

        Returns its tokens, which are input. Raises NOT_FOUND or FAILED_PRECONDITION where nobody waits for it, and
        INVALID_ARGUMENT when it is too long: the choice waits on then.
        """
        request = inference_pb2.ResumeRequest(request_id=request_id, index=index)
        if isinstance(answer, str):
            request.text = answer
        else:
            request.token_ids.ids.extend(answer)
            request.token_ids.SetInParent()
        return int(self._call(self._inference.Resume, request).num_tokens)

    def tokenize(self, prompt: str | Sequence[Mapping[str, str]], *, model: str = "") -> list[int]:
        """Token ids of a text, or of chat messages under the model's template."""
        request = inference_pb2.TokenizeRequest(model=model)
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.chat.CopyFrom(_messages(prompt))
        return list(self._call(self._inference.Tokenize, request).token_ids)

    def model_info(self, *, model: str = "") -> inference_pb2.ModelInfoResponse:
        return self._call(self._inference.ModelInfo, inference_pb2.ModelInfoRequest(model=model))

    def cancel(self, request_id: str) -> bool:
        """Whether a running request of this key's tenant had that id."""
        return bool(self._call(self._inference.Cancel, inference_pb2.CancelRequest(request_id=request_id)).cancelled)

    def status(self) -> admin_pb2.StatusResponse:
        return self._call(self._admin.Status, admin_pb2.StatusRequest())

    def audit(self, settle_s: float = 2.0) -> admin_pb2.AuditResponse:
        """What the deployment still holds, after waiting up to `settle_s` seconds for quiescence."""
        return self._call(self._admin.Audit, admin_pb2.AuditRequest(settle_s=settle_s))

    def clear_cache(self, tenant: str = "", *, everything: bool = False) -> admin_pb2.ClearCacheResponse:
        """Has the workers forget what is cached for the tenant (this key's own unless named), or for all."""
        return self._call(self._admin.ClearCache, admin_pb2.ClearCacheRequest(tenant=tenant, all=everything))

    def move(
        self, worker_id: str = "", *, request_id: str = "", tenant: str = "", to: str = ""
    ) -> admin_pb2.MoveResponse:
        """Has requests in progress leave a worker, or one of them wherever it is, for `to` or wherever it is cheapest.
        Clients notice a pause at most."""
        request = admin_pb2.MoveRequest(worker_id=worker_id, request_id=request_id, tenant=tenant, to=to)
        return self._call(self._admin.Move, request)

    def explain(self, request_id: str) -> inference_pb2.ExplainResponse:
        """Why one of this tenant's latest requests went where it went, with the costs of what else was possible."""
        return self._call(self._inference.Explain, inference_pb2.ExplainRequest(request_id=request_id))

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def _call(self, method: Callable[..., T], request: object, timeout_s: float | None = None) -> T:
        try:
            return method(request, timeout=self._timeout(timeout_s), metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


def from_rpc_error(error: grpc.RpcError) -> HeadraceError:
    """The server's HeadraceError again; transport failures become UNAVAILABLE, unknown statuses INTERNAL."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return HeadraceError(Code.INTERNAL, "the call failed")
    name = error.code().name
    trailers = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    retry = trailers.get(_RETRY_KEY, "")
    return HeadraceError(
        Code(name) if name in Code.__members__ else Code.INTERNAL,
        error.details() or name,
        field=trailers.get(_FIELD_KEY),
        retry_after_s=int(retry) / 1000 if retry.isdigit() else None,
        reason=trailers.get(_REASON_KEY),
    )


def _request(
    prompt: Input,
    model: str,
    request_id: str,
    explain: bool,
    cache_salt: str,
    no_cache: bool,
    options: Options,
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        model=model, request_id=request_id, explain=explain, cache_salt=cache_salt, no_cache=no_cache
    )
    if isinstance(stop := options.get("stop"), str):
        options = {**options, "stop": [stop]}
    sampling = {name: value for name, value in options.items() if name not in _OF_REQUEST}
    try:
        for name in options.keys() & _OF_REQUEST:
            setattr(request, name, options[name])  # type: ignore[literal-required]
        request.sampling.CopyFrom(inference_pb2.SamplingOptions(**sampling))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise invalid("sampling", str(error)) from None
    if isinstance(prompt, str):
        request.prompt = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(_messages(prompt))  # type: ignore[arg-type]
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return request


def _messages(messages: Sequence[Mapping[str, str]]) -> inference_pb2.ChatMessages:
    return inference_pb2.ChatMessages(
        messages=[inference_pb2.ChatMessage(role=message["role"], content=message["content"]) for message in messages]
    )

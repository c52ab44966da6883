"""The narrow waist of the gateway: what both front doors (gRPC, HTTP) ask for, and what they get back.

The doors parse, validate and render; `router.gateway.Gateway` owns the request between these types.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.core.records import TokenLogprobs
from headrace.sampling import SamplingParams
from headrace.v1.inference_pb2 import RoutingDecision
from router.text import TextModel


@dataclass(frozen=True, slots=True)
class ToolWait:
    """The client runs tools: each choice waits where its text ends with one of `on`."""

    on: tuple[str, ...]
    tool: str = ""
    """The client's label of what is called."""


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """One validated call: `n` branches of one prompt. Everything a door knows and a worker does not need stays here."""

    tenant: str
    label: str
    """The client's request id, or ''. A label for cancel and logs, never a key."""
    prompt_ids: tuple[int, ...]
    sampling: tuple[SamplingParams, ...]
    """One a branch; branch i has `branch=i`. Seeds are set."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    cache_salt: str = ""
    session: str = ""
    """The client's name of a conversation: its requests like to stay at one worker."""
    no_cache: bool = False
    deadline_s: float | None = None
    """Seconds from now; None: the gateway's default."""
    explain: bool = False
    received_at: float = 0.0
    """Monotonic seconds on this process."""
    tokenized_at: float = 0.0
    endpoint: str = ""
    """chat | completions | generate: the door that it came through."""
    task: str = ""
    """The client's label of the kind of work."""
    priority: int = 0
    """The client's, as vLLM has it: lower is earlier."""
    steps_left: int | None = None
    """Steps that the client's agent may still take after this one; None: not told."""
    answer_id: str = ""
    """The id that its messages carry: it names the call as the label does, for `explain`."""
    parent: str = ""
    """Label of a live request of the tenant; unless that ends well, this one is cancelled. '': none."""
    tool_wait: ToolWait | None = None
    on_transfer_failure: str = ""
    """A name of `router.core.recovery.OnFailure`; '': the deployment's."""
    may_fall_back: bool = False
    """Where policy says so, its door sends it to another deployment when it is refused."""
    prompt_field: str = "prompt"
    """Where the prompt came in."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(slots=True)
class Explanation:
    mode: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 1
    cached_tokens: int = 0
    bytes_moved: int = 0
    lane: str = "none"
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    to_first_token: list[tuple[str, float]] = field(default_factory=list)
    """(stage, ms) in the order of SPEC A5; they sum to ttft_ms."""
    to_end: list[tuple[str, float]] = field(default_factory=list)
    second_token_gap_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """A token that has a part in the text of its branch."""

    token_id: int
    text_offset: int
    """Characters of that text before the token's own."""
    logprobs: TokenLogprobs


@dataclass(slots=True)
class Delta:
    """One piece of one branch. The branch's last delta has finish_reason; the call's last delta has usage too."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    """stop | length"""
    paused: bool = False
    """The text ends with a call of a tool; nothing more comes before `resume`."""
    usage: Usage | None = None
    explanation: Explanation | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each of token_ids, where they were asked for."""
    entries: tuple[LogprobEntry, ...] = ()
    """The same with the text: of the tokens whose text begins to go out with this delta, and with the last one of those
    without text. None of a token whose text is behind the end, nor of the one that ends the branch and has no text."""


class GatewayService(Protocol):
    """What the doors call. `generate` raises HeadraceError before the first delta (refusal) or in the middle (failure);
    closing the iterator cancels the request and returns only when its bookings are released."""

    text: TextModel

    def generate(self, spec: GenerationSpec) -> AsyncIterator[Delta]: ...

    async def cancel(self, tenant: str, label: str) -> bool: ...

    def resume(self, tenant: str, label: str, index: int, token_ids: Sequence[int], field: str) -> None:
        """What a tool has answered to the choice `index` of the tenant's request of that label: input, perhaps none.

        Raises HeadraceError: no such request or choice, one that does not wait, or an answer (which came in `field`)
        that is too long; the choice waits on then.
        """
        ...

    def explain(self, tenant: str, label: str) -> list[RoutingDecision] | None:
        """The decisions of the tenant's latest call of that name; None when none is remembered."""
        ...

    def ready(self) -> bool:
        """True when at least one plan exists (a whole-request worker, or a prefill and a decode worker)."""
        ...

    def fingerprint(self) -> str:
        """The workers' model fingerprint (hex), '' before any is connected."""
        ...

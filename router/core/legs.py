"""A flight's legs, and what its owner is asked to do about them: the actions of `router.core.flight`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.core.records import FinishReason, TokenLogprobs
from headrace.errors import HeadraceError
from router.core.decision import Decision, Fetch
from router.core.placement import WorkerKey


class LegKind(Enum):
    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class Leg:
    kind: LegKind
    worker: WorkerKey
    address: str
    handle: int
    live: bool = True
    spoke: bool = False
    """A token came over it: a decode leg that spoke has all its KV."""
    waits: bool = False
    """The worker has said that the request waits for a tool."""
    keeps_kv: bool = True
    """Its KV is in the worker's pool meanwhile."""


@dataclass(frozen=True, slots=True)
class SubmitTo:
    leg: Leg
    decision: Decision
    fetch: Fetch | None
    moved: bool = False
    """Nothing has failed: the request was to leave a worker."""


@dataclass(frozen=True, slots=True)
class AdoptAt:
    leg: Leg
    source: Leg
    decision: Decision
    number: int = 1
    """Of the adoptions of this prefill, from 1: a later one takes over from those before it."""
    moved: bool = False
    """Nothing has failed: the request was to leave a reader."""


@dataclass(frozen=True, slots=True)
class FinishAt:
    leg: Leg
    reason: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """New tokens for the client, in order."""

    token_ids: tuple[int, ...]
    paused: bool = False
    """The last one ends a call of a tool."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each of them, where the request asks."""


@dataclass(frozen=True, slots=True)
class PauseAt:
    """The output so far ends with a call of a tool."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class HoldAt:
    """Nothing more is computed and the KV stays, for another worker to read."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class ResumeAt:
    """What the tool has answered; nothing, where the request only stood still."""

    leg: Leg
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The branch is over: `reason`, or `error` when it failed."""

    reason: FinishReason
    error: HeadraceError | None = None


Action = SubmitTo | AdoptAt | PauseAt | HoldAt | ResumeAt | FinishAt | Deliver | Ended

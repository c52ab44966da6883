"""Tool calls of running requests: where a call ends, what is expected of its tool, whether an answer may come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.core.records import FinishReason
from headrace.core.tool_latency import Outlook, ToolLatency
from headrace.errors import Code, HeadraceError, invalid
from headrace.sampling import SamplingParams
from router.answer import Branch
from router.api import GenerationSpec
from router.branch_text import BranchText
from router.core.flight import Flight, FlightState
from router.text import TextModel


def call_finder(text: TextModel, spec: GenerationSpec, params: SamplingParams) -> Callable[[int], bool] | None:
    """Says of each output token whether the text of a call ends with it; None where nobody waits for tools.

    The answer's text is made when the client takes it; where a call ends must be known when the token comes, before the
    worker has gone far. Both read the same tokens with the same rules.
    """
    if spec.tool_wait is None:
        return None
    reader = BranchText(text, spec.stop, spec.include_stop, params, spec.tool_wait.on)

    def ends_call(token_id: int) -> bool:
        if not reader.stopped:
            reader.push((token_id,))
        return reader.call_ended

    return ends_call


def check_unused(spec: GenerationSpec, bearers: Sequence[Branch]) -> None:
    """Raises when a live request bears the id by which this one is to be resumed."""
    if spec.tool_wait is not None and any(b.flight.state is not FlightState.ENDED for b in bearers):
        message = "request_id: a request of this id is in progress, and tool_wait needs one of its own"
        raise HeadraceError(Code.FAILED_PRECONDITION, message, field="request_id", reason="in_use")


def waiting(bearers: Sequence[Branch], index: int) -> Branch:
    """The choice of that index among those of one id. Raises when it does not wait for a tool."""
    live = [branch for branch in bearers if branch.flight.state is not FlightState.ENDED]
    if not bearers:
        message = "request_id: no request of this id is in progress"
        raise HeadraceError(Code.NOT_FOUND, message, field="request_id", reason="unknown_request")
    if all(branch.index != index for branch in bearers):
        message = f"index: the request has {len(bearers)} choices"
        raise HeadraceError(Code.NOT_FOUND, message, field="index", reason="unknown_index")
    found = next((branch for branch in live if branch.index == index and branch.flight.answerable), None)
    if found is None:
        message = "index: this choice does not wait for a tool"
        raise HeadraceError(Code.FAILED_PRECONDITION, message, field="index", reason="not_paused")
    return found


def check_room(
    flight: Flight, num_tokens: int, capacity_tokens: int | None, field: str, max_context_tokens: int | None = None
) -> None:
    """Raises when an answer of so many tokens leaves no room for a token of output, or for the output in any KV pool.

    capacity_tokens: of the largest pool; None: not known. max_context_tokens: of the endpoint; None: no bound.
    """
    most = flight.max_model_len if max_context_tokens is None else min(flight.max_model_len, max_context_tokens)
    room = most - 1 - flight.num_tokens
    if capacity_tokens is not None and capacity_tokens < flight.max_model_len:
        need = len(flight.prompt_ids) + flight.num_inserted + flight.sampling.max_tokens
        room = min(room, capacity_tokens - need)
    if num_tokens > room:
        message = f"the answer has {num_tokens} tokens; there is room for {max(room, 0)}"
        raise invalid(field, message, reason="too_long")


class Tools:
    """What the gateway learns of its tenants' tools."""

    def __init__(self) -> None:
        self.on_answer: Callable[[float], None] = lambda wait_s: None
        """Told how long each answer took; set by whoever keeps metrics."""
        self._latency = ToolLatency()

    def outlook(self, branch: Branch) -> Outlook:
        return self._latency.outlook(branch.spec.tenant, _tool(branch))

    def answered(self, branch: Branch, now: float) -> None:
        """Before the flight hears of the answer."""
        since = branch.flight.timeline.paused_at
        if since is not None:
            self._latency.answered(branch.spec.tenant, _tool(branch), now - since)
            self.on_answer(now - since)

    def ended(self, branch: Branch, reason: FinishReason) -> None:
        """A branch is over: did its client give a tool up?"""
        given_up = reason in (FinishReason.CANCELLED, FinishReason.DEADLINE)
        if given_up and branch.flight.timeline.ended_paused:
            self._latency.lost(branch.spec.tenant, _tool(branch))


def _tool(branch: Branch) -> str:
    return branch.spec.tool_wait.tool if branch.spec.tool_wait is not None else ""

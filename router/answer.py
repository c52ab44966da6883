"""The consumer's side of a call: its branches' tokens become text, stop strings end them, the last delta sums up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from headrace.core.admission_records import Ticket
from headrace.core.records import FinishReason
from router.api import Delta, Explanation, GenerationSpec, Usage
from router.branch_text import BranchText
from router.core.flight import Flight
from router.core.foresight import Outlook
from router.core.legs import Deliver, Ended
from router.text import TextModel

FINISH_NAMES = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True, eq=False)
class Branch:
    """A flight with its consumer: events wait in the call's queue."""

    flight: Flight
    index: int
    spec: GenerationSpec
    namespace: bytes
    deadline: float
    """Seconds on the gateway's clock."""
    events: Events
    ticket: Ticket
    reserved_output_tokens: int
    """Predicted length of the whole output."""
    tenant_index: int = 0
    """Of the gate's service counters."""
    outlook: Outlook | None = None
    """What was foreseen when it came in."""
    learned: set[int] = field(default_factory=set)
    """Attempts whose first token the router has been told of."""
    hashes: list[bytes] = field(default_factory=list)
    """Of the full blocks of what the flight has."""
    hashed_for: str = ""
    """Fingerprint of the workers that name blocks so."""


Events = asyncio.Queue[tuple[Branch, Deliver | Ended]]


async def deltas(
    text: TextModel, spec: GenerationSpec, branches: list[Branch], events: Events, stop: Callable[[Branch], None]
) -> AsyncIterator[Delta]:
    """The call's deltas until every branch has ended. `stop` is called when a stop string completes in a branch.

    Raises the branch's HeadraceError when one fails: the call fails as a whole.
    """
    consumed = [0] * len(branches)
    calls = spec.tool_wait.on if spec.tool_wait is not None else ()
    texts = [BranchText(text, spec.stop, spec.include_stop, branch.flight.sampling, calls) for branch in branches]
    num_open = len(branches)
    while num_open:
        branch, event = await events.get()
        if isinstance(event, Deliver):
            if texts[branch.index].stopped:
                continue  # what came while the stop string was on its way is nobody's
            consumed[branch.index] += len(event.token_ids)
            branch_text = texts[branch.index]
            piece, stopped = branch_text.push(event.token_ids, event.logprobs)
            if stopped:
                stop(branch)
            yield Delta(
                branch.index,
                piece,
                event.token_ids,
                paused=event.paused and not stopped,
                logprobs=event.logprobs,
                entries=branch_text.take_entries(),
            )
            continue
        if event.error is not None:
            raise event.error
        num_open -= 1
        # A worker may have come to the end of its output before it heard of the stop string that ends the text.
        branch_text = texts[branch.index]
        reason = FinishReason.STOP if branch_text.stopped else event.reason
        delta = Delta(branch.index, branch_text.flush(), finish_reason=FINISH_NAMES[reason])
        delta.entries = branch_text.take_entries(ended=True, by_token=reason is not FinishReason.LENGTH)
        if not num_open:
            cached_tokens = branches[0].flight.timeline.cached_tokens
            num_input = len(spec.prompt_ids) + sum(branch.flight.num_inserted for branch in branches)
            delta.usage = Usage(num_input, sum(consumed), cached_tokens)
            delta.explanation = _explanation(branches[0].flight) if spec.explain else None
        yield delta


def _explanation(flight: Flight) -> Explanation:
    line = flight.timeline
    first, end = line.to_first_token(), line.to_end()
    gap_s = line.second_token - line.first_token if line.second_token and line.first_token else 0.0
    return Explanation(
        mode="disaggregated" if flight.disaggregated else "colocated",
        prefill_worker=flight.prefill_worker,
        decode_worker=flight.decode_worker,
        attempts=flight.attempt,
        cached_tokens=line.cached_tokens,
        bytes_moved=line.bytes_moved,
        lane=line.lane,
        ttft_ms=sum(seconds for _, seconds in first) * 1e3,
        total_ms=((line.complete or 0.0) - line.received) * 1e3,
        to_first_token=[(name, seconds * 1e3) for name, seconds in first],
        to_end=[(name, seconds * 1e3) for name, seconds in end],
        second_token_gap_ms=gap_s * 1e3,
    )

"""Whom to take blocks from when there are too few."""

from __future__ import annotations

from headrace.errors import InvariantError
from workers.core.queues import Queues
from workers.core.request import Request


def choose_victim(queues: Queues) -> Request:
    """The latest arrival that computes and has no reader on its blocks: its blocks go, it recomputes later.

    The earliest arrival is chosen only when it is alone, so somebody always makes progress; and since a request returns
    with room for all its tokens and one more, every return can bring at least one token.
    Raises InvariantError when nobody qualifies: whoever asks for a block decodes, and a decoding request has no reader.
    """
    candidates = [
        request
        for ordered in (queues.prefilling, queues.decoding)
        if (request := next((r for r in reversed(ordered) if not r.pinned), None)) is not None
    ]
    if not candidates:
        raise InvariantError("a block is short although nobody computes")
    return max(candidates, key=lambda r: r.arrival)


def choose_revocable(queues: Queues) -> Request | None:
    """A handed-off request whose reader should be told to do without, or None.

    Only a circular wait needs it: this worker holds blocks for readers on a peer that waits for blocks itself, which it
    holds for readers here. Then nothing computes or is being pulled here, and a request waits whose start would set
    others free: an adoption, a preempted request, or a prefill that stays. A queue of hand_off prefills alone waits
    for its readers: they are busy, not stuck, and a revoked request would only come back to the end of that queue.
    The choice is the cheapest to compute again, one without an open lease before one with.
    """
    if queues.num_computing or queues.reserved or not queues.held:
        return None
    waiting = next(iter(queues.waiting.values()), None)
    if not queues.preempted and not queues.adopting and (waiting is None or waiting.hand_off):
        return None
    return min(queues.held.values(), key=lambda r: (r.pinned, r.computed_tokens, -r.arrival))

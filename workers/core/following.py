"""Prefills that wait for another one's blocks instead of computing the same (SPEC E4; CASES KV-06).

    leader      a prefill that runs here and has full blocks still to compute
    follower    waits in line with the leader's next block as its own next one; nothing else waits for it. It is back in
                line, at its old place, when the leader has computed all that both share, or ends, or makes no progress

A shared beginning is then computed once, however many want it at once. Where one of them ends behind the
shared full blocks, and goes on like the other, the follower waits for that block too, and copies it.

Does not: know blocks or the cache, or choose who leads.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heappop, heappush

from headrace.errors import InvariantError
from headrace.ids import RequestKey
from workers.core.request import Request, State
from workers.core.waiting import WaitingLine

_STALL_S = 1.0
_STALL_STEPS = 8
"""A leader that was not in a step for a second, and for as long as so many steps take, leads no more."""


@dataclass(slots=True)
class _Lead:
    request: Request
    full_blocks: int
    """Of all its tokens; their hashes are known."""
    since: float
    followers: list[tuple[int, int, Request]] = field(default_factory=list)
    """A heap of (blocks to wait for, arrival, request); who has left is still in it."""


class Following:
    def __init__(self, line: WaitingLine) -> None:
        self.followed = 0
        self.shared_tokens = 0
        """Tokens that the followers of now need not compute."""
        self._line = line
        self._leads: dict[RequestKey, _Lead] = {}
        self._waits: dict[RequestKey, tuple[RequestKey, int]] = {}
        """Follower -> (its leader, tokens that it expects)."""

    @property
    def has_leaders(self) -> bool:
        return bool(self._leads)

    def __len__(self) -> int:
        return len(self._waits)

    def lead(self, request: Request, block_size: int, now: float) -> None:
        """A prefill has started; it knows the hashes of all its full blocks."""
        full = request.num_tokens // block_size
        if full > request.stored_blocks:
            self._leads[request.key] = _Lead(request, full, now)

    def follow(self, request: Request, block_size: int, *, by_class: bool) -> bool:
        """Take a request out of line if a leader computes its next block. It knows the hashes of all its full blocks.

        by_class: not behind a lower class.
        """
        best, most = None, 0
        full = (request.num_tokens - 1) // block_size
        for lead in self._leads.values():
            leader = lead.request
            at, end = leader.stored_blocks, min(full, lead.full_blocks)
            if at >= end or leader.late or (by_class and leader.priority > request.priority):
                continue
            if leader.block_hashes[at] != request.block_hashes[at]:
                continue
            # A hash names all blocks before its own: the shared ones are a leading run.
            differs = bisect_left(range(at, end), True, key=lambda i: leader.block_hashes[i] != request.block_hashes[i])
            if differs > most:
                best, most = lead, differs
        if best is None:
            return False
        leader, tokens = best.request, most * block_size
        until = most + leader.stored_blocks
        behind = slice(until * block_size, until * block_size + 1)
        if until == min(full, best.full_blocks) and leader.token_ids[behind] == request.token_ids[behind]:
            until += 1
        heappush(best.followers, (until, request.arrival, request))
        self._waits[request.key] = (leader.key, tokens)
        self.shared_tokens += tokens
        self.followed += 1
        self._line.park(request)
        return True

    def moved_on(self, request: Request) -> None:
        """A prefill has published more blocks."""
        lead = self._leads.get(request.key)
        if lead is None:
            return
        while lead.followers and lead.followers[0][0] <= request.stored_blocks:
            self._wake(heappop(lead.followers)[2], request.key)

    def left(self, request: Request) -> None:
        """A prefill is none any more, or computes what nobody may share: its followers are back in line."""
        lead = self._leads.pop(request.key, None)
        if lead is not None:
            for _, _, follower in sorted(lead.followers, key=lambda entry: entry[1]):
                self._wake(follower, request.key)

    def drop(self, request: Request) -> None:
        """A follower waits no more, for whatever reason."""
        _, tokens = self._waits.pop(request.key)
        self.shared_tokens -= tokens
        request.follows = False

    def release_stalled(self, now: float, step_s: float) -> None:
        """Leaders without progress lead no more: a follower starves only if it would have starved alone."""
        patience_s = max(_STALL_S, _STALL_STEPS * step_s)
        for lead in [lead for lead in self._leads.values() if lead.followers]:
            if now - max(lead.since, lead.request.last_scheduled_at or 0.0) > patience_s:
                self.left(lead.request)

    def check_integrity(self) -> None:
        """Raises InvariantError unless each follower waits, once, for a prefill that runs."""
        if any(lead.request.state is not State.PREFILLING for lead in self._leads.values()):
            raise InvariantError("a request leads that computes no prompt")
        behind = {
            request.key: leader
            for leader, lead in self._leads.items()
            for _, _, request in lead.followers
            if self._waits.get(request.key, (None, 0))[0] == leader
        }
        if behind != {key: leader for key, (leader, _) in self._waits.items()}:
            raise InvariantError("a request follows nobody")
        if self._waits.keys() != {key for key, request in self._line.requests.items() if request.follows}:
            raise InvariantError("a request is taken for a follower, or is not")
        if self.shared_tokens != sum(tokens for _, tokens in self._waits.values()):
            raise InvariantError("the count of tokens that followers wait for is wrong")

    def _wake(self, follower: Request, leader: RequestKey) -> None:
        if self._waits.get(follower.key, (None, 0))[0] == leader:
            self.drop(follower)
            self._line.unpark(follower)

"""Which host blocks hold the KV of which preempted request: a bounded free list, and nothing about bytes.

    free --take--> taken (a HostCopy names them) --give_back--> free

A copy belongs to one preemption; one of an earlier preemption is stale and never restored.
"""

from __future__ import annotations

from headrace.errors import InvariantError
from workers.core.request import HostCopy, Request


class HostBlocks:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def take(self, request: Request, num_blocks: int, num_tokens: int) -> HostCopy | None:
        """Room for the first `num_blocks` of the request's table, or None and no change."""
        if num_blocks > len(self._free):
            return None
        blocks = tuple(self._free.pop() for _ in range(num_blocks))
        self._taken.update(blocks)
        return HostCopy(blocks, num_tokens, request.preemptions)

    def give_back(self, copy: HostCopy) -> None:
        """Raises InvariantError when the copy has been given back before."""
        if not self._taken.issuperset(copy.blocks):
            raise InvariantError("host blocks are given back twice")
        self._taken.difference_update(copy.blocks)
        self._free.extend(copy.blocks)

    def check_integrity(self, copies: list[HostCopy]) -> None:
        """Raises InvariantError unless exactly `copies` hold what is not free."""
        held = [block for copy in copies for block in copy.blocks]
        if sorted([*self._free, *held]) != list(range(self.num_blocks)) or set(held) != self._taken:
            raise InvariantError("host blocks are lost or in two states")

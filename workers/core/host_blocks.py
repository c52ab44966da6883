"""Which blocks of host memory are taken: by the copies of preempted requests, and by the host tier of the cache.

    free --take--> a HostCopy names them --give_back--> free
         --take_one--> the tier has it   --give_one---> free
         --retire----> out of use        --restore----> free

A copy belongs to one preemption; one of an earlier preemption is stale and never restored. Copies go before cached
blocks: where too few are free, the tier gives some of its blocks up (`reclaim`). Does not: move bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.errors import InvariantError
from workers.core.request import HostCopy, Request


class HostBlocks:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reclaimable: Callable[[], int] = lambda: 0
        """How many blocks `reclaim` can free; set by the tier."""
        self.reclaim: Callable[[int], None] = lambda _: None
        """Frees at least so many, at most `reclaimable()`; set by the tier."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._taken: set[int] = set()
        self._num_in_copies = 0
        self._retired: list[int] = []

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def copy_blocks(self) -> int:
        """Taken by the copies of preempted requests."""
        return self._num_in_copies

    @property
    def retired_blocks(self) -> int:
        return len(self._retired)

    @property
    def available_blocks(self) -> int:
        """What `take` can give at most."""
        return len(self._free) + self.reclaimable()

    def take(self, request: Request, num_blocks: int, num_tokens: int) -> HostCopy | None:
        """Room for the first `num_blocks` of the request's table, or None and no change."""
        if num_blocks > self.available_blocks:
            return None
        if num_blocks > len(self._free):
            self.reclaim(num_blocks - len(self._free))
        blocks = tuple(self._free.pop() for _ in range(num_blocks))
        self._taken.update(blocks)
        self._num_in_copies += num_blocks
        return HostCopy(blocks, num_tokens, request.preemptions)

    def give_back(self, copy: HostCopy) -> None:
        """Raises InvariantError when the copy has been given back before."""
        if not self._taken.issuperset(copy.blocks):
            raise InvariantError("host blocks are given back twice")
        self._taken.difference_update(copy.blocks)
        self._num_in_copies -= len(copy.blocks)
        self._free.extend(copy.blocks)

    def take_one(self) -> int | None:
        """A free block for the tier."""
        if not self._free:
            return None
        block = self._free.pop()
        self._taken.add(block)
        return block

    def give_one(self, block: int) -> None:
        """Raises InvariantError when the block is free."""
        if block not in self._taken:
            raise InvariantError("a host block is given back twice")
        self._taken.discard(block)
        self._free.append(block)

    def retire(self, num_blocks: int) -> list[int]:
        """Take so many blocks out of use, or all that are free or that the tier can give up."""
        num_blocks = min(num_blocks, self.available_blocks)
        if num_blocks > len(self._free):
            self.reclaim(num_blocks - len(self._free))
        blocks = [self._free.pop() for _ in range(num_blocks)]
        self._retired += blocks
        return blocks

    def next_restored(self, num_blocks: int) -> list[int]:
        """What `restore` takes."""
        return self._retired[max(0, len(self._retired) - num_blocks) :]

    def restore(self, num_blocks: int) -> list[int]:
        """Take so many retired blocks into use again, or all."""
        blocks = self.next_restored(num_blocks)
        del self._retired[len(self._retired) - len(blocks) :]
        self._free += blocks
        return blocks

    def check_integrity(self, copies: list[HostCopy], in_tier: Iterable[int] = ()) -> None:
        """Raises InvariantError unless exactly `copies` and the tier hold what is not free, none of it twice."""
        held = [*(block for copy in copies for block in copy.blocks), *in_tier]
        if sorted([*self._free, *self._retired, *held]) != list(range(self.num_blocks)) or set(held) != self._taken:
            raise InvariantError("host blocks are lost or in two states")
        if self._num_in_copies != sum(len(copy.blocks) for copy in copies):
            raise InvariantError("the count of blocks in copies is wrong")

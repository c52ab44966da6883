"""Prefixes that are read from a peer's cache into this one's: an operation of the cache, not a phase of a request.

    READING --arrived--> HELD --(request starts or ends, or others need the blocks)--> gone
       |
       +--failed--> gone

A fetch owns one reference to each block of the prefix: to those that the cache had, and to those that it took for what
the cache lacked. Only verified blocks get their names and enter the cache. The request that wanted them then finds in
the cache what is there: a failed fetch is a cache miss. A fetch may outlive its request, until the shell has given the
read up; targets that may still be written to then are quarantined, as an adoption's are.

While it is READING a request holds blocks and does not wait for others' (a read asks nobody for blocks, and is given up
in time). HELD blocks are protected from eviction, nothing more: `let_go` takes them before anybody lacks blocks.

Does not: queue requests, move bytes, read clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from headrace.errors import InvariantError
from headrace.ids import RequestKey
from kvtransfer.core.identity import block_hashes
from workers.core.blocks import BlockPool
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request
from workers.core.residency import quarantine_holder

PATIENCE = 3.0
"""A read may take so many times as long as it would to compute what it brings; a router expects it to be faster."""
LEAST_PATIENCE_S = 0.5
"""And at least so long: it may have to connect first."""


def patience_s(num_tokens: int, token_s: float) -> float:
    """How long a read of so many tokens may take, at `token_s` predicted seconds to compute one instead."""
    return max(LEAST_PATIENCE_S, PATIENCE * num_tokens * token_s)


@dataclass(slots=True, eq=False)
class Fetch:
    key: RequestKey
    owner: str
    """Under which name an audit shows it."""
    tenant: str
    parents: tuple[bytes, ...]
    """The predecessor of each block that is to be read: a hash, or the chain's root."""
    hashes: tuple[bytes, ...]
    """What is to be read, 16 bytes each, in the order of the prefix."""
    token_ids: tuple[int, ...]
    """Theirs, one block's after the other's."""
    targets: tuple[int, ...]
    """One own block for each of them."""
    shared: tuple[int, ...]
    """Blocks of the prefix before them, which the cache had."""
    give_up_at: float
    held: tuple[int, ...] | None = None
    """Once it has arrived: all blocks that it has references to."""
    wanted: bool = True
    """Its request is here and has not started."""
    cleared: bool = False
    """Its tenant's cache was cleared since it began: nothing of it may enter."""

    @property
    def reading(self) -> bool:
        return self.held is None

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.shared + self.targets if self.held is None else self.held


class Fetches:
    """All fetches of one worker, by the key of their request."""

    def __init__(self, pool: BlockPool, cache: PrefixCache) -> None:
        self._pool = pool
        self._cache = cache
        self._live: dict[RequestKey, Fetch] = {}
        """In order of their beginning."""

    def __len__(self) -> int:
        return len(self._live)

    def get(self, key: RequestKey) -> Fetch | None:
        return self._live.get(key)

    # ---- a fetch's life

    def begin(self, request: Request, spare_blocks: int, token_s: float, now: float) -> Fetch | None:
        """Take blocks for what the cache lacks of the request's first `fetch_blocks` blocks: all, or as many leading
        ones as leave `spare_blocks` available. None and no change when there is nothing to read or no room.

        The block of the last token is never asked for: something has to yield logits. `token_s`: predicted seconds to
        compute one token instead.
        """
        if request.key in self._live:
            raise InvariantError(f"request {request.key} fetches twice")
        size = self._pool.block_size
        wanted = min(request.fetch_blocks, (request.num_tokens - 1) // size)
        if request.no_cache or wanted <= 0:
            return None
        if len(request.block_hashes) < wanted:
            request.block_hashes = block_hashes(request.root, request.token_ids, size, request.block_hashes)
        shared = self._cache.match(request.block_hashes[:wanted])
        idle = sum(1 for block in shared if self._pool.refs(block) == 0)
        room = self._pool.available_blocks - idle - spare_blocks
        hashes = request.block_hashes[len(shared) : min(wanted, len(shared) + max(0, room))]
        if not hashes:
            return None
        self._pool.incref(shared)
        targets = self._pool.alloc(len(hashes))
        if targets is None:
            raise InvariantError("blocks that were counted as available are not")
        fetch = self._live[request.key] = Fetch(
            key=request.key,
            owner=f"fetch {request.request_id}/{request.attempt}",
            tenant=request.tenant,
            parents=(request.block_hashes[len(shared) - 1] if shared else request.root, *hashes[:-1]),
            hashes=tuple(hashes),
            token_ids=tuple(request.token_ids[len(shared) * size : (len(shared) + len(hashes)) * size]),
            targets=tuple(targets),
            shared=tuple(shared),
            give_up_at=now + patience_s(len(hashes) * size, token_s),
        )
        return fetch

    def arrived(self, key: RequestKey, num_blocks: int) -> int:
        """The first `num_blocks` targets hold their KV, verified; no read writes any more. Returns how many the cache
        has taken in. 0 when the fetch is over, or was cleared. Raises InvariantError when nobody read so many."""
        fetch = self._live.get(key)
        if fetch is None or not fetch.reading:
            return 0
        if not 0 <= num_blocks <= len(fetch.targets):
            raise InvariantError(f"{fetch.owner}: more blocks than it asked for")
        if fetch.cleared:
            num_blocks = 0
        held, fresh = list(fetch.shared), 0
        size, first = self._pool.block_size, len(fetch.shared)
        for i, (block_hash, block) in enumerate(zip(fetch.hashes[:num_blocks], fetch.targets, strict=False)):
            tokens = fetch.token_ids[i * size : (i + 1) * size]
            if self._cache.insert(block_hash, block, fetch.parents[i], first + i, tokens, fetch.tenant):
                fresh += 1
                held.append(block)
            else:
                # Somebody has computed it meanwhile: that block is the one to keep.
                held += self._hold_instead(block_hash, block)
        self._pool.decref(reversed(fetch.targets[num_blocks:]))
        fetch.held = tuple(held)
        if fetch.cleared or not fetch.wanted:
            self._drop(fetch)
        return fresh

    def failed(self, key: RequestKey, quarantined: Sequence[int]) -> bool:
        """The read is over without use; only `quarantined` targets may still be written to: they stay aside until the
        pool releases `quarantine_holder(key)`. False when the fetch is over already."""
        fetch = self._live.get(key)
        if fetch is None or not fetch.reading:
            return False
        aside = frozenset(quarantined)
        if not aside.issubset(fetch.targets):
            raise InvariantError(f"{fetch.owner}: a read into blocks that it does not have")
        self._pool.quarantine(quarantined, quarantine_holder(key))
        self._pool.decref(block for block in reversed(fetch.targets) if block not in aside)
        self._pool.decref(reversed(fetch.shared))
        del self._live[key]
        return True

    def request_left(self, key: RequestKey) -> None:
        """The request has started (and shares the blocks that it found) or ended. A read that is still under way keeps
        its blocks until the shell has given it up. Without a fetch a no-op."""
        fetch = self._live.get(key)
        if fetch is None:
            return
        fetch.wanted = False
        if not fetch.reading:
            self._drop(fetch)

    # ---- what others may want of them

    def let_go(self, num_blocks: int, keep: RequestKey | None = None) -> None:
        """Make so many more blocks available, if HELD ones are enough: those of the latest go first, all of them stay
        cached, those of `keep` held."""
        before = self._pool.available_blocks
        for fetch in reversed(list(self._live.values())):
            if self._pool.available_blocks - before >= num_blocks:
                return
            if not fetch.reading and fetch.key != keep:
                self._drop(fetch)

    def clear(self, tenant: str | None) -> list[RequestKey]:
        """The tenant's cache (None: everybody's) is being cleared: nothing that is under way for it may enter. Returns
        whose reads to give up."""
        concerned = [fetch for fetch in self._live.values() if tenant is None or fetch.tenant == tenant]
        for fetch in concerned:
            fetch.cleared = True
            if not fetch.reading:
                self._drop(fetch)
        return [fetch.key for fetch in concerned if fetch.reading]

    def overdue(self, now: float) -> list[RequestKey]:
        """Whose reads take far longer than to compute would have."""
        return [fetch.key for fetch in self._live.values() if fetch.reading and fetch.give_up_at <= now]

    # ---- looking

    def blocks(self) -> Iterator[int]:
        """One entry for each reference."""
        return chain.from_iterable(fetch.blocks for fetch in self._live.values())

    def holders(self) -> dict[str, int]:
        return {fetch.owner: len(fetch.blocks) for fetch in self._live.values() if fetch.blocks}

    def check_integrity(self) -> None:
        """Raises InvariantError unless targets of reads are nobody else's and have no names. O(blocks)."""
        for fetch in self._live.values():
            if fetch.reading and any(
                self._pool.refs(block) != 1 or self._pool.label_of(block) is not None for block in fetch.targets
            ):
                raise InvariantError(f"{fetch.owner}: a block that is being written to is used or cached")
            if not (fetch.reading or fetch.wanted):
                raise InvariantError(f"{fetch.owner}: holds blocks for nobody")

    # ---- inside

    def _hold_instead(self, block_hash: bytes, block: int) -> list[int]:
        """Nothing when the cache has lost the block's predecessor."""
        known = self._cache.match([block_hash])
        self._pool.incref(known)
        self._pool.decref([block])
        return known

    def _drop(self, fetch: Fetch) -> None:
        self._pool.decref(reversed(fetch.blocks))
        del self._live[fetch.key]

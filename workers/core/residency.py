"""A request's KV in the pool: taking blocks, growing, publishing finished ones in the prefix cache, giving them back.

What a request shares of the cache it reads where it is, all full blocks; of the block behind them it gets a copy, when
the cache has one that begins as the request goes on, and goes on in that copy.

Does not: choose who gets blocks (the scheduler does) or move bytes: copies are for the next step to make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from headrace.errors import InvariantError
from headrace.ids import RequestKey
from kvtransfer.core.identity import block_hashes
from workers.core.blocks import BlockPool
from workers.core.limits import admission_tokens
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request


def quarantine_holder(key: RequestKey) -> str:
    """Under this name the pool keeps the targets of the request's unfinished reads."""
    return f"read {key}"


class Residency:
    def __init__(self, pool: BlockPool, cache: PrefixCache) -> None:
        self._pool = pool
        self._cache = cache
        self.prefix_lookups = 0
        self.cached_tokens_hit = 0
        self.partial_tokens_hit = 0
        """Those of them that were copied out of a block."""
        self.cow_copies = 0
        self.saved_prefill_ms = 0.0

    def lacking(self, request: Request, spare_blocks: int) -> int:
        """Blocks that are missing before `admit` succeeds; 0: none."""
        return self._lacking(request, self._match_for(request), spare_blocks)

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a request without blocks that the cache has now."""
        return len(self._match_for(request)) * self._pool.block_size

    def admit(self, request: Request, spare_blocks: int, *, whole_blocks: bool = False) -> list[tuple[int, int]] | None:
        """Take all blocks the request needs to start, sharing what the cache has now; None and no change when too few.

        `spare_blocks` must remain available. The last token is never matched, since something has to yield the next
        logits; but an adoption without output yet will be handed one more token, which then is the last.
        Sets block_ids, stored_blocks and computed_tokens. `whole_blocks`: computed_tokens is to end with a block; it
        always does for an adoption.

        Returns the block copies (source, target) to make before the request computes: `computed_tokens` counts on
        them. Each source has one reference more, until `copied`.
        """
        matched = self._match_for(request)
        if self._lacking(request, matched, spare_blocks):
            return None
        source, tokens = (-1, 0) if whole_blocks else self._match_partial(request, len(matched))
        if tokens and self._lacking(request, matched, spare_blocks, source):
            source, tokens = -1, 0
        shared = [*matched, source] if tokens else matched
        self._cache.take(shared)
        blocks = self._pool.alloc(self._pool.blocks_for(admission_tokens(request)) - len(matched))
        if blocks is None:
            raise InvariantError("blocks that were counted as available are not")
        request.block_ids = matched + blocks
        request.stored_blocks = len(matched)
        request.computed_tokens = len(matched) * self._pool.block_size + tokens
        if not request.no_cache:
            self.prefix_lookups += 1
            self.cached_tokens_hit += request.computed_tokens
            self.saved_prefill_ms += sum(map(self._pool.idle.saved_ms, matched))
        if not tokens:
            return []
        self.cow_copies += 1
        self.partial_tokens_hit += tokens
        self.saved_prefill_ms += self._cache.saved_ms(len(matched)) * tokens / self._pool.block_size
        return [(source, blocks[0])]

    def copied(self, sources: Sequence[int]) -> None:
        """The step that copies them is over."""
        self._pool.decref(sources)

    def grow(self, request: Request) -> bool:
        """Have room for every token of the request. False and no change when the pool has too few blocks."""
        missing = self._pool.blocks_for(request.num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        blocks = self._pool.alloc(missing)
        if blocks is None:
            return False
        request.block_ids.extend(blocks)
        return True

    def publish(self, request: Request, *, to_the_end: bool = False) -> None:
        """Offer the blocks that computed_tokens has filled to the cache; `to_the_end`: the one that it has filled in
        part too. Call only once their bytes are there.

        Prefills are offered step by step, for others that wait with the same prefix; what a decode fills is offered
        when it leaves its blocks.
        """
        size = self._pool.block_size
        full, rest = divmod(request.computed_tokens, size)
        if request.no_cache:
            return
        if full > request.stored_blocks:
            self._hash(request, full)
            for index in range(request.stored_blocks, full):
                self._cache.insert(
                    request.block_hashes[index],
                    request.block_ids[index],
                    self._parent(request, index),
                    index,
                    request.token_ids[index * size : (index + 1) * size],
                    request.tenant,
                )
            request.stored_blocks = full
        if to_the_end and rest:
            begun = request.token_ids[full * size : full * size + rest]
            self._cache.insert_partial(
                request.block_ids[full], self._parent(request, full), full, begun, request.tenant
            )

    def can_cut(self, request: Request, num_output: int) -> bool:
        """False: what would be written anew is in the cache, where others may take it. Only after a preemption behind
        that place; the request then has to give its blocks up before it goes on.
        """
        size, end = self._pool.block_size, request.num_input + num_output - 1
        if request.stored_blocks * size > end:
            return False
        begun = [self._cache.num_tokens_of(block) for block in request.block_ids[end // size :]]
        return not begun or (begun[0] <= end % size and not any(begun[1:]))

    def cut(self, request: Request, num_output: int) -> None:
        """`Request.cut`, and the names of blocks that are not full any more."""
        request.cut(num_output)
        del request.block_hashes[request.num_tokens // self._pool.block_size :]

    def chain(self, request: Request) -> Sequence[bytes]:
        """Hashes of the full blocks that a request without output yet could share; none for one that must not."""
        full = self._matchable(request) // self._pool.block_size
        if request.no_cache or full == 0:
            return ()
        self._hash(request, full)
        return request.block_hashes[:full]

    def identity(self, request: Request) -> bytes:
        """The name of the prompt in the cache: the hash of its last full block, or b"" without one. Keeps hashes."""
        full = len(request.prompt_ids) // self._pool.block_size
        if request.no_cache or full == 0:
            return b""
        self._hash(request, full)
        return request.block_hashes[full - 1]

    def hash_all(self, request: Request) -> None:
        """Names all full blocks of the request's tokens."""
        self._hash(request, request.num_tokens // self._pool.block_size)

    def hash_ahead(self, request: Request) -> None:
        """Names the full blocks of a request that decodes, so that `publish` has them when it leaves."""
        if not request.no_cache:
            self._hash(request, request.computed_tokens // self._pool.block_size)

    def pull_targets(self, request: Request) -> Sequence[int]:
        """Blocks of an adoption that its reads may write to: all but those it shares with the cache."""
        return request.block_ids[request.stored_blocks :]

    def release(self, request: Request, quarantined: Sequence[int] = ()) -> None:
        """Give back all blocks; `quarantined` ones of them stay aside until `quarantine_holder` is released."""
        if quarantined:
            aside = frozenset(quarantined)
            if not aside.issubset(request.block_ids):
                raise InvariantError(f"request {request.key}: a read into blocks that it does not have")
            self._pool.quarantine(quarantined, quarantine_holder(request.key))
            self._pool.decref(block for block in reversed(request.block_ids) if block not in aside)
        else:
            self._pool.decref(reversed(request.block_ids))
        request.block_ids = []
        request.stored_blocks = 0
        request.computed_tokens = 0

    def freed_by(self, holders: Iterable[Request]) -> Iterator[int]:
        """How many blocks nobody uses any more once the first holder has given its own up, the first two, and so on.

        A block that they share is freed by the last of them, if nobody else has it. O(blocks).
        """
        shared: Counter[int] = Counter()
        freed = 0
        for holder in holders:
            for block in holder.block_ids:
                refs = self._pool.refs(block)
                if refs > 1:
                    shared[block] += 1
                    refs -= shared[block] - 1
                freed += refs == 1
            yield freed

    def _lacking(self, request: Request, matched: Sequence[int], spare_blocks: int, source: int = -1) -> int:
        need = self._pool.blocks_for(admission_tokens(request)) - len(matched)
        idle = sum(1 for block in matched if self._pool.refs(block) == 0)
        if source >= 0 and self._pool.refs(source) == 0:
            idle += 1
        return max(0, need + idle + spare_blocks - self._pool.available_blocks)

    def _match_for(self, request: Request) -> list[int]:
        full = self._matchable(request) // self._pool.block_size
        if request.no_cache or full == 0:
            return []
        self._hash(request, full)
        return self._cache.match(request.block_hashes[:full])

    def _match_partial(self, request: Request, full: int) -> tuple[int, int]:
        """(block, tokens) to copy behind `full` matched blocks."""
        start = full * self._pool.block_size
        end = min(start + self._pool.block_size, self._matchable(request))
        if request.no_cache or request.adopted or end <= start:
            return -1, 0
        if full:
            self._hash(request, full)
        return self._cache.match_partial(self._parent(request, full), request.token_ids[start:end])

    @staticmethod
    def _matchable(request: Request) -> int:
        """Tokens that the cache may give."""
        handed_one_more = request.adopted and not request.num_output
        return request.num_tokens if handed_one_more else request.num_tokens - 1

    @staticmethod
    def _parent(request: Request, index: int) -> bytes:
        """What the block at `index` comes behind."""
        return request.block_hashes[index - 1] if index else request.root

    def _hash(self, request: Request, num_blocks: int) -> None:
        if len(request.block_hashes) < num_blocks:
            request.block_hashes = block_hashes(
                request.root, request.token_ids, self._pool.block_size, request.block_hashes
            )

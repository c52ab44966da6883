"""What the scheduler does with the tiers below the device: which blocks to copy down ahead of their eviction, which to
read up for a request, and what a step takes from the host; all by cost.

    down   idle blocks that are evicted soon go to the host, blocks of the host to disk: in the background, so that an
           eviction is never a copy
    up     a request that is accepted has its blocks on disk read into the host; a step that starts it, or goes on with
           it, copies what the host has by then into its blocks before the rows run, and computes the rest

A block comes from where it is only when that is predicted to be sooner than computing it. While blocks are on their
way, and as long as was predicted, their request computes a block a step: what it computes now it would not have to.

Does not: move bytes, or decide who runs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from workers.core.blocks import BlockPool
from workers.core.host_blocks import HostBlocks
from workers.core.host_tier import Copy
from workers.core.policies import Pace
from workers.core.prefix_cache import PrefixCache
from workers.core.request import HostCopy, Request
from workers.core.settings import SchedulerSettings
from workers.core.tier_actions import Block, Forget, Offload, Outcome, Promote, Spill, TierAccount, tenant_tag
from workers.core.tiers import Tiers

_MAX_AHEAD = 512
"""Blocks that are copied down before they go, at most."""
_LOOK_BLOCKS = 128
"""Of them, what one look sees: it keeps the lock for about a millisecond, however large the cache."""
_EASE = 0.1
_SLACK_S = 0.02
"""Promised reads may be late by so much, and as much again as they were predicted to take."""
_UNKNOWN_READ_S = 0.002
"""What a block's read is promised to take before the first one."""
_DOUBT = 0.95
"""Of what reads were seen to take is believed after each time that it was too much: it may have been a bad moment."""


@dataclass(slots=True)
class _Sweep:
    """A pass over the blocks that are evicted next, in several looks; each of the first `seen` is in the host, or on
    its way there."""

    turn: int
    """Of the idle blocks when it began."""
    behind: int
    """Idle blocks behind all that it is to see, when it began."""
    evictions: int
    """Of the pool, when `seen` was true."""
    seen: int = 0
    is_over: bool = False


class Tiering:
    """`tiers` has what is where. One a scheduler, under its lock."""

    def __init__(
        self, settings: SchedulerSettings, pool: BlockPool, cache: PrefixCache, host: HostBlocks, pace: Pace
    ) -> None:
        self.tiers = Tiers(host, settings.disk_blocks)
        self.on_reads: Callable[[], None] = lambda: None
        """Told that there is something to `take_reads`; set by the shell."""
        self.host_hit_tokens = 0
        self.disk_hit_tokens = 0
        self._settings = settings
        self._pool = pool
        self._host = host
        self._cache = cache
        self._pace = pace
        self._ahead = min(_MAX_AHEAD, pool.num_blocks, host.num_blocks // 2)
        """So that half of the host has what the device has no more."""
        self._sweep = _Sweep(-1, 0, 0, is_over=True)
        self._reads: deque[Promote] = deque()
        self._num_reading = 0
        self._read_block_s = 0.0
        """Of reads of late, a running average; 0: not known."""
        self._names: dict[bytes, str] = {}
        self.tiers.on_kept = cache.log.stored
        self.tiers.on_gone = cache.log.removed
        cache.below = self

    # ---- what the cache tells

    def left(self, block_hash: bytes) -> None:
        """The device does not have the block any more."""
        self.tiers.device_evicted(block_hash)

    # ---- down

    def offloads(self, most: int) -> list[Offload]:
        """Copies to make now, of blocks that the device will evict next. A look sees a bounded number of them; the next
        one goes on behind."""
        pool, idle, sweep = self._pool, self._pool.idle, self._sweep
        ahead = self._ahead - pool.free_blocks
        if ahead <= 0 or not self.copy_pays():
            return []
        behind = max(0, pool.evictable_blocks - ahead)
        if sweep.is_over:
            if idle.turns == sweep.turn and behind >= sweep.behind:
                return []  # idle blocks may have gone since, but none has come near its turn
            sweep = self._sweep = _Sweep(idle.turns, behind, pool.evictions)
        sweep.seen, sweep.evictions = max(0, sweep.seen + sweep.evictions - pool.evictions), pool.evictions
        end = min(sweep.seen + _LOOK_BLOCKS, ahead)
        is_told_all = idle.look_ahead(end, 2 * _LOOK_BLOCKS)
        actions: list[Offload] = []
        for device_block in islice(idle.coming(end), sweep.seen, None):
            block_hash, parent, tenant = self._cache.content(device_block)
            if block_hash and not self.tiers.in_host(block_hash):
                block = Block(block_hash, parent, self._tag(tenant), idle.saved_ms(device_block))
                action = self.tiers.offload(block, device_block)
                if action is None:
                    return actions  # no room: the next look begins here
                actions.append(action)
            sweep.seen += 1
            if len(actions) == most:
                return actions
        sweep.is_over = sweep.seen >= ahead or (is_told_all and sweep.seen < end)
        return actions

    def offloaded(self, ticket: int) -> None:
        self.tiers.offloaded(ticket)

    def writes(self, most: int, now: float) -> list[Spill | Forget]:
        """What the disk is to do, in this order."""
        return self.tiers.writes(most, 1000.0 * self._read_block_s if self._pace.known else 0.0, now)

    def spilled(self, ticket: int, outcome: Outcome, now: float) -> None:
        self.tiers.spilled(ticket, outcome, now)

    # ---- up

    def prefetch(self, request: Request, hashes: Sequence[bytes], now: float) -> None:
        """An accepted request with this chain, without its last token: have read from disk what pays."""
        if not self.tiers.disk_blocks or not hashes:
            return
        if self.read_up(hashes[len(self._cache.match(hashes)) :], self._tag(request.tenant)):
            request.expects_blocks_until = self.promise(now)

    def read_up(self, hashes: Sequence[bytes], tag: bytes | None) -> int | None:
        """Have read from disk what of the leading run of `hashes` is there and not in the host, as far as the host has
        room. Returns how many blocks; None: computing them is sooner. `tag`: see `Tiers.promote`."""
        run = self.tiers.run(hashes)
        if run and not self._pays(self._read_block_s * (1.0 + self._num_reading / run)):
            self._read_block_s *= _DOUBT
            return None
        reads = self.tiers.promote(hashes[:run], tag)
        if reads:
            self._reads += reads
            self._num_reading += len(reads)
            self.on_reads()
        return len(reads)

    def promise(self, now: float) -> float:
        """When what is being read will be there, at the latest, if reads go on as they do."""
        return now + _SLACK_S + 2.0 * self._num_reading * (self._read_block_s or _UNKNOWN_READ_S)

    def take_reads(self, most: int) -> list[Promote]:
        return [self._reads.popleft() for _ in range(min(most, len(self._reads)))]

    def promoted(self, ticket: int, outcome: Outcome, took_s: float, now: float) -> None:
        """A read is over, after so many seconds."""
        self._num_reading -= 1
        if outcome is Outcome.DONE:
            ease = _EASE if self._read_block_s else 1.0
            self._read_block_s += ease * (took_s - self._read_block_s)
        self.tiers.promoted(ticket, outcome, now)

    def host_run(self, hashes: Sequence[bytes], start: int) -> int:
        """How many blocks of the chain from `start` on a step should take from the host."""
        if start >= len(hashes) or not self.copy_pays():
            return 0
        return self.tiers.host_run(hashes, start)

    def copy_pays(self) -> bool:
        """Copying a block from the host is sooner than computing it."""
        return self._pays(self._settings.host_copy_block_s)

    def cached_tokens(self, hashes: Sequence[bytes]) -> int:
        """Tokens of the chain that need not be computed, by what all tiers have now."""
        device = len(self._cache.match(hashes))
        return (device + self.tiers.run(hashes, device)) * self._pool.block_size

    def is_coming(self, hashes: Sequence[bytes], index: int) -> bool:
        """The block at `index` of the chain is being read from disk."""
        return index < len(hashes) and self.tiers.in_host(hashes[index])

    def restore(self, hashes: Sequence[bytes]) -> list[Copy]:
        """The next step copies these to the device; they stay in the host until `restored`."""
        copies = self.tiers.pin(hashes)
        from_disk = sum(copy.from_disk for copy in copies)
        self.disk_hit_tokens += from_disk * self._pool.block_size
        self.host_hit_tokens += (len(copies) - from_disk) * self._pool.block_size
        for copy in copies:
            copy.from_disk = False
        return copies

    def restored(self, copies: Sequence[Copy]) -> None:
        """That step is over."""
        self.tiers.unpin(copies)

    # ---- the disk's start, dropping, looking

    def found(self, block: Block | None) -> None:
        """A file of an earlier life; None: one that was no block and is deleted."""
        if block is None:
            self.tiers.counters["disk_corrupt"] += 1
        else:
            self.tiers.found(block)

    def scanned(self) -> None:
        self.tiers.scanned()

    def disk_is_off(self) -> None:
        """There is no disk tier after all."""
        self.tiers.counters["disk_errors"] += 1
        self.tiers.end_disk()

    def clear(self, tenant: str | None) -> None:
        """Drop what a tenant has below the device, or everything (None)."""
        self.tiers.clear(None if tenant is None else tenant_tag(tenant))

    def accounts(self) -> list[TierAccount]:
        """Of the tiers that there are, the device first. Every number is counted where its blocks are."""
        pool, host, tiers = self._pool, self._host, self.tiers
        aside = pool.used_blocks + pool.quarantined_blocks
        told = [TierAccount("device", pool.usable_blocks, pool.evictable_blocks, aside, pool.free_blocks)]
        if host.num_blocks:
            usable, used = host.num_blocks - host.retired_blocks, tiers.host_busy + host.copy_blocks
            told.append(TierAccount("host", usable, tiers.host_cached, used, host.free_blocks))
        if tiers.disk_blocks:
            told.append(
                TierAccount("disk", tiers.disk_blocks, tiers.disk_cached, tiers.disk_busy, tiers.free_disk_blocks)
            )
        return told

    def by_tenant(self) -> Counter[str]:
        """Copies of blocks in all tiers; a tenant that has not asked since the start is named by its tag."""
        told = Counter({self._names.get(tag, f"~{tag.hex()}"): blocks for tag, blocks in self.tiers.by_tag.items()})
        told.update(self._cache.tenants)
        return +told

    def check_integrity(self, copies: list[HostCopy]) -> None:
        """Raises InvariantError unless the tiers, and `copies` of preempted requests, hold what is taken. O(blocks)."""
        self._host.check_integrity(copies, self.tiers.host_blocks())
        self.tiers.check_integrity()

    def stats(self) -> dict[str, int]:
        tokens = {"host_hit_tokens": self.host_hit_tokens, "disk_hit_tokens": self.disk_hit_tokens}
        return self.tiers.counters | tokens

    def _pays(self, block_s: float) -> bool:
        """So long for a block is less than computing it takes; as long as nobody knows, it is."""
        return not self._pace.known or block_s < self._pool.block_size * self._pace.prefill_token_s

    def _tag(self, tenant: str) -> bytes:
        tag = tenant_tag(tenant)
        if len(self._names) > 2 * len(self.tiers.by_tag) + 64:
            self._names = {known: name for known, name in self._names.items() if known in self.tiers.by_tag}
        self._names[tag] = tenant
        return tag

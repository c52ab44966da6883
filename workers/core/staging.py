"""Blocks that a peer asks for and that lie below the device: copied up into blocks of their own, for as long as the
peer's lease is open.

    WAITING --the host has the next ones--> COPYING --copied--> WAITING
       |                                       |
       |                                       +--lease over--> LEAVING --copied--> GONE
       +--all are there, or no more can come, or late--> SEALED --lease over--> GONE
       +--lease over--> GONE

What is on disk is read into the host first, checksums and all, as for a request of this worker. The copies are nobody's
cache: they have no names, and are free when the lease is over. A stage takes all its blocks when it begins, or as many
as there is room for, and never waits for others' blocks: two workers that read from each other cannot stop each other.

| bound | kept by |
| --- | --- |
| memory: a share of the pool over all stages, and what leaves the spare blocks | `begin` |
| time: the peer still has use for what has come by then | `give_up_at`, half of the peer's own patience |

Does not: move bytes, talk, read clocks, pin what the device has (`workers.core.fetch_pins` does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, count

from headrace.errors import InvariantError
from headrace.ids import RequestKey
from workers.core.blocks import BlockPool
from workers.core.fetches import patience_s
from workers.core.host_tier import Copy
from workers.core.tiering import Tiering

_MOST_SHARE = 4
"""One over the part of the pool that all stages may have together."""
_CALLED_UP = 64
"""Blocks that are read from disk for a stage at a time."""
_PATIENCE_SHARE = 0.5
"""Of the time after which the peer gives up."""


class StageState(Enum):
    WAITING = "waiting"
    COPYING = "copying"
    SEALED = "sealed"
    LEAVING = "leaving"
    GONE = "gone"


TRANSITIONS: dict[StageState, frozenset[StageState]] = {
    StageState.WAITING: frozenset({StageState.COPYING, StageState.SEALED, StageState.GONE}),
    StageState.COPYING: frozenset({StageState.WAITING, StageState.LEAVING}),
    StageState.SEALED: frozenset({StageState.GONE}),
    StageState.LEAVING: frozenset({StageState.GONE}),
    StageState.GONE: frozenset(),
}


@dataclass(frozen=True, slots=True)
class FetchSource:
    """What a peer that fetches may read here."""

    blocks: tuple[int, ...]
    """Blocks of the device, in the order of the prefix; later ones are added at the end."""
    is_over: bool
    """No more comes."""
    reason: str = ""
    """Then: why not all that was promised came, see `Stage.reason`."""


@dataclass(frozen=True, slots=True)
class StageCopy:
    """Copy these blocks. Answer: `Staging.copied`."""

    ticket: int
    pairs: tuple[tuple[int, int], ...]
    """(host block, device block)"""


@dataclass(slots=True, eq=False)
class Stage:
    """What one lease has staged."""

    key: RequestKey
    owner: str
    """Under which name an audit shows it."""
    hashes: tuple[bytes, ...]
    targets: tuple[int, ...]
    """One own block for each of them that may still come or has."""
    give_up_at: float
    state: StageState = StageState.WAITING
    num_ready: int = 0
    """Leading targets that hold their KV."""
    reason: str = ""
    """Once SEALED with too few: gone | late | slow | no_room."""
    copying: list[Copy] = field(default_factory=list)

    @property
    def ready(self) -> tuple[int, ...]:
        return self.targets[: self.num_ready]


class Staging:
    """All stages of one worker, by the key of their lease."""

    def __init__(self, pool: BlockPool, tiering: Tiering) -> None:
        self.on_wanted: Callable[[], None] = lambda: None
        """Told that `next_copy` may have something; set by who copies."""
        self.on_change: Callable[[RequestKey], None] = lambda _: None
        """Told of a stage that has more blocks, is SEALED, or is GONE after LEAVING; set by who talks to peers."""
        self.staged_blocks = 0
        """Since the start."""
        self._pool = pool
        self._tiering = tiering
        self._live: dict[RequestKey, Stage] = {}
        """In order of their beginning."""
        self._copies: dict[int, Stage] = {}
        self._tickets = count(1)

    def __len__(self) -> int:
        return len(self._live)

    @property
    def keys(self) -> list[RequestKey]:
        """Of leases that are open."""
        return [key for key, stage in self._live.items() if stage.state is not StageState.LEAVING]

    def get(self, key: RequestKey) -> Stage | None:
        """None when there is none, or its lease is over."""
        stage = self._live.get(key)
        return None if stage is None or stage.state is StageState.LEAVING else stage

    # ---- a stage's life

    def begin(
        self, key: RequestKey, reader: str, hashes: Sequence[bytes], spare_blocks: int, token_s: float, now: float
    ) -> str:
        """Stage the leading run of `hashes` that lies below, as far as there is room with `spare_blocks` left.

        Empty, or the reason why there is nothing to stage and nothing was changed: not_cached | slow (computing is
        sooner) | no_room. `token_s`: predicted seconds to compute a token instead.
        """
        if key in self._live:
            raise InvariantError(f"stage {key} is taken")
        run = self._tiering.tiers.run(hashes)
        if not run:
            return "not_cached"
        if not self._tiering.copy_pays():
            return "slow"
        held = sum(len(stage.targets) for stage in self._live.values())
        share = self._pool.usable_blocks // _MOST_SHARE - held
        run = min(run, share, self._pool.available_blocks - spare_blocks)
        if run <= 0:
            return "no_room"
        if reason := self._call_up(hashes[: min(run, _CALLED_UP)]):
            return reason
        targets = self._pool.alloc(run)
        if targets is None:
            raise InvariantError("blocks that were counted as available are not")
        give_up_at = now + _PATIENCE_SHARE * patience_s(run * self._pool.block_size, token_s)
        self._live[key] = Stage(key, f"staged for {reader}", tuple(hashes[:run]), tuple(targets), give_up_at)
        self.on_wanted()
        return ""

    def next_copy(self, most: int) -> StageCopy | None:
        """Copies to make now, of one stage, at most so many; stages for which no more can come are SEALED."""
        for stage in list(self._live.values()):
            if stage.state is not StageState.WAITING:
                continue
            coming = stage.hashes[stage.num_ready : stage.num_ready + most]
            if run := self._tiering.tiers.host_run(coming):
                return self._copy(stage, run)
            if reason := self._call_up(stage.hashes[stage.num_ready : stage.num_ready + _CALLED_UP]):
                self._seal(stage, reason)
        return None

    def copied(self, ticket: int) -> None:
        """Those copies are made. A duplicate is a no-op."""
        stage = self._copies.pop(ticket, None)
        if stage is None:
            return
        self._tiering.restored(stage.copying)
        num_copied, stage.copying = len(stage.copying), []
        self.staged_blocks += num_copied
        if stage.state is StageState.LEAVING:
            self._give_back(stage)
        else:
            stage.num_ready += num_copied
            _advance(stage, StageState.WAITING)
            if stage.num_ready == len(stage.hashes):
                _advance(stage, StageState.SEALED)
        self.on_change(stage.key)

    def expire(self, now: float) -> None:
        """What takes too long is SEALED with what has come; a copy under way is waited for."""
        for stage in self._live.values():
            if stage.state is StageState.WAITING and now >= stage.give_up_at:
                self._seal(stage, "late")

    def end(self, key: RequestKey) -> bool:
        """The lease is over. False when it was already. What is being written to is free when it is written."""
        stage = self.get(key)
        if stage is None:
            return False
        if stage.state is StageState.COPYING:
            _advance(stage, StageState.LEAVING)
        else:
            self._give_back(stage)
        return True

    # ---- looking

    def blocks(self) -> Iterator[int]:
        """One entry for each reference."""
        return chain.from_iterable(stage.targets for stage in self._live.values())

    def holders(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for stage in self._live.values():
            held[stage.owner] = held.get(stage.owner, 0) + len(stage.targets)
        return held

    def check_integrity(self) -> None:
        """Raises InvariantError unless staged blocks are nobody else's and have no names. O(blocks)."""
        if any(self._pool.refs(block) != 1 or self._pool.label_of(block) is not None for block in self.blocks()):
            raise InvariantError("a staged block is used or cached")
        writing = (StageState.COPYING, StageState.LEAVING)
        copying = [stage for stage in self._live.values() if stage.state in writing]
        if set(copying) != set(self._copies.values()):
            raise InvariantError("a stage is written to without a copy, or has one and is not")

    # ---- inside

    def _call_up(self, hashes: Sequence[bytes]) -> str:
        """Have the first of them in the host, or on its way there, and with it the others. Else why not."""
        tiers = self._tiering.tiers
        if tiers.in_host(hashes[0]):
            return ""
        if not tiers.has(hashes[0]):
            return "gone"
        reads = self._tiering.read_up(hashes, None)
        if reads:
            return ""
        return "slow" if reads is None else "no_room"

    def _copy(self, stage: Stage, num_blocks: int) -> StageCopy:
        end = stage.num_ready + num_blocks
        stage.copying = self._tiering.tiers.pin(stage.hashes[stage.num_ready : end])
        _advance(stage, StageState.COPYING)
        ticket = next(self._tickets)
        self._copies[ticket] = stage
        sources = (copy.host_block for copy in stage.copying)
        return StageCopy(ticket, tuple(zip(sources, stage.targets[stage.num_ready : end], strict=True)))

    def _seal(self, stage: Stage, reason: str) -> None:
        stage.reason = reason
        _advance(stage, StageState.SEALED)
        self._pool.decref(reversed(stage.targets[stage.num_ready :]))
        stage.targets = stage.ready
        self.on_change(stage.key)

    def _give_back(self, stage: Stage) -> None:
        _advance(stage, StageState.GONE)
        self._pool.decref(reversed(stage.targets))
        del self._live[stage.key]


def _advance(stage: Stage, to: StageState) -> None:
    if to not in TRANSITIONS[stage.state]:
        raise InvariantError(f"{stage.owner}: {stage.state.value} -> {to.value}")
    stage.state = to

"""A pool that gives memory back, and takes it again: who is preempted for it, and how much must stay.

    resize(n)  ->  the next step retires or restores blocks so that n are out of use, as far as may be:

| invariant | kept by |
| --- | --- |
| nobody's blocks are retired | `BlockPool.retire` takes free and cached ones only |
| every request here can still run, one after another | the largest has room among what stays in use; so has a new one |
| nobody writes to a retired block | no step is on its way when it is taken; the step's plan names it to the runner |
| nobody gets a block whose memory is still being taken | it is free when the step that restores it is over |

Does not: know how much memory there is (`workers.core.watermarks` does), or give any back (the runner does).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.core.fairness import ServiceCounters
from headrace.errors import Rejected
from headrace.ids import RequestKey
from workers.core.blocks import BlockPool
from workers.core.host_blocks import HostBlocks
from workers.core.journal import Tracing
from workers.core.limits import peak_tokens
from workers.core.plan import MemoryChange
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request, State
from workers.core.settings import SchedulerSettings
from workers.core.suspension import Suspension

_LEAST_SHARE = 8
"""One over the part of the pool that always stays in use."""


class Shedding(Suspension):
    """See `workers.core.scheduler.Scheduler`, which is the one that workers make."""

    def __init__(
        self,
        settings: SchedulerSettings,
        pool: BlockPool,
        cache: PrefixCache,
        service: ServiceCounters,
        tracing: Tracing,
    ) -> None:
        super().__init__(settings, pool, cache, service, tracing)
        self.counters |= dict.fromkeys(("memory_shed", "retired_blocks", "restored_blocks"), 0)
        self._retired_wanted = self._host_wanted = 0
        self._sheds = False

    def close(self, reason: str, retry_after_s: float) -> None:
        """Nobody new is let in until `open`; who is here goes on. Again with another reason changes that."""
        self.admission.closed = Rejected(reason, retry_after_s)

    def open(self) -> None:
        self.admission.closed = None

    def resize(self, retired_blocks: int, retired_host_blocks: int = 0, *, shed: bool = False) -> None:
        """Have so many blocks out of use with the next step, of those that nobody uses; with `shed` requests are
        preempted for it."""
        self._retired_wanted = retired_blocks
        self._host_wanted = retired_host_blocks
        self._sheds = shed

    @property
    def resizing(self) -> bool:
        """A step is on its way that gives memory back or takes some: what is available says nothing yet."""
        return any(flight.plan.memory for flight in self._flights)

    @property
    def _is_to_resize(self) -> bool:
        wanted = (self._retired_wanted, self._host_wanted)
        return wanted != (self._pool.retired_blocks, self._host.retired_blocks)

    @property
    def host_blocks(self) -> HostBlocks:
        """To read."""
        return self._host

    def resume(self, key: RequestKey, token_ids: Sequence[int], now: float) -> bool:
        """As in Suspension. The request may need more than before: retired blocks come back for it."""
        resumed = super().resume(key, token_ids, now)
        if resumed and self._retired_wanted:
            self._retired_wanted = min(self._retired_wanted, self._most_retired([self.requests[key]]))
        return resumed

    def _fit_memory(self, now: float) -> MemoryChange:
        """What the step which is planned now retires and restores. Host blocks go first: they are no way to give blocks
        up while memory is short."""
        pool, host, change = self._pool, self._host, MemoryChange()
        if (more := self._host_wanted - host.retired_blocks) > 0:
            change.host_retired = host.retire(more)
        elif more < 0:
            change.host_restored = host.next_restored(-more)
        more = self._retired_wanted - pool.retired_blocks
        if more > 0:
            more = min(more, self._most_retired(self.requests.values()) - pool.retired_blocks)
            if self._sheds and more > pool.available_blocks:
                self._shed(more, now)
        if more > 0:
            change.retired = pool.retire(more)
        elif more < 0:
            change.restored = pool.next_restored(-more)
        self.counters["retired_blocks"] += len(change.retired)
        self.counters["restored_blocks"] += len(change.restored)
        self._retired_wanted = pool.retired_blocks - len(change.restored)
        self._host_wanted = host.retired_blocks - len(change.host_restored)
        self._bound_admission()
        return change

    def _memory_changed(self, change: MemoryChange) -> None:
        """The step is over: nobody writes to what it restored any more but who gets it."""
        self._pool.restore(len(change.restored))
        self._host.restore(len(change.host_restored))
        self._bound_admission()

    def _bound_admission(self) -> None:
        pool = self._pool
        self.admission.usable_tokens = pool.usable_blocks * pool.block_size if pool.retired_blocks else None

    def _most_retired(self, requests: Iterable[Request]) -> int:
        """Blocks that may be out of use while each of `requests` is here. O(requests)."""
        largest = max((peak_tokens(request, self._settings) for request in requests), default=0)
        return self._pool.num_blocks - max(self._pool.blocks_for(largest), -(-self._pool.num_blocks // _LEAST_SHARE))

    def _shed(self, num_blocks: int, now: float) -> None:
        """Preempt until so many blocks are available: what was fetched and waits, then paused requests, then the lowest
        class, the latest of it first."""
        pool = self._pool
        self.fetches.let_go(num_blocks - pool.available_blocks)
        holders = [r for r in (*self._queues.paused.values(), *self._computing()) if r.block_ids and not r.pinned]
        holders.sort(key=lambda r: (r.state is not State.TOOL_WAIT, -r.priority, -r.arrival))
        for victim in holders:
            if pool.available_blocks >= num_blocks:
                return
            self.counters["memory_shed"] += 1
            self._preempt(victim, now)

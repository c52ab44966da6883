"""What a worker's scheduler is made of, who holds what of it, and the proof that nothing is lost.

Does not: let in, take away (`Roster` and those above it do), read clocks.
"""

from __future__ import annotations

from collections import Counter

from headrace.core.fairness import ServiceCounters
from headrace.errors import InvariantError
from headrace.ids import RequestKey
from workers.core.admission import QueueAdmission
from workers.core.batch import DecodeBatch
from workers.core.blocks import BlockPool
from workers.core.fetch_pins import FetchPins
from workers.core.fetches import Fetches
from workers.core.flights import Flights
from workers.core.host_blocks import HostBlocks
from workers.core.journal import Journal, Tracing
from workers.core.policies import Pace, Policy
from workers.core.preemption import Preemption
from workers.core.prefix_cache import PrefixCache
from workers.core.queues import Queues
from workers.core.request import HostCopy, Keep, Request
from workers.core.residency import Residency
from workers.core.settings import SchedulerSettings
from workers.core.staging import Staging
from workers.core.tiering import Tiering
from workers.core.tool_wait import Call, TakeRate
from workers.core.waiting import WaitingLine


class Holdings:
    """See `workers.core.scheduler.Scheduler`, which is the one that workers make."""

    def __init__(
        self,
        settings: SchedulerSettings,
        pool: BlockPool,
        cache: PrefixCache,
        service: ServiceCounters,
        tracing: Tracing,
    ) -> None:
        if settings.block_size != pool.block_size:
            raise InvariantError("settings and pool differ in block_size")
        self.requests: dict[RequestKey, Request] = {}
        """Everybody who holds or awaits something here; forgets a request as soon as its blocks are back."""
        self.service = service
        """What each tenant has received here."""
        self.refused: list[tuple[RequestKey, str]] = []
        """Ended here without a step, and why: deadline_lost | preempted (another worker should take it). The shell
        empties it."""
        self.counters: dict[str, int] = dict.fromkeys(
            (
                *("preemptions", "recomputed_tokens", "swapped_out", "swapped_in", "routed", "deadline_lost"),
                *("paused", "tool_keep", "tool_offload", "tool_drop"),
            ),
            0,
        )
        self.paused: list[tuple[RequestKey, Keep]] = []
        """Wait for a tool since the shell last looked, and what became of their blocks. The shell empties it."""
        self._settings = settings
        self._pool = pool
        self._cache = cache
        self._residency = Residency(pool, cache)
        self.fetches = Fetches(pool, cache)
        """Prefixes on their way here; the shell reads them."""
        self._pins = FetchPins(pool, cache)
        self._pace = Pace()
        pool.idle.quota = int(settings.tenant_cache_share * pool.num_blocks)
        cache.saved_ms = lambda index: self._pace.block_ms(settings.block_size, index)
        self._policy = Policy(settings, self._pace, service)
        self._preemption = Preemption(settings, pool, self._pace, self._policy)
        self._host = HostBlocks(settings.host_blocks)
        self.tiering = Tiering(settings, pool, cache, self._host, self._pace)
        """Cached blocks in host memory and on disk."""
        self.staging = Staging(pool, self.tiering)
        """Blocks on their way up for peers."""
        self._batch = DecodeBatch(settings)
        self._journal = Journal(tracing, pool, self._batch, settings.max_num_batched_tokens)
        self.admission = QueueAdmission(settings)
        """The bounds of what waits and is held here."""
        self._queues = Queues(WaitingLine(self._policy, service), self._batch, self.admission)
        self._fresh: list[Request] = []
        """Decodes that no step has named yet."""
        self._unsaid: list[Request] = []
        """Decodes with handed-over output that their clients have not been told here."""
        self._classes: Counter[int] = Counter()
        """Requests here by priority; those without any are left out."""
        self._flights = Flights(self._batch)
        self._swap_out: list[tuple[int, int]] = []
        self._to_offload: list[Request] = []
        self._to_pause: list[tuple[Request, Keep | Call]] = []
        self._take_rate = TakeRate()
        self._pressure = 0.0
        """Blocks that preemptions of late have added to the margin; falls with every step."""
        self._arrivals = 0
        self._deadlines: list[tuple[float, RequestKey]] = []

    # ---- looking

    @property
    def free_host_blocks(self) -> int:
        """What preempted requests may take; cached blocks make room for them."""
        return self._host.available_blocks

    def complete_tokens(self, request: Request) -> int:
        """Computed tokens whose bytes are in the request's blocks now, whatever steps on their way still bring."""
        landing = (flight.landing[request.key] for flight in self._flights if request.key in flight.landing)
        return next(landing, request.computed_tokens)

    def holders(self) -> dict[str, int]:
        """Who holds how many blocks; a shared block counts for each of its holders."""
        held = {
            f"request {request.request_id}/{request.attempt}": len(request.block_ids)
            for request in self.requests.values()
            if request.block_ids
        }
        held |= self.fetches.holders() | self._pins.holders() | self.staging.holders()
        return held | {f"quarantine {name}": n for name, n in self._pool.quarantine_holders().items()}

    def unfilled_slots(self) -> int:
        """Token slots of requests' blocks that nothing is computed for; less than a block for each that computes, and
        what adoptions await."""
        size = self._pool.block_size
        return sum(len(r.block_ids) * size - r.computed_tokens for r in self.requests.values() if r.block_ids)

    def fragmentation(self) -> float:
        """Share of the token slots of used blocks that are not filled. A shared block counts once."""
        used = self._pool.used_blocks * self._pool.block_size
        return min(1.0, self.unfilled_slots() / used) if used else 0.0

    def check_integrity(self) -> None:
        """Raises InvariantError unless blocks, references, cache entries and queues agree. O(blocks + tokens held)."""
        self._pool.check_integrity()
        self._cache.check_integrity()
        self._queues.check_integrity()
        self._flights.check_integrity()
        dropped = [request for flight in self._flights for request in flight.dropped]
        known = {request.key for request in [*self._queues.all(), *dropped]}
        if known != self.requests.keys():
            raise InvariantError("a request is in no queue, or in one although it is forgotten")
        self.tiering.check_integrity(self._host_copies())
        self.fetches.check_integrity()
        self.staging.check_integrity()
        refs = Counter(block for request in self.requests.values() for block in request.block_ids)
        refs.update(self.fetches.blocks())
        refs.update(self._pins.blocks())
        refs.update(self.staging.blocks())
        for flight in self._flights:
            refs.update(flight.copied)
        if any(self._pool.refs(block) != refs[block] for block in range(self._pool.num_blocks)):
            raise InvariantError("references to blocks and block tables differ")
        for request in self.requests.values():
            if request.computed_tokens > min(len(request.block_ids) * self._pool.block_size, request.num_tokens):
                raise InvariantError(f"request {request.key} has computed more than it has room for")

    # ---- inside

    def _host_copies(self) -> list[HostCopy]:
        """Everything that holds host blocks."""
        returning = [copy for flight in self._flights for copy in flight.host_copies]
        return [*returning, *(r.host for r in self.requests.values() if r.host is not None)]

    def _drop_copy(self, request: Request) -> None:
        copy, request.host = request.host, None
        if copy is None:
            return
        if self._flights.newest is not None and self._flights.copies_out:
            self._flights.newest.host_copies.append(copy)  # a step may still have to write it
        else:
            self._host.give_back(copy)

    def _spare_blocks(self) -> int:
        """Blocks that an admission leaves: the watermark, and what running requests are expected to grow by.

        The more often somebody had to be preempted of late, the more.
        """
        if not (self._queues.num_computing or self._queues.reserved):
            return 0
        growth = self._pool.blocks_for(self._batch.growth_tokens())
        return self._settings.watermark_blocks + growth + int(self._pressure)

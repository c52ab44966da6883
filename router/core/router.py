"""The router of one gateway: where each request goes. One object with the fleet's columns, the prefix index, what was
learned of lanes and predictions, and a policy. `choose` books nothing; book what was sent, undo what was not
delivered. Does not: send, know clocks, or have chance of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

import numpy as np

from headrace.core.records import CacheChange, Role, WorkerLoad
from router.core.arrays import Floats, Ints, Mask
from router.core.cost import NUM_TERMS, NUM_WAYS, Parts, Prefix, Priced, Work, first_token_ms
from router.core.decision import KINDS, Candidates, Decision, Fetch, PlanKind, RouteAsk
from router.core.fleet_table import Booking, FleetTable
from router.core.foresight import Outlook, cheapest
from router.core.lanes import Lanes
from router.core.placement import Mode, WorkerKey
from router.core.plans import (
    Eligible,
    decode_all,
    decode_pool,
    eligible,
    holder_of,
    plan_all,
    ready_mask,
    weights_of,
)
from router.core.policies import Chance, Policy, choose_by, lowest, queued_tokens
from router.core.prefix_index import PrefixIndex
from router.core.settings import RoutingSettings

_DECODE = KINDS.index(PlanKind.DECODE)
_NEW = 0.1
"""Weight of the newest prediction error."""
_MOST_SESSIONS = 100_000
_MOST_ADAPTERS = 1_000
_NO_ADAPTER = np.zeros(0, np.bool_)


def warm_up() -> None:
    """Loads what a choice has compiled; many seconds the first time on a machine."""
    router, ask = Router(lambda: 0.0), RouteAsk("warm-up", 1)
    for role in (Role.PREFILL, Role.DECODE):
        router.worker_up(WorkerKey(role.value, ""), role, capacity_tokens=16, block_size=16)
    router.choose(ask, 0.0)
    router.choose_decode(ask, WorkerKey(Role.PREFILL.value, ""), 0.0)


class Router:
    """See the module's docstring."""

    def __init__(
        self,
        chance: Chance,
        settings: RoutingSettings | None = None,
        policy: Policy = Policy.COST,
        index: PrefixIndex | None = None,
    ) -> None:
        """chance: gives the next random number of 0..1, for ties; for example `random.Random(seed).random`."""
        self.settings = settings or RoutingSettings()
        self.table = FleetTable()
        self.index = index or PrefixIndex()
        self.policy = policy
        self.lanes = Lanes(self.settings.default_block_ms)
        self.regret_ms = 0.0
        """Sum over completed requests, see `completed`."""
        self.error = 0.0
        """Average distance of the predicted from the realised time to the first token, as a share of the latter."""
        self._chance = chance
        self._weights = weights_of(self.settings)
        self._turn = 0
        self._usual: dict[Mode, tuple[int, Mask, Eligible | None]] = {}
        """What `_who` found for requests that any worker has room for, and the version of the table then."""
        self._terms = np.zeros((NUM_WAYS, 0, NUM_TERMS))
        self._busy = 0.0
        self._busy_at: float | None = None
        self._tickets: dict[WorkerKey, dict[int, int]] = {}
        self._sends_until: dict[int, float] = {}
        """Slot -> when what was to be fetched from it is sent."""
        self._sessions: OrderedDict[tuple[str, str], WorkerKey] = OrderedDict()
        self._adapters: OrderedDict[str, set[WorkerKey]] = OrderedDict()

    # ---- what the fleet tells

    def worker_up(
        self,
        key: WorkerKey,
        role: Role,
        capacity_tokens: int,
        block_size: int,
        lane: str = "",
        node: str = "",
        address: str = "",
        chunk_tokens: int = 0,
    ) -> None:
        """A session to this worker is usable. Idempotent.

        chunk_tokens: most prompt tokens of one request that a step of it takes; 0: not told, see
        `router.core.cost.USUAL_CHUNK_TOKENS`.
        """
        self.table.up(key, role, capacity_tokens, block_size, lane, node, address, chunk_tokens)

    def paired(self, reader: WorkerKey, holder: WorkerKey, works: bool) -> None:
        """Whether the one can read the other's blocks: otherwise it adopts nothing from there.

        (A fetch of a prefix that cannot be made is a cache miss.)
        """
        self.table.paired(reader, holder, works)

    def worker_down(self, key: WorkerKey) -> None:
        """Forgets its load, its bookings and its blocks. Idempotent."""
        slot = self.table.down(key)
        if slot is not None:
            self.index.forget(slot)
            self._sends_until.pop(slot, None)
        self._tickets.pop(key, None)
        for workers in self._adapters.values():
            workers.discard(key)

    def report(self, key: WorkerKey, load: WorkerLoad) -> bool:
        """Takes a load report. False: its cache has changes that never came, ask for a snapshot."""
        slot = self.table.slot(key)
        if slot is None:
            return True
        self.table.report(key, load)
        tickets = self._tickets.get(key, {})
        for seq in [s for s in tickets if s <= load.submit_seq]:
            del tickets[seq]
        return not self.index.behind(slot, load.cache_epoch, load.cache_seq)

    def cache_changed(self, key: WorkerKey, change: CacheChange) -> bool:
        """Takes a cache change. False: one before it is missing, ask for a snapshot."""
        slot = self.table.slot(key)
        return slot is None or self.index.apply(slot, change)

    # ---- choosing

    def choose(self, ask: RouteAsk, now: float) -> Decision | None:
        """The plan; None when no worker can take the request now, or when one that `may_wait` should."""
        table = self.table
        table.steps.refresh()
        self.index.expire(now)
        ready, found = self._who(ask)
        if found is None:
            return None
        depths = self._depths(ask)
        self._note_busy(found.parts, now)
        self._turn += 1
        is_cost = self.policy is Policy.COST
        if not is_cost:
            pool = np.flatnonzero(found.parts.prefill | found.parts.whole)
            place = choose_by(self.policy, queued_tokens(table, pool), depths[pool], self._turn, self._chance)
            found = found.only(int(pool[place]))
        work = self._work(ask, depths, ready)
        prefix = self._prefix(ask, depths, is_cost, now)
        priced = plan_all(table, self.lanes, found.parts, prefix, work, self._weights, self._terms_room())
        costs, waits = priced.costs.ravel(), priced.waits.ravel()
        if not ask.may_wait:
            costs[waits] = inf
        chosen = lowest(costs, self._chance)
        if waits[chosen]:
            return None
        way, slot = divmod(chosen, len(depths))
        fetched = int(priced.fetched[way, slot])
        fetch = None
        if fetched:
            fetch = Fetch(table.key(holder_of(table, prefix, slot)), int(prefix.depths[slot]) + fetched)
        return self._decide(priced, prefix, way, slot, fetch, work, found.reason)

    def choose_decode(self, ask: RouteAsk, source: WorkerKey, now: float) -> Decision | None:
        """The decode worker for a prefill that has started at `source` (SPEC E7); None when there is none."""
        table = self.table
        table.steps.refresh()
        self.index.expire(now)
        at = table.slot(source)
        pool = decode_pool(table, ready_mask(table, ask.most_tokens, ask.excluded, ask.avoided), at)
        if not pool.any():
            pool = decode_pool(table, ready_mask(table, ask.most_tokens, ask.excluded, (), willing=False), at)
        if not pool.any():
            return None
        depths = self._depths(ask)
        work = self._work(ask, depths, pool)
        terms, costs = decode_all(table, self.lanes, pool, depths, work, self._weights, at)
        if self.policy is Policy.COST:
            slot = lowest(costs, self._chance)
        else:
            slots = np.flatnonzero(pool)
            place = choose_by(self.policy, queued_tokens(table, slots), depths[slots], self._turn, self._chance)
            slot = int(slots[place])
        n = len(depths)
        nothing = np.zeros((1, n), np.int64)
        priced = Priced(terms[None], costs[None], nothing, nothing > 0, np.full((1, n), _DECODE))
        return self._decide(priced, self._prefix(ask, depths, False, now), 0, slot, None, work, "late")

    def can_place(self, mode: Mode, most_tokens: int) -> bool:
        """Whether there is a plan for a request that may need so many tokens of KV."""
        return eligible(self.table, mode, ready_mask(self.table, most_tokens, (), ())) is not None

    @property
    def most_capacity_tokens(self) -> int | None:
        """Tokens of the largest KV pool; None without a worker."""
        live = np.flatnonzero(self.table.live[: self.table.num_slots])
        return int(self.table.capacity_tokens[live].max()) if len(live) else None

    def outlook(self, ask: RouteAsk, now: float) -> Outlook | None:
        """The cheapest plan's times as things stand; None when no worker can take it. Books nothing, draws nothing."""
        self.table.steps.refresh()
        ready, found = self._who(ask)
        if found is None:
            return None
        depths = self._depths(ask)
        work = self._work(ask, depths, ready)
        prefix = self._prefix(ask, depths, self.policy is Policy.COST, now)
        priced = plan_all(self.table, self.lanes, found.parts, prefix, work, self._weights, self._terms_room())
        return cheapest(self.table, found.parts, prefix, priced, work)

    # ---- bookings

    def book(self, decision: Decision, ask: RouteAsk, now: float) -> int:
        """Counts a request as sent to the decision's worker, which must be there; the submit_seq to send with it."""
        table, worker = self.table, decision.worker
        slot = table.slot(worker)
        assert slot is not None
        size = max(1, int(table.block_size[slot]))
        is_decode = decision.kind is PlanKind.DECODE
        booking = Booking(
            us=round(decision.booked_ms * 1e3),
            tokens=0 if is_decode else ask.num_tokens - min(decision.cached_blocks * size, ask.num_tokens - 1),
            rows=int(decision.whole or is_decode),
            context=ask.num_tokens if decision.whole or is_decode else 0,
            blocks=max(0, -(-ask.num_tokens // size) - decision.held_blocks),
        )
        seq = table.book(worker, booking)
        if decision.fetch is not None and (source := table.slot(decision.fetch.source)) is not None:
            lane_ms = float(self.lanes.block_ms(table.lane[source : source + 1], table.num_lanes)[0])
            begin = max(now, self._sends_until.get(source, now))
            self._sends_until[source] = begin + 1e-3 * lane_ms * (decision.fetch.num_blocks - decision.held_blocks)
        if ask.keys and not ask.no_cache:
            until = now + self.settings.expect_s + 3e-3 * decision.predicted_ttft_ms
            ready_at = now + 1e-3 * decision.predicted_ttft_ms
            ticket = self.index.expect(slot, ask.keys, until, ready_at, decision.fetch is not None)
            self._tickets.setdefault(worker, {})[seq] = ticket
        if ask.session:
            self._sessions[ask.tenant, ask.session] = worker
            self._sessions.move_to_end((ask.tenant, ask.session))
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        if ask.adapter:
            self._adapters.setdefault(ask.adapter, set()).add(worker)
            self._adapters.move_to_end(ask.adapter)
            if len(self._adapters) > _MOST_ADAPTERS:
                self._adapters.popitem(last=False)
        return seq

    def undo(self, worker: WorkerKey, seq: int) -> None:
        """Delivery failed: its load and blocks are as if it had not been booked. Idempotent."""
        self.table.undo(worker, seq)
        ticket = self._tickets.get(worker, {}).pop(seq, None)
        if ticket is not None:
            self.index.withdraw(ticket)

    # ---- learning and telling

    def completed(self, decision: Decision, realised_ttft_ms: float) -> float:
        """Learns from a request's time to the first token, from when it was sent. Returns the regret: how much sooner
        the quickest candidate was predicted to answer, in milliseconds, at least 0.
        """
        predicted = decision.predicted_ttft_ms
        self.error += _NEW * (abs(predicted - realised_ttft_ms) / max(realised_ttft_ms, 1e-3) - self.error)
        slot = self.table.slot(decision.worker)
        if slot is not None and predicted > 0.0:
            self.table.steps.observe(slot, realised_ttft_ms / predicted)
        quickest = first_token_ms(np.asarray(decision.candidates.terms, np.float64), self.settings.queue_weight).min()
        regret = max(0.0, realised_ttft_ms - float(quickest))
        self.regret_ms += regret
        return regret

    def transferred(self, worker: WorkerKey, num_blocks: int, took_ms: float) -> None:
        """Learns from blocks that came to, or went from, a worker."""
        slot = self.table.slot(worker)
        if slot is not None:
            self.lanes.observe(int(self.table.lane[slot]), num_blocks, took_ms)

    # ---- inside

    def _who(self, ask: RouteAsk) -> tuple[Mask, Eligible | None]:
        """Those that are ready, and their parts. Closed and avoided ones count only when it cannot be done without."""
        table = self.table
        is_usual = not ask.excluded and not ask.avoided and ask.most_tokens <= table.least_capacity_tokens
        if is_usual and (known := self._usual.get(ask.mode)) is not None and known[0] == table.version:
            return known[1], known[2]
        ready = ready_mask(self.table, ask.most_tokens, ask.excluded, ask.avoided)
        part = eligible(self.table, ask.mode, ready)
        if part is None:
            ready = ready_mask(self.table, ask.most_tokens, ask.excluded, (), willing=False)
            part = eligible(self.table, ask.mode, ready)
        if is_usual:
            self._usual[ask.mode] = table.version, ready, part
        return ready, part

    def _depths(self, ask: RouteAsk) -> Ints:
        if ask.no_cache or not ask.keys:
            return np.zeros(self.table.num_slots, np.int64)
        return self.index.lookup(ask.keys, self.table.num_slots)

    def _prefix(self, ask: RouteAsk, depths: Ints, may_fetch: bool, now: float) -> Prefix:
        n = len(depths)
        wait_ms, reads_ms, is_read = np.zeros(n), np.zeros(n), np.zeros(n, np.bool_)
        if not may_fetch:
            return Prefix(depths, depths, wait_ms, is_read, reads_ms, False)
        readable = self.index.told(ask.keys, depths)
        if readable is not depths:
            for slot in np.flatnonzero(readable < depths).tolist():
                ready_at, is_read[slot] = self.index.coming(slot, ask.keys[int(depths[slot]) - 1])
                wait_ms[slot] = max(0.0, ready_at - now) * 1e3
            if not ask.may_wait:
                # Sent now, it would not wait for what is being read there.
                depths = np.where(is_read, readable, depths)
                is_read[:] = False
        for slot, until in self._sends_until.items():
            reads_ms[slot] = max(0.0, until - now) * 1e3
        return Prefix(depths, readable, wait_ms, is_read, reads_ms, True)

    def _work(self, ask: RouteAsk, depths: Ints, usable: Mask) -> Work:
        home = self._sessions.get((ask.tenant, ask.session)) if ask.session else None
        session = self.table.slot(home) if home else None
        adapter = _NO_ADAPTER
        if ask.adapter and (workers := self._adapters.get(ask.adapter)):
            adapter = np.zeros(self.table.num_slots, np.bool_)
            adapter[[slot for key in workers if (slot := self.table.slot(key)) is not None]] = True
        return Work(
            num_tokens=ask.num_tokens,
            output_tokens=ask.expected_output_tokens,
            best_depth=int((depths * usable).max(initial=0)),
            busy=self._busy,
            time_left_ms=inf if ask.time_left_s is None else ask.time_left_s * 1e3,
            session=-1 if session is None else session,
            adapter=adapter,
        )

    def _note_busy(self, parts: Parts, now: float) -> None:
        starts = parts.prefill | parts.whole
        waited = np.count_nonzero(self.table.queue_ms[: len(starts)][starts])
        share = waited / np.count_nonzero(starts)
        passed = 0.0 if self._busy_at is None else max(0.0, now - self._busy_at)
        self._busy_at = now
        self._busy += (1.0 - 0.5 ** (passed / self.settings.busy_half_life_s)) * (share - self._busy)

    def _decide(
        self, priced: Priced, prefix: Prefix, way: int, slot: int, fetch: Fetch | None, work: Work, reason: str
    ) -> Decision:
        table, kind = self.table, KINDS[int(priced.kinds[way, slot])]
        held = int(prefix.depths[slot])
        cached = fetch.num_blocks if fetch else held
        terms = priced.terms[way, slot]
        booked_ms = 0.0
        if kind is not PlanKind.DECODE:
            start = min(cached * int(table.block_size[slot]), work.num_tokens - 1)
            booked_ms = table.steps.share_ms(slot, work.num_tokens - start, start)
        return Decision(
            kind=kind,
            worker=table.key(slot),
            whole=kind in (PlanKind.WHOLE, PlanKind.FETCH_WHOLE, PlanKind.HOLDER_WHOLE),
            fetch=fetch,
            reason=reason,
            cost_ms=float(priced.costs[way, slot]),
            terms=tuple(terms.tolist()),
            held_blocks=held,
            cached_blocks=cached,
            predicted_ttft_ms=float(first_token_ms(terms, self.settings.queue_weight)),
            booked_ms=booked_ms,
            diverged_at_block=work.best_depth,
            candidates=self._keep(priced, prefix),
        )

    def _terms_room(self) -> Floats:
        """What a choice fills in anew: asking the system for so much memory each time is dearer than the choice."""
        if self._terms.shape[1] < self.table.num_slots:
            self._terms = np.zeros((NUM_WAYS, 2 * self.table.num_slots, NUM_TERMS))
        return self._terms

    def _keep(self, priced: Priced, prefix: Prefix) -> Candidates:
        """The cheapest candidates' columns."""
        most = self.settings.most_explained
        costs = priced.costs.ravel()
        at = np.flatnonzero(costs < inf)
        considered = len(at)
        if considered > most:
            at = at[np.argpartition(costs[at], most)[:most]]
        ways, slots = np.divmod(at, priced.costs.shape[1])
        fetched = priced.fetched.ravel()[at]
        return Candidates(
            self.table.roster,
            priced.kinds.ravel()[at].astype(np.int8),
            slots.astype(np.int32),
            (prefix.depths[slots] + fetched).astype(np.int32),
            fetched.astype(np.int32),
            priced.terms[ways, slots].astype(np.float32),
            considered,
        )

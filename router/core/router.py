"""The router of one gateway: where each request goes. One object with the fleet's columns, the prefix index, what was
learned of lanes and predictions, and a policy. `choose` has no side effects on them; book what was sent, undo what
was not delivered. Does not: send, know clocks, or have chance of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.core.records import CacheChange, Role, WorkerLoad
from router.core.cost import (
    FIRST_TOKEN_TERMS,
    TERMS,
    Floats,
    Ints,
    RoutingSettings,
    Rows,
    Work,
    candidate_terms,
    decode_terms,
    queue_ms,
)
from router.core.fleet_table import DECODE, Booking, FleetTable
from router.core.lanes import Lanes
from router.core.placement import Mode, WorkerKey
from router.core.plans import (
    KINDS,
    Candidates,
    Decision,
    Eligible,
    Fetch,
    PlanKind,
    RouteAsk,
    decode_pool,
    eligible,
    ready_mask,
)
from router.core.policies import Chance, Policy, choose_by, lowest, queued_tokens
from router.core.prefix_index import PrefixIndex

_NEW = 0.1
"""Weight of the newest prediction error."""


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One candidate of a decision, for people."""

    kind: PlanKind
    worker: WorkerKey
    cost_ms: float
    terms: dict[str, float]
    cached_blocks: int
    fetched_blocks: int
    is_chosen: bool


class Router:
    """See the module's docstring."""

    def __init__(
        self,
        chance: Chance,
        settings: RoutingSettings | None = None,
        policy: Policy = Policy.COST,
        index: PrefixIndex | None = None,
    ) -> None:
        """chance: the next random number of 0..1, for ties; for example `random.Random(seed).random`."""
        self.table = FleetTable()
        self.index = index or PrefixIndex()
        self.settings = settings or RoutingSettings()
        self.policy = policy
        self.lanes = Lanes(self.settings.default_block_ms)
        self.regret_ms = 0.0
        """Sum over completed requests, see `completed`."""
        self.error = 0.0
        """Average distance of the predicted from the realised time to the first token, as a share of the latter."""
        self._chance = chance
        self._turn = 0
        self._busy = 0.0
        self._busy_at: float | None = None
        self._tickets: dict[tuple[WorkerKey, int], int] = {}

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
    ) -> None:
        """A session to this worker is usable. Idempotent."""
        self.table.up(key, role, capacity_tokens, block_size, lane, node, address)

    def worker_down(self, key: WorkerKey) -> None:
        """Forgets its load, its bookings and its blocks. Idempotent."""
        slot = self.table.down(key)
        if slot is not None:
            self.index.forget(slot)
        for booked in [b for b in self._tickets if b[0] == key]:
            del self._tickets[booked]

    def report(self, key: WorkerKey, load: WorkerLoad) -> bool:
        """Takes a load report. False: its cache has changes that never came, ask for a snapshot."""
        slot = self.table.slot(key)
        if slot is None:
            return True
        self.table.report(key, load)
        for booked in [b for b in self._tickets if b[0] == key and b[1] <= load.submit_seq]:
            del self._tickets[booked]
        return not self.index.behind(slot, load.cache_epoch, load.cache_seq)

    def cache_changed(self, key: WorkerKey, change: CacheChange) -> bool:
        """Takes a cache change. False: one before it is missing, ask for a snapshot."""
        slot = self.table.slot(key)
        return slot is None or self.index.apply(slot, change)

    # ---- choosing

    def choose(self, ask: RouteAsk, now: float) -> Decision | None:
        """The plan; None when no worker can take the request now. Books nothing."""
        table = self.table
        table.refresh()
        self.index.expire(now)
        ready = ready_mask(table, ask.most_tokens, ask.excluded, ask.avoided)
        part = eligible(table, ask.mode, ready)
        if part is None and (ask.avoided or table.closed.any()):
            ready = ready_mask(table, ask.most_tokens, ask.excluded, ())
            part = eligible(table, ask.mode, ready)
        if part is None:
            return None
        depths = self._depths(ask)
        self._turn += 1
        if self.policy is not Policy.COST:
            pool = np.flatnonzero(part.prefill | part.whole)
            place = choose_by(self.policy, queued_tokens(table, pool), depths[pool], self._turn, self._chance)
            part = _only(part, int(pool[place]))
        self._note_busy(part, now)
        best_depth = int(depths[ready].max(initial=0))
        work = Work(
            ask.num_tokens,
            ask.expected_output_tokens,
            best_depth,
            self._busy,
            None if ask.time_left_s is None else ask.time_left_s * 1e3,
        )
        kinds, rows, holders = self._rows(part, depths, work)
        terms = candidate_terms(table, rows, work, self.settings)
        chosen = lowest(terms.sum(axis=0), self._chance)
        candidates = Candidates(table.roster, kinds, rows.slots, rows.cached_blocks, rows.fetched_blocks, terms)
        return self._decision(ask, candidates, chosen, holders, best_depth, part.reason)

    def choose_decode(self, ask: RouteAsk, source: WorkerKey, now: float) -> Decision | None:
        """The decode worker for a prefill that has started at `source` (SPEC E7); None when there is none."""
        table = self.table
        table.refresh()
        self.index.expire(now)
        ready = ready_mask(table, ask.most_tokens, ask.excluded, ask.avoided)
        pool = decode_pool(table, ready, table.slot(source))
        if not len(pool):
            pool = decode_pool(table, ready_mask(table, ask.most_tokens, ask.excluded, ()), table.slot(source))
        if not len(pool):
            return None
        depths = self._depths(ask)
        work = Work(ask.num_tokens, ask.expected_output_tokens, int(depths.max(initial=0)), self._busy)
        terms = decode_terms(table, pool, work, depths[pool], self.settings)
        if self.policy is Policy.COST:
            chosen = lowest(terms.sum(axis=0), self._chance)
        else:
            chosen = choose_by(self.policy, queued_tokens(table, pool), depths[pool], self._turn, self._chance)
        kinds = np.full(len(pool), KINDS.index(PlanKind.DECODE))
        candidates = Candidates(table.roster, kinds, pool, depths[pool], np.zeros_like(pool), terms)
        return self._decision(ask, candidates, chosen, {}, work.best_depth, "late")

    def can_place(self, mode: Mode, most_tokens: int) -> bool:
        """Whether there is a plan for a request that may need so many tokens of KV."""
        return eligible(self.table, mode, ready_mask(self.table, most_tokens, (), ())) is not None

    @property
    def most_capacity_tokens(self) -> int | None:
        """Tokens of the largest KV pool; None without a worker."""
        live = np.flatnonzero(self.table.live[: self.table.num_slots])
        return int(self.table.capacity_tokens[live].max()) if len(live) else None

    @property
    def least_queued_tokens(self) -> int:
        """Work ahead of a new prefill where there is least of it; 0 without a worker."""
        table, count = self.table, self.table.num_slots
        live = table.live[:count]
        prefills = np.flatnonzero(live & (table.role[:count] != DECODE))
        slots = prefills if len(prefills) else np.flatnonzero(live)
        return int(queued_tokens(table, slots).min()) if len(slots) else 0

    # ---- bookings

    def book(self, decision: Decision, ask: RouteAsk, now: float) -> int:
        """Counts a request as sent to the decision's worker, which must be there; the submit_seq to send with it."""
        table, slot = self.table, self.table.slot(decision.worker)
        assert slot is not None
        size = max(1, int(table.block_size[slot]))
        cached = min(decision.cached_blocks * size, ask.num_tokens - 1)
        decodes = decision.whole or decision.kind is PlanKind.DECODE
        held = decision.cached_blocks - (decision.fetch.num_blocks if decision.fetch else 0)
        booking = Booking(
            us=round(decision.prefill_ms * 1e3),
            tokens=0 if decision.kind is PlanKind.DECODE else ask.num_tokens - cached,
            rows=int(decodes),
            context=ask.num_tokens if decodes else 0,
            blocks=max(0, -(-ask.num_tokens // size) - held),
        )
        seq = table.book(decision.worker, booking)
        if ask.keys and not ask.no_cache:
            ticket = self.index.expect(slot, ask.keys, now + self.settings.expect_s)
            self._tickets[decision.worker, seq] = ticket
        return seq

    def undo(self, worker: WorkerKey, seq: int) -> None:
        """Delivery failed: as if it had not been booked. Idempotent."""
        self.table.undo(worker, seq)
        ticket = self._tickets.pop((worker, seq), None)
        if ticket is not None:
            self.index.withdraw(ticket)

    # ---- learning and telling

    def completed(self, decision: Decision, realised_ttft_ms: float) -> float:
        """Learns from a request's time to the first token, from when it was sent. Returns the regret: how much sooner
        another candidate was predicted to answer, in milliseconds, at least 0.
        """
        predicted = decision.predicted_ttft_ms
        self.error += _NEW * (abs(predicted - realised_ttft_ms) / max(realised_ttft_ms, 1e-3) - self.error)
        slot = self.table.slot(decision.worker)
        if slot is not None and not self.table.has_costs[slot] and predicted > 0.0:
            self.table.scale_generic((realised_ttft_ms / predicted) ** _NEW)
        best = decision.candidates.terms[list(FIRST_TOKEN_TERMS)].sum(axis=0).min()
        regret = max(0.0, realised_ttft_ms - float(best))
        self.regret_ms += regret
        return regret

    def moved(self, worker: WorkerKey, num_blocks: int, took_ms: float) -> None:
        """Learns from blocks that this worker has read from another one of its lane."""
        slot = self.table.slot(worker)
        if slot is not None:
            self.lanes.observe(int(self.table.lane[slot]), num_blocks, took_ms)

    def explain(self, decision: Decision) -> list[CandidateRow]:
        """All candidates, cheapest first."""
        found = decision.candidates
        costs = found.terms.sum(axis=0)
        rows = []
        for at in np.argsort(costs, kind="stable").tolist():
            worker = found.roster[int(found.slots[at])]
            assert worker is not None
            terms = {name: float(found.terms[i, at]) for i, name in enumerate(TERMS)}
            rows.append(
                CandidateRow(
                    KINDS[int(found.kinds[at])],
                    worker,
                    float(costs[at]),
                    terms,
                    int(found.cached_blocks[at]),
                    int(found.fetched_blocks[at]),
                    at == decision.chosen,
                )
            )
        return rows

    # ---- inside

    def _depths(self, ask: RouteAsk) -> Ints:
        if ask.no_cache or not ask.keys:
            return np.zeros(self.table.num_slots, np.int64)
        return self.index.lookup(ask.keys, self.table.num_slots)

    def _note_busy(self, part: Eligible, now: float) -> None:
        slots = np.flatnonzero(part.prefill | part.whole)
        share = float((queue_ms(self.table, slots) > 0.0).mean()) if len(slots) else 0.0
        passed = 0.0 if self._busy_at is None else max(0.0, now - self._busy_at)
        self._busy_at = now
        self._busy += (1.0 - 0.5 ** (passed / self.settings.busy_half_life_s)) * (share - self._busy)

    def _rows(self, part: Eligible, depths: Ints, work: Work) -> tuple[Ints, Rows, dict[int, int]]:
        """(kinds, candidates, best holder by lane)."""
        table, settings = self.table, self.settings
        pairs, whole = np.flatnonzero(part.prefill), np.flatnonzero(part.whole)
        holding = np.flatnonzero(part.holder & (depths > 0))
        slots = np.concatenate([pairs, whole, holding])
        is_pair = np.zeros(len(slots), np.bool_)
        is_pair[: len(pairs)] = True
        kinds = np.full(len(slots), KINDS.index(PlanKind.WHOLE))
        kinds[: len(pairs)] = KINDS.index(PlanKind.PAIR)
        kinds[len(pairs) + len(whole) :] = KINDS.index(PlanKind.HOLDER_WHOLE)
        cached, fetched = depths[slots], np.zeros(len(slots), np.int64)
        fetch_ms = np.zeros(len(slots))
        holders: dict[int, int] = {}
        if work.best_depth >= settings.least_fetch_blocks and self.policy is Policy.COST:
            live = table.live[: table.num_slots]
            targets = np.flatnonzero(kinds != KINDS.index(PlanKind.HOLDER_WHOLE))
            more, times = np.zeros(len(slots), np.int64), np.zeros(len(slots))
            for lane in np.unique(table.lane[slots[targets]]).tolist():
                on_lane = np.flatnonzero(live & (table.lane[: table.num_slots] == lane))
                holder = int(on_lane[depths[on_lane].argmax()])
                holders[lane] = holder
                mine = targets[table.lane[slots[targets]] == lane]
                more[mine] = depths[holder] - depths[slots[mine]]
                times[mine] = more[mine] * self.lanes.block_ms(lane) + settings.fetch_overhead_ms
            worth = np.flatnonzero(more >= settings.least_fetch_blocks)
            exposed = np.maximum(times[worth] - queue_ms(table, slots[worth]), 0.0)
            kind = np.where(is_pair[worth], KINDS.index(PlanKind.FETCH_PAIR), KINDS.index(PlanKind.FETCH_WHOLE))
            kinds = np.concatenate([kinds, kind])
            cached = np.concatenate([cached, cached[worth] + more[worth]])
            fetched = np.concatenate([fetched, more[worth]])
            fetch_ms = np.concatenate([fetch_ms, exposed])
            is_pair = np.concatenate([is_pair, is_pair[worth]])
            slots = np.concatenate([slots, slots[worth]])
        transfer, far = np.zeros(len(slots)), np.zeros(len(slots))
        if len(pairs):
            lanes = table.lane[slots]
            best = self._best_decode(part, depths, work)
            size = np.maximum(table.block_size[slots], 1)
            left = np.clip(work.num_tokens - cached * size, 1, settings.chunk_tokens)
            for lane, (price, node) in best.items():
                on_lane = is_pair & (lanes == lane)
                far[on_lane] = price
                far[on_lane & (table.node[slots] != node)] += settings.topology_ms
                transfer[on_lane] = -(-left[on_lane] // size[on_lane]) * self.lanes.block_ms(lane)
        return kinds, Rows(slots, cached, fetched, fetch_ms, is_pair, transfer, far), holders

    def _best_decode(self, part: Eligible, depths: Ints, work: Work) -> dict[int, tuple[float, int]]:
        """Lane -> (price of its cheapest decode worker, that one's node): what a pair adds whoever prefills."""
        table = self.table
        pool = np.flatnonzero(part.decode)
        prices: Floats = decode_terms(table, pool, work, depths[pool], self.settings).sum(axis=0)
        best = {}
        for lane in np.unique(table.lane[pool]).tolist():
            mine = np.flatnonzero(table.lane[pool] == lane)
            at = mine[prices[mine].argmin()]
            best[lane] = (float(prices[at]), int(table.node[pool[at]]))
        return best

    def _decision(
        self,
        ask: RouteAsk,
        candidates: Candidates,
        chosen: int,
        holders: dict[int, int],
        best_depth: int,
        reason: str,
    ) -> Decision:
        table = self.table
        slot, kind = int(candidates.slots[chosen]), KINDS[int(candidates.kinds[chosen])]
        terms = candidates.terms[:, chosen]
        fetch = None
        if candidates.fetched_blocks[chosen]:
            holder = holders[int(table.lane[slot])]
            fetch = Fetch(table.key(holder), int(candidates.cached_blocks[chosen]))
        prefill = 0.0 if kind is PlanKind.DECODE else float(terms[TERMS.index("prefill")])
        return Decision(
            kind=kind,
            worker=table.key(slot),
            whole=kind in (PlanKind.WHOLE, PlanKind.FETCH_WHOLE, PlanKind.HOLDER_WHOLE),
            fetch=fetch,
            reason=reason,
            cost_ms=float(terms.sum()),
            terms=tuple(terms.tolist()),
            cached_blocks=int(candidates.cached_blocks[chosen]),
            predicted_ttft_ms=float(terms[list(FIRST_TOKEN_TERMS)].sum()),
            prefill_ms=prefill,
            diverged_at_block=best_depth,
            candidates=candidates,
            chosen=chosen,
        )


def _only(part: Eligible, slot: int) -> Eligible:
    """The same with one worker to prefill at."""
    one = np.zeros_like(part.prefill)
    one[slot] = True
    return Eligible(part.prefill & one, part.whole & one, np.zeros_like(one), part.decode, part.reason)

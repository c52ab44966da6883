"""Random lives on one worker with a tiny pool: each row always sees its own KV, and outputs are those of a run alone.

Requests of every kind (whole, hand_off, adopted, resumed, opted out of the cache) come, are preempted, cancelled,
expire, lose their readers or their reads, at any point, also while a step is on its way, or two: the runner may have
computed both, one or none of them when the first is applied. Reads that were given up go on
writing garbage until they are terminal. Prefixes are fetched from peers, arrive as a whole or in part or not at all,
and peers pin what is cached here. Memory is taken from the pool and given back, with and without preemptions for it,
and the worker closes and opens. `check_integrity` and the laws of `tests.scheduler_laws` hold after every operation;
every request that was let in ends exactly once, in a way that somebody is told of; everything drains.

`tests/property` runs it for seconds, `tests/chaos` for minutes. Longer than others: one
machine, all of whose rules share its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.records import FinishReason
from headrace.errors import Rejected
from headrace.ids import RequestKey
from tests.core_world import World, alone, chain, make_settings
from tests.scheduler_laws import check_blocks, check_on_their_way, check_plan, toy_cost_s, toy_predictor
from workers.core.limits import end_reason
from workers.core.plan import StepPlan
from workers.core.policies import POLICIES
from workers.core.request import Keep, Request, State

GARBAGE = -2
ROOTS = (b"a" * 16, b"b" * 16)
NORMAL = (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH)

prompts = st.one_of(
    # Few tokens and few shapes, so that prefixes are shared often.
    st.builds(lambda n, tail: [*range(1, n + 1), *tail], st.integers(1, 8), st.lists(st.integers(1, 2), max_size=3)),
    st.integers(1, 10).map(lambda n: [3] * n),
)


@dataclass(frozen=True)
class Wish:
    prompt: list[int]
    max_tokens: int
    known: int
    min_tokens: int
    ignore_eos: bool
    kind: str
    no_cache: bool
    root: bytes
    patience: float | None
    priority: int
    tenant: str
    predicted: int
    fetch: int


wishes = st.builds(
    Wish,
    prompt=prompts,
    max_tokens=st.integers(1, 24),
    known=st.integers(0, 3),
    min_tokens=st.integers(0, 3),
    ignore_eos=st.booleans(),
    kind=st.sampled_from(["whole", "whole", "hand_off", "adopted"]),
    no_cache=st.sampled_from([False, False, False, True]),
    root=st.sampled_from([ROOTS[0], ROOTS[0], ROOTS[1]]),
    patience=st.sampled_from([None, None, 5.0, 40.0]),
    priority=st.sampled_from([0, 0, 1, -1]),
    tenant=st.sampled_from(["a", "a", "b"]),
    predicted=st.sampled_from([0, 0, 4]),
    fetch=st.sampled_from([0, 0, 1, 2, 9]),
)


changes = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(POLICIES)),
        "batching": st.sampled_from(["continuous", "continuous", "continuous", "window", "static"]),
        "chunk_mode": st.sampled_from(["fixed", "bucketed", "adaptive", "adaptive"]),
        "max_decode_rows": st.sampled_from([0, 0, 1, 2]),
        "min_prefill_share": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        "next_token_deadline_s": st.sampled_from([0.0, 2.0]),
        "ttft_target_s": st.sampled_from([0.0, 3.0]),
        "mlfq_quantum_tokens": st.sampled_from([1, 8]),
        "host_blocks": st.sampled_from([0, 0, 3, 20]),
        "min_progress_tokens": st.sampled_from([0, 1, 4]),
        "route_when_preempted": st.booleans(),
        "tenant_cache_share": st.sampled_from([1.0, 1.0, 0.3, 0.0]),
        "lost_deadline": st.sampled_from(["reject", "best_effort"]),
        "itl_target_s": st.sampled_from([0.0, 0.6, 0.8, 1.2]),
    }
)


aheads = st.sampled_from([0, 0, 1, 2])
"""Steps that are on their way before something happens, at least."""


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 12),
        rows=st.integers(2, 5),
        spare_tokens=st.integers(0, 8),
        chunk=st.integers(1, 9),
        watermark=st.integers(0, 2),
        block_size=st.sampled_from([2, 3, 4]),
        predicts=st.sampled_from([True, True, False]),
        ahead=st.sampled_from([0, 1, 1]),
        changes=changes,
    )
    def start(
        self,
        num_blocks: int,
        rows: int,
        spare_tokens: int,
        chunk: int,
        watermark: int,
        block_size: int,
        predicts: bool,
        ahead: int,
        changes: dict[str, object],
    ) -> None:
        self.world = World(
            make_settings(
                max_num_batched_tokens=rows + spare_tokens,
                max_num_seqs=rows,
                long_prefill_token_threshold=chunk,
                watermark_blocks=watermark,
                block_size=block_size,
                max_model_len=num_blocks * block_size,
                max_waiting_requests=12,
                max_decode_rows=min(rows, changes.pop("max_decode_rows", 0)),
                **changes,
            ),
            num_blocks=num_blocks,
            vocab=24,
            predictor=toy_predictor() if predicts else None,
            cost=toy_cost_s,
        )
        self.most = 1 + ahead
        self.plans: list[StepPlan] = []
        """On their way, oldest first."""
        self.computed = 0
        """Of them."""
        self.known: dict[RequestKey, int] = {}
        self.asked: set[RequestKey] = set()
        """Tools have added to them: no run alone to compare with."""
        self.gone: dict[RequestKey, str] = {}
        """How each request has ended."""
        self.writing: dict[RequestKey, list[int]] = {}
        """Targets of reads that were given up and are not over."""
        self.cleared: set[RequestKey] = set()
        """Fetches whose tenant's cache was cleared while they were under way."""
        self.pins: list[RequestKey] = []

    # ---- requests come

    @rule(wish=wishes, siblings=st.integers(1, 3))
    def come(self, wish: Wish, siblings: int) -> None:
        for _ in range(siblings):
            self.come_one(wish)

    def come_one(self, wish: Wish) -> None:
        world = self.world
        request = world.make(
            wish.prompt,
            wish.max_tokens,
            min_tokens=min(wish.min_tokens, wish.max_tokens),
            ignore_eos=wish.ignore_eos,
            stop=(5,),
            root=wish.root,
            hand_off=wish.kind == "hand_off",
            adopted=wish.kind == "adopted",
            no_cache=wish.no_cache,
            deadline=None if wish.patience is None else world.now + wish.patience,
        )
        request.priority, request.tenant = wish.priority, wish.tenant
        request.predicted_output_tokens = wish.predicted
        request.fetch_blocks = 0 if request.adopted else wish.fetch
        # An earlier attempt may have produced a part of the output, never its end.
        fits = len(wish.prompt) < world.settings.max_model_len
        done = alone(request, world.settings, world.vocab)[:-1][: wish.known] if fits else []
        for token in done:
            request.append(token)
        request.emitted = self.known[request.key] = len(done)
        world.truth[request.key] += done
        world.delivered[request.key] += done
        accept = world.scheduler.adopt if request.adopted else world.scheduler.submit
        if accept(request, world.now) is not None:
            del world.seen[request.key]

    # ---- steps

    @precondition(lambda self: len(self.plans) < self.most)
    @rule()
    def schedule(self) -> None:
        world = self.world
        before = {key: request.state for key, request in world.scheduler.requests.items()}
        plan = world.scheduler.schedule(world.now)
        refused, world.scheduler.refused = world.scheduler.refused, []
        for key, why in refused:
            assert world.seen[key].state is State.FINISHED
            self.end(key, why)
        if plan is not None:
            self.plans.append(plan)
            check_plan(world, plan, before)
        elif (key := world.scheduler.revocable(world.now)) is not None:
            assert world.scheduler.finish(key, FinishReason.ERROR, world.now)
            self.end(key, "revoked")

    def end(self, key: RequestKey, how: str) -> None:
        assert key not in self.gone, f"{how} after {self.gone[key]}"
        self.gone[key] = how

    @precondition(lambda self: self.computed < len(self.plans))
    @rule()
    def compute(self) -> None:
        self.world.compute(self.plans[self.computed])
        self.computed += 1

    @precondition(lambda self: self.plans)
    @rule()
    def apply(self) -> None:
        plan = self.plans.pop(0)
        self.computed = max(0, self.computed - 1)
        for key, reason in self.world.apply(plan).finished:
            assert self.world.seen[key].finish_reason is reason
            self.end(key, reason)

    @rule(steps=st.sampled_from([1, 1, 2, 3, 9]), leave=st.sampled_from([0, 1, 2]))
    def run_on(self, steps: int, leave: int = 0) -> None:
        """As an engine does, which is looked at when `leave` steps are on their way."""
        for _ in range(steps):
            self.plan_until(self.most)
            if self.plans:
                self.apply()
        self.plan_until(min(leave, self.most))

    def plan_until(self, count: int) -> None:
        for _ in range(count - len(self.plans)):
            self.schedule()

    # ---- tools

    @precondition(lambda self: self.decoding())
    @rule(data=st.data(), keep=st.sampled_from(Keep), ahead=aheads)
    def pause(self, data: st.DataObject, keep: Keep, ahead: int) -> None:
        self.plan_until(min(ahead, self.most))
        if self.decoding():
            request = data.draw(st.sampled_from(self.decoding()))
            assert self.world.scheduler.pause(request.key, keep, self.world.now)

    @precondition(lambda self: self.callers())
    @rule(
        data=st.data(),
        wait_s=st.sampled_from([0.1, 5.0, 500.0]),
        lost_share=st.sampled_from([0.0, 0.5]),
        ahead=aheads,
    )
    def call(self, data: st.DataObject, wait_s: float, lost_share: float, ahead: int) -> None:
        """A call ended some tokens ago; the request may have been preempted since."""
        self.plan_until(min(ahead, self.most))
        if not self.callers():
            return
        request = data.draw(st.sampled_from(self.callers()))
        num_output = data.draw(st.integers(self.told(request) + 1, request.num_output))
        self.world.call(request, num_output, wait_s=(wait_s,), lost_share=lost_share)

    @precondition(lambda self: self.paused())
    @rule(data=st.data(), answer=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def resume(self, data: st.DataObject, answer: list[int]) -> None:
        self.answer_tool(data.draw(st.sampled_from(self.paused())), answer)

    # ---- adoptions

    @rule()
    def reserve(self) -> None:
        for key in self.world.scheduler.reserve_adoptions(self.world.now):
            assert self.world.seen[key].state is State.TRANSFERRING

    @precondition(lambda self: self.pulling())
    @rule(data=st.data(), knew=st.booleans())
    def complete(self, data: st.DataObject, knew: bool) -> None:
        self.hand_over(data.draw(st.sampled_from(self.pulling())), knew)

    @precondition(lambda self: self.pulling())
    @rule(data=st.data(), landed=st.floats(0, 1))
    def lose_the_holder(self, data: st.DataObject, landed: float) -> None:
        """Some blocks have landed, others are still being written."""
        request = data.draw(st.sampled_from(self.pulling()))
        targets = request.block_ids[request.stored_blocks :]
        in_flight = targets[int(landed * len(targets)) :]
        assert self.world.scheduler.finish_adoption(request.key, FinishReason.ERROR, in_flight, self.world.now)
        self.end(request.key, "lost its holder")
        self.writing[request.key] = in_flight

    # ---- fetches

    @precondition(lambda self: self.fetching())
    @rule(data=st.data(), share=st.sampled_from([0.0, 0.5, 1.0]))
    def fetch_arrives(self, data: st.DataObject, share: float) -> None:
        self.take_in_fetch(data.draw(st.sampled_from(self.fetching())), share)

    @precondition(lambda self: self.fetching())
    @rule(data=st.data(), landed=st.floats(0, 1))
    def fetch_fails(self, data: st.DataObject, landed: float) -> None:
        key = data.draw(st.sampled_from(self.fetching()))
        fetch = self.world.scheduler.fetches.get(key)
        assert fetch is not None
        self.writing[key] = list(fetch.targets[int(landed * len(fetch.targets)) :])
        self.world.scheduler.fetch_failed(key, self.writing[key], self.world.now)
        self.world.scheduler.fetch_failed(key, [], self.world.now)

    @rule(tenant=st.sampled_from(["a", None]))
    def clear_fetches(self, tenant: str | None) -> None:
        self.cleared |= set(self.world.scheduler.fetches.clear(tenant))

    @precondition(lambda self: self.world.seen)
    @rule(data=st.data())
    def peer_pins(self, data: st.DataObject) -> None:
        """A peer asks for a prefix that somebody here had."""
        request = data.draw(st.sampled_from(list(self.world.seen.values())))
        key = RequestKey(1_000_000 + len(self.pins))
        if key in self.pins:
            return
        if not isinstance(self.world.scheduler.open_fetch(key, "peer", request.block_hashes, self.world.now), Rejected):
            self.pins.append(key)

    @precondition(lambda self: self.pins)
    @rule()
    def peer_is_done(self) -> None:
        assert self.world.scheduler.close_fetch(self.pins.pop())

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), over=st.booleans())
    def late_write(self, data: st.DataObject, over: bool) -> None:
        self.write_late(data.draw(st.sampled_from(sorted(self.writing))), over)

    # ---- memory goes and comes

    @rule(
        share=st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0]),
        host_share=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        shed=st.booleans(),
    )
    def resize(self, share: float, host_share: float, shed: bool) -> None:
        blocks, host_blocks = self.world.num_blocks, self.world.settings.host_blocks
        self.world.scheduler.resize(int(share * blocks), int(host_share * host_blocks), shed=shed)

    @rule(closed=st.booleans())
    def close_or_open(self, closed: bool) -> None:
        if closed:
            self.world.scheduler.close("memory_pressure", 1.0)
        else:
            self.world.scheduler.open()

    # ---- requests go

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.CANCELLED, FinishReason.STOP]), ahead=aheads)
    def finish(self, data: st.DataObject, reason: FinishReason, ahead: int) -> None:
        self.plan_until(min(ahead, self.most))
        if not self.alive():
            return
        request = data.draw(st.sampled_from(self.alive()))
        self.remember_targets(request)
        assert self.world.scheduler.finish(request.key, reason, self.world.now)
        self.end(request.key, "cancelled")
        assert not self.world.scheduler.finish(request.key, reason, self.world.now)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def release_handed_off(self, data: st.DataObject) -> None:
        self.let_go(data.draw(st.sampled_from(self.held())))

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), pinned=st.booleans())
    def change_pin(self, data: st.DataObject, pinned: bool) -> None:
        request = data.draw(st.sampled_from(self.alive()))
        if not pinned:
            self.world.scheduler.unpin(request.key)
        elif request.hand_off:
            self.world.scheduler.pin(request.key)

    @rule(seconds=st.integers(1, 4))
    def expire(self, seconds: int) -> None:
        self.world.now += seconds
        for request in self.pulling():
            if request.deadline is not None and request.deadline <= self.world.now:
                self.remember_targets(request)
        for key in self.world.scheduler.expire(self.world.now):
            assert self.world.seen[key].finish_reason is FinishReason.DEADLINE
            self.end(key, "expired")

    @rule(tenant=st.sampled_from(["a", "b", None]))
    def clear_cache(self, tenant: str | None) -> None:
        self.world.scheduler.clear_cache(tenant)
        assert not self.world.cache.tenants[tenant] if tenant else not len(self.world.cache)

    # ---- laws

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check_integrity()
            check_blocks(self.world)
            check_on_their_way(self.world, self.plans)
            assert self.world.scheduler.refused == []
            assert self.world.pool.quarantined_blocks == sum(len(blocks) for blocks in self.writing.values())

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for key in sorted(self.writing):
            self.write_late(key, True)
        while self.pins:
            self.peer_is_done()
        world.scheduler.open()
        world.scheduler.resize(0)
        # Liveness: with readers and holders that do their part, everybody ends.
        for _ in range(400):
            for key in self.fetching():
                self.take_in_fetch(key, 1.0)
            if not world.scheduler.requests:
                break
            self.reserve()
            for request in self.pulling():
                self.hand_over(request)
            for request in self.held():
                self.let_go(request)
            for request in self.paused():
                self.answer_tool(request, [1])
            world.now += 1.0  # a batch's window ends
            self.run_on(1)
        if world.pool.retired_blocks or world.scheduler.host_blocks.retired_blocks:
            self.run_on(2)
        while self.plans:
            self.apply()
        assert self.gone.keys() == world.seen.keys()
        for request in world.seen.values():
            got = world.delivered[request.key]
            expected = got if request.key in self.asked else alone(request, world.settings, world.vocab)
            assert got == expected[: len(got)]
            if request.finish_reason in NORMAL and request.key in world.ended:
                assert got == expected
            ledger = request.ledger
            total = ledger.queue_s + ledger.prefill_s + ledger.sampling_s + ledger.decode_s + ledger.preempted_s
            total += ledger.tool_wait_s
            assert request.finished_at is not None
            assert 0.0 <= total <= request.finished_at - request.accepted_at + 1e-9
            if not request.adopted and not request.hand_off:
                assert abs(total - (request.finished_at - request.accepted_at)) < 1e-9
        world.assert_drained()

    # ---- what the other side does

    def hand_over(self, request: Request, knew: bool = False) -> None:
        """`knew`: the last output token that came with the adoption is the one that the holder sampled."""
        world = self.world
        if knew and request.output_ids:
            world.pull(request, request.num_tokens - 1)
            assert world.scheduler.activate(request.key, request.output_ids, request.num_tokens - 1, world.now)
            return
        world.pull(request)
        twin = world.make(
            request.prompt_ids,
            request.sampling.max_tokens,
            output=alone(request, world.settings, world.vocab)[: len(request.output_ids) + 1],
            min_tokens=request.sampling.min_tokens,
            ignore_eos=request.sampling.ignore_eos,
            stop=request.sampling.stop_token_ids,
        )
        del world.seen[twin.key]
        if end_reason(twin, world.settings) is not None:
            assert world.scheduler.finish_adoption(request.key, FinishReason.HANDED_OFF, [], world.now)
            self.end(request.key, "complete at its holder")
        else:
            world.activate(request)

    def take_in_fetch(self, key: RequestKey, share: float) -> None:
        """A peer that has so large a part of the prefix."""
        world = self.world
        fetch = world.scheduler.fetches.get(key)
        assert fetch is not None
        size, num_blocks = world.settings.block_size, int(share * len(fetch.targets))
        content = chain(world.truth[key])[len(fetch.shared) * size :]
        for index, block in enumerate(fetch.targets[:num_blocks]):
            world.runner.kv[block] = content[index * size : (index + 1) * size]
        fresh = world.scheduler.fetch_arrived(key, num_blocks, world.now)
        assert fresh <= (0 if key in self.cleared else num_blocks)
        assert world.scheduler.fetch_arrived(key, num_blocks, world.now) == 0

    def let_go(self, request: Request) -> None:
        assert self.world.scheduler.release_handed_off(request.key, self.world.now)
        self.end(request.key, "handed off")

    def write_late(self, key: RequestKey, over: bool) -> None:
        for block in self.writing[key]:
            self.world.runner.kv[block] = [GARBAGE] * self.world.settings.block_size
        if over:
            assert self.world.scheduler.release_quarantine(key) == len(self.writing.pop(key))

    def remember_targets(self, request: Request) -> None:
        if request in self.pulling():
            self.writing[request.key] = request.block_ids[request.stored_blocks :]

    def answer_tool(self, request: Request, answer: list[int]) -> None:
        room = self.world.settings.max_model_len - request.num_tokens - 1
        if room < len(answer):
            assert self.world.scheduler.finish(request.key, FinishReason.CANCELLED, self.world.now)
            self.end(request.key, "no room for the tool's answer")
            return
        assert self.world.scheduler.resume(request.key, answer, self.world.now)
        self.world.truth[request.key] += answer
        self.asked.add(request.key)

    def told(self, request: Request) -> int:
        """Output that no call can end in: an earlier attempt's, or before a tool's answer."""
        at, count = request.inserts[-1] if request.inserts else (0, 0)
        return max(self.known.get(request.key, 0), at + count - request.num_input)

    def callers(self) -> list[Request]:
        states = (State.DECODING, State.PREFILLING, State.PREEMPTED)
        alive = [r for r in self.alive() if r.state in states and not r.hand_off and not self.is_to_pause(r)]
        return [r for r in alive if r.num_output > self.told(r) and r.key not in self.world._calls]

    def decoding(self) -> list[Request]:
        return [r for r in self.alive() if r.state is State.DECODING and not self.is_to_pause(r)]

    def is_to_pause(self, request: Request) -> bool:
        """A gateway does not ask again before it has an answer."""
        return any(request is other for other, _ in self.world.scheduler._to_pause)

    def paused(self) -> list[Request]:
        return [r for r in self.alive() if r.state is State.TOOL_WAIT]

    def fetching(self) -> list[RequestKey]:
        """Whose reads are under way, whether or not their requests still are."""
        return self.world.scheduler.fetches.overdue(inf)

    def alive(self) -> list[Request]:
        return [r for r in self.world.seen.values() if r.state is not State.FINISHED]

    def pulling(self) -> list[Request]:
        return [r for r in self.alive() if r.adopted and r.state is State.TRANSFERRING]

    def held(self) -> list[Request]:
        return [r for r in self.alive() if r.hand_off and r.state is State.TRANSFERRING]

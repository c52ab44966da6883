"""Plans, baselines and the fleet's columns: who may serve what, who is taken, and what a booking leaves behind."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from headrace.core.records import CacheChange, Role, WorkerLoad
from router.core.cost import USUAL_CHUNK_TOKENS, prefill_ms
from router.core.decision import Decision, PlanKind, RouteAsk
from router.core.explained import candidate_rows
from router.core.fleet_table import Booking, FleetTable
from router.core.placement import Mode, WorkerKey
from router.core.policies import Policy
from router.core.router import Router

KEYS = tuple(range(1, 65))
ROOMY = WorkerLoad(free_blocks=1000, total_blocks=1000)
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}


def key(name: str) -> WorkerKey:
    return WorkerKey(name, "1")


def router(*names: str, policy: Policy = Policy.COST, seed: int = 1) -> Router:
    """Idle workers; the name's first letter is the role."""
    made = Router(random.Random(seed).random, policy=policy)
    for name in names:
        made.worker_up(key(name), ROLES[name[0]], 100_000, 16)
        made.report(key(name), ROOMY)
    return made


def ask(**kw: object) -> RouteAsk:
    return RouteAsk("r", 1024, KEYS, 16, 16, **kw)  # type: ignore[arg-type]


def choose(made: Router, **kw: object) -> Decision:
    decision = made.choose(ask(**kw), 0.0)
    assert decision is not None
    return decision


# ---- who may serve what


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("policy", list(Policy))
def test_every_plan_keeps_the_rules_of_pools_lanes_and_room(mode: Mode, policy: Policy) -> None:
    rng = random.Random(5)
    for _ in range(150):
        names = [f"{rng.choice('pdc')}{i}" for i in range(rng.randint(1, 4))]
        lanes = {name: rng.choice(("tcp", "tcp", "ucx")) for name in names}
        capacity = {name: rng.choice((512, 100_000)) for name in names}
        excluded = {key(name) for name in names if rng.random() < 0.2}
        made = Router(rng.random, policy=policy)
        for name in names:
            made.worker_up(key(name), ROLES[name[0]], capacity[name], 16, lane=lanes[name])
            made.report(key(name), replace(ROOMY, waiting_tokens=rng.randrange(5)))
        ready = [name for name in names if key(name) not in excluded and capacity[name] >= 1040]
        plan = made.choose(ask(mode=mode, excluded=excluded), 0.0)
        if plan is None:
            assert not ready or (mode is Mode.DISAGGREGATED and not _pairs(ready, lanes))
            continue
        name = plan.worker.worker_id
        assert name in ready
        if mode is Mode.COLOCATED or not _pairs(ready, lanes):
            assert plan.whole
        elif mode is Mode.DISAGGREGATED:
            assert not plan.whole
        if not plan.whole:
            late = made.choose_decode(ask(excluded=excluded), plan.worker, 0.0)
            assert late is not None and late.worker != plan.worker and late.worker.worker_id in ready
            assert lanes[late.worker.worker_id] == lanes[name] and late.worker.worker_id[0] != "p"


def _pairs(ready: list[str], lanes: dict[str, str]) -> bool:
    """Somebody can prefill for somebody else."""
    return any(lanes[a] == lanes[b] for a in ready for b in ready if a != b and a[0] != "d" and b[0] != "p")


def test_with_a_whole_pool_down_whatever_lives_serves_whole_requests() -> None:
    for names in (("p0", "p1"), ("d0", "d1"), ("c0",)):
        assert choose(router(*names)).kind is PlanKind.WHOLE
    assert router().choose(ask(), 0.0) is None
    made = router("p0", "d0")
    assert choose(made).kind is PlanKind.PAIR
    made.worker_down(key("p0"))
    decision = choose(made)
    assert decision.whole and decision.worker == key("d0") and decision.reason == "pool_down"


def test_the_decode_worker_that_holds_the_conversation_takes_the_suffix() -> None:
    made = router("p0", "d0", "d1")
    made.cache_changed(key("d1"), CacheChange(1, 0, 1, KEYS[:63], is_snapshot=True))
    made.lanes.observe(0, 1, 1e6)  # fetching is out of the question
    decision = choose(made)
    assert decision.kind is PlanKind.HOLDER_WHOLE and decision.worker == key("d1") and decision.whole


def test_both_pools_serve_whole_requests_where_the_other_is_crowded() -> None:
    what = replace(ask(), max_tokens=200, expected_output_tokens=200)
    made = router("p0", "d0")
    decision = made.choose(what, 0.0)
    assert decision is not None and decision.kind is PlanKind.PAIR
    made.report(key("p0"), replace(ROOMY, queue_s=1e3, waiting_tokens=100_000))
    decision = made.choose(what, 0.0)
    assert decision is not None and decision.whole and decision.worker == key("d0")
    made.report(key("p0"), ROOMY)
    made.report(key("d0"), replace(ROOMY, decode_rows=500, decode_context=500_000, expected_output_tokens=100_000))
    decision = made.choose(what, 0.0)
    assert decision is not None and decision.whole and decision.worker == key("p0")


def test_a_choice_is_that_of_a_router_that_was_told_all_of_it_at_once() -> None:
    """Whatever workers have done between the choices: come, gone, come back as another role, closed, opened, shrunk."""
    rng = random.Random(9)
    made = Router(lambda: 0.0)
    told: dict[str, tuple[Role, int, str, WorkerLoad]] = {}
    for at in range(400):
        name = f"w{rng.randrange(5)}"
        if name in told and rng.random() < 0.2:
            del told[name]
            made.worker_down(key(name))
        else:
            role, capacity, lane, load = told.get(name, (Role.COLOCATED, 0, "", ROOMY))
            if name not in told or rng.random() < 0.4:
                role, lane = rng.choice(list(Role)), rng.choice(("tcp", "tcp", "ucx"))
                capacity = rng.choice((512, 2_000, 100_000))
                made.worker_up(key(name), role, capacity, 16, lane=lane)
            load = replace(load, closed=rng.choice(("", "", "memory")), queue_s=rng.random(), submit_seq=at)
            told[name] = role, capacity, lane, load
            made.report(key(name), load)
        fresh = Router(lambda: 0.0)
        for each, (role, capacity, lane, load) in told.items():
            fresh.worker_up(key(each), role, capacity, 16, lane=lane)
            fresh.report(key(each), load)
        what = ask(mode=rng.choice(list(Mode)))
        ours, theirs = made.choose(what, 0.0), fresh.choose(what, 0.0)
        assert (ours and (ours.worker, ours.kind, ours.reason)) == (
            theirs and (theirs.worker, theirs.kind, theirs.reason)
        )


def test_excluded_workers_are_never_taken_and_avoided_or_closed_ones_only_alone() -> None:
    for policy in Policy:
        made = router("c0", "c1", "c2", policy=policy)
        made.report(key("c2"), replace(ROOMY, closed="memory"))
        for _ in range(6):
            assert choose(made, excluded={key("c0")}).worker == key("c1")
            assert choose(made, avoided={key("c1")}).worker == key("c0")
            assert choose(made, excluded={key("c0")}, avoided={key("c1")}).worker in (key("c1"), key("c2"))
        everybody = {key(f"c{i}") for i in range(3)}
        assert made.choose(ask(excluded=everybody), 0.0) is None


def test_a_prefill_worker_is_never_its_own_decode_worker() -> None:
    made = router("c0", "c1")
    for _ in range(5):
        decision = choose(made, mode=Mode.DISAGGREGATED)
        late = made.choose_decode(ask(), decision.worker, 0.0)
        assert late is not None and late.worker != decision.worker
    assert router("c0").choose(ask(mode=Mode.DISAGGREGATED), 0.0) is None


# ---- policies


def test_round_robin_visits_everybody_in_turn() -> None:
    made = router("c0", "c1", "c2", policy=Policy.ROUND_ROBIN)
    seen = [choose(made).worker for _ in range(6)]
    assert set(seen[:3]) == {key("c0"), key("c1"), key("c2")} and seen[:3] == seen[3:]


def test_least_loaded_takes_the_one_with_least_work_ahead() -> None:
    made = router("c0", "c1", "c2", policy=Policy.LEAST_LOADED)
    for name, waiting in (("c0", 500), ("c1", 100), ("c2", 300)):
        made.report(key(name), replace(ROOMY, waiting_tokens=waiting))
    assert choose(made).worker == key("c1")


def test_power_of_two_never_takes_the_most_loaded_and_spreads_over_the_rest() -> None:
    made = router("c0", "c1", "c2", "c3", policy=Policy.POWER_OF_TWO)
    for i in range(4):
        made.report(key(f"c{i}"), replace(ROOMY, waiting_tokens=100 * i))
    seen = [choose(made).worker.worker_id for _ in range(200)]
    assert set(seen) == {"c0", "c1", "c2"} and seen.count("c0") > seen.count("c2")


def test_prefix_only_takes_the_longest_prefix_whatever_its_load() -> None:
    made = router("c0", "c1", "c2", policy=Policy.PREFIX_ONLY)
    for name, blocks, waiting in (("c0", 10, 0), ("c1", 20, 9000), ("c2", 20, 8000)):
        made.cache_changed(key(name), CacheChange(1, 0, 1, KEYS[:blocks], is_snapshot=True))
        made.report(key(name), replace(ROOMY, waiting_tokens=waiting, cache_epoch=1, cache_seq=1))
    assert choose(made).worker == key("c2")
    assert choose(made, no_cache=True).worker == key("c0")


@pytest.mark.parametrize("policy", list(Policy))
def test_every_policy_tells_a_whole_decision_and_chooses_late(policy: Policy) -> None:
    made = router("p0", "p1", "d0", "d1", policy=policy)
    decision = choose(made)
    assert decision.kind is PlanKind.PAIR and decision.booked_ms > 0.0 and candidate_rows(decision)
    late = made.choose_decode(ask(), decision.worker, 0.0)
    assert late is not None and late.kind is PlanKind.DECODE and late.worker in (key("d0"), key("d1"))


def test_equal_workers_share_the_work_by_chance() -> None:
    made = router("c0", "c1", "c2", "c3")
    seen = [choose(made).worker for _ in range(200)]
    assert all(seen.count(key(f"c{i}")) > 20 for i in range(4))


# ---- bursts


def test_a_burst_of_siblings_prefills_its_prefix_once_or_twice() -> None:
    made = router(*(f"c{i}" for i in range(8)))
    cold, waiting = 0, []
    for i in range(64):
        what = replace(ask(), request_id=str(i), keys=(*KEYS[:60], 1000 + i), may_wait=True)
        decision = made.choose(what, 0.0)
        if decision is None:
            waiting.append(what)
            continue
        cold += decision.cached_blocks < 60
        holder = decision.worker
        made.book(decision, what, 0.0)
    assert cold <= 2 and len(waiting) > 1
    # What waits goes on with the prefix once it is told of, and without it when it is lost.
    made.cache_changed(holder, CacheChange(1, 0, 60, KEYS[:60], is_snapshot=True))
    told = made.choose(waiting[0], 0.1)
    assert told is not None and told.cached_blocks == 60
    made.worker_down(holder)
    lost = made.choose(waiting[1], 0.1)
    assert lost is not None and lost.cached_blocks == 0


def test_whoever_may_not_wait_is_sent_at_once_and_fetches_only_what_is_there() -> None:
    made = router(*(f"c{i}" for i in range(8)))
    for i in range(64):
        what = replace(ask(), request_id=str(i), keys=(*KEYS[:60], 1000 + i))
        decision = made.choose(what, 0.0)
        assert decision is not None and decision.fetch is None
        made.book(decision, what, 0.0)


# ---- bookings


def columns(table: FleetTable) -> dict[str, list[object]]:
    return {name: value.tolist() for name, value in vars(table).items() if isinstance(value, np.ndarray)}


def test_undo_restores_table_and_index_exactly() -> None:
    rng = random.Random(3)
    made = router("p0", "p1", "d0", "c0")
    made.cache_changed(key("p0"), CacheChange(1, 0, 1, KEYS[:5], is_snapshot=True))
    made.table.steps.refresh()
    before, depths = columns(made.table), made.index.lookup(KEYS, 4).tolist()
    booked = []
    for _ in range(50):
        what = replace(ask(), num_tokens=rng.randint(1, 3000), keys=KEYS[: rng.randint(0, 64)])
        decision = made.choose(what, 0.0)
        assert decision is not None
        booked.append((decision.worker, made.book(decision, what, 0.0)))
        if not decision.whole:
            late = made.choose_decode(what, decision.worker, 0.0)
            assert late is not None
            booked.append((late.worker, made.book(late, what, 0.0)))
    assert made.table.total == len(booked) and columns(made.table) != before
    rng.shuffle(booked)
    for worker, seq in [*booked, *booked[:5]]:
        made.undo(worker, seq)
    assert columns(made.table) == before and made.table.total == 0
    assert made.index.lookup(KEYS, 4).tolist() == depths and made.index.num_blocks == 5


def test_a_report_includes_the_bookings_up_to_its_number() -> None:
    rng = random.Random(4)
    table, pending, reported = FleetTable(), set[int](), WorkerLoad()
    slot = table.up(key("c0"), Role.COLOCATED, 1000, 16)
    last = 0
    for _ in range(300):
        if rng.random() < 0.5:
            last += 1
            assert table.book(key("c0"), Booking(tokens=7, us=11, rows=1)) == last
            pending.add(last)
        elif rng.random() < 0.5:
            seq = rng.randint(0, last + 1)
            table.undo(key("c0"), seq)
            pending.discard(seq)
        else:
            load = WorkerLoad(submit_seq=rng.randint(0, last), waiting_tokens=rng.randrange(100), queue_s=1.0)
            table.report(key("c0"), load)
            if load.submit_seq >= reported.submit_seq:
                reported = load
                pending = {seq for seq in pending if seq > load.submit_seq}
        assert table.load(key("c0")) == reported and table.total == len(pending)
        assert table.waiting_tokens[slot] == reported.waiting_tokens + 7 * len(pending)
        assert table.rows[slot] == len(pending)
    table.down(key("c0"))
    assert table.total == 0


def test_a_slot_is_used_again_by_another_generation_that_inherits_nothing() -> None:
    made = router("c0", "c1")
    decision = choose(made, excluded={key("c1")})
    made.book(decision, ask(), 0.0)
    slot = made.table.slot(key("c0"))
    assert slot is not None
    made.worker_down(key("c0"))
    made.worker_down(key("c0"))
    again = WorkerKey("c0", "2")
    made.worker_up(again, Role.PREFILL, 5000, 8)
    assert made.table.slot(again) == slot and made.table.generation[slot] == 2
    assert made.table.total == 0 and made.table.queue_ms[slot] == 0.0
    assert made.index.lookup(KEYS, 2).tolist() == [0, 0]
    assert made.report(key("c0"), WorkerLoad(queue_s=9.0)) and made.table.queue_ms[slot] == 0.0
    assert made.cache_changed(key("c0"), CacheChange(1, 0, 1, KEYS, is_snapshot=True))
    assert made.index.entries == 0


@pytest.mark.parametrize(("told", "chunk"), [(0, USUAL_CHUNK_TOKENS), (32, 32), (2048, 2048)])
def test_columns_agree_with_the_cost_table_of_one_worker_step_by_step(told: int, chunk: int) -> None:
    from headrace.core.step_shape import GENERIC_S, CostTable, StepShape, chunk_pairs

    # 1. Others, with other chunks, change nothing of it.
    table, one = FleetTable(), CostTable(GENERIC_S)
    for i, (rows, context) in enumerate(itertools.product((0, 1, 40, 600), (0, 5000))):
        load = replace(ROOMY, decode_rows=rows, decode_context=context * (rows > 0), step_costs=GENERIC_S)
        for name, chunk_tokens in ((f"c{i}", told), (f"other{i}", 100 + i)):
            table.up(key(name), Role.COLOCATED, 1000, 16, chunk_tokens=chunk_tokens)
            table.report(key(name), load)
    table.steps.refresh()
    slots = [slot for slot in range(table.num_slots) if table.key(slot).worker_id.startswith("c")]
    assert len(slots) == 8 and set(table.columns.chunk_tokens[slots].tolist()) == {chunk}
    for tokens, slot in itertools.product((1, 3, chunk - 1, chunk, chunk + 1, 3 * chunk + 7), slots):
        rows, context = int(table.rows[slot]), int(table.context[slot])
        # 2. A prefill takes whole chunks and a rest; the last one samples.
        starts = range(100, 100 + tokens, chunk)
        pieces = [(start, min(chunk, 100 + tokens - start)) for start in starts]
        shapes = [
            StepShape(rows, context, 1, piece, chunk_pairs(start, piece), rows + (start == starts[-1]))
            for start, piece in pieces
        ]
        got, alone = prefill_ms(table.columns, slot, tokens, 100)
        assert got == pytest.approx(1e3 * sum(map(one.cost_s, shapes)), abs=1e-3 * len(shapes))
        idle = StepShape(rows, context, 0, 0, 0, rows)
        assert alone == pytest.approx(1e3 * one.cost_s(idle) * len(shapes), rel=1e-9, abs=1e-6)
        # 3. Those behind it are told the same of whole chunks.
        if tokens == chunk:
            share_ms = table.steps.share_ms(slot, tokens, 100)
            assert share_ms == pytest.approx(got - table.steps.prompt_ms[slot], abs=1e-3)

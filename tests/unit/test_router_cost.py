"""The router's cost: each term decides where it is all that differs, and is told in milliseconds."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from headrace.core.records import CacheChange, Role, WorkerLoad
from headrace.core.step_shape import KNOTS, NUM_FEATURES
from router.core.decision import Decision, PlanKind, RouteAsk
from router.core.explained import candidate_rows
from router.core.placement import Mode, WorkerKey
from router.core.router import Router
from router.core.settings import RoutingSettings

BLOCK = 10
KEYS = tuple(range(1, 101))


def costs(row_ms: float = 1.0, context_ms: float = 0.0) -> tuple[float, ...]:
    """A step takes `row_ms` a row beyond the first, and `context_ms` a token that decodes attend to."""
    pieces = [b - a for a, b in itertools.pairwise(KNOTS)] + [KNOTS[-1]]
    out = [0.0, *(width * row_ms * 1e-3 for width in pieces), 0.0, context_ms * 1e-3, 0.0, 0.0, 0.0]
    assert len(out) == NUM_FEATURES
    return tuple(out)


IDLE = WorkerLoad(free_blocks=1000, total_blocks=1000, step_costs=costs())
FACE_VALUE = RoutingSettings(duplication_weight=0.25, decode_weight=1.0, interference_weight=1.0, least_contention=0.0)
"""So that the numbers of a test say what decides."""
NO_FETCH = replace(FACE_VALUE, least_fetch_blocks=1000)
FULL = replace(IDLE, free_blocks=0, evictable_blocks=1000)


def key(name: str) -> WorkerKey:
    return WorkerKey(name, "1")


def router(settings: RoutingSettings | None = None, **loads: WorkerLoad) -> Router:
    """Workers by name; the name's first letter is the role (p, d or c), and each is its own node."""
    made = Router(random.Random(1).random, settings or FACE_VALUE)
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}
    for name, load in loads.items():
        made.worker_up(key(name), roles[name[0]], 100_000, BLOCK, node=name[1:])
        made.report(key(name), load)
    return made


def hold(made: Router, name: str, num_blocks: int) -> None:
    assert made.cache_changed(key(name), CacheChange(1, 0, 1, KEYS[:num_blocks], is_snapshot=True))


def ask(num_tokens: int = 1000, output: int = 1, **kw: object) -> RouteAsk:
    return RouteAsk("r", num_tokens, KEYS, output, output, **kw)  # type: ignore[arg-type]


def choose(made: Router, what: RouteAsk | None = None, now: float = 0.0) -> Decision:
    decision = made.choose(what or ask(), now)
    assert decision is not None
    return decision


def terms(made: Router, decision: Decision, term: str) -> dict[str, float]:
    """Worker -> milliseconds of the term in its plan without a fetch."""
    rows = [row for row in candidate_rows(decision) if not row.fetched_blocks]
    return {row.worker.worker_id: pytest.approx(row.terms[term], rel=1e-5) for row in rows}


# ---- one term each


def test_queue_decides() -> None:
    made = router(c0=replace(IDLE, queue_s=0.5), c1=IDLE)
    decision = choose(made)
    assert decision.worker == key("c1") and terms(made, decision, "queue") == {"c0": 500.0, "c1": 0.0}


def test_what_was_sent_since_the_last_report_is_part_of_the_queue() -> None:
    made = router(c0=IDLE, c1=IDLE)
    first = choose(made)
    seq = made.book(first, ask(), 0.0)
    second = choose(made, replace(ask(), keys=()))
    assert second.worker != first.worker
    made.undo(first.worker, seq)
    assert terms(made, choose(made), "queue") == {"c0": 0.0, "c1": 0.0}


def test_prefill_decides_and_cached_blocks_lessen_it() -> None:
    made = router(NO_FETCH, c0=replace(IDLE, step_costs=costs(row_ms=2.0)), c1=IDLE)
    assert choose(made).worker == key("c1")
    hold(made, "c0", 80)
    decision = choose(made)
    # The first row of a step is free here: two steps of 1 ms a row, against one of 200 rows at 2 ms.
    assert decision.worker == key("c0") and terms(made, decision, "prefill") == {"c0": 398.0, "c1": 998.0}
    assert decision.held_blocks == decision.diverged_at_block == 80


def test_memory_wait_decides() -> None:
    short = replace(IDLE, free_blocks=10, decode_rows=2, decode_context=1000, expected_output_tokens=100)
    made = router(
        replace(FACE_VALUE, pressure_weight=0.0, interference_weight=0.0, decode_weight=0.0), c0=short, c1=IDLE
    )
    made.report(key("c1"), replace(short, free_blocks=1000))
    decision = choose(made)
    assert decision.worker == key("c1")
    # 900 tokens are short; 1000 come free in the 50 steps of 1 ms that the decodes have left.
    assert terms(made, decision, "memory_wait") == {"c0": 45.0, "c1": 0.0}


def test_restore_decides_between_equal_holders() -> None:
    made = router(c0=replace(IDLE, restore_block_s=0.01), c1=IDLE)
    for name in ("c0", "c1"):
        hold(made, name, 50)
    decision = choose(made)
    assert decision.worker == key("c1") and terms(made, decision, "restore") == {"c0": 50.0, "c1": 0.0}


def test_a_prefix_is_fetched_when_that_is_quicker_than_its_holders_queue_and_than_computing_it() -> None:
    made = router(c0=replace(IDLE, queue_s=2.0), c1=IDLE)
    hold(made, "c0", 90)
    decision = choose(made)
    assert decision.kind is PlanKind.FETCH_WHOLE and decision.worker == key("c1")
    assert decision.fetch is not None and (decision.fetch.source, decision.fetch.num_blocks) == (key("c0"), 90)
    assert (decision.held_blocks, decision.cached_blocks) == (0, 90)
    for _ in range(200):
        made.transferred(key("c0"), 1, 100.0)
    decision = choose(made)
    assert decision.kind is PlanKind.WHOLE and decision.worker == key("c1") and decision.fetch is None


def test_only_equal_lanes_fetch() -> None:
    made = Router(random.Random(1).random)
    for name, lane in (("c0", "tcp"), ("c1", "ucx")):
        made.worker_up(key(name), Role.COLOCATED, 100_000, BLOCK, lane=lane)
        made.report(key(name), replace(IDLE, queue_s=2.0 if name == "c0" else 0.0))
    hold(made, "c0", 90)
    assert choose(made).kind is PlanKind.WHOLE


def test_transfer_decides_between_a_pair_and_one_worker() -> None:
    loads = {"p0": IDLE, "d0": IDLE, "c0": replace(IDLE, queue_s=0.05)}
    assert choose(router(replace(FACE_VALUE, default_block_ms=0.0), **loads)).kind is PlanKind.PAIR
    slow = router(replace(FACE_VALUE, default_block_ms=10.0), **loads)
    decision = choose(slow)
    assert decision.kind is PlanKind.WHOLE and decision.whole
    pair = choose(slow, ask(mode=Mode.DISAGGREGATED))
    assert terms(slow, pair, "transfer") == {"p0": 520.0}  # the last chunk only


def test_the_last_chunk_of_a_hand_off_is_that_of_the_worker_that_prefills() -> None:
    made = router(replace(FACE_VALUE, default_block_ms=10.0), p0=IDLE, p1=IDLE, d0=IDLE)
    for name, role, chunk_tokens in (("p0", Role.PREFILL, 100), ("p1", Role.PREFILL, 0), ("d0", Role.DECODE, 200)):
        made.worker_up(key(name), role, 100_000, BLOCK, chunk_tokens=chunk_tokens)
    # 1. Blocks of ten tokens; who does not tell has the usual chunk.
    pair = choose(made, ask(mode=Mode.DISAGGREGATED))
    assert terms(made, pair, "transfer") == {"p0": 100.0, "p1": 520.0}
    # 2. The same for the decode worker, which is chosen later, and for a source that is gone by then.
    for source, transfer_ms in (("p0", 100.0), ("p1", 520.0), ("p9", 520.0)):
        late = made.choose_decode(ask(), key(source), 0.0)
        assert late is not None and terms(made, late, "transfer") == {"d0": transfer_ms}


def test_decode_decides_late_from_fresh_load() -> None:
    slow = replace(IDLE, decode_rows=50, decode_context=5000, step_costs=costs(context_ms=0.01))
    made = router(replace(FACE_VALUE, interference_weight=0.0), p0=IDLE, d0=IDLE, d1=slow)
    first = made.choose_decode(ask(output=100), key("p0"), 0.0)
    made.report(key("d0"), replace(slow, decode_rows=90))
    second = made.choose_decode(ask(output=100), key("p0"), 0.0)
    assert first is not None and second is not None
    assert (first.worker, second.worker) == (key("d0"), key("d1")) and first.kind is PlanKind.DECODE


def test_interference_with_those_who_decode_there_decides() -> None:
    busy = replace(IDLE, decode_rows=20, decode_context=20, expected_output_tokens=20)
    free = replace(FACE_VALUE, decode_weight=0.0, pressure_weight=0.0)
    made = router(free, c0=busy, c1=IDLE)
    decision = choose(made)
    assert decision.worker == key("c1")
    assert terms(made, decision, "interference")["c1"] == 0.0
    made = router(replace(free, interference_weight=0.0), c0=busy, c1=replace(IDLE, queue_s=1.0))
    assert choose(made).worker == key("c0")


def test_contention_makes_work_dearer_than_waiting_when_the_fleet_is_busy() -> None:
    made = router(NO_FETCH, c0=replace(IDLE, queue_s=0.6), c1=replace(IDLE, queue_s=0.1))
    hold(made, "c0", 40)
    decision = choose(made)
    assert decision.worker == key("c1") and terms(made, decision, "contention") == {"c0": 0.0, "c1": 0.0}
    decision = choose(made, now=1000.0)
    assert decision.worker == key("c0")
    assert terms(made, decision, "contention") == {"c0": 4 * 598.0, "c1": 4 * 998.0}


def test_pressure_decides_where_growth_would_not_fit() -> None:
    tight = replace(IDLE, free_blocks=150, decode_rows=1, decode_context=10, expected_output_tokens=1000)
    made = router(replace(FACE_VALUE, interference_weight=0.0), c0=tight, c1=replace(tight, free_blocks=1000))
    decision = choose(made)
    assert decision.worker == key("c1")
    # 100 blocks of prompt and 100 of others' growth, 150 are there: a quarter of the prompt's time.
    assert terms(made, decision, "pressure") == {"c0": 250.0, "c1": 0.0}


def test_eviction_decides_by_what_the_displaced_blocks_saved() -> None:
    dear, cheap = replace(FULL, eviction_ms_per_block=3.0), replace(FULL, eviction_ms_per_block=1.0)
    made = router(c0=dear, c1=cheap, c2=replace(dear, free_blocks=90))
    decision = choose(made)
    assert decision.worker == key("c2")
    assert terms(made, decision, "eviction") == {"c0": 300.0, "c1": 100.0, "c2": 30.0}


def test_duplication_decides_where_copies_would_displace_others() -> None:
    dear = replace(IDLE, eviction_ms_per_block=20.0)
    loads = {"c0": replace(dear, queue_s=0.6), "c1": dear}
    made = router(NO_FETCH, **loads)
    hold(made, "c0", 50)
    decision = choose(made)
    assert decision.worker == key("c0") and terms(made, decision, "duplication") == {"c0": 0.0, "c1": 250.0}
    made = router(replace(NO_FETCH, duplication_weight=0.0), **loads)
    hold(made, "c0", 50)
    assert choose(made).worker == key("c1")


def test_a_session_and_an_adapter_stay_where_they_were() -> None:
    for kw, term in (({"session": "s"}, "session"), ({"adapter": "a"}, "adapter")):
        made = router(c0=IDLE, c1=IDLE, c2=IDLE)
        what = replace(ask(no_cache=True), **kw)
        first = choose(made, what)
        seq = made.book(first, what, 0.0)
        made.undo(first.worker, seq)
        for _ in range(8):
            decision = choose(made, what)
            assert decision.worker == first.worker
        assert sorted(x.expected > 0 for x in terms(made, decision, term).values()) == [False, True, True]


def test_topology_decides_between_equal_prefill_workers() -> None:
    made = router(p1=IDLE, p2=IDLE, d2=IDLE)
    decision = choose(made, ask(mode=Mode.DISAGGREGATED))
    assert decision.worker == key("p2") and terms(made, decision, "topology") == {"p1": 1.0, "p2": 0.0}
    made = router(p1=IDLE, d1=IDLE, d2=IDLE)
    late = made.choose_decode(ask(), key("p1"), 0.0)
    assert late is not None and late.worker == key("d1")


def test_a_deadline_buys_an_earlier_first_token() -> None:
    made = router(c0=replace(IDLE, queue_s=0.5), c1=replace(IDLE, step_costs=costs(1.0, 0.01)))
    what = ask(output=100)
    assert choose(made, what).worker == key("c0")
    decision = choose(made, replace(what, time_left_s=1.1))
    assert decision.worker == key("c1") and terms(made, decision, "deadline")["c0"] == 10.0 * (1498.0 - 1100.0)


# ---- unknown costs


def test_an_unknown_worker_costs_what_the_others_cost_on_average() -> None:
    made = router(
        c0=replace(IDLE, step_costs=costs(1.0)),
        c1=replace(IDLE, step_costs=costs(3.0)),
        c2=replace(IDLE, step_costs=()),
    )
    assert terms(made, choose(made), "prefill") == {"c0": 998.0, "c1": 3 * 998.0, "c2": 2 * 998.0}


def test_a_fleet_without_costs_learns_its_level_and_its_slow_worker() -> None:
    unknown = replace(IDLE, step_costs=())
    made = router(c0=unknown, c1=unknown)
    assert choose(made).predicted_ttft_ms > 0.0
    for _ in range(300):
        decision = choose(made)
        made.completed(decision, 100.0 if decision.worker == key("c0") else 300.0)
    decision = choose(made)
    assert decision.worker == key("c0") and decision.predicted_ttft_ms == pytest.approx(100.0, rel=0.1)
    assert made.error < 0.1


def test_regret_is_what_the_quickest_candidate_was_predicted_to_save() -> None:
    made = router(c0=IDLE, c1=replace(IDLE, queue_s=1.0))
    decision = choose(made)
    assert made.completed(decision, 900.0) == 0.0
    assert made.completed(decision, 1200.0) == pytest.approx(202.0) and made.regret_ms == pytest.approx(202.0)


# ---- explain


def test_explain_shows_every_candidate_cheapest_first_and_its_terms_add_up() -> None:
    hindered = replace(FACE_VALUE, least_contention=1.0)
    idle = replace(IDLE, step_costs=costs(context_ms=0.01))
    made = router(hindered, p0=idle, p1=replace(idle, queue_s=0.3), d0=idle, c0=replace(idle, queue_s=0.2))
    hold(made, "p1", 50)
    hold(made, "d0", 60)
    decision = choose(made, ask(output=100, mode=Mode.AUTO))
    rows = candidate_rows(decision)
    kinds = {(row.worker.worker_id, row.kind) for row in rows}
    assert kinds == {
        *(("p0", PlanKind.PAIR), ("p0", PlanKind.FETCH_PAIR), ("p1", PlanKind.PAIR), ("p1", PlanKind.FETCH_PAIR)),
        *(("c0", PlanKind.WHOLE), ("c0", PlanKind.FETCH_WHOLE), ("d0", PlanKind.HOLDER_WHOLE)),
    }
    assert [row.cost_ms for row in rows] == sorted(row.cost_ms for row in rows)
    assert rows[0].is_chosen and sum(row.is_chosen for row in rows) == 1
    assert all(sum(row.terms.values()) == pytest.approx(row.cost_ms, rel=1e-5) for row in rows)
    assert decision.candidates.considered == len(rows)


def test_what_is_kept_for_explain_is_bounded_and_names_workers_that_are_gone() -> None:
    made = router(replace(FACE_VALUE, most_explained=5), **{f"c{i}": replace(IDLE, queue_s=i / 10) for i in range(20)})
    decision = choose(made)
    made.worker_down(key("c0"))
    made.worker_up(key("c99"), Role.COLOCATED, 1000, BLOCK)
    rows = candidate_rows(decision)
    assert [row.worker.worker_id for row in rows] == ["c0", "c1", "c2", "c3", "c4"]
    assert decision.candidates.considered == 20

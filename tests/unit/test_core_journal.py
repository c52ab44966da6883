"""What is recorded of a request's life: whole, true, the same requests everywhere, and nothing of what they say."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from headrace.core.predictor import StepPredictor, StepShape, fit
from headrace.core.records import FinishReason
from headrace.errors import Rejected
from headrace.ids import RequestId
from kvtransfer.core.identity import block_hashes
from tests.core_world import ROOT, World, make_settings
from workers.core.journal import DECODE_EVERY, Event, Record, Tracing
from workers.core.request import Keep, Request, State
from workers.core.settings import SchedulerSettings

B = 4


class Recorded:
    """A world whose journal is kept, and the life of one of its requests."""

    def __init__(self, settings: SchedulerSettings | None = None, sample_rate: float = 1.0, **world: object) -> None:
        self.records: list[Record] = []
        tracing = Tracing(self.records.append, sample_rate)
        self.world = World(settings or make_settings(), tracing=tracing, **world)  # type: ignore[arg-type]

    def of(self, request: Request) -> list[Record]:
        return [record for record in self.records if record.request_id == request.request_id]

    def events(self, request: Request) -> list[str]:
        return [record.event.value for record in self.of(request)]


def trained() -> StepPredictor:
    shapes = [StepShape(d, 9 * d, p, 6 * p, 30 * p, d) for d in range(9) for p in range(4) if d or p]
    return StepPredictor(fit([(s, 0.02 + 0.001 * s.rows) for s in shapes * 3], {}))


def test_a_whole_life_is_submitted_scheduled_answered_and_finished() -> None:
    w = Recorded()
    request = w.world.submit(10, max_tokens=3)
    w.world.run()
    assert w.events(request) == ["submitted", "scheduled", "first_token", "scheduled", "finished"]
    assert [r.phase for r in w.of(request)] == ["waiting", "prefill", "prefill", "decode", "decode"]
    last = w.of(request)[-1]
    assert (last.reason, last.output_tokens, last.held_blocks) == ("length", 3, 3)
    w.world.assert_drained()


def test_a_step_is_recorded_as_it_was_planned() -> None:
    # 1. One request decodes: 5 prompt tokens, so that its first decode row is its sixth token, in 2 blocks of 4.
    w = Recorded(make_settings(long_prefill_token_threshold=6), num_blocks=20, predictor=trained())
    decode = w.world.submit(5, max_tokens=9)
    w.world.step()
    w.world.step()
    # 2. A prompt of 14 tokens, two chunks of 6 and one of 2, comes in beside it.
    prefill = w.world.submit(14, max_tokens=2)
    prefill.priority = 3
    w.world.step()
    shape = StepShape(1, 8, 1, 6, 6 * (6 + 3), 1)
    predicted_ms = round(1000 * w.world.predictor.predict_s(shape), 3)  # type: ignore[union-attr]
    w.world.step()
    second = [r for r in w.of(prefill) if r.event is Event.SCHEDULED][1]
    # 3. The decode's third row has 8 tokens in context; the chunk is 6 tokens from position 6 on, none sampled.
    assert second._asdict() | {"predicted_iteration_ms": None} == {
        "time_s": 3.0,
        "request_id": prefill.request_id,
        "event": "scheduled",
        "phase": "prefill",
        "scheduled_tokens": 6,
        "prefilled_tokens": 6,
        "remaining_prompt_tokens": 2,
        "active_decodes": 1,
        "token_budget": 64,
        "predicted_iteration_ms": None,
        "free_kv_blocks": 20 - 2 - 4,
        "priority_reason": "arrival",
        "attempt": 0,
        "tenant": "",
        "priority": 3,
        "cache_identity": block_hashes(ROOT, prefill.prompt_ids, B)[2].hex(),
        "reason": "",
        "held_blocks": 4,
        "preemptions": 0,
        "output_tokens": 0,
        "cached_tokens": 0,
        "cost_ms": None,
    }
    assert second.predicted_iteration_ms == predicted_ms
    first_decode = next(r for r in w.of(decode) if r.phase == "decode")
    assert (first_decode.scheduled_tokens, first_decode.prefilled_tokens) == (1, 5)
    assert (first_decode.remaining_prompt_tokens, first_decode.held_blocks) == (0, 2)


def test_chunks_always_add_up_to_what_is_prefilled() -> None:
    w = Recorded(make_settings(long_prefill_token_threshold=5, max_num_batched_tokens=8))
    requests = [w.world.submit(length, max_tokens=6) for length in (3, 17, 22, 9)]
    w.world.run()
    for request in requests:
        chunks = [r for r in w.of(request) if r.event is Event.SCHEDULED and r.phase == "prefill"]
        for chunk in chunks:
            whole = chunk.prefilled_tokens + chunk.scheduled_tokens + chunk.remaining_prompt_tokens
            assert whole == len(request.prompt_ids)
        for before, after in pairwise(chunks):
            assert after.prefilled_tokens == before.prefilled_tokens + before.scheduled_tokens
        assert chunks[-1].remaining_prompt_tokens == 0
    w.world.assert_drained()


def test_a_long_decode_is_recorded_once_in_so_many_tokens() -> None:
    w = Recorded(num_blocks=200)
    request = w.world.submit(5, max_tokens=3 * DECODE_EVERY)
    w.world.run()
    rows = [r.output_tokens for r in w.of(request) if r.phase == "decode" and r.event is Event.SCHEDULED]
    assert rows == [1, DECODE_EVERY, 2 * DECODE_EVERY]


def test_a_decode_that_waits_for_its_turn_is_recorded_when_it_gets_it() -> None:
    w = Recorded(make_settings(max_num_seqs=4, max_decode_rows=1, next_token_deadline_s=0.0), num_blocks=200)
    requests = [w.world.submit(4, max_tokens=DECODE_EVERY + 9) for _ in range(3)]
    w.world.run()
    for request in requests:
        rows = [r.output_tokens for r in w.of(request) if r.phase == "decode" and r.event is Event.SCHEDULED]
        assert rows == [1, DECODE_EVERY]


def test_decodes_that_take_turns_are_recorded_only_in_steps_that_name_them() -> None:
    w = Recorded(make_settings(max_num_seqs=4, max_decode_rows=1, next_token_deadline_s=0.0))
    requests = [w.world.submit(4, max_tokens=8) for _ in range(3)]
    plans: list[tuple[float, set[int]]] = []
    while (plan := w.world.schedule()) is not None:
        plans.append((w.world.now, set(plan.keys)))
        w.world.apply(plan)
    for request in requests:
        times = {time for time, keys in plans if request.key in keys}
        scheduled = [r for r in w.of(request) if r.event is Event.SCHEDULED]
        assert {r.time_s for r in scheduled} <= times
        assert [r.phase for r in scheduled] == ["prefill", "decode"]


def test_a_handed_off_and_an_adopted_life_share_their_cache_identity() -> None:
    p, d = Recorded(), Recorded()
    prompt = list(range(500, 511))
    there = p.world.submit(prompt, max_tokens=6, hand_off=True)
    p.world.run()
    p.world.scheduler.release_handed_off(there.key, p.world.now)
    here = d.world.adopt(prompt, max_tokens=6)
    d.world.scheduler.reserve_adoptions(d.world.now)
    d.world.pull(here)
    d.world.activate(here)
    d.world.run()
    assert p.events(there) == ["submitted", "scheduled", "first_token", "handed_off", "finished"]
    assert p.of(there)[-1].reason == "handed_off"
    assert d.events(here) == ["submitted", "reserved", "adopted", "scheduled", "finished"]
    assert [r.phase for r in d.of(here)] == ["waiting", "transfer", "transfer", "decode", "decode"]
    identities = {r.cache_identity for r in [*p.of(there), *d.of(here)]}
    assert identities == {block_hashes(ROOT, prompt, B)[1].hex()}
    assert all(r.remaining_prompt_tokens == 0 for r in p.of(there)[2:])


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_a_preempted_life_tells_the_way_back_and_what_it_cost(way: str) -> None:
    host_blocks = 32 if way == "swap" else 0
    w = Recorded(make_settings(host_blocks=host_blocks), num_blocks=8)
    requests = [w.world.submit(8, max_tokens=12) for _ in range(3)]
    w.world.run()
    victim = max(requests, key=lambda r: r.preemptions)
    events = w.events(victim)
    assert events.count("preempted") == victim.preemptions >= 1
    lost = w.of(victim)[events.index("preempted")]
    assert (lost.reason, lost.preemptions) == (way, 1)
    assert lost.held_blocks > 0 and lost.prefilled_tokens > 0
    assert lost.cost_ms is not None
    assert lost.cost_ms.keys() == {"freed_ms", "restore_ms", "deadline_ms", "debt_ms", "nearly_ms", "class_ms"}
    back = events[events.index("preempted") + 1 :]
    assert back[0] == ("swapped_in" if way == "swap" else "scheduled")
    assert back[-1] == "finished"
    w.world.assert_drained()


def test_a_paused_life_tells_what_became_of_its_blocks() -> None:
    w = Recorded()
    request = w.world.submit(6, max_tokens=6)
    for _ in range(2):
        w.world.step()
    assert w.world.scheduler.pause(request.key, Keep.DROP, w.world.now)
    w.world.truth[request.key] += [70, 71, 72]
    assert w.world.scheduler.resume(request.key, [70, 71, 72], w.world.now)
    w.world.run()
    events = w.events(request)
    assert events[4:] == ["paused", "resumed", "scheduled", "scheduled", "finished"]
    assert w.of(request)[4].reason == "drop"
    w.world.assert_drained()


def test_a_pause_does_not_double_what_is_recorded_of_a_long_decode() -> None:
    w = Recorded(num_blocks=200)
    request = w.world.submit(5, max_tokens=2 * DECODE_EVERY + 5)
    for _ in range(10):
        w.world.step()
    w.world.scheduler.pause(request.key, Keep.KEEP, w.world.now)
    w.world.truth[request.key] += [70]
    w.world.scheduler.resume(request.key, [70], w.world.now)
    w.world.run()
    rows = [r.output_tokens for r in w.of(request) if r.phase == "decode" and r.event is Event.SCHEDULED]
    assert rows == [1, 11, DECODE_EVERY, 2 * DECODE_EVERY]


def test_instants_that_come_out_of_order_do_not_turn_time_back() -> None:
    w = Recorded()
    w.world.scheduler.submit(w.world.make(4), 5.0)
    w.world.scheduler.submit(w.world.make(4), 4.0)
    assert [record.time_s for record in w.records] == [5.0, 5.0]


def test_a_refusal_and_a_lost_deadline_have_their_reasons() -> None:
    w = Recorded(make_settings(max_waiting_requests=1))
    first = w.world.submit(4)
    second = w.world.make(4)
    assert isinstance(w.world.scheduler.submit(second, 0.0), Rejected)
    assert [(r.event.value, r.reason) for r in w.of(second)] == [("refused", "queue_full")]
    w.world.run()
    w.world.submit(4, max_tokens=50)  # somebody computes: a lost request would delay it
    w.world.step()
    hurried = w.world.submit(4, deadline=w.world.now + 5.0)
    w.world.scheduler._pace.known = True
    w.world.scheduler._pace.decode_token_s = 100.0
    w.world.now += 3.0
    w.world.step()
    assert w.events(hurried) == ["submitted", "deadline_lost", "finished"]
    assert w.of(hurried)[-1].reason == "deadline"
    assert w.events(first)[-1] == "finished"


def test_every_life_begins_and_ends_once_whenever_it_is_cancelled() -> None:
    w = Recorded(make_settings(max_num_seqs=3), num_blocks=12)
    for step in range(30):
        w.world.submit(3 + step % 9, max_tokens=7)
        plan = w.world.schedule()
        if step % 3 == 0:
            key = sorted(w.world.scheduler.requests)[step % len(w.world.scheduler.requests)]
            w.world.scheduler.finish(key, FinishReason.CANCELLED, w.world.now)
        if plan is not None:
            w.world.apply(plan)
    w.world.run()
    for request in w.world.seen.values():
        events = w.events(request)
        assert (events[0], events[-1]) == ("submitted", "finished")
        assert events.count("submitted") == events.count("finished") == 1
    times = [record.time_s for record in w.records]
    assert times == sorted(times)
    assert w.world.scheduler._journal.idle
    w.world.assert_drained()


def test_without_sampling_nothing_is_recorded_or_followed() -> None:
    w = Recorded(sample_rate=0.0)
    request = w.world.submit(6)
    assert w.world.scheduler._journal.idle and not request.traced
    w.world.run()
    assert w.records == []


def test_the_same_requests_are_recorded_in_every_process_and_about_as_many_as_asked() -> None:
    ids = [f"req-{i:x}" for i in range(4000)]
    tracing = Tracing(lambda record: None, 0.1)
    chosen = [name for name in ids if tracing.samples(RequestId(name))]
    assert 300 < len(chosen) < 500
    code = (
        "from workers.core.journal import Tracing\n"
        "t = Tracing(lambda record: None, 0.1)\n"
        "print(*[n for n in (f'req-{i:x}' for i in range(4000)) if t.samples(n)])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.split() == chosen
    more = Tracing(lambda record: None, 0.3)
    assert all(more.samples(RequestId(name)) for name in chosen)


def test_no_token_of_prompt_output_or_tool_is_in_any_record() -> None:
    # Token ids so large that no count, time or size can equal one by chance.
    planted = [9_000_017 + 31 * i for i in range(12)]
    w = Recorded(num_blocks=16, vocab=4_000_000_000)
    request = w.world.submit(planted, max_tokens=8)
    for _ in range(3):
        w.world.step()
    w.world.scheduler.pause(request.key, Keep.KEEP, w.world.now)
    tool = [8_000_009, 8_000_023]
    w.world.truth[request.key] += tool
    w.world.scheduler.resume(request.key, tool, w.world.now)
    w.world.run()
    assert request.state is State.FINISHED
    text = repr(w.records)
    assert len(w.records) >= 7
    for token in request.token_ids:
        assert str(token) not in text


def test_recording_changes_no_plan() -> None:
    plans: list[list[object]] = []
    for sample_rate in (0.0, 1.0):
        w = Recorded(make_settings(max_num_seqs=3, host_blocks=8), sample_rate, num_blocks=10)
        seen: list[object] = []
        for step in range(60):
            if step < 20:
                w.world.submit(2 + step % 7, max_tokens=5 + step % 6)
            w.world.scheduler.reserve_adoptions(w.world.now)
            plan = w.world.schedule()
            if plan is not None:
                seen.append((plan.keys, plan.num_tokens, plan.token_ids, list(map(list, plan.block_tables))))
                w.world.apply(plan)
        assert w.world.scheduler.counters["preemptions"] > 0
        plans.append(seen)
    assert plans[0] == plans[1]

"""What a peer gets of blocks that lie below the device: the right bytes, in order, within bounds, and nothing kept."""

from __future__ import annotations

from random import Random

import pytest

from headrace.core.records import FinishReason
from headrace.errors import Rejected
from headrace.ids import RequestKey
from kvtransfer.core.identity import block_hashes
from tests.core_world import ROOT, chain, linear_predictor
from tests.unit.test_core_tiering import Tiered, prefix, world
from workers.core import staging
from workers.core.fetches import LEAST_PATIENCE_S
from workers.core.staging import TRANSITIONS, FetchSource, StageCopy, StageState
from workers.core.tier_actions import Outcome

PEER, OTHER = RequestKey(99), RequestKey(98)
HASHES = block_hashes(ROOT, prefix(33), 4)
"""Eight blocks."""


def opened(w: Tiered, key: RequestKey = PEER) -> FetchSource:
    source = w.scheduler.open_fetch(key, "r", HASHES, w.now)
    assert isinstance(source, FetchSource)
    w.scheduler.check_integrity()
    return source


def refused(w: Tiered) -> str:
    source = w.scheduler.open_fetch(PEER, "r", HASHES, w.now)
    assert isinstance(source, Rejected)
    w.scheduler.check_integrity()
    return source.reason


def end_stage(w: Tiered, copy: StageCopy) -> None:
    for host_block, device_block in copy.pairs:
        w.runner.kv[device_block] = list(w.runner.host[host_block])
    w.scheduler.staging.copied(copy.ticket)
    w.scheduler.check_integrity()


def stage(w: Tiered, most: int = 3) -> None:
    """All copies that can be made now."""
    while (copy := w.scheduler.staging.next_copy(most)) is not None:
        assert len(copy.pairs) <= most
        end_stage(w, copy)


def assert_right(w: Tiered, source: FetchSource) -> None:
    """The peer reads the prefix, from its first block on."""
    content = chain(prefix(33))
    for index, block in enumerate(source.blocks):
        assert w.runner.kv[block] == content[4 * index : 4 * index + 4]


def now_source(w: Tiered, key: RequestKey = PEER) -> FetchSource:
    source = w.scheduler.fetch_source(key)
    assert source is not None
    assert_right(w, source)
    return source


def roomy(**settings: object) -> Tiered:
    """A quarter of this device has room for the prefix."""
    return world(num_blocks=40, **settings)


def sink(w: Tiered) -> None:
    """The prefix leaves the device for the host."""
    w.submit(prefix(33), max_tokens=1)
    w.run()
    w.submit((w.num_blocks - 12) * 4, max_tokens=1)
    w.run()
    while w.copy_down():
        pass
    w.forget_device()


def hold(w: Tiered, where: str) -> int:
    """The prefix is in one tier below the device alone; returns how many of its blocks."""
    sink(w)
    if where == "disk":
        w.write_down()
        taken = w.scheduler.host_blocks.retire(1000)
        w.scheduler.host_blocks.restore(len(taken))
        assert w.tiering.tiers.host_cached == 0
    assert not w.cache.match(HASHES)
    return w.tiering.tiers.run(HASHES)


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_peer_reads_what_lies_below_and_leaves_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_CALLED_UP", 3)
    w = roomy()
    held = hold(w, where)
    assert held == 8
    # 1. nothing is there at once, and all of it is coming
    assert opened(w) == FetchSource((), is_over=False)
    stage(w)
    while not now_source(w).is_over:
        assert where == "disk"
        assert w.read_up() in (2, 3)  # some at a time
        stage(w)
    # 2. every block, in order
    source = now_source(w)
    assert len(source.blocks) == held and source.is_over and not source.reason
    assert w.scheduler.holders() == {"staged for r": held}
    assert w.scheduler.staging.staged_blocks == held
    # 3. the copies were nobody's cache
    assert w.scheduler.close_fetch(PEER) and not w.scheduler.close_fetch(PEER)
    assert not w.cache.match(HASHES) and w.tiering.tiers.run(HASHES) == held
    assert w.tiering.tiers.host_busy == 0
    w.assert_drained()


def test_what_the_device_has_goes_first_and_what_lies_below_follows_it() -> None:
    w = roomy()
    hold(w, "host")
    w.submit(prefix(14), max_tokens=1)
    w.run()
    on_device = len(w.cache.match(HASHES))
    assert 0 < on_device < 8
    source = opened(w)
    assert len(source.blocks) == on_device and not source.is_over
    stage(w, most=1)
    source = now_source(w)
    assert len(source.blocks) == 8 and source.is_over
    w.scheduler.close_fetch(PEER)
    w.assert_drained()


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.FAILED])
@pytest.mark.parametrize("good", [0, 3])
def test_a_file_that_is_not_what_was_written_ends_the_run_before_it(outcome: Outcome, good: int) -> None:
    w = roomy()
    hold(w, "disk")
    opened(w)
    reads = w.tiering.take_reads(100)
    for index, read in enumerate(reads):
        w.end_read(read, outcome=outcome if index == good else Outcome.DONE)
    stage(w)
    source = now_source(w)
    assert len(source.blocks) == good and source.is_over and source.reason == "gone"
    assert w.scheduler.staging.get(PEER) is not None
    # Blocks that will not come are not kept for them.
    assert w.pool.used_blocks == good
    w.scheduler.close_fetch(PEER)
    w.assert_drained()


@pytest.mark.parametrize("come", [0, 3])
def test_what_takes_too_long_is_over_with_what_has_come_by_then(come: int) -> None:
    w = roomy()
    hold(w, "disk")
    opened(w)
    w.read_up(come)
    stage(w)
    w.scheduler.staging.expire(w.now + 0.4 * LEAST_PATIENCE_S)
    assert not now_source(w).is_over
    w.scheduler.staging.expire(w.now + LEAST_PATIENCE_S)
    source = now_source(w)
    assert len(source.blocks) == come and source.is_over and source.reason == "late"
    w.scheduler.close_fetch(PEER)
    w.read_up()
    w.assert_drained()


def test_the_peer_may_leave_at_any_moment_and_no_written_block_is_given_to_others() -> None:
    w = roomy()
    hold(w, "host")
    opened(w)
    changes: list[RequestKey] = []
    w.scheduler.staging.on_change = changes.append
    copy = w.scheduler.staging.next_copy(3)
    assert copy is not None
    # 1. it leaves while blocks are being written: they are nobody's yet
    assert w.scheduler.close_fetch(PEER) and not w.scheduler.close_fetch(PEER)
    assert w.scheduler.fetch_source(PEER) is None and w.scheduler.revocable_fetches() == []
    assert {w.pool.refs(block) for _, block in copy.pairs} == {1}
    assert w.scheduler.holders() == {"staged for r": 8}
    assert changes == []
    # 2. written
    end_stage(w, copy)
    assert changes == [PEER]
    w.scheduler.staging.copied(copy.ticket)
    w.assert_drained()


def test_a_peer_that_leaves_while_the_disk_reads_gives_everything_back_at_once() -> None:
    w = roomy()
    hold(w, "disk")
    opened(w)
    assert w.pool.used_blocks == 8
    assert w.scheduler.close_fetch(PEER)
    assert w.pool.used_blocks == 0
    w.read_up()
    stage(w)
    w.assert_drained()


def test_stages_take_a_share_of_the_device_and_never_wait_for_room() -> None:
    # 1. as many leading blocks as a quarter of the device has
    w = world(num_blocks=16)
    hold(w, "host")
    opened(w)
    assert w.pool.used_blocks == 4
    # 2. and no more for the next peer
    source = w.scheduler.open_fetch(OTHER, "s", HASHES, w.now)
    assert isinstance(source, Rejected) and source.reason == "no_room"
    stage(w)
    source = now_source(w)
    assert len(source.blocks) == 4 and source.is_over
    w.scheduler.close_fetch(PEER)
    # 3. nor where those who compute need the blocks
    spare = 14
    assert w.scheduler.staging.begin(PEER, "r", HASHES, spare, 0.001, w.now) == ""
    assert w.pool.used_blocks == w.num_blocks - spare
    w.scheduler.close_fetch(PEER)
    w.submit(60, 4)
    w.step()
    assert refused(w) == "no_room"
    w.run()
    w.assert_drained()


def test_somebody_who_lacks_blocks_may_have_the_lease_revoked() -> None:
    w = world(num_blocks=16)
    hold(w, "host")
    opened(w)
    assert w.scheduler.revocable_fetches() == []
    big = w.submit(60, 1)
    assert w.step() is None
    assert w.scheduler.revocable_fetches() == [PEER]
    w.scheduler.close_fetch(PEER)
    w.run()
    w.assert_output_as_alone(big)
    w.assert_drained()


def test_a_refusal_says_why() -> None:
    w = roomy()
    assert refused(w) == "not_cached"
    hold(w, "host")
    w.scheduler.close("memory", 1.0)
    assert refused(w) == "closed"
    w.scheduler.open()
    token_s = 0.001
    quick = roomy(host_copy_block_s=10.0)
    hold(quick, "host")
    quick.predictor = linear_predictor(token_s)
    quick.scheduler._pace.known, quick.scheduler._pace.prefill_token_s = True, token_s
    assert refused(quick) == "slow"


def test_no_block_is_staged_where_a_step_still_copies_from() -> None:
    """A preempted request's blocks are free as soon as its copy to the host is planned."""
    w = roomy(max_num_seqs=4)
    hold(w, "host")
    victim = w.submit(20, 8)
    w.step()
    w.scheduler._preempt(victim, w.now)
    w.submit(8, 4)
    plan = w.schedule()
    assert plan is not None and plan.swap_out
    assert refused(w) == "busy"
    w.apply(plan)
    opened(w)
    w.scheduler.close_fetch(PEER)
    w.run()
    w.assert_output_as_alone(victim)
    w.assert_drained()


def test_a_cleared_tenants_blocks_do_not_come_up_any_more() -> None:
    w = roomy()
    hold(w, "host")
    opened(w)
    copy = w.scheduler.staging.next_copy(3)
    assert copy is not None
    w.scheduler.clear_cache(None)
    end_stage(w, copy)
    stage(w)
    source = now_source(w)
    assert len(source.blocks) == 3 and source.is_over and source.reason == "gone"
    w.scheduler.close_fetch(PEER)
    w.assert_drained()


def test_every_state_of_a_stage_leads_to_its_end() -> None:
    for state in StageState:
        reached = {state}
        while (more := reached.union(*(TRANSITIONS[at] for at in reached))) != reached:
            reached = more
        assert StageState.GONE in reached


@pytest.mark.parametrize("seed", range(15))
def test_whatever_happens_when_peers_read_right_blocks_and_nothing_is_lost(seed: int) -> None:
    """Copies and reads end late or badly, peers come and go, requests compute, time passes, caches are cleared."""
    rng = Random(seed)
    num_blocks = rng.choice([24, 40])
    w = world(num_blocks=num_blocks, host_blocks=2 * num_blocks)  # so that everything idle is copied down
    hold(w, rng.choice(["host", "disk"]))
    open_keys: list[RequestKey] = []
    copies: list[StageCopy] = []
    for number in range(1000, 1150):
        what = rng.random()
        if what < 0.06:
            w.submit([*prefix(rng.randrange(1, 34)), *(rng.randrange(9) for _ in range(3))], rng.randint(1, 4))
            w.run()
        elif what < 0.2:
            w.copy_down(rng.randint(1, 8))
            w.write_down(rng.randint(1, 8))
        elif what < 0.35:
            w.read_up(rng.randint(1, 4), outcome=rng.choice([*3 * [Outcome.DONE], Outcome.FAILED]))
        elif what < 0.5:
            if not isinstance(w.scheduler.open_fetch(RequestKey(number), "r", HASHES, w.now), Rejected):
                open_keys.append(RequestKey(number))
        elif what < 0.65:
            if (copy := w.scheduler.staging.next_copy(rng.randint(1, 4))) is not None:
                copies.append(copy)
        elif what < 0.8 and copies:
            end_stage(w, copies.pop(rng.randrange(len(copies))))
        elif what < 0.9 and open_keys:
            assert w.scheduler.close_fetch(open_keys.pop(rng.randrange(len(open_keys))))
        elif what < 0.91:
            w.scheduler.clear_cache(None)
        elif what < 0.95:
            sink(w)
        elif what < 0.97:
            w.scheduler.host_blocks.restore(len(w.scheduler.host_blocks.retire(rng.choice([4, 1000]))))
        else:
            w.now += 0.1
            w.scheduler.staging.expire(w.now)
        for request in list(w.scheduler.requests.values()):
            w.scheduler.finish(request.key, FinishReason.CANCELLED, w.now)  # it waits for blocks that peers read
        w.scheduler.check_integrity()
        for key in open_keys:
            now_source(w, key)
    for copy in copies:
        end_stage(w, copy)
    stage(w)
    for key in open_keys:
        now_source(w, key)
        assert w.scheduler.close_fetch(key)
    w.read_up()
    w.assert_drained()
    assert w.tiering.tiers.host_busy == 0

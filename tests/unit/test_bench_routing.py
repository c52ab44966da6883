"""The virtual cluster: production routers and schedulers on one clock. Small worlds that run, drain and repeat."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from bench.simulate import routing, routing_loads
from bench.simulate.calls import ClusterRun, ClusterSpec, Prompts
from bench.simulate.cluster import Cluster
from bench.simulate.fleet import KnownCosts, WorkerSpec, gpu_coefficients
from bench.simulate.worker import gpu_cost, settings_of
from bench.simulate.workload import Job, poisson
from headrace.core.predictor import StepShape
from headrace.core.records import FinishReason, Role
from headrace.core.slo import ttft_s
from kvtransfer.core.identity import block_hashes
from kvtransfer.core.lease import Lease
from router.core.placement import Mode

BLOCK = 16
SETTINGS = settings_of(
    block_size=BLOCK,
    max_num_batched_tokens=128,
    long_prefill_token_threshold=128,
    max_num_seqs=16,
    max_model_len=8_192,
)


def worker(role: Role = Role.COLOCATED, num_blocks: int = 400, **changes: object) -> WorkerSpec:
    return replace(WorkerSpec(SETTINGS, num_blocks, gpu_coefficients(), role), **changes)  # type: ignore[arg-type]


def shared_prefixes(count: int = 60, seed: int = 1, rate: float = 100.0, prefixes: int = 6) -> list[Job]:
    """Prompts of 20 shared blocks and one of their own; answers of 4 to 12 tokens."""
    rng = Random(seed)
    return [
        Job(at, 21 * BLOCK, rng.randint(4, 12), pieces=(*range(100 * (1 + rng.randrange(prefixes)), 100 * 8)[:20], n))
        for n, at in enumerate(poisson(rng, rate, count), 10_000)
    ]


def simulated(jobs: Sequence[Job], *workers: WorkerSpec, **options: object) -> ClusterRun:
    """Runs a cluster and asserts that nothing is left in it."""
    cluster = Cluster(ClusterSpec(workers or (worker(),) * 4, **options))  # type: ignore[arg-type]
    run = cluster.run(jobs)
    for one in (one for one in cluster.workers if one.alive):
        assert not one.legs
        assert not one.scheduler.requests
        assert one.pool.used_blocks == one.pool.quarantined_blocks == 0
        one.scheduler.check_integrity()
    for gateway in cluster.gateways:
        gateway.catch_up(cluster.now + 1.0)
        assert gateway.router.table.total == 0
    return run


def assert_complete(run: ClusterRun) -> None:
    for outcome in run.outcomes:
        timeline = outcome.timeline
        assert timeline.reason is FinishReason.EOS
        assert len(timeline.token_times) == outcome.job.output_tokens
        assert list(timeline.token_times) == sorted(timeline.token_times)
        assert timeline.prefilled_tokens + timeline.cached_tokens == outcome.job.prompt_tokens


@pytest.mark.parametrize("policy", routing.POLICIES)
def test_every_policy_serves_everything_and_leaves_nothing(policy: str) -> None:
    run = simulated(shared_prefixes(), policy=policy)
    assert_complete(run)
    assert sum(run.plans.values()) == 60


def test_cost_finds_more_than_turns_do() -> None:
    jobs = shared_prefixes(120)
    turns, cost = (simulated(jobs, policy=policy) for policy in ("round_robin", "cost"))
    assert cost.hit_rate > turns.hit_rate


def test_one_seed_gives_one_run() -> None:
    first, again = (simulated(shared_prefixes(), seed=3, policy="power_of_two") for _ in range(2))
    other = simulated(shared_prefixes(), seed=4, policy="power_of_two")
    assert first == again
    assert first.outcomes != other.outcomes


PAIRS = (worker(Role.PREFILL),) * 2 + (worker(Role.DECODE),) * 2


@pytest.mark.parametrize("mode", [Mode.DISAGGREGATED, Mode.AUTO])
def test_pairs_hand_requests_over_and_leave_nothing(mode: Mode) -> None:
    run = simulated(shared_prefixes(), *PAIRS, mode=mode)
    assert_complete(run)
    if mode is Mode.DISAGGREGATED:
        assert run.prefilled[2:] == [0, 0]


def test_a_hand_off_goes_by_the_machines_of_production(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    verify = Lease.verify
    monkeypatch.setattr(Lease, "verify", lambda self, **said: held.append(self.lease_id) or verify(self, **said))
    jobs = [Job(0.1 * n, 300, 4) for n in range(5)]
    run = simulated(jobs, worker(Role.PREFILL), worker(Role.DECODE), mode=Mode.DISAGGREGATED)
    assert len(held) == 5 and all(len(outcome.timeline.token_times) == 4 for outcome in run.outcomes)


def test_a_hand_off_exposes_only_its_last_chunk() -> None:
    # 1. The prompt takes three chunks; blocks of the first two travel while the others are computed.
    # 2. A lane that takes longer than a chunk delays the second token by what is left of them all.
    job = Job(0.0, 24 * BLOCK, 2)
    quick, slow = (
        simulated([job], worker(Role.PREFILL), worker(Role.DECODE), mode=Mode.DISAGGREGATED, block_transfer_s=seconds)
        for seconds in (1e-4, 1e-2)
    )
    gaps = [run.timelines[0].token_times[1] - run.timelines[0].token_times[0] for run in (quick, slow)]
    assert ttft_s(quick.timelines[0]) == ttft_s(slow.timelines[0])
    step_s = gpu_cost(StepShape(1, 24 * BLOCK + 1, 0, 0, 0, 1))
    assert gaps[0] < step_s + 8 * 1e-4 + 0.01
    assert 16 * 1e-2 < gaps[1] < 24 * 1e-2 + step_s + 0.01


def test_requests_survive_a_worker_and_a_whole_pool() -> None:
    jobs = shared_prefixes(40, rate=400.0)
    died = simulated(jobs, worker(), worker(), worker(dies_at=0.05))
    assert [len(t.token_times) for t in died.timelines] == [job.output_tokens for job in jobs]
    alone = simulated(jobs, *PAIRS[:2], *(worker(Role.DECODE, dies_at=0.05) for _ in range(2)))
    assert [len(t.token_times) for t in alone.timelines] == [job.output_tokens for job in jobs]
    assert alone.plans["whole"] > 0


def test_what_nobody_can_take_stays_in_the_count() -> None:
    jobs = [Job(0.0, 300 * BLOCK, 2), *shared_prefixes(5)]
    run = simulated(jobs, worker(num_blocks=200), worker(num_blocks=200))
    assert [bool(outcome.refused) for outcome in run.outcomes] == [True, *[False] * 5]
    assert len(run.timelines) == 6


def test_several_gateways_share_one_cluster() -> None:
    run = simulated(shared_prefixes(), gateways=3)
    assert_complete(run)


def test_gateways_know_each_workers_chunk() -> None:
    half = replace(SETTINGS, long_prefill_token_threshold=64)
    cluster = Cluster(ClusterSpec((worker(), worker(settings=half)), gateways=2))
    assert [gateway.router.table.columns.chunk_tokens.tolist() for gateway in cluster.gateways] == [[128, 64]] * 2


def test_names_of_pieces_say_what_is_shared() -> None:
    prompts = Prompts(BLOCK)
    first = prompts.of(Job(0.0, 40, 1, pieces=(7, 8, 9)))
    second = prompts.of(Job(0.0, 48, 1, pieces=(7, 9, 9)))
    lonely = prompts.of(Job(0.0, 48, 1))
    assert (len(first.token_ids), len(first.hashes), len(second.hashes)) == (40, 2, 3)
    assert first.hashes[0] == second.hashes[0]
    assert not {*first.hashes[1:], *second.hashes[1:]} & set(lonely.hashes)
    assert len({*first.hashes, *second.hashes, *lonely.hashes}) == 7
    # What a scheduler hashes behind them goes on from them.
    assert block_hashes(b"", [*second.token_ids, *[1] * BLOCK], BLOCK, second.hashes)[:3] == list(second.hashes)


def test_the_pooled_cache_counts_leading_runs() -> None:
    def job(*pieces: int) -> Job:
        return Job(0.0, 10 * len(pieces) + 1, 1, pieces=pieces)

    assert routing_loads.pooled_hits([job(1, 2, 3), job(1, 2, 4), job(5, 2)], 10, 10) == 2
    assert routing_loads.pooled_hits([job(1), job(2), job(1)], 1, 10) == 0
    # A whole prompt that is cached computes its last token again, and so its last block counts as missed.
    assert routing_loads.pooled_hits([Job(0.0, 20, 1, pieces=(1, 2))] * 2, 10, 10) == 1


def test_known_costs_are_those_of_the_model() -> None:
    predictor = KnownCosts(gpu_coefficients())
    for shape in (StepShape(1, 100, 0, 0, 0, 1), StepShape(40, 9_000, 2, 900, 90_000, 41), StepShape(0, 0, 1, 257, 9)):
        assert predictor.predict_s(shape) == pytest.approx(gpu_cost(shape), rel=1e-6)
        assert predictor.ready


@pytest.mark.parametrize("name", list(routing_loads.WORKLOADS))
def test_workloads_are_seeded_and_in_order(name: str) -> None:
    load = replace(routing_loads.WORKLOADS[name], requests=260)
    jobs = load.jobs(1)
    assert jobs == load.jobs(1) != load.jobs(2)
    assert [job.at_s for job in jobs] == sorted(job.at_s for job in jobs)
    assert all(len(job.pieces) * routing_loads.BLOCK_TOKENS == job.prompt_tokens for job in jobs)
    bursts = [job.at_s for job in jobs if job.tenant == "b0"]
    assert len(bursts) == (routing_loads.SIBLINGS if load.siblings else 0)
    assert len(set(bursts)) <= 1


def test_blocks_of_adoptions_that_lose_their_deadlines_come_back() -> None:
    """They were set aside for reads that do not exist here, until nothing could be adopted, or decoded, any more."""
    rng = Random(9)
    jobs = [Job(at, rng.randint(10, 40) * BLOCK, rng.randint(5, 15), deadline_s=3.0) for at in poisson(rng, 64, 640)]
    pair = (worker(role, slower=10.0) for role in (Role.PREFILL, Role.DECODE))
    assert any(outcome.timeline.token_times for outcome in simulated(jobs, *pair).outcomes)


def test_refusing_lost_deadlines_keeps_goodput_at_several_times_capacity() -> None:
    """The gateway's forecasts, of the production router, against workers that then do what they do."""

    def in_time(rate: float, judged: bool) -> tuple[float, int]:
        rng = Random(1)
        jobs = [
            Job(at, rng.randint(10, 40) * BLOCK, rng.randint(5, 15), deadline_s=3.0)
            for at in poisson(rng, rate, int(10 * rate))
        ]
        slow = worker(slower=10.0)
        run = simulated(jobs, slow, slow, refuse_lost_deadlines=judged)
        ended = [outcome.timeline.reason in (FinishReason.EOS, FinishReason.LENGTH) for outcome in run.outcomes]
        return sum(ended) / 10, sum(outcome.refused == "deadline_lost" for outcome in run.outcomes)

    # 1. with a little load nobody is refused, and all end in time
    assert in_time(4.0, judged=True) == (4.0, 0)
    # 2. at several times what the two can do, many are refused, and twice as many end in time
    (kept, refused), (collapsed, _) = in_time(32.0, judged=True), in_time(32.0, judged=False)
    assert refused > 100 and kept > 1.5 * collapsed

"""Comparisons of routing policies over eight virtual workers, each a table: five workloads, recorded traces, several
gateways, and the three ways to use prefill and decode.

Everything is measured from an empty cluster to the last answer. Goodput is good requests over the time in which
requests arrive, which is the same for all. Refused requests stay in every denominator; a request without a first token
has an endless one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.simulate import routing_loads
from bench.simulate.calls import ClusterRun, ClusterSpec
from bench.simulate.cluster import Cluster
from bench.simulate.fleet import WorkerSpec, gpu_coefficients
from bench.simulate.report import Row, Table, render
from bench.simulate.routing_loads import BLOCK_TOKENS, TRACE_BLOCK_TOKENS, WORKLOADS, Workload
from bench.simulate.worker import settings_of
from bench.simulate.workload import Job
from headrace.core.records import Role
from headrace.core.slo import Slo, goodput, percentile, tpot_s, ttft_s
from router.core.placement import Mode
from router.core.policies import Policy
from router.core.settings import RoutingSettings

NUM_WORKERS = 8
POLICIES = tuple(policy.value for policy in Policy)
WORKLOAD_SLO = Slo(ttft_s=1.0, tpot_s=0.1)
TRACE_SLO = Slo(ttft_s=10.0, tpot_s=0.2)
NUM_BLOCKS = 2_048
TRACE_BLOCKS = 1_000
TRACE_BLOCK_S = 0.004


def worker(
    slower: float = 1.0, role: Role = Role.COLOCATED, num_blocks: int = NUM_BLOCKS, dies_at: float | None = None
) -> WorkerSpec:
    """Of the workloads: 24 ms a decode step, 12,500 prompt tokens a second; a 70B model on a few GPUs."""
    settings = settings_of(
        block_size=BLOCK_TOKENS,
        max_num_batched_tokens=1_024,
        long_prefill_token_threshold=1_024,
        max_num_seqs=128,
        max_model_len=1 << 14,
    )
    return WorkerSpec(settings, num_blocks, gpu_coefficients(4.0), role, slower=slower, dies_at=dies_at)


def trace_worker() -> WorkerSpec:
    """Of the traces, whose prompts have up to 190,000 tokens: 30 ms a decode step, 20,000 prompt tokens a second."""
    settings = settings_of(
        block_size=TRACE_BLOCK_TOKENS,
        max_num_batched_tokens=2_048,
        long_prefill_token_threshold=2_048,
        max_num_seqs=128,
        max_model_len=1 << 18,
    )
    return WorkerSpec(settings, TRACE_BLOCKS, gpu_coefficients(2.0, step_s=0.015))


# ---- five workloads


def simulate(load: Workload, policy: str, seed: int, gateways: int = 1) -> ClusterRun:
    workers = [worker()] * NUM_WORKERS
    workers[0] = worker(load.slowest)
    return Cluster(ClusterSpec(tuple(workers), policy, gateways=gateways, seed=seed)).run(load.jobs(seed))


def quality(load: Workload, policies: Sequence[str], seeds: Sequence[int]) -> Table:
    """Medians over the seeds of what each run measures."""
    rows: list[Row] = []
    for policy in policies:
        runs = [figures(simulate(load, policy, seed), WORKLOAD_SLO) for seed in seeds]
        row: Row = {"policy": policy}
        row |= {name: median(float(run[name]) for run in runs) for name in runs[0]}
        rows.append(row)
    note = (
        f"{load.requests} requests at {load.rate:g}/s, medians of {len(seeds)} seeds; {_contract(WORKLOAD_SLO)}; "
        "busiest: prompt tokens that the busiest worker computed over the mean"
    )
    return Table(f"routing, {load.name}", note, rows)


def figures(run: ClusterRun, slo: Slo) -> Row:
    ttfts = [inf if (ttft := ttft_s(timeline)) is None else ttft for timeline in run.timelines]
    tpots = [tpot for timeline in run.timelines if (tpot := tpot_s(timeline.token_times)) is not None]
    return {
        "ttft p50": (percentile(ttfts, 0.5) or 0.0) * 1e3,
        "ttft p99": (percentile(ttfts, 0.99) or 0.0) * 1e3,
        "tpot p50": (percentile(tpots, 0.5) or 0.0) * 1e3,
        "goodput/s": goodput(run.timelines, slo, arrivals_s(run)),
        "hit %": 100 * run.hit_rate,
        "busiest": run.busiest,
        "cold": cold_siblings(run),
        "refused": sum(bool(outcome.refused) for outcome in run.outcomes),
    }


def arrivals_s(run: ClusterRun) -> float:
    """Seconds from the first arrival to the last."""
    instants = [outcome.job.at_s for outcome in run.outcomes]
    return max(instants) - min(instants)


def cold_siblings(run: ClusterRun) -> float:
    """Siblings of a burst that computed more than half of their prompt: the most of any burst."""
    cold = Counter(
        outcome.job.tenant
        for outcome in run.outcomes
        if outcome.job.tenant and outcome.timeline.cached_tokens < outcome.job.prompt_tokens / 2
    )
    return max(cold.values(), default=0)


# ---- traces


def trace_run(jobs: Sequence[Job], policy: str, seed: int = 0) -> ClusterRun:
    # A block is eight times as long as in the workloads.
    routing_settings = RoutingSettings(default_block_ms=1e3 * TRACE_BLOCK_S)
    spec = ClusterSpec((trace_worker(),) * NUM_WORKERS, policy, block_transfer_s=TRACE_BLOCK_S, seed=seed)
    spec = replace(spec, routing=routing_settings)
    return Cluster(spec).run(jobs)


def replay(folder: Path, name: str, policies: Sequence[str], count: int | None = None, speed: float = 1.0) -> Table:
    jobs = routing_loads.trace(folder, name, count, speed)
    pooled = routing_loads.pooled_hits(jobs, NUM_WORKERS * TRACE_BLOCKS, TRACE_BLOCK_TOKENS)
    rows: list[Row] = []
    for policy in policies:
        began = perf_counter()
        run = trace_run(jobs, policy)
        row: Row = {"policy": policy}
        row |= figures(run, TRACE_SLO)
        del row["cold"]
        row["of pooled"] = run.hit_tokens / TRACE_BLOCK_TOKENS / pooled if pooled else 0.0
        row["busy %"] = 100 * sum(run.busy_s) / len(run.busy_s) / run.end_s
        row["real s"] = perf_counter() - began
        rows.append(row)
    note = (
        f"{len(jobs)} requests, {speed:g} times as fast as recorded; {NUM_WORKERS} workers of {TRACE_BLOCKS} blocks of "
        f"{TRACE_BLOCK_TOKENS} tokens; of pooled: hit blocks over the {pooled} of one LRU over all that memory; "
        f"{_contract(TRACE_SLO)}"
    )
    return Table(f"routing, {name}", note, rows)


# ---- several gateways


def gateways(load: Workload, numbers: Sequence[int], seeds: Sequence[int]) -> Table:
    rows: list[Row] = []
    for number in numbers:
        runs = [figures(simulate(load, "cost", seed, number), WORKLOAD_SLO) for seed in seeds]
        row: Row = {"gateways": f"{number}"}
        rows.append(row | {name: median(float(run[name]) for run in runs) for name in runs[0]})
    return Table(f"gateways, {load.name}", f"medians of {len(seeds)} seeds; requests take turns", rows)


# ---- disaggregated, colocated, or both

GRID_TTFT_S = (0.5, 1.0, 2.0)
GRID_TPOT_S = (0.03, 0.05, 0.1)


def grid(seeds: Sequence[int]) -> Table:
    """Goodput of the three modes on the same workers, for each contract."""
    colocated = (worker(),) * NUM_WORKERS
    split = tuple(worker(role=role) for role in (Role.PREFILL, Role.DECODE) for _ in range(4))
    specs = {
        "disaggregated": ClusterSpec(split, mode=Mode.DISAGGREGATED),
        "colocated": ClusterSpec(colocated, mode=Mode.COLOCATED),
        "auto": ClusterSpec(split, mode=Mode.AUTO),
    }
    load = WORKLOADS["zipf"]
    runs = {
        name: [Cluster(replace(spec, seed=seed)).run(load.jobs(seed)) for seed in seeds] for name, spec in specs.items()
    }
    rows: list[Row] = []
    for ttft in GRID_TTFT_S:
        for tpot in GRID_TPOT_S:
            slo = Slo(ttft_s=ttft, tpot_s=tpot)
            row: Row = {"ttft <= s": f"{ttft:g}", "tpot <= ms": f"{tpot * 1e3:g}"}
            for name, made in runs.items():
                row[name] = median(goodput(run.timelines, slo, arrivals_s(run)) for run in made)
            rows.append(row)
    return Table("modes", f"goodput/s, {load.name}, {load.requests} requests, medians of {len(seeds)} seeds", rows)


def _contract(slo: Slo) -> str:
    return f"goodput: TTFT <= {slo.ttft_s:g} s and TPOT <= {(slo.tpot_s or 0.0) * 1e3:g} ms"


def run(
    what: str,
    trace: Sequence[str],
    workloads: Sequence[str] | None,
    policies: Sequence[str] | None,
    seeds: int,
    traces: str,
    requests: int | None,
    speed: float,
) -> None:
    """Print what was asked for. Raises SystemExit for a name that does not exist."""
    chosen = policies or POLICIES
    try:
        if what == "quality":
            for name in workloads or WORKLOADS:
                _show(quality(WORKLOADS[name], chosen, range(seeds)))
        elif what == "trace":
            for name in trace or routing_loads.TRACES:
                _show(replay(Path(traces), name, chosen, requests, speed))
        elif what == "gateways":
            _show(gateways(WORKLOADS["zipf"], (1, 4), range(seeds)))
        else:
            _show(grid(range(seeds)))
    except (KeyError, OSError) as error:
        raise SystemExit(f"no such workload or trace: {error}") from error


def _show(table: Table) -> None:
    print(f"\n{render(table)}", flush=True)

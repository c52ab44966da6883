"""The comparisons of the iteration scheduler, each a table: batching, chunk size, budgets, fairness between tenants.

All in virtual time, so that one factor changes and nothing else: one seed, one workload, one machine a table. Arrivals
are open-loop, at a share of what the machine completes with everything there from the start (`capacity`); runs go on
until the last request has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from time import perf_counter

from bench.simulate import workload
from bench.simulate.report import Row, Table, figures, render, service, service_gap
from bench.simulate.worker import BLOCK_SIZE, Cost, Run, Unsupported, VirtualWorker, default_cost, gpu_cost, settings_of
from bench.simulate.workload import Job, Lengths
from headrace.core.fairness import ServiceCounters, ServiceWeights
from headrace.core.predictor import Profile, StepPredictor, StepShape, fit
from headrace.core.slo import Slo
from headrace.core.step_shape import CostTable
from workers.core.scheduler import SchedulerSettings

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Of a token in a tenant's service (VTC, section 5.1)."""
STEP_SIGMA = 0.1
"""Spread of a step's time where budgets are compared; a predictor without anything left to miss proves nothing."""
POLICIES = ("fcfs", "decode_first", "aging", "deadline", "shortest_remaining", "mlfq", "fair", "slo_fair")


@dataclass(frozen=True)
class Machine:
    name: str
    cost: Cost
    max_num_seqs: int
    num_blocks: int
    short: tuple[int, int]
    long: tuple[int, int]
    """(prompt, output) tokens of the usual request and of the long one."""
    token_budget: int
    batch_window_s: float
    slo: Slo
    profile: Profile | None = field(default=None, hash=False)
    """Where costs were measured: the predictor's profile, whose quantiles are how much a step varies."""

    @property
    def most_tokens(self) -> int:
        """Of a prompt, and of an answer."""
        return 2 * self.long[0]


CPU = Machine("cpu", default_cost, 16, 4_096, (64, 64), (1_024, 128), 256, 0.5, Slo(10.0, 0.25))
GPU = Machine("gpu", gpu_cost, 64, 32_768, (200, 100), (4_000, 200), 1_024, 0.05, Slo(1.0, 0.02))
MACHINES = {machine.name: machine for machine in (CPU, GPU)}


def measured(profile: Profile) -> Machine:
    """The machine that `headrace profile` has measured, under the load of the small CPU."""
    cost = CostTable(profile.coefficients).cost_s
    return replace(CPU, name="measured", cost=cost, profile=profile)


@dataclass(frozen=True)
class Load:
    """What a comparison draws its requests from. `lengths`: mixed, lognormal, or the path of a recorded trace."""

    machine: Machine
    lengths: str = "mixed"
    requests: int = 300
    seed: int = 1

    def draw(self) -> Lengths:
        """Raises OSError when a trace is not there."""
        machine = self.machine
        if self.lengths == "mixed":
            return workload.mixed(machine.short, machine.long, long_share=0.1)
        if self.lengths == "lognormal":
            return workload.lognormal(*machine.short, sigma=1.0, most=machine.most_tokens)
        return workload.sampled(workload.trace(Path(self.lengths), 2_000), machine.most_tokens)

    def jobs(self, instants: Callable[[Random, float], Sequence[float]], share: float) -> list[Job]:
        """`instants(rng, rate)`; the rate is `share` of the machine's capacity."""
        rng = Random(self.seed)
        return workload.make(rng, instants(rng, share * capacity(self)), self.draw())

    def steady(self, share: float) -> list[Job]:
        return self.jobs(lambda rng, rate: workload.poisson(rng, rate, self.requests), share)

    def at_once(self) -> list[Job]:
        return workload.make(Random(self.seed), [0.0] * self.requests, self.draw())


@cache
def capacity(load: Load) -> float:
    """Requests a second when all are there from the start: continuous batching, the machine's own budget."""
    return load.requests / simulate(load, settings(load.machine), load.at_once()).end_s


def settings(machine: Machine, **changes: object) -> SchedulerSettings:
    """The machine's settings but for `changes`. Raises Unsupported when this scheduler has no such setting."""
    values: dict[str, object] = {
        "max_num_batched_tokens": machine.token_budget,
        "max_num_seqs": machine.max_num_seqs,
        "long_prefill_token_threshold": machine.token_budget,
        "max_model_len": 4 * machine.most_tokens,
    }
    return settings_of(**(values | changes))


def simulate(
    load: Load,
    chosen: SchedulerSettings,
    jobs: Sequence[Job],
    *,
    varies: bool = False,
    predictor: StepPredictor | None = None,
) -> Run:
    """`varies`: steps differ from their costs by chance, by what was measured of that or by STEP_SIGMA."""
    machine = load.machine
    ratios = machine.profile.ratios if varies and machine.profile else ()
    sigma = STEP_SIGMA if varies and not ratios else 0.0
    worker = VirtualWorker(
        chosen, machine.num_blocks, machine.cost, sigma=sigma, ratios=ratios, seed=load.seed, predictor=predictor
    )
    return worker.run(jobs)


# ---- 1: who shares a batch


def batching(load: Load) -> Table:
    """Static and window (dynamic) batching against continuous (article, sections 1-3)."""
    machine = load.machine
    rows: list[Row] = []
    for name in ("static", "window", "continuous"):
        chosen = settings(machine, batching=name, batch_window_s=machine.batch_window_s)
        offline = figures(simulate(load, chosen, load.at_once()))
        online = simulate(load, chosen, load.steady(0.5))
        rows.append({"batching": name, "offline out tok/s": offline["out tok/s"], **figures(online)})
    note = f"all at once (offline), then Poisson at 50 % of capacity; window {machine.batch_window_s:g} s"
    return Table(_title("batching", load), note, rows)


# ---- 2: how large a chunk


def chunks(load: Load) -> Table:
    """The chunk curve (article, sections 6-8 and 13): one chunk, and every decode, fit into a step."""
    machine = load.machine
    rows: list[Row] = []
    for chunk in (16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, None):
        most = 4 * machine.most_tokens if chunk is None else chunk
        chosen = settings(
            machine,
            long_prefill_token_threshold=most,
            max_num_batched_tokens=machine.max_num_seqs + most,
        )
        run = simulate(load, chosen, load.steady(0.7))
        rows.append({"chunk": "unlimited" if chunk is None else f"{chunk}", **figures(run, machine.slo)})
    return Table(_title("chunks", load), f"Poisson at 70 % of capacity; {_contract(machine.slo)}", rows)


# ---- 3: tokens or milliseconds


def budget(load: Load) -> Table:
    """Fixed token budgets against a time budget that the predictor turns into chunks (sections 9, 11, 12)."""
    machine = load.machine
    target_s = machine.slo.itl_s or 0.0
    loads = {
        "mix": load.steady(0.7),
        "burst": load.jobs(
            lambda rng, rate: workload.burst(rng, 0.5 * rate, load.requests, 20 / rate, size=10), share=0.7
        ),
    }
    make_predictor = trained(machine, load.seed)
    # Not more: a share of it is what prefills get whatever the time budget says.
    largest = 2 * machine.token_budget
    choices: dict[str, dict[str, object]] = {
        f"{tokens} tokens": {"max_num_batched_tokens": tokens, "long_prefill_token_threshold": tokens}
        for tokens in (machine.token_budget // 8 * 2**n for n in range(7))
    }
    for quantile in (0.5, 0.95, 0.99):
        choices[f"{target_s * 1e3:g} ms at p{quantile * 100:g}"] = {
            "max_num_batched_tokens": largest,
            "long_prefill_token_threshold": largest,
            "itl_target_s": target_s,
            "itl_quantile": quantile,
        }
    rows: list[Row] = []
    for name, jobs in loads.items():
        for choice, changes in choices.items():
            predictor = make_predictor() if "itl_target_s" in changes else None
            run = simulate(load, settings(machine, **changes), jobs, varies=True, predictor=predictor)
            held = [step for step in run.steps if step.shape.decode_rows and step.shape.prefill_tokens]
            late = sum(step.end_s - step.begin_s > target_s for step in held)
            rows.append(
                {"load": name, "budget": choice, "late %": 100 * late / max(1, len(held)), **figures(run, machine.slo)}
            )
    varied = "as measured" if machine.profile else f"by {STEP_SIGMA:.0%} at random"
    note = (
        f"70 % of capacity; steps vary {varied}; late: steps with decodes and a chunk that take "
        f"more than {target_s * 1e3:g} ms; {_contract(machine.slo)}"
    )
    return Table(_title("budget", load), note, rows)


def trained(machine: Machine, seed: int, samples: int = 1_000) -> Callable[[], StepPredictor]:
    """Makes fresh predictors with one profile: the measured one, or one of the machine's own costs."""
    if (profile := machine.profile) is not None:
        return lambda: StepPredictor(profile)
    rng = Random(seed)
    shapes = [_some_shape(rng, machine) for _ in range(samples)]
    samples_s = [(shape, machine.cost(shape) * rng.lognormvariate(0.0, STEP_SIGMA)) for shape in shapes]
    fitted = fit(samples_s, {"model": "simulated", "machine": machine.name})
    return lambda: StepPredictor(fitted)


def _some_shape(rng: Random, machine: Machine) -> StepShape:
    """A decode step, a chunk, or both; chunk sizes spread over all orders of magnitude."""
    decodes = rng.randint(0, machine.max_num_seqs)
    chunk = 0 if decodes and rng.random() < 0.3 else round(2 ** rng.uniform(0, 13))
    start = rng.randint(0, machine.most_tokens)
    return StepShape(
        decode_rows=decodes,
        decode_context=sum(rng.randint(1, machine.most_tokens) for _ in range(decodes)),
        prefill_rows=int(chunk > 0),
        prefill_tokens=chunk,
        prefill_context=chunk * start + chunk * chunk // 2,
        sampled_rows=decodes,
    )


# ---- 4: who gets how much


def fairness(load: Load) -> Table:
    """Two tenants that are backlogged throughout, one with prompts 100 times as long (sections 14, 15, 17)."""
    machine = load.machine
    small, large, answer = machine.long[0] // 100, machine.long[0] // 100 * 100, machine.short[1]
    pairs, singles = 200, 1_500
    jobs = [
        job
        for _ in range(pairs)
        for job in (Job(0, large, answer, tenant="long"), Job(0, small, answer, tenant="short"))
    ]
    jobs += [Job(0, small, answer, tenant="short")] * singles
    horizon_s = 500 * machine.cost(StepShape(machine.max_num_seqs, 0, 1, machine.token_budget, 0))
    # A pool that is small beside all the service makes the bound mean something.
    num_blocks = machine.num_blocks // 16
    rows: list[Row] = []
    for policy, weight in [*((policy, 1.0) for policy in POLICIES), ("fair", 2.0)]:
        service = ServiceCounters(ServiceWeights(INPUT_WEIGHT, OUTPUT_WEIGHT, tenants={"long": weight}))
        worker = VirtualWorker(settings(machine, policy=policy), num_blocks, machine.cost, service=service)
        run = worker.run(jobs, until_s=horizon_s)
        name = policy if weight == 1.0 else f"{policy}, long weighs {weight:g}"
        rows.append({"policy": name, **_shares(run, weight)})
    bound = 2 * max(INPUT_WEIGHT * large, OUTPUT_WEIGHT * num_blocks * BLOCK_SIZE)
    note = (
        f"prompts of {large} and {small} tokens, answers of {answer}, {horizon_s:.0f} s; service in tokens "
        f"({INPUT_WEIGHT:g} x input + {OUTPUT_WEIGHT:g} x output) over the tenant's weight, greatest gap over any "
        f"interval; VTC's bound {bound:,.0f}"
    )
    return Table(f"fairness, {machine.name}", note, rows)


def _shares(run: Run, weight: float) -> Row:
    """The long tenant's share of the service so far, over time; the gap; how many requests each got done.

    weight: of the long tenant.
    """
    for tenant in ("long", "short"):
        if all(outcome.scheduled_at is not None for outcome in run.outcomes if outcome.job.tenant == tenant):
            raise RuntimeError(f"tenant {tenant} was not backlogged to the end")
    long, short = (service(run.steps, tenant, INPUT_WEIGHT, OUTPUT_WEIGHT) for tenant in ("long", "short"))
    row: Row = {}
    for quarter in (1, 2, 3, 4):
        at = len(run.steps) * quarter // 4 - 1
        row[f"long % at {quarter}/4"] = 100 * long[at] / (long[at] + short[at])
    row["gap tokens"] = service_gap([served / weight for served in long], short)
    for tenant in ("long", "short"):
        timelines = [outcome.timeline for outcome in run.outcomes if outcome.job.tenant == tenant]
        row[f"{tenant} done"] = sum(timeline.completed for timeline in timelines)
    return row


def _title(name: str, load: Load) -> str:
    return f"{name}, {load.machine.name}, lengths {load.lengths}, {load.requests} requests, seed {load.seed}"


def _contract(slo: Slo) -> str:
    ttft, itl = slo.ttft_s or 0.0, slo.itl_s or 0.0
    return f"goodput: TTFT <= {ttft:g} s and the request's ITL p{slo.itl_share * 100:g} <= {itl * 1e3:g} ms"


def _read(path: str) -> Profile:
    return Profile.from_json(Path(path).read_bytes())


SCENARIOS: dict[str, Callable[[Load], Table]] = {
    "batching": batching,
    "chunks": chunks,
    "budget": budget,
    "fairness": fairness,
}


def run(
    names: Sequence[str],
    machines: Sequence[str],
    lengths: str,
    requests: int,
    seed: int,
    profile: str | None = None,
) -> None:
    """Print each comparison on each machine, or on the one of a profile's file.

    Raises SystemExit after all, when this tree could not make one of them.
    """
    try:
        chosen = [MACHINES[name] for name in machines] if profile is None else [measured(_read(profile))]
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot read the profile: {error}") from error
    missing = 0
    for name in names:
        for load in (Load(machine, lengths, requests, seed) for machine in chosen):
            began = perf_counter()
            try:
                table = SCENARIOS[name](load)
            except Unsupported as error:
                missing += 1
                print(f"\n== {name}, {load.machine.name}: not possible here: {error}", flush=True)
            except OSError as error:
                raise SystemExit(f"cannot read the trace: {error}") from error
            else:
                print(f"\n{render(table)}\n({perf_counter() - began:.1f} s of real time)", flush=True)
    if missing:
        raise SystemExit(1)

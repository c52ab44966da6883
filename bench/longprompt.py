"""What a long prompt does to the tokens of those who decode: the default model, scheduler and runner in one process.

    one prompt   some requests decode, one of thousands of tokens arrives: the longest gap between two tokens, with
                 chunks by predicted time, with fixed chunks, and with the prompt as a single step
    mix          prompts of all lengths arrive at random beside running decodes: gaps at p95 and p99 under a time
                 budget that comes from the ITL target, and under a budget of tokens alone

Step times are learned here, in a warm-up that nothing is measured in. Trials alternate, figures are medians of rounds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headrace.core.predictor import StepPredictor, StepShape
from headrace.core.slo import percentile
from headrace.ids import RequestId, RequestKey
from headrace.paths import cache_root
from headrace.sampling import SamplingParams
from workers.core.blocks import BlockPool
from workers.core.plan import StepPlan
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request
from workers.core.scheduler import Scheduler, SchedulerSettings
from workers.main import scheduler_settings, torch_runner
from workers.model.prepare import DEFAULT_MODEL, prepare_model
from workers.runner.base import Runner
from workers.spec import WorkerSpec

MAX_LEN, CONTEXT, QUIET_STEPS = 8192, 64, 40
"""Prompts of CONTEXT tokens decode; QUIET_STEPS of their steps are measured before the long prompt comes."""
TOKEN_BUDGET = 512
WARM_UP = ((64, 1500), (256, 3000), (16, 400))
"""(chunk, prompt) in tokens: sizes and positions that the predictor is to have seen."""


@dataclass(slots=True)
class Trial:
    """Seconds, but for tokens."""

    steps: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Between two tokens of the requests that decode all the time."""
    ttfts: list[float] = field(default_factory=list)
    chunk_s: float = 0.0
    """Longest predicted time of what a step prefilled, alone, at the quantile that budgets use."""
    longest_chunk: int = 0

    def gap(self, share: float) -> float:
        return percentile(self.gaps, share) or 0.0


class Engine:
    """One scheduler before the runner, stepped by hand."""

    def __init__(self, runner: Runner, settings: SchedulerSettings, predictor: StepPredictor, seed: int) -> None:
        self.trial = Trial()
        self._runner = runner
        self._predictor = predictor
        self._quantile = settings.itl_quantile
        self._random = random.Random(seed)
        pool = BlockPool(runner.num_blocks, settings.block_size)
        self._scheduler = Scheduler(settings, pool, PrefixCache(pool), predictor)
        self._keys = 0
        self._running: dict[RequestKey, float] = {}
        """Instant of the last token of each request that decodes all the time."""

    def submit(self, num_tokens: int, max_tokens: int, *, watched: bool = False) -> Request:
        self._keys += 1
        key = RequestKey(self._keys)
        ids = [self._random.randrange(100, 40000) for _ in range(num_tokens)]
        sampling = SamplingParams(max_tokens, min_tokens=max_tokens, ignore_eos=True)
        request = Request(key, RequestId(str(key)), 1, ids, sampling, b"bench")
        rejected = self._scheduler.submit(request, time.perf_counter())
        if rejected is not None:
            raise SystemExit(f"the scheduler refuses a prompt of {num_tokens} tokens: {rejected.reason}")
        if watched:
            self._running[key] = 0.0
        return request

    def decode(self, rows: int) -> float:
        """`rows` endless decodes; the median of their steps in seconds."""
        watched = [self.submit(CONTEXT, MAX_LEN - CONTEXT - 1, watched=True) for _ in range(rows)]
        while any(request.first_token_at is None for request in watched):
            self.step()
        self.trial = Trial()
        for _ in range(QUIET_STEPS):
            self.step()
        return statistics.median(self.trial.steps)

    def step(self) -> None:
        began = time.perf_counter()
        plan = self._scheduler.schedule(began)
        if plan is None:
            raise SystemExit("the scheduler has nothing to run although requests decode")
        chunk_s = self._predict_chunk_s(plan)
        result = self._runner.run(plan)
        now = time.perf_counter()
        events = self._scheduler.apply(plan, result, now)
        self._scheduler.catch_up()
        trial = self.trial
        trial.steps.append(now - began)
        trial.chunk_s = max(trial.chunk_s, chunk_s)
        trial.longest_chunk = max(trial.longest_chunk, plan.num_prefill_tokens)
        for key in events.token_keys:
            if key in self._running:
                trial.gaps.append(now - self._running[key])
                self._running[key] = now

    def _predict_chunk_s(self, plan: StepPlan) -> float:
        whole = StepShape.of(plan.num_tokens, plan.start_pos, plan.samples, plan.num_decode_rows)
        chunk = StepShape(0, 0, whole.prefill_rows, whole.prefill_tokens, whole.prefill_context, 0)
        return self._predictor.predict_s(chunk, self._quantile) if whole.prefill_rows else 0.0


class Bench:
    def __init__(self, threads: int, most_tokens: int, target_s: float, quantile: float, decodes: int) -> None:
        folder = prepare_model(DEFAULT_MODEL, cache_root())
        spec = WorkerSpec.model_validate(
            {
                "worker_id": "bench",
                "incarnation": "0",
                "role": "colocated",
                "model_path": str(folder),
                "max_model_len": MAX_LEN,
                "max_num_batched_tokens": most_tokens,
                "threads": threads,
                "kv_cache_bytes": 3 << 30,
                "cluster_token": "",
            }
        )
        self._runner = torch_runner(spec)
        base = replace(
            scheduler_settings(spec, self._runner),
            max_num_batched_tokens=TOKEN_BUDGET,
            chunk_mode="fixed",
            itl_quantile=quantile,
        )
        self.settings = {
            "adaptive": replace(base, chunk_mode="adaptive", itl_target_s=target_s),
            "fixed 256": replace(base, long_prefill_token_threshold=256),
            "fixed 512": replace(base, long_prefill_token_threshold=TOKEN_BUDGET),
            "one step": replace(base, max_num_batched_tokens=most_tokens, long_prefill_token_threshold=most_tokens),
        }
        self.decodes = decodes
        self.predictor = StepPredictor()
        for chunk, prompt in WARM_UP:
            self._one_prompt(replace(base, long_prefill_token_threshold=chunk), self.predictor, prompt, 0)

    def one_prompt(self, mode: str, num_tokens: int, seed: int) -> tuple[float, Trial]:
        """The median step of decodes alone, and what happened from the prompt's arrival to its first token."""
        # A step of the whole prompt is no news for the next trial.
        predictor = StepPredictor() if mode == "one step" else self.predictor
        return self._one_prompt(self.settings[mode], predictor, num_tokens, seed)

    def _one_prompt(
        self, settings: SchedulerSettings, predictor: StepPredictor, num_tokens: int, seed: int
    ) -> tuple[float, Trial]:
        engine = Engine(self._runner, settings, predictor, seed)
        quiet_s = engine.decode(self.decodes)
        engine.trial = Trial()
        request = engine.submit(num_tokens, 2)
        while request.first_token_at is None:
            engine.step()
        engine.trial.ttfts.append(request.first_token_at - request.accepted_at)
        return quiet_s, engine.trial

    def mix(self, mode: str, seconds: float, rate: float, seed: int) -> Trial:
        """Prompts of 16 to 2,048 tokens (evenly over the logarithm), `rate` a second, for `seconds`."""
        engine = Engine(self._runner, self.settings[mode], self.predictor, seed)
        engine.decode(self.decodes)
        engine.trial = Trial()
        rng = random.Random(seed)
        began = time.perf_counter()
        due, came = began + rng.expovariate(rate), []
        while (now := time.perf_counter()) < began + seconds:
            while due <= now:
                came.append(engine.submit(int(2 ** rng.uniform(4, 11)), rng.randrange(8, 65)))
                due += rng.expovariate(rate)
            engine.step()
        engine.trial.ttfts = [r.first_token_at - r.accepted_at for r in came if r.first_token_at is not None]
        return engine.trial


def run(
    *,
    threads: int,
    prompt: int,
    decodes: int,
    rounds: int,
    itl_target_ms: float,
    itl_quantile: float,
    mix: bool,
    seconds: float,
    rate: float,
) -> None:
    bench = Bench(threads, prompt + 128, itl_target_ms / 1e3, itl_quantile, decodes)
    print(f"warm-up: {bench.predictor.samples} steps, median error {bench.predictor.error:.1%}", flush=True)
    if mix:
        _run_mix(bench, rounds, seconds, rate, itl_target_ms)
    else:
        _run_one_prompt(bench, rounds, prompt)


def _run_one_prompt(bench: Bench, rounds: int, prompt: int) -> None:
    modes = ("adaptive", "fixed 256", "one step")
    columns = ("decode step", "gap p50", "p99", "longest", "2 x step + chunk", "first token")
    lines: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in modes}
    for turn in range(rounds):
        for mode in modes if turn % 2 == 0 else modes[::-1]:
            quiet_s, trial = bench.one_prompt(mode, prompt, turn)
            bound_s = 2 * quiet_s + trial.chunk_s
            seconds = (quiet_s, trial.gap(0.5), trial.gap(0.99), max(trial.gaps), bound_s, trial.ttfts[0])
            lines[mode].append(seconds)
            text = ", ".join(f"{name} {value * 1e3:.0f}" for name, value in zip(columns, seconds, strict=True))
            within = sum(gap < bound_s for gap in trial.gaps) / len(trial.gaps)
            print(
                f"  round {turn + 1} {mode}: {text} ms; chunks to {trial.longest_chunk} tokens; "
                f"{within:.1%} of {len(trial.gaps)} gaps within 2 x step + chunk",
                flush=True,
            )
    for mode, rows in lines.items():
        text = "  ".join(f"{name} {_spread([row[i] for row in rows])}" for i, name in enumerate(columns))
        print(f"{mode:10s} {text}", flush=True)


def _run_mix(bench: Bench, rounds: int, seconds: float, rate: float, target_ms: float) -> None:
    modes = ("adaptive", "fixed 512")
    trials: dict[str, list[Trial]] = {mode: [] for mode in modes}
    for turn in range(rounds):
        for mode in modes if turn % 2 == 0 else modes[::-1]:
            trials[mode].append(bench.mix(mode, seconds, rate, turn))
    for mode, ones in trials.items():
        shares = {
            name: [trial.gap(share) for trial in ones] for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
        }
        text = "  ".join(f"{name} {_spread(values)}" for name, values in shares.items())
        ttft = [statistics.median(trial.ttfts) for trial in ones]
        print(
            f"{mode:10s} ITL {text}  longest {_spread([max(t.gaps) for t in ones])}  target {target_ms:.0f} ms  "
            f"TTFT p50 {_spread(ttft)}  answered {[len(t.ttfts) for t in ones]}",
            flush=True,
        )


def _spread(values: Sequence[float]) -> str:
    low, high = min(values) * 1e3, max(values) * 1e3
    return f"{statistics.median(values) * 1e3:.0f} ({low:.0f}-{high:.0f}) ms"

"""`headrace profile`: measures a worker's steps, fits their times, and leaves the profile where that worker looks.

A grid of decode rows, contexts and prefill tokens is measured in random order, pass after pass, so that a noisy minute
touches every point a little; a point is the median of its passes. The fit is judged on random mixed steps that are
measured in the same passes and not fitted: against each time that they took, as a scheduler meets it, and against their
medians, which have less of the machine's own noise.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from statistics import median

from cluster.backend import process_env
from cluster.config import Deployment, load_config, read_machine, read_model_facts, resolve
from cluster.prepare import check_path, prepare_model
from headrace.core.predictor import Profile, StepShape, fit
from headrace.errors import StartupError
from headrace.ids import RequestKey
from headrace.sampling import SamplingParams
from workers.core.plan import StepPlan
from workers.predictor_file import default_profile_path, profile_key
from workers.runner.base import Runner
from workers.spec import WorkerSpec

Sample = tuple[StepShape, float]
_NUM_IDS = 256
"""Token ids of the measured rows are below: every vocabulary has so many."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    contexts_each: int
    """How many of them, drawn anew, meet each pair of rows and tokens."""
    chunks: tuple[int, ...]
    """Prefill tokens of a step."""
    held_out: int
    """Random steps."""
    passes: int
    limit_s: float
    """When it is over, passes after the first stop where they are."""


QUICK = Effort((0, 1, 4, 16, 48), (16, 512), 1, (0, 16, 64, 256), held_out=20, passes=5, limit_s=42.0)
FULL = Effort(
    (0, 1, 2, 4, 8, 16, 32, 48, 64),
    (16, 256, 1024, 2048),
    2,
    (0, 4, 32, 128, 256, 512),
    held_out=50,
    passes=5,
    limit_s=240.0,
)


@dataclass(frozen=True, slots=True)
class Step:
    """A step to measure: contexts before it, one each decode row, and (start, tokens, is the last of its prompt)."""

    decodes: tuple[int, ...]
    chunks: tuple[tuple[int, int, bool], ...]

    def columns(self) -> tuple[list[int], list[int], list[bool]]:
        """num_tokens, start_pos, samples of a plan."""
        return (
            [1] * len(self.decodes) + [tokens for _, tokens, _ in self.chunks],
            [*self.decodes, *(start for start, _, _ in self.chunks)],
            [True] * len(self.decodes) + [last for _, _, last in self.chunks],
        )

    @property
    def shape(self) -> StepShape:
        return StepShape.of(*self.columns(), len(self.decodes))


class Meter:
    """Runs steps over random blocks of a runner's pool, no block twice in a step."""

    def __init__(self, runner: Runner, spec: WorkerSpec, rng: random.Random) -> None:
        self._runner = runner
        self._spec = spec
        self._rng = rng

    def fits(self, step: Step) -> bool:
        """Whether the worker could be given this step: rows, tokens, lengths, blocks."""
        counts, starts, _ = step.columns()
        blocks = self._runner.layout.blocks_for
        return (
            0 < len(counts) <= self._spec.max_num_seqs
            and sum(counts) <= self._spec.max_num_batched_tokens
            and max(start + count for start, count in zip(starts, counts, strict=True)) <= self._spec.max_model_len
            and sum(blocks(start + count) for start, count in zip(starts, counts, strict=True))
            <= self._runner.num_blocks
        )

    def measure_s(self, step: Step) -> float:
        plan = self._plan(step)
        began = time.perf_counter()
        self._runner.run(plan)
        return time.perf_counter() - began

    def _plan(self, step: Step) -> StepPlan:
        counts, starts, samples = step.columns()
        each = [self._runner.layout.blocks_for(start + count) for start, count in zip(starts, counts, strict=True)]
        blocks = iter(self._rng.sample(range(self._runner.num_blocks), sum(each)))
        return StepPlan(
            0,
            [RequestKey(row) for row in range(len(counts))],
            counts,
            starts,
            [self._rng.randrange(_NUM_IDS) for _ in range(sum(counts))],
            [[next(blocks) for _ in range(count)] for count in each],
            samples,
            [SamplingParams(max_tokens=1)] * len(counts),
            [()] * len(counts),
            num_decode_rows=len(step.decodes),
        )


def grid(effort: Effort, fits: Callable[[Step], bool], rng: random.Random) -> list[Step]:
    """Every pair of rows and tokens that fits, at some contexts. The tokens of a step are one chunk or several, some of
    them the last of a prompt.
    """
    steps = []
    for rows in effort.rows:
        for tokens in effort.chunks:
            for context in rng.sample(effort.contexts, effort.contexts_each):
                pieces = min(rng.choice((1, 1, 2, 4)), max(1, tokens // 8))
                sizes = [tokens // pieces] * (pieces - 1) + [tokens - tokens // pieces * (pieces - 1)]
                chunks = tuple((context, size, rng.random() < 0.5) for size in sizes if size)
                steps.append(Step((context,) * rows, chunks))
    return [step for step in steps if fits(step)]


def random_steps(spec: WorkerSpec, fits: Callable[[Step], bool], rng: random.Random) -> Iterator[Step]:
    """An endless mixed workload: decodes alone, prefills alone and both, sizes and contexts evenly over their logs."""
    longest = max(1, spec.max_model_len // 2)
    while True:
        decodes = _log_uniform(rng, spec.max_num_seqs) if rng.random() < 0.8 else 0
        pieces = rng.choice((0, 0, 1, 1, 2, 3))
        chunks = tuple(
            (
                rng.choice((0, _log_uniform(rng, longest))),
                _log_uniform(rng, spec.long_prefill_token_threshold),
                rng.random() < 0.5,
            )
            for _ in range(pieces)
        )
        step = Step(tuple(_log_uniform(rng, min(longest, 2048)) for _ in range(decodes)), chunks)
        if fits(step):
            yield step


def _log_uniform(rng: random.Random, most: int) -> int:
    return min(most, int(2 ** rng.uniform(0.0, most.bit_length())))


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile and the held-out steps that it was checked on: every time they took, and the medians of each step."""

    profile: Profile
    single: list[Sample]
    medians: list[Sample]
    noise: float | None
    """By how much, as a share, a step typically differs from itself a pass before; None: one pass only."""

    def lines(self) -> Iterator[str]:
        """The error on the held-out steps for people: all, and by kind."""
        repeats = "no step was repeated" if self.noise is None else f"a repeated step differs by {self.noise:.1%}"
        yield f"fitted {self.profile.samples} grid steps; {repeats}; median absolute errors on random steps:"
        kinds: dict[str, list[Sample]] = {"decode": [], "prefill": [], "mixed": []}
        for sample in self.single:
            shape = sample[0]
            kinds["decode" if not shape.prefill_rows else "mixed" if shape.decode_rows else "prefill"].append(sample)
        for name, samples in {"all": self.single, **kinds, "medians": self.medians}.items():
            if samples:
                yield f"  {name:8s} {self.profile.checked(samples).held_out_error:6.1%}   of {len(samples)}"


def measure(runner: Runner, spec: WorkerSpec, effort: Effort, tell: Callable[[str], None]) -> Measured:
    """The profile of this runner, checked on steps that were not fitted. `tell` gets the progress."""
    rng = random.Random(0)
    meter = Meter(runner, spec, rng)
    steps = grid(effort, meter.fits, rng)
    if not steps:
        raise StartupError("the KV pool or the limits of a step are too small for any step of the profile")
    num_fitted = len(steps)
    steps += islice(random_steps(spec, meter.fits, rng), effort.held_out)
    # Buffers grow and pages are touched at the biggest step, before anything counts.
    meter.measure_s(max(steps, key=lambda step: step.shape.rows))
    took = _passes(meter, steps, effort, rng, tell)
    medians = [(step.shape, median(times)) for step, times in zip(steps, took, strict=True)]
    spread = [abs(second / first - 1.0) for times in took for first, second in pairwise(times)]
    single = [(steps[at].shape, one) for at in range(num_fitted, len(steps)) for one in took[at]]
    profile = fit(medians[:num_fitted], profile_key(spec, runner)).checked(single)
    return Measured(profile, single, medians[num_fitted:], median(spread) if spread else None)


def _passes(
    meter: Meter, steps: list[Step], effort: Effort, rng: random.Random, tell: Callable[[str], None]
) -> list[list[float]]:
    """Seconds of each step, at least one."""
    took: list[list[float]] = [[] for _ in steps]
    until = time.monotonic() + effort.limit_s
    for turn in range(effort.passes):
        for count, at in enumerate(rng.sample(range(len(steps)), len(steps))):
            if turn and time.monotonic() > until:
                return took
            took[at].append(meter.measure_s(steps[at]))
            tell(f"pass {turn + 1} of at most {effort.passes}, step {count + 1} of {len(steps)}")
    return took


def run(source: str | None, out: Path | None, threads: int | None, quick: bool) -> None:
    """Measures the first pool's worker of a configuration or a model. Raises StartupError, one line a fault."""
    if out is not None and not out.absolute().parent.is_dir():
        raise StartupError(f"{out}: its folder does not exist")
    if out is not None and out.is_dir():
        raise StartupError(f"{out}: is a folder; name a file in it")
    deployment = _resolved(source, threads)
    spec, *others = deployment.workers
    # Thread counts are read when the libraries load: as the launcher sets them for a worker, and before it.
    os.environ.update(process_env(spec))
    from workers.main import torch_runner

    tell = _Progress()
    try:
        tell(f"loading {spec.model_path}")
        runner = torch_runner(spec)
        measured = measure(runner, spec, QUICK if quick else FULL, tell)
    finally:
        tell.end()
    for line in measured.lines():
        print(line)
    path = out or default_profile_path(measured.profile.key)
    _write(path, measured.profile)
    print(f"profile of {spec.worker_id} ({spec.threads} threads): {path}")
    for count in sorted({other.threads for other in others} - {spec.threads}):
        print(f"other workers have {count} threads and need their own: headrace profile --threads {count}")


def _resolved(source: str | None, threads: int | None) -> Deployment:
    config = load_config(source, pool_overrides={} if threads is None else {"threads": threads})
    check_path(config.model.path)
    folder = asyncio.run(prepare_model(config.model.path, kernels=True))
    return resolve(config, read_model_facts(folder, config.model.weight_format), read_machine(), lambda: "profile")


def _write(path: Path, profile: Profile) -> None:
    """As a whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(profile.to_json())
        temporary.replace(path)
    except OSError as error:
        raise StartupError(f"{path}: the profile cannot be written ({error.strerror or error})") from error


class _Progress:
    """One line on standard error that is written over; nothing where that is no terminal."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def end(self) -> None:
        self("")

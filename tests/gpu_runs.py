"""Drives a runner by hand through whole generations: plans of mixed rows, block tables in no order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.ids import RequestKey
from headrace.sampling import SamplingParams
from tests.model_fixtures import LLAMA3_ROPE, tiny_model
from workers.core.plan import StepPlan
from workers.runner.base import Runner
from workers.runner.gpu_runner import GpuRunner

GREEDY = SamplingParams(max_tokens=99)
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"kv_heads": 2, "rope_scaling": LLAMA3_ROPE}),
    ("llama", {"kv_heads": 1, "heads": 3, "hidden": 96, "head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"kv_heads": 8, "sliding_window": 24, "tied": False}),
    ("qwen2", {"kv_heads": 2, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    ("qwen3", {"kv_heads": 2, "head_dim": 32, "tied": False}),
]
"""Every way in which a model of F1 differs: GQA, biases, QK-norm, windows, rotation, a head of its own."""


def gpu_runner(folder: Path, warm: bool = True, **options: Any) -> GpuRunner:
    """Over 40 blocks on the CPU, its graphs recorded; warm: after steps to warm up."""
    settings = {"num_blocks": 40, "device": "cpu", "max_seqs": 6, "max_batched_tokens": 96, "use_triton": False}
    runner = GpuRunner(folder, 256, **(settings | options))
    if warm:
        runner.warm_up()
    else:
        runner.graphs.record(runner.device)
    return runner


def model_of(tmp_path: Path, family: str = "llama", **config: Any) -> Path:
    return tiny_model(tmp_path, family, layers=2, **config)


@dataclass
class Row:
    """One request: what it computes next and where its KV is."""

    ids: list[int]
    table: list[int]
    sampling: SamplingParams = GREEDY
    done: int = 0
    prompt: int = 0
    logprobs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.ids)


def prompt_of(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 512, tokens).tolist()


def step_of(rows: Sequence[tuple[Row, int]], fed: Mapping[int, int] | None = None, **moves: Any) -> StepPlan:
    """Each row goes on by so many tokens, and samples when these are its last. fed: row -> its token is the one of that
    place in the step before."""
    plan = StepPlan(1, **moves)
    for number, (row, count) in enumerate(rows):
        end = row.done + count
        ids = [-1 - fed[number]] if fed and number in fed else row.ids[row.done : end]
        plan.keys.append(RequestKey(number))
        plan.num_tokens.append(count)
        plan.start_pos.append(row.done)
        plan.token_ids += ids
        plan.block_tables.append(row.table)
        plan.samples.append(end >= len(row.ids))
        plan.sampling.append(row.sampling)
        plan.banned.append(())
        plan.histories.append(row.ids if row.sampling.needs_history else None)
        plan.prompt_lens.append(row.prompt)
        row.done = end
    counts = [count for _, count in rows]
    plan.num_decode_rows = next((number for number, count in enumerate(counts) if count > 1), len(counts))
    return plan


def take(rows: Sequence[tuple[Row, int]], plan: StepPlan, runner: Runner) -> None:
    """Run the plan; rows that sampled have a token more."""
    result = runner.run(plan)
    sampled = [row for (row, _), samples in zip(rows, plan.samples, strict=True) if samples]
    for number, (row, token) in enumerate(zip(sampled, result.token_ids, strict=True)):
        row.ids.append(token)
        row.logprobs.append(result.logprobs.get(number))


def story(runner: Runner, sampling: SamplingParams = GREEDY) -> Iterator[Row]:
    """Three requests in mixed steps: prompts in chunks that end inside blocks, beside rows that decode already; the
    last one starts at position 21 of what the first one computed, in a block copied for it. Yields them when done.
    """
    first = Row(prompt_of(1, 45), [3, 17, 5, 11, 0, 9], sampling)
    second = Row(prompt_of(2, 9), [12, 30, 7], sampling)
    third = Row([*first.ids[:21], *prompt_of(3, 30)], [3, 38, 21, 14, 6], sampling, done=21)

    def go(*rows: tuple[Row, int], **moves: Any) -> None:
        take(rows, step_of(rows, **moves), runner)

    go((first, 23), (second, 5))
    go((first, 22), (second, 4))
    for _ in range(3):
        go((first, 1), (second, 1))
    go((first, 1), (second, 1), (third, 17), copies=[(17, 38)])
    go((first, 1), (second, 1), (third, 13))
    for _ in range(6):
        go((first, 1), (second, 1), (third, 1))
    yield from (first, second, third)


def outputs(runner: Runner, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    return [row.ids[row.prompt :] for row in story(runner, sampling)]

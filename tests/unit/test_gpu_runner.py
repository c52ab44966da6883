"""The device runner gives the CPU runner's tokens, whatever the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import InvariantError, StartupError
from headrace.sampling import SamplingParams
from tests.gpu_runs import FAMILIES, Row, gpu_runner, model_of, outputs, prompt_of, step_of, story, take
from tests.model_fixtures import plan_of, watch_logits
from workers.core.plan import StepPlan
from workers.model.weight_format import WeightFormat
from workers.runner.gpu_runner import GpuRunner
from workers.runner.torch_runner import TorchRunner

DRAWN = SamplingParams(
    max_tokens=99,
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    min_p=0.005,
    seed=11,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((7, 2.0), (9, -3.0)),
    logprobs=3,
)

PLAIN = SamplingParams(max_tokens=99, temperature=0.8, seed=3)


def cpu_runner(folder: Path, **options: Any) -> TorchRunner:
    return TorchRunner(folder, 256, **({"num_blocks": 40} | options))


@pytest.mark.parametrize(("family", "config"), FAMILIES, ids=lambda value: value if isinstance(value, str) else "")
def test_tokens_are_those_of_the_cpu_runner_over_chunks_mixed_steps_and_a_prefix_hit_inside_a_block(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    folder = model_of(tmp_path, family, **config)
    assert outputs(gpu_runner(folder)) == outputs(cpu_runner(folder))


def test_seeded_tokens_and_their_logprobs_are_those_of_the_cpu_runner(tmp_path: Path) -> None:
    folder = model_of(tmp_path)
    for ours, wanted in zip(story(gpu_runner(folder), DRAWN), story(cpu_runner(folder), DRAWN), strict=True):
        assert ours.ids == wanted.ids
        for got, right in zip(ours.logprobs, wanted.logprobs, strict=True):
            assert got.top_ids == right.top_ids and len(got.top_ids) == 3
            assert got.logprob == pytest.approx(right.logprob, abs=1e-4)
            assert got.top_logprobs == pytest.approx(right.top_logprobs, abs=1e-4)


@pytest.mark.parametrize(("family", "config"), FAMILIES, ids=lambda value: value if isinstance(value, str) else "")
def test_logits_are_those_of_the_cpu_runner(
    tmp_path: Path, family: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_logits(monkeypatch)
    folder = model_of(tmp_path, family, **config)
    runner, wanted = gpu_runner(folder), cpu_runner(folder)
    ids = prompt_of(5, 60)
    done = 0
    for count in (7, 16, 30, *[1] * 7):
        plan = plan_of([(done, ids[done : done + count], [3, 17, 5, 11])])
        runner.run(plan)
        wanted.run(plan)
        done += count
        assert np.abs(runner._space.logits[0].numpy() - seen[-1]).max() < 1e-4


def test_banned_tokens_do_not_come(tmp_path: Path) -> None:
    runner, wanted = gpu_runner(model_of(tmp_path)), cpu_runner(model_of(tmp_path))
    plan = plan_of([(0, prompt_of(1, 9), [3]), (0, prompt_of(2, 9), [4])])
    best = runner.run(plan).token_ids
    plan.banned = [(best[0],), ()]
    again = runner.run(plan).token_ids
    assert again == wanted.run(plan).token_ids
    assert again[0] != best[0] and again[1] == best[1]


def test_without_graphs_and_in_other_company_the_tokens_are_the_same(tmp_path: Path) -> None:
    folder = model_of(tmp_path, "mistral", sliding_window=24)
    with_graphs, without = gpu_runner(folder), gpu_runner(folder, cuda_graphs=False)
    assert outputs(with_graphs) == outputs(without)
    assert with_graphs.counters["graph_padding_rows"] > 0
    assert without.counters["graph_eager_off"] > 0
    alone = gpu_runner(folder)
    row = Row(prompt_of(2, 9), [12, 30, 7])
    for count in (5, 4, *[1] * 11):
        take([(row, count)], step_of([(row, count)]), alone)
    assert row.ids[9:] == outputs(with_graphs)[1]


def test_padding_rows_of_a_graph_write_no_kv(tmp_path: Path) -> None:
    runner = gpu_runner(model_of(tmp_path), max_seqs=8)
    rows = [(Row(prompt_of(seed, 1), [10 + seed]), 1) for seed in range(5)]
    runner.kv_pool[:] = 171
    take(rows, step_of(rows), runner)
    assert runner.counters["graph_hits_8"] == 1
    blocks = runner.kv_pool.reshape(runner.num_blocks, -1)
    assert {block for block in range(40) if (blocks[block] != 171).any()} == {10, 11, 12, 13, 14}


def test_what_a_block_holds_behind_a_row_is_never_read(tmp_path: Path) -> None:
    folder = model_of(tmp_path)
    clean, dirty = gpu_runner(folder), gpu_runner(folder)
    clean.kv_pool[:] = 0
    dirty.kv_pool.view(np.float32)[:] = np.nan
    assert outputs(dirty) == outputs(clean)


def test_a_block_comes_back_from_the_host_and_moves_happen_in_the_order_of_the_plan(tmp_path: Path) -> None:
    runner = gpu_runner(model_of(tmp_path), host_blocks=3)
    assert 0.0 < runner.host_copy_block_s < 1.0
    blocks = runner.kv_pool.reshape(runner.num_blocks, -1)
    for block in range(4):
        blocks[block] = block + 1
    # Out before anything else; back over the block that went out; then the copy, of what came back.
    runner.run(StepPlan(0, swap_out=[(1, 2), (2, 0)]))
    runner.run(StepPlan(0, swap_out=[(3, 1)], swap_in=[(1, 1), (2, 3)], copies=[(3, 0)]))
    assert [int(blocks[block][0]) for block in range(4)] == [2, 4, 3, 2]
    assert runner.memory_plan()["host_kv"] == 3 * runner.layout.block_bytes


def test_a_preempted_request_goes_on_from_the_host_with_the_same_tokens(tmp_path: Path) -> None:
    folder = model_of(tmp_path)
    told = []
    for swaps in (False, True):
        runner = gpu_runner(folder, host_blocks=4)
        row, other = Row(prompt_of(1, 20), [3, 17, 5]), Row(prompt_of(2, 30), [3, 17])
        take([(row, 20)], step_of([(row, 20)]), runner)
        take([(row, 1)], step_of([(row, 1)]), runner)
        moves: dict[str, Any] = {}
        if swaps:
            out = [(3, 0), (17, 2)]
            take([(other, 30)], step_of([(other, 30)], swap_out=out), runner)
            row.table = [8, 9, 5]
            moves = {"swap_in": [(0, 8), (2, 9)]}
        for _ in range(4):
            take([(row, 1)], step_of([(row, 1)], **moves), runner)
            moves = {}
        told.append(row.ids)
    assert told[0] == told[1]


@pytest.mark.parametrize("sampling", [PLAIN, DRAWN], ids=["plain", "penalties"])
def test_fed_back_tokens_with_two_steps_under_way_equal_run_by_run(tmp_path: Path, sampling: SamplingParams) -> None:
    folder = model_of(tmp_path)
    told = []
    for overlapped in (False, True):
        runner = gpu_runner(folder)
        rows = [Row(prompt_of(seed, 9 + seed), [5 * seed, 5 * seed + 1, 5 * seed + 2], sampling) for seed in range(3)]
        start = [(row, len(row.ids)) for row in rows]
        steps = 8
        if not overlapped:
            take(start, step_of(start), runner)
            for _ in range(steps):
                take([(row, 1) for row in rows], step_of([(row, 1) for row in rows]), runner)
        else:
            runner.submit(step_of(start))
            for step in range(steps):
                # Rows change places: each names its token by the order of the step before.
                order = rows[::-1] if step % 2 == 0 else rows
                runner.submit(step_of([(row, 1) for row in order], fed={0: 2, 1: 1, 2: 0}))
                before = rows if step % 2 == 0 else rows[::-1]
                for row, token in zip(before, runner.collect().token_ids, strict=True):
                    row.ids.append(token)
            for row, token in zip(rows if steps % 2 == 0 else rows[::-1], runner.collect().token_ids, strict=True):
                row.ids.append(token)
        told.append([row.ids for row in rows])
    assert told[0] == told[1]


def test_a_third_step_and_a_token_that_nobody_samples_are_refused(tmp_path: Path) -> None:
    runner = gpu_runner(model_of(tmp_path))
    row = Row(prompt_of(1, 9), [3])
    runner.submit(step_of([(row, 9)]))
    with pytest.raises(InvariantError, match="under way"):
        runner.run(StepPlan(2))
    runner.submit(StepPlan(3))
    with pytest.raises(InvariantError, match="already"):
        runner.submit(StepPlan(4))
    assert len(runner.collect().token_ids) == 1
    assert runner.collect().token_ids == []
    with pytest.raises(InvariantError, match="no step"):
        runner.collect()
    with pytest.raises(InvariantError, match="0 tokens fed back"):
        runner.run(step_of([(row, 1)], fed={0: 0}))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, [1] * 17, [3])], "does not fit"),
        ([(0, [], [3])], "does not fit"),
        ([(250, [1] * 7, list(range(17)))], "256 positions"),
        ([(0, [1], [40])], "outside the pool"),
        ([(0, [512], [3])], "outside the vocabulary"),
        ([(0, [1] * 97, list(range(7)))], "made for"),
        ([(0, [1], [3])] * 7, "made for"),
    ],
)
def test_an_impossible_plan_is_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    runner = gpu_runner(model_of(tmp_path))
    with pytest.raises(InvariantError, match=message):
        runner.run(plan_of(rows))


def test_what_a_device_cannot_do_is_refused_by_the_options_name(tmp_path: Path) -> None:
    folder = model_of(tmp_path)
    with pytest.raises(StartupError, match="quantization: int8"):
        GpuRunner(folder, 256, device="cpu", num_blocks=4, weight_format=WeightFormat.INT8)
    with pytest.raises(StartupError, match="batch_invariant"):
        gpu_runner(folder, batch_invariant=True)
    if not torch.cuda.is_available():
        with pytest.raises(StartupError, match="device cuda was asked for"):
            GpuRunner(folder, 256, device="cuda", num_blocks=4)
    with pytest.raises(StartupError, match="at least one block"):
        GpuRunner(folder, 256, device="cpu")


def test_halves_compute_in_halves_and_say_so(tmp_path: Path) -> None:
    folder = model_of(tmp_path)
    runner, exact = gpu_runner(folder, weight_format=WeightFormat.BFLOAT16), gpu_runner(folder)
    assert runner.layout.block_bytes * 2 == exact.layout.block_bytes
    assert runner.memory_plan()["weights"] < 0.6 * exact.memory_plan()["weights"]
    assert runner.identity_fields()["kv_dtype"] == "bfloat16"
    assert len({runner.fingerprint(), exact.fingerprint(), cpu_runner(folder).fingerprint()}) == 3
    ids = prompt_of(1, 40)
    for each in (runner, exact):
        each.run(plan_of([(0, ids, [3, 5, 7])]))
    near = torch.nn.functional.cosine_similarity(runner._space.logits[0], exact._space.logits[0], dim=0)
    assert near > 0.999


def test_dummy_weights_need_a_configuration_alone_and_are_the_same_each_time(tmp_path: Path) -> None:
    folder = model_of(tmp_path, tied=False)
    real = gpu_runner(folder)
    (folder / "model.safetensors").unlink()
    dummies = [gpu_runner(folder, load_format="dummy") for _ in range(2)]
    assert outputs(dummies[0]) == outputs(dummies[1]) != outputs(real)
    assert dummies[0].memory_plan() == real.memory_plan()
    embedding_bytes = 512 * real.config.hidden * 4
    assert real.memory_plan()["weights"] - real.read_bytes == embedding_bytes + 256 * real.config.head_dim * 4


def test_every_byte_of_the_plan_is_named(tmp_path: Path) -> None:
    plan = gpu_runner(model_of(tmp_path), host_blocks=2).memory_plan()
    assert set(plan) == {"weights", "workspace", "graphs", "kv", "lane_probe", "host_kv", "block_metadata"}
    assert all(size > 0 for use, size in plan.items() if use != "graphs")

"""Bit equality of a row in any company: batch, order, chunks, block tables and threads (DESIGN law 6)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.model_fixtures import plan_of, tiny_model, watch_logits
from workers.runner.torch_runner import TorchRunner


def _ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 512, length).tolist()


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_are_the_same_bits_in_any_company(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, kv_heads: int, threads: int
) -> None:
    logits_of_steps = watch_logits(monkeypatch)
    folder = tiny_model(tmp_path_factory.getbasetemp(), kv_heads=kv_heads, hidden=192, intermediate=528, head_dim=64)
    alone = TorchRunner(folder, 512, num_blocks=64, threads=1, exact=True)
    ids = _ids(200, 1)

    # 1. The reference: one chunk, one thread, nobody else.
    alone.run(plan_of([(0, ids, list(range(13)))]))
    wanted = logits_of_steps[-1]

    # 2. Chunks of odd sizes and single tokens, mates of many lengths before and after, scattered blocks.
    runner = TorchRunner(folder, 512, num_blocks=64, threads=threads, exact=True)
    assert str(threads) in runner.exact_rows
    table = list(range(60, 47, -1))
    done = 0
    for step, chunk in enumerate([5, 50, 1, 1, 94, 17, 31, 1]):
        before = [(0, _ids(3 + 7 * step, step), [1, 2, 3, 4]) for _ in range(step % 3)]
        after = [(0, _ids(1 + step, 9), [5, 6, 7, 8])]
        runner.run(plan_of([*before, (done, ids[done : done + chunk], table), *after]))
        done += chunk
        got = logits_of_steps[-2]
    assert done == 200
    assert np.array_equal(got, wanted)
    # 3. The pool holds the same KV bits too.
    size = runner.layout.block_bytes
    for i in range(12):
        mine = runner.kv_pool[table[i] * size : (table[i] + 1) * size]
        assert np.array_equal(mine, alone.kv_pool[i * size : (i + 1) * size])


def test_decode_rows_do_not_depend_on_the_size_of_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_of_steps = watch_logits(monkeypatch)
    runner = TorchRunner(tiny_model(tmp_path), 256, num_blocks=64, threads=1)
    prompts = [_ids(20 + i, i) for i in range(12)]
    tables = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(12)]
    for ids, table in zip(prompts, tables, strict=True):
        runner.run(plan_of([(0, ids, table)]))
    rows = [(len(ids), [7], table) for ids, table in zip(prompts, tables, strict=True)]
    runner.run(plan_of(rows[:1]))
    alone = logits_of_steps[-1]
    for count in range(2, 13):
        runner.run(plan_of(rows[:count]))
        assert np.array_equal(logits_of_steps[-count], alone)

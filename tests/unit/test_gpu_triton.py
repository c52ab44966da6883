"""A whole model through the Triton kernels, interpreted: the tokens of plain torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from headrace.sampling import SamplingParams
from kernels.gpu_ops import DeviceOps
from kernels.gpu_rows import RowBuffers, check_rows, fill_rows, layout_for
from kernels.ops import PoolShape
from tests.gpu_runs import Row, gpu_runner, model_of, prompt_of, step_of, take

pytest.importorskip("triton", minversion="3.8")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(), reason="neither a GPU nor interpreted"
)
DRAWN = SamplingParams(max_tokens=99, temperature=0.9, top_k=40, top_p=0.9, seed=5, presence_penalty=0.4)


def small(tmp_path: Path) -> Path:
    """QK-norm, a window in one of two layers, GQA: all that the kernels can be asked for."""
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    return model_of(tmp_path, "qwen3", heads=2, kv_heads=1, hidden=32, intermediate=32, **window)


def test_tokens_are_those_of_plain_torch(tmp_path: Path) -> None:
    folder = small(tmp_path)
    told = []
    for use_triton in (True, False):
        runner = gpu_runner(folder, warm=False, use_triton=use_triton, max_seqs=4, max_batched_tokens=32)
        first, *others = [Row(prompt_of(seed, 3 + 17 * (seed == 0)), [9 + seed, 3 - seed], DRAWN) for seed in range(3)]
        steps = [
            [(first, 11)],
            [(first, 9), *((row, 3) for row in others)],
            *[[(row, 1) for row in (first, *others)]] * 2,
        ]
        for rows in steps:
            take(rows, step_of(rows), runner)
        told.append([row.ids for row in (first, *others)])
        assert runner.counters["graph_padding_rows"] == 2
        if use_triton:
            assert [name for name, who in runner.kernels().items() if who == "torch"] == ["linear", "embed"]
    assert told[0] == told[1]


def test_batch_invariant_products_and_attention_give_a_row_the_same_bits_alone_and_among_others() -> None:
    pytest.importorskip("kernels.triton.matmul")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ops = DeviceOps(device, batch_invariant=True)
    assert ops.chosen()["linear"] == "triton"
    shape = PoolShape(num_blocks=12, kv_heads=1, layers=1, block_size=16, head_dim=16)
    pool = shape.view(torch.randn(shape.num_blocks * shape.block_floats)).to(device)
    x, weight = torch.randn(3, 48).to(device), torch.randn(64, 48).to(device)
    tables = [[3, 1, 4, 11, 9], [2], [6, 5]]
    seen = []
    for rows in (1, 3):
        columns = check_rows(16, 99, [70, 3, 20][:rows], [1] * rows, tables[:rows], [0] * rows, [True] * rows, 9, 0)
        layout = layout_for(rows, rows, columns.width, rows)
        buffers = RowBuffers(layout.num_bytes, device)
        fill_rows(buffers.next_host(layout), columns, shape)
        buffers.send(layout)
        qkv, mixed = torch.empty(rows, 64, device=device), torch.empty(rows, 32, device=device)
        ops.linear(x[:rows], weight, qkv)
        ops.attention(qkv, 2, pool, 0, buffers.rows(layout, rows, 0), mixed)
        seen.append(torch.cat((qkv[0], mixed[0])))
    assert torch.equal(*seen)
    assert torch.allclose(seen[0][:64], x[0] @ weight.t(), atol=1e-4)

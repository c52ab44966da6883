"""The device operations in plain torch mean what the CPU kernels and their references mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import gpu_sampling, reference
from kernels.gpu_ops import DeviceOps
from kernels.gpu_rows import RowBuffers, check_rows, fill_rows, layout_for
from kernels.ops import LogprobScorer, PoolShape, Sampler, SampleTable
from workers.runner.gpu_inputs import device_edits

CPU = torch.device("cpu")
OPS = DeviceOps(CPU, use_triton=False)


def chosen(logits: torch.Tensor, settings: np.ndarray) -> list[int]:
    out = torch.zeros(len(logits), dtype=torch.int64)
    OPS.sample(logits.clone(), torch.from_numpy(settings), out)
    return out.tolist()


@pytest.mark.parametrize("vocab", [31, 1024, 3000])
def test_sampling_chooses_the_cpu_samplers_tokens(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    rows = 400
    logits = torch.from_numpy(generator.standard_normal((rows, vocab)).astype(np.float32) * 2)
    logits[:40] = logits[:40].round()  # many equals
    settings = np.zeros((rows, 8))
    settings[:, 0] = generator.choice([0.0, 0.3, 1.0, 1.7], rows)
    settings[:, 1] = generator.choice([0, 1, 5, 40, vocab + 7], rows)
    settings[:, 2] = generator.choice([1.0, 0.9, 0.4, 1e-6], rows)
    settings[:, 3] = generator.choice([0.0, 0.05, 0.5, 1.0], rows)
    settings[:, 4] = generator.random(rows)
    wanted = Sampler(vocab).choose(logits.clone(), SampleTable(settings, [()] * rows))
    assert chosen(logits, settings) == wanted


def test_a_row_with_nan_or_infinity_is_greedy_over_what_is_finite() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[1.0, nan, 3.0], [inf, 2.0, 5.0], [-inf, -inf, -inf], [nan, inf, nan], [2.0, 7.0, 7.0]])
    settings = np.zeros((5, 8))
    for temperature in (0.0, 1.0):
        settings[:, 0], settings[:, 2] = temperature, 1.0
        settings[4, 0] = 0.0
        assert chosen(logits, settings) == [2, 2, 0, 0, 1]
        assert chosen(logits, settings) == Sampler(3).choose(logits.clone(), SampleTable(settings, [()] * 5))


def test_edits_are_those_of_the_reference_row_by_row() -> None:
    vocab = 64
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))
    settings = np.zeros((4, 8))
    settings[:, 5:] = (1.0, 0.0, 0.0)
    settings[0, 5:], settings[2, 5:] = (1.3, 0.5, 0.25), (0.7, -0.5, 0.1)
    histories = [np.array([5, 5, 9, 63, 5, 9]), np.zeros(0, np.int64), np.array([1, 2, 3]), np.zeros(0, np.int64)]
    biases = [((5, 1.5), (0, -2.0)), (), ((3, 4.0),), ()]
    prompts = [2, 0, 3, 0]
    table = SampleTable(settings, [(7, 8), (), (), (1,)], biases, histories, prompts)
    edits = device_edits(table, CPU)
    assert edits is not None
    got = logits.clone()
    OPS.sample(got, torch.from_numpy(settings), torch.zeros(4, dtype=torch.int64), edits)
    for row in range(4):
        wanted = reference.edit_logits(
            logits[row], histories[row].tolist(), prompts[row], *settings[row, 5:].tolist(), biases[row]
        )
        wanted[list(table.banned[row])] = float("-inf")
        assert torch.equal(got[row], wanted)
    assert device_edits(SampleTable(settings, [()] * 4), CPU) is None


def test_logprobs_are_the_cpu_scorers() -> None:
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(2)) * 3
    logits[1] = logits[1].round()
    logits[2, :190] = float("-inf")
    logits[3, 4] = float("nan")
    tokens = [3, 1, 0, 2, 199, 7]
    values, ids = OPS.logprobs(logits, torch.tensor(tokens), 5)
    wanted, wanted_ids = LogprobScorer(200).score(logits.contiguous(), tokens, [5] * 6)
    for row in (0, 1, 2, 4, 5):
        assert ids[row].tolist() == wanted_ids[row].tolist()
        assert np.allclose(values[row].numpy(), wanted[row], atol=1e-5)
    assert (values[3] == gpu_sampling.LOGPROB_FLOOR).all() and (wanted[3] == values[3].numpy()).all()


@pytest.mark.parametrize("window", [0, 20])
def test_attention_of_a_mixed_step_is_the_references(window: int) -> None:
    shape = PoolShape(num_blocks=12, kv_heads=2, layers=2, block_size=8, head_dim=16)
    generator = torch.Generator().manual_seed(3)
    pool = shape.view(torch.randn(shape.num_blocks * shape.block_floats, generator=generator))
    heads, counts, starts = 6, [1, 1, 7, 1, 12], [30, 0, 17, 4, 0]
    tables = [[3, 7, 1, 11], [5], [2, 9, 0], [4], [6, 8]]
    tokens = sum(counts)
    qkv = torch.randn(tokens, (heads + 4) * 16, generator=generator)
    columns = check_rows(8, 100, starts, counts, tables, [0] * tokens, [True] * 5, 9, 0)
    layout = layout_for(5, tokens, columns.width, 5)
    buffers = RowBuffers(layout.num_bytes, CPU)
    fill_rows(buffers.next_host(layout), columns, shape)
    buffers.send(layout)
    out = torch.full((tokens, heads * 16), float("nan"))
    OPS.attention(qkv, heads, pool, 1, buffers.rows(layout, columns.num_decode, columns.max_tokens), out, window)
    q = qkv[:, : heads * 16].reshape(tokens, heads, 16)
    wanted = reference.attention(q, pool, 1, starts, counts, tables, window)
    assert torch.allclose(out.view(tokens, heads, 16), wanted, atol=1e-5)


def test_wrong_shapes_are_refused_before_anything_is_written() -> None:
    x, out = torch.ones(3, 8), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="out must have shape"):
        OPS.linear(x, torch.ones(5, 8), out)
    with pytest.raises(ValueError, match="x must have shape"):
        OPS.linear(x, torch.ones(4, 9), out)
    with pytest.raises(ValueError, match="whole rows"):
        OPS.rms_norm(torch.ones(8, 3).t(), torch.ones(8), 1e-5, torch.zeros(3, 8))
    with pytest.raises(ValueError, match="gate_up"):
        OPS.swiglu(x, torch.zeros(3, 5))
    assert not out.any()


def test_every_operation_says_who_runs_it() -> None:
    assert set(OPS.chosen().values()) == {"torch"}
    assert {"decode_attention", "prefill_attention", "rope_write", "linear", "embed"} <= set(OPS.chosen())
    assert not OPS.capturable

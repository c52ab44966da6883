"""Row-wise Triton kernels: the reference's values, whatever the outputs held before, at any strides."""

from __future__ import annotations

import pytest
import torch

from kernels import reference

pytest.importorskip("triton", minversion="3.8")

from kernels.triton.rows import add_rms_norm, rms_norm, rope_write, swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert not got.isnan().any()
    assert ((got.double() - wanted.double()).abs() <= tolerance * (1 + wanted.double().abs())).all()


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 96), (2, 896), (5, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_the_references_between_rows_that_stay_as_they_are(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = normal(rows, width + 8, dtype=dtype)[:, :width], normal(width, dtype=dtype, seed=1)
    room = poisoned(rows, width + 16, dtype=dtype)
    rms_norm(x, weight, 1e-5, room[:, :width])
    assert_close(room[:, :width], reference.rms_norm(x.double(), weight.double(), 1e-5), TOLERANCE[dtype])
    assert room[:, width:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_norm_with_a_residual_is_the_norm_of_the_residual_that_it_leaves(dtype: torch.dtype) -> None:
    residual, delta = normal(4, 200, dtype=dtype), normal(4, 200, dtype=dtype, seed=1)
    weight, total = normal(200, dtype=dtype, seed=2), residual.double() + delta.double()
    out, alone = poisoned(4, 200, dtype=dtype), poisoned(4, 200, dtype=dtype)
    add_rms_norm(residual, delta, weight, 1e-6, out)
    assert_close(residual, total, TOLERANCE[dtype])
    rms_norm(residual, weight, 1e-6, alone)
    assert torch.equal(out, alone)


def test_a_norm_in_place_is_the_norm_apart() -> None:
    x, delta, weight = normal(3, 100), normal(3, 100, seed=1), normal(100, seed=2)
    out = poisoned(3, 100)
    add_rms_norm(x.clone(), delta, weight, 1e-6, out)
    add_rms_norm(x, delta, weight, 1e-6, delta)
    assert torch.equal(delta, out)
    rms_norm(x, weight, 1e-6, x)
    assert torch.equal(x, out)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("rows", "width"), [(1, 24), (3, 1024), (2, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_the_references_for_small_and_for_large_gates(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = normal(rows, 2 * width, dtype=dtype) * 8
    gate_up[0, :2] = torch.tensor([200.0, -200.0])
    room = poisoned(rows, width + 8, dtype=dtype)
    swiglu(gate_up, room[:, :width])
    assert_close(room[:, :width], reference.swiglu(gate_up.double()), TOLERANCE[dtype])
    assert room[:, width:].isnan().all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "dtype", "norm"),
    [
        (14, 2, 64, 16, torch.float32, False),
        (4, 4, 96, 32, torch.float32, True),
        (16, 1, 128, 16, torch.bfloat16, True),
        (3, 1, 256, 64, torch.float16, False),
        (2, 2, 80, 16, torch.bfloat16, False),
    ],
)
def test_q_and_k_are_normed_and_turned_and_keys_and_values_lie_where_the_slots_say(
    heads: int, kv_heads: int, dim: int, block: int, dtype: torch.dtype, norm: bool
) -> None:
    """Padding tokens (slot -1) in the middle; a pool that is part of a larger one; NaN where nothing is written."""
    width, layer = (heads + 2 * kv_heads) * dim, 1
    qkv = normal(5, width + 16, dtype=dtype)
    pool = poisoned(4, kv_heads + 1, 3, 2, block, dim, dtype=dtype)[:, :kv_heads]
    slots = torch.tensor([3 * block + 1, -1, 0, 2 * block - 1, -1], device=DEVICE)
    positions = torch.tensor([7, 0, 0, 299, 1 << 30], dtype=torch.int32, device=DEVICE)
    angles = torch.arange(300)[:, None] / 100.0 ** (torch.arange(dim // 2) / dim)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    weights = (normal(dim, dtype=dtype, seed=1), normal(dim, dtype=dtype, seed=2), 1e-6) if norm else None
    before, real = qkv.clone(), slots >= 0

    rope_write(qkv[:, :width], heads, pool, layer, positions, slots, cos, sin, weights)

    # 1. What the reference makes of the tokens that are no padding.
    split = before[real, :width].double().unflatten(1, (-1, dim))
    q, k, v = split.split((heads, kv_heads, kv_heads), dim=1)
    if weights:
        q, k = (reference.rms_norm(x, w.double(), 1e-6) for x, w in zip((q, k), weights[:2], strict=True))
    turns = cos.double()[positions[real].long()], sin.double()[positions[real].long()]
    q, k = reference.rope(q, *turns), reference.rope(k, *turns)
    assert_close(qkv[real, :width], torch.cat((q, k, v), 1).flatten(1), TOLERANCE[dtype])
    # 2. Padding, and what lies between the rows, stays.
    assert torch.equal(qkv[~real], before[~real])
    assert torch.equal(qkv[:, width:], before[:, width:])
    # 3. The pool has K and V as the rows have them, and nothing else was touched.
    wanted = poisoned(*pool.shape, dtype=dtype)
    turned = qkv[real, :width].unflatten(1, (-1, dim))
    reference.write_kv(wanted, layer, slots[real], turned[:, heads : heads + kv_heads], turned[:, heads + kv_heads :])
    assert torch.equal(pool.nan_to_num(9e4), wanted.nan_to_num(9e4))


def test_no_rows_are_no_work() -> None:
    none, weight = torch.empty(0, 64, device=DEVICE), normal(64)
    rms_norm(none, weight, 1e-6, none)
    add_rms_norm(none, none, weight, 1e-6, none)
    swiglu(torch.empty(0, 128, device=DEVICE), none)
    pool, table = poisoned(1, 1, 1, 2, 16, 16), torch.ones(1, 8, device=DEVICE)
    positions = torch.empty(0, dtype=torch.int32, device=DEVICE)
    rope_write(torch.empty(0, 64, device=DEVICE), 2, pool, 0, positions, positions.long(), table, table)
    assert pool.isnan().all()

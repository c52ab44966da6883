"""The batch-invariant linear layer: right, and for each row the same bits in every batch."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton", minversion="3.8")

from kernels.triton.matmul import FEW_ROWS, Scratch, linear, order_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies the bits of bfloat16 as integers.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """With poison in the result, in the scratch, and behind the rows of everything."""
    rows, columns, width = len(x), len(weight), x.shape[1]
    room = torch.full((rows, columns + 8), float("nan"), dtype=x.dtype, device=DEVICE)
    poisoned = [torch.nn.functional.pad(part, (0, 8), value=float("nan"))[:, :width] for part in (x, weight)]
    scratch = Scratch.make(DEVICE, rows)
    scratch.pieces.fill_(float("nan"))
    linear(*poisoned, room[:, :columns], bias, scratch)
    assert room[:, columns:].isnan().all()
    assert not scratch.arrived.any()
    return room[:, :columns]


# One piece, several (whole, and of an odd depth), the large tiles.
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "splits", "dtype"),
    [
        (1, 1, 8, 1, torch.float32),
        (5, 100, 96, 1, HALF),
        (17, 70, 1024, 2, torch.float32),
        (40, 65, 2085, 4, HALF),
        (FEW_ROWS + 5, 130, 1024, 2, HALF),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product_is_that_of_float64(
    rows: int, columns: int, depth: int, splits: int, dtype: torch.dtype, with_bias: bool
) -> None:
    assert order_of(columns, depth, dtype).splits == splits
    x, weight = normal(rows, depth, dtype=dtype), normal(columns, depth, dtype=dtype, seed=1)
    bias = normal(columns, dtype=dtype, seed=2) if with_bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = (1e-6 if dtype is torch.float32 else 2e-3) * depth**0.5
    assert ((product(x, weight, bias).double() - exact).abs() <= tolerance * (1 + exact.abs() / depth**0.5)).all()


def ascending(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A product in one order of additions, as a GPU has it; that of BLAS changes with the shapes."""
    total = np.zeros((len(a), b.shape[1]), dtype)
    for k in range(a.shape[1]):
        total += a[:, k, None].astype(dtype) * b[k].astype(dtype)
    return total


@pytest.mark.parametrize(("depth", "dtype"), [(2112, torch.float32), (1100, HALF), (200, HALF)])
def test_a_row_has_the_same_bits_alone_and_among_any_others(
    depth: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 16, 32 and 64 rows with their pieces in several programs, and the large ones, which have them in one."""
    monkeypatch.setattr(np, "matmul", ascending)
    x, weight = normal(FEW_ROWS + 1, depth, dtype=dtype), normal(70, depth, dtype=dtype, seed=1)
    bias = normal(70, dtype=dtype, seed=2)
    everyone = product(x, weight, bias)
    for first, last in ((0, 1), (FEW_ROWS, FEW_ROWS + 1), (3, 20), (0, 97)):
        assert torch.equal(product(x[first:last], weight, bias), everyone[first:last])


def test_what_scratch_is_reused_for_does_not_matter() -> None:
    scratch = Scratch.make(DEVICE)
    x, weight = normal(3, 1024), normal(90, 1024, seed=1)
    first, again, other = (torch.empty(3, 90, device=DEVICE) for _ in range(3))
    linear(x, weight, first, scratch=scratch)
    linear(x * 2, weight, other, scratch=scratch)
    linear(x, weight, again, scratch=scratch)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_pieces_depend_on_the_layer_and_suffice_for_a_batch_of_one() -> None:
    assert order_of(2048, 2048, torch.bfloat16).splits == 4
    assert order_of(4096, 14336, torch.bfloat16).splits == 2
    assert order_of(28672, 4096, torch.bfloat16).splits == 1
    assert order_of(896, 896, torch.bfloat16).splits == 1


PRINT_PRODUCTS = """
import re
from kernels.triton.compiled import compile_variant
from kernels.triton.matmul import variants
for variant in variants():
    if "bf16/2048x" in variant.name:
        print(sorted(set(re.findall(r"(?:wgmma.mma_async|mma.sync)\\\\S*", compile_variant(variant).asm["ptx"]))))
"""


def test_tiles_of_all_sizes_multiply_with_one_instruction() -> None:
    """Compiled for Hopper: products of 64 columns and a depth of 16, whatever the number of rows."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PRINT_PRODUCTS.replace("\\\\", "\\")]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    kind = r"\['wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16'\]"
    assert [re.fullmatch(kind, line)[1] for line in printed.splitlines()] == ["16", "32", "64", "128"]  # type: ignore[index]


def test_no_rows_are_no_work() -> None:
    linear(torch.empty(0, 8, device=DEVICE), normal(4, 8), torch.empty(0, 4, device=DEVICE))

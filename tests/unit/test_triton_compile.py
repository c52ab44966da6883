"""Kernels compile for Hopper on a machine without a GPU, and keep all they hold in registers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from kernels.triton.compiled import Usage, Variant
from kernels.triton.report import all_variants, fits, lines

CHOSEN = (
    "decode bf16 d128 g4 b16, merged in place",
    "decode bf16 d256 g16 b16, merged apart",
    "prefill bf16 d96 g4 b16, window",
    "prefill bf16 d128 g4 b16, long",
    "prefill bf16 d256 g4 b16, long",
    "linear/bf16/2048x2048/4096 rows",
    "linear/fp32/2048x2048/4096 rows",
    "rope_write/bf16/32x32x96/norm",
    "sample/choose/8",
    "sample/collect/64",
)


def test_chosen_kernels_compile_for_hopper_without_spilling() -> None:
    # Another process: in this one the kernels are made for the interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.triton.report", *CHOSEN]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(f"| {name} |" in run.stdout for name in CHOSEN)


def test_every_variant_names_the_arguments_of_its_kernel_and_has_a_name_of_its_own() -> None:
    variants = all_variants()
    assert set(CHOSEN) <= {variant.name for variant in variants}
    for variant in variants:
        named = [*variant.signature, *variant.constexprs]
        assert sorted(named) == sorted(variant.kernel.arg_names), variant.name


def test_the_report_tells_what_does_not_fit() -> None:
    used = [Usage(96, 0, 1 << 10, "mma"), Usage(255, 8, 1 << 10, ""), Usage(96, 0, 1 << 20, "wgmma")]
    assert [fits(one) for one in used] == [True, False, False]
    table = list(lines((Variant(f"kernel {i}", None, {}), one) for i, one in enumerate(used)))
    assert table[1:] == [
        "| kernel 0 | 4 x 2 | 96 | 0 | 1.0 | mma |",
        "| kernel 1 | 4 x 2 | 255 | 8 | 1.0 | none |",
        "| kernel 2 | 4 x 2 | 96 | 0 | 1024.0 | wgmma |",
    ]

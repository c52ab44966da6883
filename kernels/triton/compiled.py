"""Compile a kernel for Hopper without a GPU and read what the assembler made of it.

Not for launching: Triton compiles what it launches by itself. Nothing here works on interpreted kernels, so do not set
TRITON_INTERPRET in a process that compiles.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
"""H100, H200 (built as sm_90a)."""

HOPPER_SHARED_BYTES = 227 * 1024
"""Most shared memory of one program (CUDA C++ programming guide, table of compute capabilities)."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way in which a kernel is launched.

    name: unique in its module, such as "decode/bf16/d128/g4/b16"; kernel: a function under @triton.jit; signature: type
    of each argument that is no constexpr, in Triton's notation, where ":16" says that the value (for a pointer, the
    address) is a multiple of 16, as Triton finds out at a launch: "*bf16:16", "i32:16", "i32", "fp32".
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, slots=True)
class Usage:
    """What a compiled kernel takes: registers of a thread, bytes of its stack frame (spilled registers are there), and
    shared bytes of a program. tensor_core: "wgmma", "mma" or "" by the instructions that it uses.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_core: str


def compile_variant(variant: Variant, target: GPUTarget = HOPPER) -> Any:
    """Triton's compiled kernel (`asm["cubin"]`, `asm["ptx"]`, `metadata`); from Triton's cache when it is there.

    Raises ValueError when the variant does not name exactly the kernel's arguments.
    """
    arguments = list(variant.kernel.arg_names)
    named = [*variant.signature, *variant.constexprs]
    if sorted(named) != sorted(arguments):
        raise ValueError(f"{variant.name}: names differ from the kernel's: {sorted(set(named) ^ set(arguments))}")
    types = {name: variant.signature.get(name, "constexpr").split(":")[0] for name in arguments}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(arguments)
        if variant.signature.get(name, "").endswith(":16")
    }
    source = ASTSource(variant.kernel, types, constexprs=dict(variant.constexprs), attrs=attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(source, target=target, options=options)


def usage(compiled: Any) -> Usage:
    """What the assembler reports of a result of `compile_variant`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of registers: {text!r}")
    ptx = compiled.asm["ptx"]
    tensor_core = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else ""
    return Usage(int(found[1]), int(found[2]), int(compiled.metadata.shared), tensor_core)

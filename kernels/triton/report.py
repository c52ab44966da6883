"""`python -m kernels.triton.report [part of a name ...]`: compile all kernels for Hopper, print what each takes.

Needs no GPU. Ends with 1 when a kernel keeps registers in memory or takes more shared memory than there is.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context

import kernels.triton
from kernels.triton.compiled import HOPPER_SHARED_BYTES, Usage, Variant, compile_variant, usage

HEADER = """\
| kernel | warps x stages | registers | stack bytes | shared KiB | tensor core |
| --- | ---: | ---: | ---: | ---: | --- |"""


def all_variants(parts: Sequence[str] = ()) -> list[Variant]:
    """The variants of all modules beside this one; with `parts`, those whose name has one of them.

    Raises ValueError when two have one name.
    """
    modules = [import_module(f"kernels.triton.{found.name}") for found in pkgutil.iter_modules(kernels.triton.__path__)]
    found = [variant for module in modules if hasattr(module, "variants") for variant in module.variants()]
    names = [variant.name for variant in found]
    if len(set(names)) != len(names):
        raise ValueError(f"one name for two variants: {sorted({name for name in names if names.count(name) > 1})}")
    return [variant for variant in found if not parts or any(part in variant.name for part in parts)]


def fits(used: Usage) -> bool:
    return used.stack_bytes == 0 and used.shared_bytes <= HOPPER_SHARED_BYTES


def lines(measured: Iterable[tuple[Variant, Usage]]) -> Iterable[str]:
    """A table in Markdown, line by line as results come."""
    yield HEADER
    for variant, used in measured:
        cells = [
            variant.name,
            f"{variant.num_warps} x {variant.num_stages}",
            used.registers,
            used.stack_bytes,
            f"{used.shared_bytes / 1024:.1f}",
            used.tensor_core or "none",
        ]
        yield f"| {' | '.join(map(str, cells))} |"


def _use(name: str) -> Usage:
    [variant] = [variant for variant in all_variants() if variant.name == name]
    return usage(compile_variant(variant))


def main(parts: Sequence[str]) -> int:
    chosen = all_variants(parts)
    good = True
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        results = pool.map(_use, [variant.name for variant in chosen])

        def measured() -> Iterable[tuple[Variant, Usage]]:
            nonlocal good
            for variant, used in zip(chosen, results, strict=True):
                good &= fits(used)
                yield variant, used

        for line in lines(measured()):
            print(line, flush=True)
    print(f"{len(chosen)} kernels" if good else "a kernel keeps registers in memory or takes too much shared memory")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

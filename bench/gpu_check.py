"""Everything that only a GPU can tell: are the kernels right there, and how near are they to what the device can do?

    python -m bench.gpu_check [--only kernels|model|peers] [--out FOLDER] [--quick]

Each stage prints a table and writes FOLDER/<stage>.json, and takes less than five minutes on one H200. Needs torch
with CUDA, Triton, transformers for the stage `peers`; no network, no model files: the weights are random. Without a GPU
and with TRITON_INTERPRET=1, `--only kernels` checks small shapes for errors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

Report = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=STAGES, action="append", help="again for several; all without")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"))
    parser.add_argument("--quick", action="store_true", help="without peers of kernels, fewer shapes")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        print("torch sees no CUDA device; with TRITON_INTERPRET=1 the errors of small shapes can be checked here")
        return 2
    failed = []
    for name in arguments.only or STAGES:
        began = time.monotonic()
        print(f"\n== {name}", flush=True)
        good, report = STAGES[name](arguments.quick)
        report |= {"machine": machine(), "seconds": time.monotonic() - began, "command": sys.argv[1:]}
        (arguments.out / f"{name}.json").write_text(json.dumps(report, indent=1))
        print(f"== {name}: {'good' if good else 'NOT GOOD'} after {report['seconds']:.0f} s", flush=True)
        if not good:
            failed.append(name)
    return len(failed)


def machine() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    return found


def kernels(quick: bool) -> tuple[bool, Report]:
    from bench.gpu import kernels as stage
    from bench.gpu.clock import measure_walls

    on_device = torch.cuda.is_available()
    torch.manual_seed(0)
    checks = []
    for check in stage.checks("cuda" if on_device else "cpu", "full" if on_device else "tiny"):
        print(check.line(), flush=True)
        checks.append(check)
    report: Report = {"checks": [asdict(check) for check in checks]}
    good = all(check.good for check in checks)
    if on_device:
        walls = measure_walls()
        print("\n".join(walls.lines()), flush=True)
        figures = []
        for figure in stage.times(walls, quick):
            print(figure.line(), flush=True)
            figures.append(asdict(figure) | {"met": figure.met})
            good &= figure.met is not False
        report |= {"walls": asdict(walls), "figures": figures}
    return good, report


def model(quick: bool) -> tuple[bool, Report]:
    from bench.gpu import model as stage
    from bench.gpu.clock import measure_walls

    walls = measure_walls()
    print("\n".join(walls.lines()), flush=True)
    steps, good = [], True
    with TemporaryDirectory() as folder:
        for step in stage.figures(walls, Path(folder), quick):
            print(step.line(), flush=True)
            steps.append(asdict(step) | {"share": step.share, "met": step.met})
            good &= step.met is not False
        idle = stage.idle(Path(folder), "cuda", "Llama-3.2-1B", 256 if quick else 1200, 256)
    print(idle.line(), flush=True)
    return good and idle.met, {"walls": asdict(walls), "steps": steps, "idle": asdict(idle)}


def peers(quick: bool) -> tuple[bool, Report]:
    from bench.gpu import peers as stage

    with TemporaryDirectory() as folder:
        rates = []
        for rate in stage.rates("Qwen3-0.6B", Path(folder), "cuda", 64 if quick else 256):
            print(rate.line(), flush=True)
            rates.append(rate)
    ratio = rates[1].tokens_a_second / rates[-1].tokens_a_second
    print(f"ours by theirs: {ratio:.2f} (wanted 3)", flush=True)
    return ratio >= 3.0, {"rates": [asdict(rate) for rate in rates], "ratio": ratio}


STAGES: dict[str, Callable[[bool], tuple[bool, Report]]] = {"kernels": kernels, "model": model, "peers": peers}


if __name__ == "__main__":
    sys.exit(main())

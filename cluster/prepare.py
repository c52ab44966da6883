"""Prepares the model, and on a new machine the compiled kernels, in a process of its own: the launcher stays free of
torch.

python -m cluster.prepare PATH [CACHE_DIR [kernels]]
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from headrace.errors import StartupError
from headrace.paths import cache_root

REPO_ROOT = Path(__file__).resolve().parent.parent


def check_path(path: str) -> None:
    """Refuses, at once, a path that is not there. A bare name may be the default model's."""
    if ("/" in path or path.endswith((".gguf", ".safetensors"))) and not Path(path).expanduser().exists():
        raise StartupError(f"{path}: no such model folder or GGUF file")


async def prepare_model(path: str, *, kernels: bool = False) -> Path:
    """The prepared folder; with `kernels`, these are compiled too. Raises StartupError with one line."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cluster.prepare",
        path,
        str(cache_root()),
        *(["kernels"] if kernels else []),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO_ROOT), os.environ.get("PYTHONPATH")]))},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
    lines = out.decode().strip().splitlines()
    if child.returncode != 0 or not lines:
        said = err.decode("utf-8", "replace").strip().splitlines()
        raise StartupError(said[-1] if said else f"{path}: the model cannot be prepared (exit code {child.returncode})")
    return Path(lines[-1])


def main() -> int:
    from kernels.environment import compile_kernels, compiled
    from workers.model.prepare import prepare_model as prepare

    try:
        folder = prepare(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else cache_root())
    except StartupError as error:
        print(error, file=sys.stderr)
        return 1
    # Once a machine, and here: workers that start together would all compile the same.
    if "kernels" in sys.argv[3:] and not compiled():
        compile_kernels()
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

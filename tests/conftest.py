"""Settings of the OpenMP team, before anybody imports torch; on a new machine what numba compiles, once for all
processes that the tests start. Without a GPU, Triton's kernels are interpreted: it looks at the setting when imported.
"""

import os

from kernels.environment import compile_kernels, compiled
from router.core.router import warm_up

# isort: split
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_sessionstart() -> None:
    if not compiled():
        compile_kernels()
    warm_up()

"""Settings of the OpenMP team, before anybody imports torch; on a new machine what numba compiles, once for all
processes that the tests start.
"""

from kernels.environment import compile_kernels, compiled
from router.core.router import warm_up


def pytest_sessionstart() -> None:
    if not compiled():
        compile_kernels()
    warm_up()

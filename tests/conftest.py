"""Settings of the OpenMP team, before anybody imports torch; on a new machine the kernels, once for all processes that
the tests start.
"""

from kernels.environment import compile_kernels, compiled


def pytest_sessionstart() -> None:
    if not compiled():
        compile_kernels()

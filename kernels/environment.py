"""Process settings that must be in place before numba and torch are imported; importing this module makes them.

- NUMBA_CACHE_DIR: compiled kernels are kept between starts. The folder's name holds a digest of the kernel sources,
  because numba itself only looks at the file that holds the compiled function, not at the intrinsics that it inlines.
- GOMP_SPINCOUNT: OpenMP's idle threads spin 300,000 rounds by default, which on a shared machine steals the core that
  the working thread needs (measured: 8 decode rows 1,460 ms against 143 ms beside other load).
"""

from __future__ import annotations

import contextlib
import os
import platform
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from headrace.paths import cache_root

_SPIN_ROUNDS = 3000


def _numba_cache() -> Path:
    digest = blake2b(digest_size=6)
    folder = Path(__file__).parent
    for source in sorted(folder.glob("*.py")):
        digest.update(source.read_bytes())
    return cache_root() / "numba" / digest.hexdigest()


def _mark() -> Path:
    """Exists when these very files have been compiled for this processor by this numba: all that numba looks at."""
    digest = blake2b(f"{version('numba')} {platform.node()} {platform.machine()}".encode(), digest_size=6)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        stat = source.stat()
        digest.update(f"{source} {stat.st_mtime_ns} {stat.st_size}".encode())
    return Path(os.environ["NUMBA_CACHE_DIR"]) / f"complete-{digest.hexdigest()}"


def compiled() -> bool:
    """Whether importing `kernels.ops` will be quick."""
    return _mark().exists()


def compile_kernels() -> None:
    """Compile everything and remember it. Many seconds the first time."""
    import kernels.ops  # noqa: F401

    with contextlib.suppress(OSError):
        _mark().touch()


if "NUMBA_CACHE_DIR" not in os.environ:
    os.environ["NUMBA_CACHE_DIR"] = str(_numba_cache())
os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_ROUNDS))

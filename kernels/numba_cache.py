"""Where compiled kernels are kept between starts. Importing this module sets it; import it before numba.

The folder's name holds a digest of the kernel sources, because numba itself only looks at the file that holds the
compiled function, not at the intrinsics that it inlines.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path


def cache_root() -> Path:
    """HEADRACE_CACHE, or ~/.cache/headrace."""
    chosen = os.environ.get("HEADRACE_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "headrace"


def _numba_cache() -> Path:
    digest = blake2b(digest_size=6)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return cache_root() / "numba" / digest.hexdigest()


if "NUMBA_CACHE_DIR" not in os.environ:
    os.environ["NUMBA_CACHE_DIR"] = str(_numba_cache())

"""Where this program keeps things on disk."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Converted models, compiled kernels, digests: `$HEADRACE_CACHE`, else `headrace` in the user's cache directory."""
    named = os.environ.get("HEADRACE_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"

"""The deployment's directory and the guardian that answers for it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cluster import guardian


class RunDir:
    """A private directory (Ray's session lives in it) and a guardian that ends and removes all when this process ends.

    Short on purpose: Ray's Unix socket paths, at most 107 bytes, lie below it.
    """

    def __init__(self, files: Sequence[Path] = ()) -> None:
        """`files` are removed at the end too."""
        self.path = Path(tempfile.gettempdir()) / f"headrace-{secrets.token_hex(4)}"
        self.path.mkdir(mode=0o700)
        # Every process started from here on inherits the mark by which the guardian knows it.
        os.environ[guardian.ENV_RUN_DIR] = str(self.path)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(self.path), *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self, *, keep_logs: bool = False, timeout_s: float = 10.0) -> None:
        """Blocks until nothing is left (milliseconds when all ended in order). Idempotent."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(b"keep" if keep_logs else b"done")
            self._process.stdin.close()
        os.environ.pop(guardian.ENV_RUN_DIR, None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

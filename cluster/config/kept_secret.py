"""A secret that this machine keeps: names of cached blocks must be the same after a restart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from headrace.errors import StartupError

MIN_CHARS = 16


def kept_secret(path: Path, new_secret: Callable[[], str]) -> str:
    """What the file holds; a new secret is put there first, 0600, when there is none.

    Raises StartupError, one line, when the file cannot be used, is not this user's alone, or holds too little.
    """
    try:
        if not path.exists():
            _keep(path, new_secret())
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(file) as opened:
            info = os.fstat(file)
            if info.st_uid != os.geteuid() or info.st_mode & 0o077:
                raise StartupError(f"{path}: must belong to this user and be readable by nobody else")
            secret = opened.read().strip()
    except OSError as error:
        raise StartupError(f"{path}: cannot keep the cache's secret there ({error.strerror})") from error
    if len(secret) < MIN_CHARS:
        raise StartupError(f"{path}: holds no secret of at least {MIN_CHARS} characters; delete it to get a new one")
    return secret


def _keep(path: Path, secret: str) -> None:
    """Whole or not at all; when two start at once the first one's secret stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "w") as opened:
            opened.write(secret + "\n")
        if not path.exists():
            os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        temporary.unlink()

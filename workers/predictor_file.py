"""Which step-time profile a worker may start from: the key that both sides make, the file's place, the loading."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import kernels
from headrace.core.predictor import Profile, StepPredictor
from headrace.paths import cache_root
from workers.model.digest import files_digest
from workers.model.identity import ENGINE_VERSION
from workers.runner.base import Runner
from workers.spec import WorkerSpec

log = logging.getLogger("headrace.workers.predictor_file")

NO_PROFILE = "none"
"""As `WorkerSpec.profile_path`: look for no profile at all."""


def profile_key(spec: WorkerSpec, runner: Runner) -> dict[str, str]:
    """What a step's time depends on beside its shape. Reads the kernels' sources, and the model's digest."""
    identity = runner.identity_fields()
    sources = sorted(Path(kernels.__file__).parent.glob("*.py"))
    return {
        "model": str(identity["weights"]),
        "weight_format": spec.weight_format.value,
        "machine": _machine(),
        "threads": str(spec.threads),
        "kernels": f"engine {ENGINE_VERSION}, sources {files_digest(sources, cache_root())}",
        "dtype": str(identity["kv_dtype"]),
        "parallel_degree": "1",
    }


def default_profile_path(key: Mapping[str, str]) -> Path:
    """Where `headrace profile` puts the profile of `key`, and where a worker of that key looks."""
    digest = blake2b(json.dumps(sorted(key.items())).encode(), digest_size=8, person=b"headrace/profile")
    return cache_root() / "profiles" / f"{digest.hexdigest()}.json"


def load_predictor(spec: WorkerSpec, key: Mapping[str, str]) -> StepPredictor:
    """From the spec's profile where it fits `key`, else from nothing. Logs which, in one line; never fails."""
    if spec.profile_path == NO_PROFILE:
        return _without("profile_off", spec)
    path = Path(spec.profile_path) if spec.profile_path else default_profile_path(key)
    try:
        profile = Profile.from_json(path.read_bytes())
    except FileNotFoundError as error:
        if not spec.profile_path:
            return _without("profile_none", spec)
        return _refused(spec, path, error.strerror)
    except OSError as error:
        return _refused(spec, path, error.strerror)
    except ValueError as error:
        return _refused(spec, path, str(error))
    if reason := profile.mismatch(key):
        return _refused(spec, path, reason)
    log.info(
        "profile_used worker=%s path=%s samples=%d held_out_error=%s",
        spec.worker_id,
        path,
        profile.samples,
        profile.held_out_error,
    )
    return StepPredictor(profile)


def _without(event: str, spec: WorkerSpec) -> StepPredictor:
    log.info("%s worker=%s: step times are learned as they come", event, spec.worker_id)
    return StepPredictor()


def _refused(spec: WorkerSpec, path: Path, reason: str | None) -> StepPredictor:
    log.warning("profile_refused worker=%s path=%s: %s; step times are learned anew", spec.worker_id, path, reason)
    return StepPredictor()


def _machine() -> str:
    """Processor and cores: another machine of the same kind may use the profile."""
    name = platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {os.cpu_count()} cores"

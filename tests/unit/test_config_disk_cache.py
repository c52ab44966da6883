"""The disk cache's settings, and the secret that has to outlive a launch."""

from __future__ import annotations

import stat
from itertools import count
from pathlib import Path

import pytest

from cluster.config import ConfigError, kept_secret, load_config, masked_yaml, resolve
from cluster.config.resolve import Deployment
from headrace.errors import StartupError
from tests.unit.cluster_builders import machine, model

POOL = {"role": "colocated"}


def deploy(tmp_path: Path, text: str) -> Deployment:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    names = count()
    return resolve(load_config(str(file)), model(), machine(), lambda: f"new-{next(names)}", lambda: "the kept one")


def test_there_is_no_disk_cache_unless_asked_for(tmp_path: Path) -> None:
    deployment = deploy(tmp_path, "pools: [{role: colocated}]")
    (worker,) = deployment.workers
    assert (worker.disk_cache_bytes, worker.disk_cache_dir) == (0, "")
    assert deployment.gateways[0].cache_namespace_secret.startswith("new-")


def test_a_disk_cache_keeps_the_secret_that_names_its_blocks(tmp_path: Path) -> None:
    text = "pools: [{role: colocated, disk_cache_bytes: 2GiB, disk_cache_dir: /x/kv}]"
    deployment = deploy(tmp_path, text)
    assert (deployment.workers[0].disk_cache_bytes, deployment.workers[0].disk_cache_dir) == (2 << 30, "/x/kv")
    assert deployment.gateways[0].cache_namespace_secret == "the kept one"
    own = deploy(tmp_path, "gateway: {cache_namespace_secret: an-operators-own-one}\n" + text)
    assert own.gateways[0].cache_namespace_secret == "an-operators-own-one"
    assert "an-operators-own-one" not in masked_yaml(own)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pools: [{role: colocated, swap_bytes: 0, disk_cache_bytes: 1GiB}]", "needs swap_bytes"),
        ("gateway: {cache_namespace_secret: short}", "cache_namespace_secret"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        deploy(tmp_path, text)


def test_a_kept_secret_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "kv" / "namespace_secret"
    numbers = count()

    def new() -> str:
        return f"a-secret-of-many-characters-{next(numbers)}"

    assert kept_secret(path, new) == kept_secret(path, new) == "a-secret-of-many-characters-0"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_kept_secret_that_others_may_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("a-secret-of-many-characters")
    path.chmod(0o644)
    with pytest.raises(StartupError, match="nobody else"):
        kept_secret(path, str)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(StartupError, match="holds no secret"):
        kept_secret(path, str)
    with pytest.raises(StartupError, match="cannot keep"):
        kept_secret(Path("/proc/none/secret"), str)

"""What the doctor reads of this machine for one configuration, without starting anything."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ServeConfig
from cluster.doctor import deployment, machine


def config(**sections: Any) -> ServeConfig:
    return ServeConfig.model_validate(sections)


@pytest.fixture(autouse=True)
def no_ray_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_each_door_whose_port_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        grpc_port, http_port = one.getsockname()[1], other.getsockname()[1]
        taken = config(gateway={"grpc_port": grpc_port, "http_port": http_port})
        grpc_fault, http_fault = deployment.read_port_faults(taken)
    assert f"gateway.grpc_port: 127.0.0.1:{grpc_port}" in grpc_fault
    assert f"gateway.http_port: 127.0.0.1:{http_port}" in http_fault
    # Both are free again, and nothing of the doctor's holds them.
    assert deployment.read_port_faults(taken) == []


def test_an_address_that_is_not_this_machines_is_told() -> None:
    # 192.0.2.0/24 is for documentation: nobody has it.
    gateway, peers = deployment.read_addresses(config(kv_transfer={"host": "192.0.2.1"}))
    assert (gateway.resolved, gateway.error) == ("127.0.0.1", "")
    assert (peers.host, peers.error) == ("192.0.2.1", "Cannot assign requested address")


def test_workers_of_a_joined_cluster_listen_on_the_nodes_own_address() -> None:
    assert deployment.peer_host(config()) == "127.0.0.1"
    joined = deployment.peer_host(config(cluster={"address": "auto"}))
    assert deployment.read_addresses(config(kv_transfer={"host": joined}))[1].error == ""


def test_rays_token_is_looked_for_where_ray_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 1. None.
    assert deployment.read_ray(config()).token_source == ""
    # 2. The default file.
    default = tmp_path / ".ray" / "auth_token"
    default.parent.mkdir()
    default.write_text("secret")
    default.chmod(0o640)
    facts = deployment.read_ray(config())
    assert (facts.token_source, facts.token_mode, facts.token_fault) == (str(default), 0o640, "")
    # 3. A named file goes before it, and is not there.
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "other"))
    facts = deployment.read_ray(config())
    assert (facts.token_source, facts.token_fault) == (
        str(tmp_path / "other"),
        "cannot be read (No such file or directory)",
    )
    # 4. The token itself goes before both.
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    facts = deployment.read_ray(config())
    assert (facts.token_source, facts.token_mode) == ("RAY_AUTH_TOKEN", None)


def test_a_cluster_to_join_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        assert deployment.read_ray(config(cluster={"address": address})).address_error == ""
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert deployment.read_ray(config(cluster={"address": "auto"})).address_error == ""
    assert "Connection refused" in deployment.read_ray(config(cluster={"address": address})).address_error


def test_a_file_with_secrets_and_the_kept_secret_are_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.touch(0o644)
    with_key = config(gateway={"api_keys": ["secret"], "host": "0.0.0.0"}, pools=[colocated(disk_cache_bytes="1GiB")])
    # 1. Before the first start there is no kept secret, and looking makes none.
    facts = deployment.read_secrets(with_key, str(file))
    assert (facts.is_loopback, facts.num_api_keys, facts.config_mode) == (False, 1, 0o644)
    assert (facts.kept_secret_fault, (tmp_path / "cache").exists()) == ("", False)
    # 2. One that others may read cannot be used.
    kept = tmp_path / "cache" / "kv" / "namespace_secret"
    kept.parent.mkdir(parents=True)
    kept.write_text("s" * 32)
    kept.chmod(0o644)
    assert "readable by nobody else" in deployment.read_secrets(with_key, str(file)).kept_secret_fault
    # 3. Without secrets the file's mode does not matter, without a disk cache the kept one does not.
    facts = deployment.read_secrets(config(), str(file))
    assert (facts.config_mode, facts.kept_secret_fault) == (None, "")


def test_folders_that_do_not_exist_yet_are_judged_by_where_they_will_be(tmp_path: Path) -> None:
    pools = [colocated(disk_cache_bytes="1GiB", replicas=2), colocated(disk_cache_bytes="2GiB")]
    cache, blocks, events = deployment.read_folders(config(pools=pools, events={"path": str(tmp_path / "a" / "log")}))
    assert (cache.path, cache.needed_bytes) == (str(tmp_path / "cache"), 0)
    assert (blocks.path, blocks.needed_bytes) == (str(tmp_path / "cache" / "kv"), 4 << 30)
    assert events.path == str(tmp_path / "a" / "log")
    assert all(folder.is_writable and folder.free_bytes for folder in (cache, blocks, events))


def test_versions_are_those_that_are_installed_and_pinned() -> None:
    facts = deployment.read_versions(config(cluster={"backend": "process"}))
    assert {"torch", "grpcio", "numpy"} <= facts.found.keys() & facts.pinned.keys()
    assert "ray" not in facts.required
    assert "ray" in deployment.read_versions(config()).required


def test_huge_pages_are_counted_in_a_mapping_like_a_pools() -> None:
    facts = machine.read_huge_pages()
    assert facts.setting in ("always", "madvise", "never", "")
    assert 0 <= facts.got_bytes <= facts.asked_bytes
    if facts.setting == "never":
        assert facts.got_bytes == 0


def test_this_process_has_a_pid_namespace_and_limits() -> None:
    facts = machine.read_isolation(in_cluster=False)
    assert facts.namespace.startswith("pid:[")
    assert facts.namespace_pids >= 1
    assert machine.read_memlock(1).limit_bytes >= -1
    assert machine.read_open_files() != 0


def colocated(**fields: Any) -> dict[str, Any]:
    return {"role": "colocated", **fields}

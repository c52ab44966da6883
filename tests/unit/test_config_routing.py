"""Every setting of the router from the file to the gateway."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from cluster.config import ConfigError, load_config, resolve
from cluster.config.routing import RoutingConfig
from router.core.policies import Policy
from router.core.settings import RoutingSettings
from tests.unit.cluster_builders import machine, model

ROUTING = {
    "policy": "prefix_only",
    "queue_weight": 1.5,
    "decode_weight": 0.25,
    "eviction_weight": 0.5,
    "duplication_weight": 0.75,
    "session_ms": 3.0,
    "topology_ms": 4.0,
    "fetch_overhead_ms": 6.5,
    "max_index_entries": 5000,
}


def file_of(tmp_path: Path, routing: dict[str, object]) -> str:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"gateway": {"routing": routing}}))
    return str(path)


def test_every_setting_reaches_the_gateway(tmp_path: Path) -> None:
    assert ROUTING.keys() == RoutingConfig.model_fields.keys()
    gateway = resolve(load_config(file_of(tmp_path, ROUTING)), model(), machine(), lambda: "s" * 32).gateways[0]
    told = asdict(gateway.routing) | {
        "policy": gateway.routing_policy,
        "max_index_entries": gateway.max_index_entries,
    }
    assert {name: told[name] for name in ROUTING} == ROUTING


def test_without_a_file_the_defaults_are_those_of_the_core() -> None:
    assert RoutingConfig().settings() == RoutingSettings()


def test_every_policy_has_a_name_in_the_file(tmp_path: Path) -> None:
    for policy in Policy:
        config = load_config(file_of(tmp_path, {"policy": policy.value}))
        assert config.gateway.routing.policy == policy.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "fastest"),
        ("queue_weight", 0),
        ("queue_weight", -1.0),
        ("session_ms", -0.5),
        ("max_index_entries", 10),
        ("max_index_entries", True),
        ("load_weight", 1.0),
        ("chunk_tokens", 512),  # workers tell it
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"gateway.routing.{field}"):
        load_config(file_of(tmp_path, {field: value}))

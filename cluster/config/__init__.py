"""Configuration: `load_config` -> `ServeConfig` (what the user wrote) -> `resolve` -> `Deployment` (what runs)."""

from cluster.config.facts import Machine, ModelFacts, read_machine, read_model_facts
from cluster.config.kept_secret import kept_secret
from cluster.config.load import ConfigError, load_config
from cluster.config.resolve import ClusterSettings, Deployment, masked_yaml, resolve
from cluster.config.schema import DEFAULT_MODEL, ServeConfig

__all__ = [
    "DEFAULT_MODEL",
    "ClusterSettings",
    "ConfigError",
    "Deployment",
    "Machine",
    "ModelFacts",
    "ServeConfig",
    "kept_secret",
    "load_config",
    "masked_yaml",
    "read_machine",
    "read_model_facts",
    "resolve",
]

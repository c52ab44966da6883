"""Every `auto` becomes a number here, once: `ServeConfig` + model + machine -> `Deployment`. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path, PurePath

import yaml
from pydantic import BaseModel, ConfigDict

from cluster.config.facts import Machine, ModelFacts
from cluster.config.load import ConfigError
from cluster.config.schema import PoolConfig, ServeConfig, TenantConfig
from cluster.config.units import format_bytes
from headrace.core.records import Role
from headrace.errors import StartupError
from router.spec import GatewaySpec, TenantSpec
from workers.model.weight_format import WeightFormat
from workers.spec import WorkerSpec

DEFAULT_KV_CACHE_BYTES = 1 << 30
DEFAULT_KV_CACHE_FRACTION = 0.10
BURST_S = 10
"""Of its rate: the automatic bucket of a tenant."""
PROCESS_BYTES = 384 << 20
"""Interpreter, libraries and workspace of one worker, beside weights and KV."""


class ClusterSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str
    address: str | None
    liveness_s: float
    start_timeout_s: float
    drain_timeout_s: float
    restart_initial_s: float
    restart_max_s: float
    restart_reset_s: float


class Deployment(BaseModel):
    """What runs. Specs are templates: the controller fills in `incarnation` (worker) and the ending of `gateway_id`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gateway: GatewaySpec
    workers: tuple[WorkerSpec, ...]
    cluster: ClusterSettings


def resolve(config: ServeConfig, model: ModelFacts, machine: Machine, new_secret: Callable[[], str]) -> Deployment:
    """Raises ConfigError or StartupError when the deployment does not fit the model or the machine."""
    asked_len = config.model.max_model_len
    if asked_len is not None and asked_len > model.max_position_embeddings:
        raise ConfigError(
            [f"model.max_model_len: must be at most the model's own limit, {model.max_position_embeddings}"]
        )
    kv_bytes = [_kv_cache_bytes(pool, model, machine, asked_len) for pool in config.pools]
    max_model_len = _max_model_len(config, model, kv_bytes)
    _check_memory(config, model, machine, kv_bytes)
    threads = _threads(config, machine)
    token = config.cluster.token.get_secret_value() if config.cluster.token else new_secret()
    namespace_secret = new_secret()
    in_cluster = config.cluster.address is not None

    workers: list[WorkerSpec] = []
    counts: dict[str, int] = {}
    for pool, pool_threads, pool_kv_bytes in zip(config.pools, threads, kv_bytes, strict=True):
        for _ in range(pool.replicas):
            index = counts.get(pool.role, 0)
            counts[pool.role] = index + 1
            workers.append(
                WorkerSpec(
                    worker_id=f"{pool.role}-{index}",
                    incarnation="",
                    role=Role(pool.role),
                    model_path=model.path,
                    max_model_len=max_model_len,
                    threads=pool_threads,
                    kv_cache_bytes=pool_kv_bytes,
                    block_size=pool.block_size,
                    exact=config.exact,
                    weight_format=config.model.weight_format,
                    max_num_batched_tokens=pool.max_num_batched_tokens,
                    max_num_seqs=pool.max_num_seqs,
                    long_prefill_token_threshold=pool.long_prefill_token_threshold,
                    max_waiting_requests=pool.max_waiting_requests,
                    max_waiting_tokens=pool.max_waiting_tokens,
                    transport=config.kv_transfer.transport,
                    read_timeout_s=config.kv_transfer.read_timeout_s,
                    quarantine_cap_bytes=config.kv_transfer.quarantine_cap_bytes,
                    liveness_s=config.cluster.liveness_s,
                    event_log_path=str(Path(config.events.path).absolute()) if config.events.path else "",
                    event_log_sample_rate=config.events.sample_rate,
                    event_log_max_bytes=config.events.max_bytes,
                    event_log_max_files=config.events.max_files,
                    host=config.kv_transfer.host or ("auto" if in_cluster else "127.0.0.1"),
                    cluster_token=token,
                )
            )
    limits = config.gateway.limits
    gateway = GatewaySpec(
        gateway_id="gateway-0",
        model_path=model.path,
        served_model_name=config.model.served_model_name or default_served_name(config.model.path),
        max_model_len=max_model_len,
        block_size=config.pools[0].block_size,
        dtype=_dtype_shown(config.model.weight_format),
        chat_template=config.model.chat_template and str(Path(config.model.chat_template).absolute()),
        host=config.gateway.host,
        grpc_port=config.gateway.grpc_port,
        http_port=config.gateway.http_port,
        api_keys=tuple(key.get_secret_value() for key in config.gateway.api_keys),
        mode=config.gateway.mode,
        liveness_s=config.cluster.liveness_s,
        drain_timeout_s=config.cluster.drain_timeout_s,
        cluster_token=token,
        cache_namespace_secret=namespace_secret,
        kv_bytes_per_token=model.kv_bytes_per_token,
        tenants={name: _tenant(tenant) for name, tenant in config.gateway.tenants.items()},
        **limits.model_dump(),
    )
    settings = config.cluster.model_dump(exclude={"token"})
    return Deployment(gateway=gateway, workers=tuple(workers), cluster=ClusterSettings(**settings))


def _tenant(tenant: TenantConfig) -> TenantSpec:
    settings = tenant.model_dump()
    if tenant.burst_tokens is None:
        settings["burst_tokens"] = math.ceil((tenant.tokens_per_s or 0.0) * BURST_S)
    return TenantSpec(**settings)


def _dtype_shown(weight_format: WeightFormat) -> str:
    """What clients are told; empty: what the model's own config.json says."""
    return "" if weight_format is WeightFormat.AUTO else weight_format.value


def default_served_name(path: str) -> str:
    """The model's name to clients: the folder's or file's, without `.gguf`."""
    return PurePath(path.rstrip("/")).name.removesuffix(".gguf") or path


def masked_yaml(deployment: Deployment) -> str:
    """The resolved deployment for people: secrets and per-process ids left out."""
    data = deployment.model_dump(mode="json")
    for spec in (data["gateway"], *data["workers"]):
        for name in ("cluster_token", "cache_namespace_secret"):
            if name in spec:
                spec[name] = "***"
        spec.pop("controller_pid")
        spec.pop("incarnation", None)
    data["gateway"]["api_keys"] = ["***"] * len(data["gateway"]["api_keys"])
    text: str = yaml.safe_dump(data, sort_keys=False)
    return text


def _threads(config: ServeConfig, machine: Machine) -> list[int]:
    """Threads of each pool's workers: what explicit pools leave, divided between the others, at least one each.

    Torch's own default is every core in every process, which on two cores makes two workers slower than one.
    """
    taken = sum(pool.threads * pool.replicas for pool in config.pools if pool.threads is not None)
    sharing = sum(pool.replicas for pool in config.pools if pool.threads is None)
    share = max(1, (machine.cores - taken) // sharing) if sharing else 0
    return [pool.threads or share for pool in config.pools]


def _block_bytes(pool: PoolConfig, model: ModelFacts) -> int:
    return model.kv_bytes_per_token * pool.block_size


def _kv_cache_bytes(pool: PoolConfig, model: ModelFacts, machine: Machine, max_model_len: int | None) -> int:
    """Whole blocks only. An explicit max_model_len raises the automatic size to hold one such request."""
    if pool.kv_cache_bytes is not None:
        size = pool.kv_cache_bytes
    elif pool.kv_cache_fraction is not None:
        size = int(pool.kv_cache_fraction * machine.available_bytes)
    else:
        size = min(DEFAULT_KV_CACHE_BYTES, int(DEFAULT_KV_CACHE_FRACTION * machine.available_bytes))
        if max_model_len is not None:
            size = max(size, -(-max_model_len // pool.block_size) * _block_bytes(pool, model))
    return size // _block_bytes(pool, model) * _block_bytes(pool, model)


def _max_model_len(config: ServeConfig, model: ModelFacts, kv_bytes: list[int]) -> int:
    held = []
    for index, (pool, size) in enumerate(zip(config.pools, kv_bytes, strict=True)):
        tokens = size // model.kv_bytes_per_token
        if size < 2 * _block_bytes(pool, model):
            needed = format_bytes(2 * _block_bytes(pool, model))
            raise ConfigError([f"pools.{index}.kv_cache_bytes: must be at least two blocks of this model, {needed}"])
        if config.model.max_model_len is not None and tokens < config.model.max_model_len:
            needed = format_bytes(-(-config.model.max_model_len // pool.block_size) * _block_bytes(pool, model))
            raise ConfigError(
                [
                    f"pools.{index}.kv_cache_bytes: holds {tokens} tokens, below max_model_len "
                    f"{config.model.max_model_len}; must be at least {needed}"
                ]
            )
        held.append(tokens)
    return config.model.max_model_len or min(model.max_position_embeddings, *held)


def _check_memory(config: ServeConfig, model: ModelFacts, machine: Machine, kv_bytes: list[int]) -> None:
    if config.cluster.address is not None:
        return  # the workers live on other machines
    num_workers = sum(pool.replicas for pool in config.pools)
    kv_total = sum(size * pool.replicas for pool, size in zip(config.pools, kv_bytes, strict=True))
    needed = num_workers * (model.weight_bytes + PROCESS_BYTES) + kv_total
    if needed > machine.available_bytes:
        raise StartupError(
            f"not enough memory: {num_workers} worker(s) need {format_bytes(needed)} (KV {format_bytes(kv_total)}, "
            f"weights {format_bytes(model.weight_bytes)} each), {format_bytes(machine.available_bytes)} available; "
            "lower kv_cache_bytes or the number of workers"
        )

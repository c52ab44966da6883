"""Every `auto` becomes a number here, once: `ServeConfig` + model + machine -> `Deployment`. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path, PurePath

import yaml
from pydantic import BaseModel, ConfigDict

from cluster.config import memory, ports
from cluster.config.facts import Machine, ModelFacts
from cluster.config.load import ConfigError
from cluster.config.schema import ServeConfig, TenantConfig
from headrace.core.fairness import ServiceWeights
from headrace.core.records import Role
from router.spec import EVERY_OTHER, EndpointSpec, GatewaySpec, TenantSpec
from workers.model.weight_format import WeightFormat
from workers.spec import WorkerSpec

BURST_S = 10
"""Of its rate: the automatic bucket of a tenant."""


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

    gateways: tuple[GatewaySpec, ...]
    """Equal but for their names and ports."""
    workers: tuple[WorkerSpec, ...]
    cluster: ClusterSettings


def resolve(
    config: ServeConfig,
    model: ModelFacts,
    machine: Machine,
    new_secret: Callable[[], str],
    kept_secret: Callable[[], str] | None = None,
) -> Deployment:
    """Raises ConfigError or StartupError when the deployment does not fit the model or the machine.

    kept_secret: gives the same secret at every start, for caches that outlive the deployment. None: as new_secret.
    """
    asked_len = config.model.max_model_len
    if asked_len is not None and asked_len > model.max_position_embeddings:
        raise ConfigError(
            [f"model.max_model_len: must be at most the model's own limit, {model.max_position_embeddings}"]
        )
    in_cluster = config.cluster.address is not None
    engine = config.engine.resolved(0 if in_cluster else machine.num_gpus)
    model = memory.on_gpu(config, model, engine.device)
    if engine.device == "cpu":
        kv_bytes = [memory.kv_cache_bytes(pool, model, machine, asked_len) for pool in config.pools]
        host_kv_bytes = kv_bytes
    else:
        if shares := [index for index, pool in enumerate(config.pools) if pool.kv_cache_fraction is not None]:
            raise ConfigError(
                [
                    f"pools.{index}.kv_cache_fraction: is of the machine's own memory; on a GPU it is "
                    "engine.gpu_memory_utilization"
                    for index in shares
                ]
            )
        kv_bytes = [memory.gpu_kv_cache_bytes(pool, model) for pool in config.pools]
        host_kv_bytes = [0] * len(kv_bytes)
    max_model_len = memory.max_model_len(config, model, kv_bytes, engine.device)
    swap_bytes = memory.swap_bytes(config, model, machine, host_kv_bytes)
    memory.check_memory(config, model, machine, host_kv_bytes, swap_bytes)
    threads = _threads(config, machine)
    token = config.cluster.token.get_secret_value() if config.cluster.token else new_secret()
    namespace_secret = _namespace_secret(config, new_secret, kept_secret or new_secret)

    service = _service(config)
    workers: list[WorkerSpec] = []
    counts: dict[str, int] = {}
    for pool, pool_threads, pool_kv_bytes, pool_swap_bytes in zip(
        config.pools, threads, kv_bytes, swap_bytes, strict=True
    ):
        low_memory_bytes, critical_memory_bytes = memory.memory_marks(pool, machine)
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
                    engine=engine,
                    exact=config.exact,
                    weight_format=config.model.weight_format,
                    max_num_batched_tokens=pool.max_num_batched_tokens,
                    max_num_seqs=pool.max_num_seqs,
                    long_prefill_token_threshold=pool.long_prefill_token_threshold,
                    max_waiting_requests=pool.max_waiting_requests,
                    max_waiting_tokens=pool.max_waiting_tokens,
                    max_queue_s=pool.max_queue_s,
                    max_reserved_kv_tokens=pool.max_reserved_kv_tokens,
                    scheduling=pool.scheduling.spec(route_when_preempted=pool.replicas > 1),
                    overlap=pool.scheduling.overlap,
                    service=service,
                    swap_bytes=pool_swap_bytes,
                    disk_cache_bytes=pool.disk_cache_bytes,
                    disk_cache_dir=str(Path(pool.disk_cache_dir).absolute()) if pool.disk_cache_dir else "",
                    low_memory_bytes=low_memory_bytes,
                    critical_memory_bytes=critical_memory_bytes,
                    profile_path=_profile_path(pool.profile),
                    transport=config.kv_transfer.transport,
                    read_timeout_s=config.kv_transfer.read_timeout_s,
                    read_retries=config.kv_transfer.read_retries,
                    checksums=config.kv_transfer.checksums,
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
        gateway_id="",
        model_path=model.path,
        served_model_name=config.model.served_model_name or default_served_name(config.model.path),
        max_model_len=max_model_len,
        block_size=config.pools[0].block_size,
        dtype=_dtype_shown(config.model.weight_format),
        exact=config.exact,
        chat_template=config.model.chat_template and str(Path(config.model.chat_template).absolute()),
        host=config.gateway.host,
        api_keys=tuple(key.get_secret_value() for key in config.gateway.api_keys),
        mode=config.gateway.mode,
        routing_policy=config.gateway.routing.policy,
        routing=config.gateway.routing.settings(),
        max_index_entries=config.gateway.routing.max_index_entries,
        on_transfer_failure=config.kv_transfer.on_failure,
        liveness_s=config.cluster.liveness_s,
        drain_timeout_s=config.cluster.drain_timeout_s,
        cluster_token=token,
        cache_namespace_secret=namespace_secret,
        keeps_generations=any(pool.disk_cache_bytes for pool in config.pools),
        kv_bytes_per_token=model.kv_bytes_per_token,
        service=service,
        tenants={name: _tenant(tenant) for name, tenant in config.gateway.tenants.items()},
        degradation=config.gateway.degradation.spec(),
        endpoints={name: EndpointSpec(**caps.model_dump()) for name, caps in config.gateway.endpoints.items()},
        **limits.model_dump(),
    )
    settings = config.cluster.model_dump(exclude={"token"})
    return Deployment(gateways=_gateways(gateway, config), workers=tuple(workers), cluster=ClusterSettings(**settings))


def _gateways(common: GatewaySpec, config: ServeConfig) -> tuple[GatewaySpec, ...]:
    replicas, grpc_port, http_port = config.gateway.replicas, config.gateway.grpc_port, config.gateway.http_port
    shared = {"shared_grpc_port": grpc_port, "shared_http_port": http_port} if replicas > 1 else {}
    return tuple(
        common.model_copy(
            update={
                "gateway_id": f"gateway-{index}",
                "grpc_port": ports.own_port(grpc_port, index, replicas),
                "http_port": ports.own_port(http_port, index, replicas),
                **shared,
            }
        )
        for index in range(replicas)
    )


def _namespace_secret(config: ServeConfig, new_secret: Callable[[], str], kept_secret: Callable[[], str]) -> str:
    if config.gateway.cache_namespace_secret is not None:
        return config.gateway.cache_namespace_secret.get_secret_value()
    return kept_secret() if any(pool.disk_cache_bytes for pool in config.pools) else new_secret()


def _tenant(tenant: TenantConfig) -> TenantSpec:
    settings = tenant.model_dump(exclude={"weight"})
    if tenant.burst_tokens is None:
        settings["burst_tokens"] = math.ceil((tenant.tokens_per_s or 0.0) * BURST_S)
    return TenantSpec(**settings)


def _service(config: ServeConfig) -> ServiceWeights:
    """What service counts, with each tenant's share of it."""
    shares = {name: tenant.weight for name, tenant in config.gateway.tenants.items()}
    default = shares.pop(EVERY_OTHER, 1.0)
    weights = config.pools[0].scheduling.service_weights
    return ServiceWeights(**weights.model_dump(), tenants=shares, default_tenant=default)


def _profile_path(profile: str) -> str:
    """As `WorkerSpec.profile_path` has it."""
    if profile == "auto":
        return ""
    return profile if profile == "none" else str(Path(profile).absolute())


def _dtype_shown(weight_format: WeightFormat) -> str:
    """What clients are told; empty: what the model's own config.json says."""
    return "" if weight_format is WeightFormat.AUTO else weight_format.value


def default_served_name(path: str) -> str:
    """The model's name to clients: the folder's or file's, without `.gguf`."""
    return PurePath(path.rstrip("/")).name.removesuffix(".gguf") or path


def masked_yaml(deployment: Deployment) -> str:
    """The resolved deployment for people: secrets and per-process ids left out."""
    data = deployment.model_dump(mode="json")
    for spec in (*data["gateways"], *data["workers"]):
        for name in ("cluster_token", "cache_namespace_secret"):
            if name in spec:
                spec[name] = "***"
        spec.pop("controller_pid")
        spec.pop("run_dir", None)
        spec.pop("incarnation", None)
    for spec in data["gateways"]:
        spec["api_keys"] = ["***"] * len(spec["api_keys"])
        if (fallback := spec["degradation"]["fallback"]) and fallback["api_key"]:
            fallback["api_key"] = "***"
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

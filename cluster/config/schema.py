"""What a user may write: the frozen, typed form of a configuration file.

Validators raise and never repair. `auto` is kept as None here and becomes a number once, in `resolve`.
Field names are vLLM's where vLLM has one.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator

from cluster.config import ports
from cluster.config.degradation import DegradationConfig
from cluster.config.devices import EngineConfig
from cluster.config.routing import RoutingConfig
from cluster.config.scheduling import SchedulingConfig
from cluster.config.section import Count, Seconds, Section, auto_size, auto_to_none
from cluster.config.units import parse_bytes
from workers.model.weight_format import WeightFormat

DEFAULT_MODEL = "smollm2-135m-instruct"
TENANT_NAME = r"[A-Za-z0-9_.-]{1,64}"
Port = Annotated[int, Field(ge=0, le=ports.MAX_PORT)]
SizeBytes = Annotated[int, BeforeValidator(parse_bytes)]
Tuple = Field(strict=False)
"""YAML has lists only: a tuple field takes one."""


class ModelConfig(Section):
    path: Annotated[str, Field(min_length=1)] = DEFAULT_MODEL
    """A Hugging Face folder, a GGUF file, or the default model's name."""
    served_model_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    chat_template: str | None = None
    """Path of a Jinja template that replaces the model's own."""
    max_model_len: Annotated[Annotated[int, Field(ge=1, le=1 << 24)] | None, BeforeValidator(auto_to_none)] = None
    """Most tokens of prompt and output together. auto: the model's limit, at most what the smallest KV pool holds."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """How the weights are kept; arithmetic is float32. auto: as the checkpoint has them, GGUF's integers too. On a GPU
    also the type of activations and KV. auto: bfloat16, float16 where the checkpoint is."""
    quantization: Literal["none", "int8"] = "none"
    """int8: all matrices become integers with a scale for each output channel."""

    @property
    def weight_format(self) -> WeightFormat:
        return WeightFormat(self.dtype if self.quantization == "none" else self.quantization)

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if self.quantization != "none" and self.dtype != "auto":
            raise ValueError(
                f"quantization {self.quantization} and dtype {self.dtype} exclude each other; leave one out"
            )
        return self


class LimitsConfig(Section):
    """What one client call may ask for."""

    default_max_tokens: Count | None = None
    default_deadline_s: Seconds = 600.0
    max_body_bytes: Annotated[SizeBytes, Field(ge=1024, le=1 << 30)] = 8 << 20
    max_n: Annotated[int, Field(ge=1, le=1024)] = 16
    max_stop_strings: Annotated[int, Field(ge=0, le=1024)] = 4
    max_stop_bytes: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    max_live_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3
    max_worker_crashes: Annotated[int, Field(ge=1, le=10)] = 2
    max_waiting_requests: Count | None = None
    """Bounds of what waits at all workers together for its prefill; unset: none."""
    max_waiting_tokens: Count | None = None
    max_queue_s: Seconds | None = None
    """Predicted prefill time of what waits."""
    max_reserved_kv_tokens: Count | None = None
    """Prompts and predicted outputs of everything in progress."""
    refuse_lost_deadlines: bool = False
    """Refuse at once what will not end before its deadline."""
    output_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Share of outputs that the predicted length shall cover."""


class TenantConfig(Section):
    """What one tenant may hold and take; unset: no bound."""

    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Its share beside the other tenants' in the workers' fair policies."""
    max_concurrent_requests: Count | None = None
    max_live_kv_bytes: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(auto_size)] = None
    tokens_per_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Prompt and output tokens."""
    burst_tokens: Annotated[Annotated[int, Field(ge=1, le=1 << 40)] | None, BeforeValidator(auto_to_none)] = None
    """auto: what tokens_per_s gives in 10 s."""

    @model_validator(mode="after")
    def _check_rate(self) -> Self:
        if self.burst_tokens is not None and self.tokens_per_s is None:
            raise ValueError("burst_tokens needs tokens_per_s")
        return self


class EndpointConfig(Section):
    """What one call through an endpoint may ask for; unset: no bound of its own."""

    max_context_tokens: Annotated[int, Field(ge=2)] | None = None
    """Prompt and output together."""
    max_uncached_tokens: Count | None = None
    """Of the prompt, beyond what is known to be cached when the call comes."""


class GatewayConfig(Section):
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Gateways. Clients meet any of several at grpc_port and http_port."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    grpc_port: Port = 50_051
    http_port: Port = 8000
    api_keys: Annotated[tuple[SecretStr, ...], Tuple] = ()
    """`KEY` or `TENANT=KEY`; empty: no authentication."""
    mode: Literal["auto", "disaggregated", "colocated"] = "auto"
    routing: RoutingConfig = RoutingConfig()
    cache_namespace_secret: Annotated[
        Annotated[SecretStr, Field(min_length=16)] | None, BeforeValidator(auto_to_none)
    ] = None
    """Secret that keeps tenants' cached blocks apart. auto: a fresh one at each start, or with a disk cache the one
    that is kept in this machine's cache folder."""
    limits: LimitsConfig = LimitsConfig()
    tenants: dict[Annotated[str, Field(pattern=f"^{TENANT_NAME}$")], TenantConfig] = Field(default_factory=dict)
    """By name; `default` holds for every tenant without an entry."""
    endpoints: dict[Literal["chat", "completions", "generate", "default"], EndpointConfig] = Field(default_factory=dict)
    """By name; `default` holds for every endpoint without an entry."""

    degradation: DegradationConfig = DegradationConfig()

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        plain = [key.get_secret_value() for key in keys]
        if any(not key or key != key.strip() or not key.isprintable() for key in plain):
            raise ValueError("a key must be printable, without spaces around it, and not empty")
        named = [key.split("=", 1) for key in plain if "=" in key.rstrip("=")]
        if any(not re.fullmatch(TENANT_NAME, tenant) or not key.strip("=") for tenant, key in named):
            raise ValueError("write KEY or TENANT=KEY; a tenant has 1 to 64 letters, digits, `_`, `.` or `-`")
        if len(set(plain)) != len(plain):
            raise ValueError("the same key is listed twice")
        return keys

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        if (fault := ports.fault(self.grpc_port, self.http_port, self.replicas)) is not None:
            raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _check_degradation(self) -> Self:
        policy = self.degradation.lost_deadline
        if policy != "reject" and not self.limits.refuse_lost_deadlines:
            raise ValueError(
                f"degradation.lost_deadline: {policy} needs limits.refuse_lost_deadlines: true; else no deadline is "
                "judged"
            )
        return self


class PoolConfig(Section):
    """A pool of equal workers."""

    role: Literal["prefill", "decode", "colocated"]
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    threads: Annotated[Annotated[int, Field(ge=1, le=1024)] | None, BeforeValidator(auto_to_none)] = None
    """Compute threads of each worker. auto: the machine's cores divided between the workers."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 64
    long_prefill_token_threshold: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    """Most prompt tokens of one request in one step."""
    max_waiting_requests: Count = 1024
    max_waiting_tokens: Annotated[int, Field(ge=0)] = 1_000_000
    max_queue_s: Seconds | None = None
    """Predicted prefill time of the queue of prefills; unset: no bound. A single request may take longer."""
    max_reserved_kv_tokens: Count | None = None
    """Prompts and predicted outputs of everything at a worker; unset: no bound. A single request may be longer."""
    kv_cache_bytes: Annotated[Annotated[int, Field(ge=4096)] | None, BeforeValidator(auto_size)] = None
    """KV pool of each worker. auto: 1 GiB, at most 10 % of the available memory."""
    kv_cache_fraction: Annotated[float, Field(gt=0, le=0.9)] | None = None
    """KV pool of each worker as a share of the memory available at start."""
    block_size: Literal[8, 16, 32, 64, 128] = 16
    """Tokens of one KV block."""
    swap_bytes: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(auto_size)] = None
    """Host memory of each worker for the KV of preempted requests and for cached blocks that the KV pool has no room
    for. auto: a quarter of its KV pool, at most what is left of the available memory; 0: none."""
    disk_cache_bytes: Annotated[SizeBytes, Field(ge=0)] = 0
    """Cached blocks of each worker on disk, kept over restarts; 0: none."""
    disk_cache_dir: Annotated[str, Field(min_length=1)] | None = None
    """Folder for them; unset: `kv` in the cache folder of the worker's machine."""
    low_memory_bytes: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(auto_size)] = None
    """Memory left to a worker below which it takes no new requests and gives unused KV memory back. auto: 3 % of the
    memory available at start, at most 512 MiB; 0: never."""
    critical_memory_bytes: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(auto_size)] = None
    """Memory left below which requests are preempted for it, too. auto: half of low_memory_bytes."""
    profile: Annotated[str, Field(min_length=1)] = "auto"
    """Step-time profile of each worker. auto: the one in the cache that fits; none; or a path."""
    scheduling: SchedulingConfig = SchedulingConfig()

    @model_validator(mode="after")
    def _check_budgets(self) -> Self:
        if self.kv_cache_bytes is not None and self.kv_cache_fraction is not None:
            raise ValueError("kv_cache_bytes and kv_cache_fraction exclude each other")
        if self.disk_cache_bytes and self.swap_bytes == 0:
            raise ValueError("disk_cache_bytes needs swap_bytes: blocks go to disk and back through host memory")
        low, critical = self.low_memory_bytes, self.critical_memory_bytes
        if low is not None and critical is not None and critical > low:
            raise ValueError(
                f"critical_memory_bytes {critical} is above low_memory_bytes {low}; nobody is preempted while others "
                "are let in"
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} is above max_num_batched_tokens {self.max_num_batched_tokens}; "
                "a step has at least one token a sequence"
            )
        if self.scheduling.max_decode_rows > self.max_num_seqs:
            raise ValueError(
                f"scheduling.max_decode_rows {self.scheduling.max_decode_rows} is above max_num_seqs "
                f"{self.max_num_seqs}"
            )
        return self


class KvTransferConfig(Section):
    transport: Literal["auto", "ucx", "tcp", "nccl"] = "auto"
    """auto: each pair of workers measures UCX, where its library is installed, and TCP, and takes the faster one. nccl:
    torch.distributed, whose gloo moves KV that lies in host memory."""
    read_timeout_s: Seconds = 30.0
    read_retries: Annotated[int, Field(ge=0, le=10)] = 1
    """Reads of one hand-off that are made again after they failed, over another lane where there is one."""
    checksums: bool = True
    """Every block is compared with its holder's digest once it was read."""
    quarantine_cap_bytes: Annotated[SizeBytes, Field(ge=0)] = 256 << 20
    """A worker whose abandoned reads hold more than this restarts."""
    on_failure: Literal["auto", "retry", "other_prefill", "local_recompute", "fail"] = "auto"
    """What becomes of a request whose KV could not be handed on. auto: the first of the three ways that is predicted to
    keep the deadline, else the quickest."""
    host: Annotated[Annotated[str, Field(min_length=1)] | None, BeforeValidator(auto_to_none)] = None
    """Address that workers listen on. auto: loopback, or the Ray node's address in a cluster."""


class ClusterConfig(Section):
    backend: Literal["ray", "process"] = "ray"
    address: Annotated[str, Field(min_length=1)] | None = None
    """An existing Ray cluster; unset: a private one is started on this machine."""
    token: Annotated[Annotated[SecretStr, Field(min_length=16)] | None, BeforeValidator(auto_to_none)] = None
    """Secret of the calls inside the deployment. auto: a fresh one."""
    liveness_s: Annotated[float, Field(ge=1, le=600)] = 8.0
    """Silence after which a process counts as hung: it is killed and replaced."""
    start_timeout_s: Seconds = 120.0
    drain_timeout_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """How long running requests may go on after Ctrl-C."""
    restart_initial_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """Delay before the second restart in a row; doubles each time. The first restart is immediate."""
    restart_max_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    restart_reset_s: Seconds = 60.0
    """Time in service after which the delays begin anew."""

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if self.address is not None and self.backend != "ray":
            raise ValueError("address names a Ray cluster and needs backend: ray")
        if self.restart_max_s < self.restart_initial_s:
            raise ValueError(f"restart_max_s must be at least restart_initial_s, {self.restart_initial_s}")
        return self


class EventsConfig(Section):
    """The event log: what happened to requests at the workers, without what they say."""

    path: Annotated[str, Field(min_length=1)] | None = None
    """Folder, a file for each worker; unset: no log."""
    sample_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of requests that are recorded."""
    max_bytes: Annotated[SizeBytes, Field(ge=64 << 10, le=1 << 40)] = 64 << 20
    """Of one file."""
    max_files: Annotated[int, Field(ge=1, le=100)] = 4
    """Of one worker."""


class ServeConfig(Section):
    """The whole file."""

    model: ModelConfig = ModelConfig()
    gateway: GatewayConfig = GatewayConfig()
    pools: Annotated[tuple[PoolConfig, ...], Tuple] = (
        PoolConfig(role="prefill"),
        PoolConfig(role="decode"),
    )
    kv_transfer: KvTransferConfig = KvTransferConfig()
    cluster: ClusterConfig = ClusterConfig()
    events: EventsConfig = EventsConfig()
    engine: EngineConfig = EngineConfig()
    exact: bool = False
    """Outputs bit-equal whatever the batch; slower."""

    @model_validator(mode="after")
    def _check_topology(self) -> Self:
        if not self.pools:
            raise ValueError("pools: must have at least 1 entry")
        roles = {pool.role for pool in self.pools}
        if "prefill" in roles and "decode" not in roles:
            raise ValueError("pools: a prefill pool needs a decode pool")
        if "decode" in roles and "prefill" not in roles:
            raise ValueError("pools: a decode pool needs a prefill pool")
        if self.gateway.mode == "disaggregated" and "prefill" not in roles:
            raise ValueError("gateway.mode: disaggregated needs a prefill and a decode pool")
        if any(pool.scheduling.service_weights != self.pools[0].scheduling.service_weights for pool in self.pools):
            raise ValueError("pools: service_weights must be the same everywhere; a tenant's service is added up")
        if self.exact and self.engine.device == "cuda":
            raise ValueError("exact needs engine.device: cpu; engine.batch_invariant is what a GPU can keep")
        if len({pool.block_size for pool in self.pools}) > 1:
            raise ValueError("pools: block_size must be the same everywhere; KV blocks move between pools unchanged")
        return self

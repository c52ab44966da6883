"""What a gateway process is told at birth: resolved, frozen, JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from headrace.core.admission_records import Reason
from headrace.core.fairness import ServiceWeights
from router.core.prefix_index import DEFAULT_MAX_ENTRIES
from router.core.settings import RoutingSettings

EVERY_OTHER = "default"
"""The name of an entry that holds for everything without one of its own."""
OVERLOAD: set[str] = {
    *(Reason.CONCURRENCY, Reason.QUEUE_FULL, Reason.WAITING_TOKENS, Reason.RESERVED_KV, Reason.QUEUE_SECONDS),
    *("memory_pressure", "no_worker"),
}
"""Reasons of refusals for want of room, of gateway and workers; a tenant's own limits are none of them."""


class TenantSpec(BaseModel):
    """What one tenant may hold and take at a gateway; None: no bound."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_concurrent_requests: int | None = None
    max_live_kv_bytes: int | None = None
    tokens_per_s: float | None = None
    burst_tokens: int = 0


class EndpointSpec(BaseModel):
    """What one call through an endpoint may ask for; None: no bound."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_context_tokens: int | None = None
    max_uncached_tokens: int | None = None


class FallbackSpec(BaseModel):
    """Another deployment with an OpenAI-compatible API."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """Up to and with `/v1`, without a `/` at its end."""
    model: str | None = None
    """The model's name there; None: the same model."""
    api_key: str = ""
    timeout_s: float = 30.0
    """Until the first byte of its answer."""
    max_requests: int = 64


class DegradationSpec(BaseModel):
    """What becomes of requests that cannot be served as they ask."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lost_deadline: str = "reject"
    """reject | best_effort | fallback"""
    overload: str = "reject"
    """reject | fallback"""
    best_effort_classes: int = 1
    fallback: FallbackSpec | None = None

    @property
    def routed(self) -> frozenset[str]:
        """Reasons of refusals that go to the fallback."""
        lost = {Reason.DEADLINE_LOST} if self.lost_deadline == "fallback" else set()
        return frozenset(lost | (OVERLOAD if self.overload == "fallback" else set()))


class GatewaySpec(BaseModel):
    """One gateway. Times in seconds, sizes in bytes; port 0 asks the OS."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gateway_id: str
    model_path: str
    """The prepared model folder: tokenizer.json, config.json, chat template."""
    served_model_name: str
    max_model_len: int
    block_size: int = 16
    dtype: str = "float32"
    exact: bool = False
    """Workers compute a row bit for bit the same in any company."""
    chat_template: str | None = None
    """Path of a template that replaces the model's own."""
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8000
    shared_grpc_port: int | None = None
    """Where clients meet this gateway or a sibling of it, beside its own ports. None: at its own ports."""
    shared_http_port: int | None = None
    run_dir: str = ""
    """A folder of the deployment's own that all its gateways see; '': none."""
    api_keys: tuple[str, ...] = ()
    """Empty: no authentication. Otherwise `key` or `tenant=key`."""
    mode: str = "auto"
    """auto | disaggregated | colocated"""
    routing_policy: str = "cost"
    """A name of `router.core.policies.Policy`."""
    routing: RoutingSettings = RoutingSettings()
    max_index_entries: int = DEFAULT_MAX_ENTRIES
    """Of the prefix index: pairs of a block and a worker that has it."""
    default_max_tokens: int | None = None
    default_deadline_s: float = 600.0
    drain_timeout_s: float = 10.0
    """How long running requests may go on after a stop was asked for."""
    max_body_bytes: int = 8 << 20
    max_n: int = 16
    max_stop_strings: int = 4
    max_stop_bytes: int = 1024
    max_live_requests: int = 1024
    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    max_reserved_kv_tokens: int | None = None
    max_queue_s: float | None = None
    refuse_lost_deadlines: bool = False
    output_quantile: float = 0.9
    kv_bytes_per_token: int = 0
    tenants: dict[str, TenantSpec] = {}
    """By name; `default` holds for every tenant without an entry."""
    endpoints: dict[str, EndpointSpec] = {}
    """By name; `default` holds for every endpoint without an entry."""
    degradation: DegradationSpec = DegradationSpec()
    service: ServiceWeights = ServiceWeights()
    """What a tenant's service is counted in, and the tenants' shares of it; the same at every worker."""
    max_attempts: int = 3
    max_worker_crashes: int = 2
    on_transfer_failure: str = "auto"
    """A name of `router.core.recovery.OnFailure`."""
    liveness_s: float = 8.0
    cluster_token: str
    cache_namespace_secret: str = ""
    keeps_generations: bool = False
    """How often a tenant's cache was cleared is kept for good on this node's disk: some blocks outlive the deployment.
    """
    controller_pid: int = 0

    def endpoint(self, name: str) -> EndpointSpec:
        """The caps of an endpoint: chat, completions or generate."""
        return self.endpoints.get(name) or self.endpoints.get(EVERY_OTHER) or EndpointSpec()


class GatewayReady(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    gateway_id: str
    grpc_address: str
    """This gateway's own."""
    http_address: str
    shared_grpc_address: str = ""
    shared_http_address: str = ""
    pid: int = Field(gt=0)

    @property
    def client_addresses(self) -> tuple[str, str]:
        """Where clients go: gRPC, HTTP."""
        return self.shared_grpc_address or self.grpc_address, self.shared_http_address or self.http_address

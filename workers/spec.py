"""What a worker process is told at birth: resolved, frozen, JSON. Made by `cluster.config`, read by `workers.main` and
`workers.actor`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from headrace.core.fairness import ServiceWeights
from headrace.core.records import Role
from workers.core.settings import SchedulingOptions
from workers.model.weight_format import WeightFormat


class EngineOptions(BaseModel):
    """What a worker computes on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = "cpu"
    """cpu | cuda"""
    cuda_graphs: bool = True
    batch_invariant: bool = False
    gpu_memory_utilization: float = 0.9


class WorkerSpec(BaseModel):
    """One worker incarnation. Paths are local to the node; times in seconds, sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_id: str
    incarnation: str
    role: Role
    model_path: str
    """A prepared Hugging Face folder (config.json, safetensors)."""
    max_model_len: int
    threads: int = Field(ge=1)
    kv_cache_bytes: int = Field(ge=0)
    """0, on a GPU alone: what is left in `engine.gpu_memory_utilization` of its memory."""
    engine: EngineOptions = EngineOptions()
    block_size: int = 16
    exact: bool = False
    weight_format: WeightFormat = WeightFormat.AUTO
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    long_prefill_token_threshold: int = 256
    """Most prompt tokens of one request in one step (chunk size)."""
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1_000_000
    max_queue_s: float | None = None
    max_reserved_kv_tokens: int | None = None
    scheduling: SchedulingOptions = SchedulingOptions()
    overlap: str = "auto"
    """on | off | auto: see `workers.runner.threaded.step_queue`."""
    service: ServiceWeights = ServiceWeights()
    """The same in the whole deployment: the pools' service of a tenant is added up."""
    swap_bytes: int = 0
    """Host memory for the KV of preempted requests and for cached blocks; whole blocks of it are used."""
    disk_cache_bytes: int = 0
    """Bound of this worker's cached blocks on disk; 0: none."""
    disk_cache_dir: str = ""
    """Folder for them; '': `kv` in the machine's cache folder."""
    low_memory_bytes: int = 0
    """Available memory below which nobody new is let in; 0: never."""
    critical_memory_bytes: int = 0
    """Available memory below which requests are preempted for it."""
    profile_path: str = ""
    """Step-time profile to start from. '': the one of this worker's own key in the cache, if any; 'none': none."""
    transport: str = "auto"
    """auto | ucx | tcp"""
    read_timeout_s: float = 30.0
    """A read that moves nothing for this long is given up (its blocks stay quarantined until it is terminal)."""
    read_retries: int = 1
    """Reads of one hand-off that are made again after they failed, over another lane where there is one."""
    checksums: bool = True
    """Tell readers a digest of each block, and compare those of blocks read."""
    quarantine_cap_bytes: int = 256 << 20
    liveness_s: float = 8.0
    """Silence after which a session or a lease counts as broken."""
    event_log_path: str = ""
    """Folder of the event log; '': none is written."""
    event_log_sample_rate: float = Field(default=1.0, ge=0, le=1)
    """Share of requests that are recorded, the same ones at every worker."""
    event_log_max_bytes: int = Field(default=64 << 20, ge=1)
    """Of one file."""
    event_log_max_files: int = Field(default=4, ge=1)
    """Of this worker, the one that is being written included."""
    host: str = "127.0.0.1"
    cluster_token: str
    controller_pid: int = 0
    """Process backend: exit when this process is gone (0: do not watch)."""


class WorkerReady(BaseModel):
    """What a worker answers once warm-up and self-test are over."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_id: str
    incarnation: str
    role: Role
    address: str
    pid: int
    fingerprint: str
    total_blocks: int
    block_size: int
    lane: str
    lane_gbps: float = 0.0
    """Measured at start by a loopback read; 0 when not measured."""
    memory_plan: dict[str, int] = {}
    """Bytes by use: weights, workspace, kv, block_metadata."""
    weight_storage: str = ""
    """How the weights are kept in memory, in words."""
    lane_note: str = ""
    """Why a better lane is not used, or empty."""
    exact_rows: str = ""
    start_s: float = 0.0

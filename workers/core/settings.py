"""The numbers a scheduler obeys. Pools have their own, so that prefill, decode and colocated workers differ by data
alone (SPEC B12). Made by `cluster.config`, checked here, read everywhere in `workers.core`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum


class Batching(StrEnum):
    """When new requests may join (scheduler article, section 2)."""

    CONTINUOUS = "continuous"
    """Before every step."""
    WINDOW = "window"
    """When all of the last batch have ended, after `batch_window_s` of waiting or with a full batch."""
    STATIC = "static"
    """When all of the last batch have ended and a full batch waits; after ten windows without an arrival a part of
    one."""


class ChunkMode(StrEnum):
    """How long the pieces of a prompt are (SPEC B2)."""

    FIXED = "fixed"
    """`long_prefill_token_threshold` tokens."""
    BUCKETED = "bucketed"
    """Halved with each doubling of decode rows above an eighth of `max_num_seqs`."""
    ADAPTIVE = "adaptive"
    """As many as the step's predicted time allows; fixed while there is no prediction or no decode to protect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """What an operator may choose for each pool; `cluster.config.scheduling` has the same with a person's units."""

    batching: str = Batching.CONTINUOUS
    batch_window_s: float = 0.05
    policy: str = "slo_fair"
    """A name of `workers.core.policies.POLICIES`."""
    chunk_mode: str = ChunkMode.ADAPTIVE
    itl_target_s: float = 0.0
    """Time budget of a step with decode rows; 0: tokens are the only budget."""
    itl_quantile: float = 0.95
    """Share of steps that should stay inside the time budget: the predictor's residual quantile that is used."""

    max_decode_rows: int = 0
    """Decode rows in one step, the rest takes turns; 0: as many as there are rows."""
    min_prefill_share: float = 0.1
    """Share of a step's tokens that prefills get while they wait, however many decodes there are."""
    next_token_deadline_s: float = 1.0
    """A decode that has not been in a step for so long goes before prefills and other decodes; 0: never."""
    age_boost_ms_per_s: float = 1000.0
    """Priority that a second of waiting adds. At 1000 a prefill goes first when it has waited longer than the time that
    it needs more than another."""
    ttft_target_s: float = 2.0
    """First token due after arrival; urgency grows as it comes near. 0: no such target."""
    urgency_horizon_s: float = 1.0
    """Slack below which a deadline adds to the priority, a millisecond for each that is missing."""
    nearly_complete_boost_ms: float = 500.0
    """Added to a started prefill whose last chunk is next."""
    class_weight_ms: float = 1000.0
    """Priority that one step of `priority` is worth."""
    mlfq_quantum_tokens: int = 512
    """Service after which a request falls one level; each level's quantum is twice the one above."""
    fairness_weight_ms: float = 1.0
    """Priority lost for each unit of service that the tenant is ahead of the one furthest behind."""
    lost_deadline: str = "reject"
    """What becomes of a waiting request that cannot meet its deadline any more: reject | best_effort."""

    min_progress_tokens: int = 16
    """Tokens a request computes after a preemption before it may be preempted again."""
    nearly_finished_bonus_ms: float = 500.0
    """What keeps a request from being preempted whose output is almost complete, at most."""
    deadline_penalty_ms: float = 2000.0
    """What keeps a request from being preempted that would miss its deadline for it."""
    tenant_cache_share: float = 1.0
    """Share of the blocks that a tenant may have idle in the prefix cache before its own go first; 1: no quota."""
    route_when_preempted: bool = False
    """There are other workers of this role: a victim that has received little goes there instead of waiting here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings(SchedulingOptions):
    """Raises ValueError when a step could have room for decodes alone, or none at all, or a number makes no sense."""

    max_num_batched_tokens: int
    """Tokens computed in one step."""
    max_num_seqs: int
    """Rows in one step, and requests that compute here at the same time."""
    long_prefill_token_threshold: int
    """Most prompt tokens of one request in one step."""
    block_size: int
    max_waiting_requests: int
    """Bound of the queue of prefills, and of the queue of adoptions."""
    max_waiting_tokens: int
    """Bound of uncomputed tokens in the queue of prefills; a single request may be longer."""
    watermark_blocks: int
    """Blocks left available at an admission while others run, so that their next growth preempts nobody."""
    max_model_len: int
    """Longest prompt + output, in tokens."""
    eos_token_ids: tuple[int, ...]
    max_queue_s: float | None = None
    """Bound of the predicted time of the queue of prefills; None: none. A single request may take longer."""
    max_reserved_kv_tokens: int | None = None
    """Bound of the tokens, expected outputs too, of all that is here; None: none. A single request may be longer."""
    host_blocks: int = 0
    """Blocks of host memory for preempted requests and for cached blocks; 0: neither is kept."""
    host_copy_block_s: float = 0.0
    """Seconds to copy one block to the host, or back."""
    disk_blocks: int = 0
    """Bound of cached blocks on disk; they go there through the host."""

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens of one request that a step can take, when it has nothing else to compute."""
        return min(self.long_prefill_token_threshold, self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "long_prefill_token_threshold", "block_size", "mlfq_quantum_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} must not be negative or without end")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        if not 0 <= self.max_decode_rows <= self.max_num_seqs:
            raise ValueError("max_decode_rows must be from 0 to max_num_seqs")
        if not 0.0 <= self.min_prefill_share <= 1.0:
            raise ValueError("min_prefill_share must be from 0 to 1")
        if not 0.0 <= self.tenant_cache_share <= 1.0:
            raise ValueError("tenant_cache_share must be from 0 to 1")
        if not 0.0 < self.itl_quantile < 1.0:
            raise ValueError("itl_quantile must be between 0 and 1")
        if self.lost_deadline not in ("reject", "best_effort"):
            raise ValueError("lost_deadline must be reject or best_effort")
        Batching(self.batching)
        ChunkMode(self.chunk_mode)

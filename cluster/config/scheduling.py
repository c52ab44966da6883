"""How a pool's workers choose what to compute next: the `scheduling` section of a pool.

Each number is one of `workers.core.settings.SchedulerSettings`, which says what it does, in the units that people
write; `spec` is the one place where they become the worker's.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from cluster.config.section import Milliseconds, Section, on_or_off
from workers.core.settings import SchedulingOptions

Weight = Annotated[float, Field(ge=0, le=1e6)]


class ServiceWeightsConfig(Section):
    """What a unit of service counts when tenants are compared."""

    input_token: Weight = 1.0
    output_token: Weight = 2.0
    cached_token: Weight = 0.1
    """A prompt token that the prefix cache had."""
    kv_block_s: Weight = 0.0
    """A KV block held for a second."""


class SchedulingConfig(Section):
    policy: Literal["fcfs", "decode_first", "aging", "deadline", "shortest_remaining", "mlfq", "fair", "slo_fair"] = (
        "slo_fair"
    )
    """Who goes first."""
    batching: Literal["continuous", "window", "static"] = "continuous"
    """When new requests may join: before every step, or when the last batch has ended."""
    batch_window_ms: Milliseconds = 50.0
    """How long a batch is collected; batching window and static only."""
    chunk_mode: Literal["fixed", "bucketed", "adaptive"] = "adaptive"
    """How long the pieces of a prompt are: fixed, shorter the more decodes run, or by predicted time."""
    itl_target_ms: Milliseconds = 0.0
    """Time budget of a step with decodes; 0: none."""
    itl_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Share of steps that should stay inside the time budget."""
    max_decode_rows: Annotated[int, Field(ge=0, le=4096)] = 0
    """Decodes in one step, the others take turns; 0: as many as there are rows."""
    min_prefill_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of a step's tokens that prefills get while they wait."""
    next_token_deadline_ms: Milliseconds = 1000.0
    """A decode that waited so long for its next token goes first; 0: never."""
    age_boost_ms_per_s: Milliseconds = 1000.0
    """Priority that a second of waiting adds."""
    ttft_target_ms: Milliseconds = 2000.0
    """First token due after arrival; 0: no such target."""
    urgency_horizon_ms: Milliseconds = 1000.0
    """Slack below which a deadline adds to the priority."""
    nearly_complete_boost_ms: Milliseconds = 500.0
    """Added to a prefill whose last chunk is next."""
    class_weight_ms: Milliseconds = 1000.0
    """What one step of a request's `priority` is worth."""
    mlfq_quantum_tokens: Annotated[int, Field(ge=1, le=1 << 30)] = 512
    """Service after which a request falls one level; policy mlfq only."""
    fairness_weight_ms: Milliseconds = 1.0
    """Priority lost for each unit of service that the tenant is ahead."""
    lost_deadline: Literal["reject", "best_effort"] = "reject"
    """What becomes of a waiting request that cannot meet its deadline any more."""
    min_progress_tokens: Annotated[int, Field(ge=0, le=1 << 30)] = 16
    """Tokens a request computes after a preemption before it may be preempted again."""
    nearly_finished_bonus_ms: Milliseconds = 500.0
    """What keeps a request with an almost complete output from being preempted."""
    deadline_penalty_ms: Milliseconds = 2000.0
    """What keeps a request from being preempted that would miss its deadline for it."""
    tenant_cache_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the blocks that a tenant may have unused in the prefix cache before its own go first; 1: no quota."""
    overlap: Annotated[Literal["auto", "on", "off"], BeforeValidator(on_or_off)] = "auto"
    """Plan the next step while one runs; auto: where the runner computes beside the host."""
    service_weights: ServiceWeightsConfig = ServiceWeightsConfig()
    """The same in all pools."""

    def spec(self, route_when_preempted: bool) -> SchedulingOptions:
        """The worker's form, in its units."""
        values = self.model_dump(exclude={"service_weights", "overlap"})
        for name in ("batch_window", "itl_target", "next_token_deadline", "ttft_target", "urgency_horizon"):
            values[f"{name}_s"] = values.pop(f"{name}_ms") / 1000.0
        return SchedulingOptions(**values, route_when_preempted=route_when_preempted)

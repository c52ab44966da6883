"""One step, while it is being filled (the budgets that are left, the columns so far) and while the runner has it.

Both objects are thrown away with the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.ids import RequestKey
from workers.core.limits import SchedulerSettings, banned_ids
from workers.core.plan import StepPlan
from workers.core.request import Request


class Packing:
    """`plan` is valid once `rows` is not empty; decode rows must be added before prefill rows."""

    def __init__(self, step_id: int, settings: SchedulerSettings) -> None:
        self.plan = StepPlan(step_id)
        self.rows: dict[RequestKey, Request] = {}
        self.tokens_left = settings.max_num_batched_tokens
        self._settings = settings

    @property
    def rows_left(self) -> int:
        return self._settings.max_num_seqs - len(self.rows)

    @property
    def full(self) -> bool:
        return self.tokens_left == 0 or self.rows_left == 0

    def add_decode(self, request: Request) -> None:
        self._add(request, 1)
        self.plan.num_decode_rows += 1

    def add_prefill(self, request: Request) -> None:
        """The next chunk: as much as is missing, allowed for one request, and left in this step."""
        chunk = min(request.uncomputed_tokens, self._settings.long_prefill_token_threshold, self.tokens_left)
        self._add(request, chunk)

    def _add(self, request: Request, num_tokens: int) -> None:
        plan = self.plan
        start = request.computed_tokens
        end = start + num_tokens
        samples = end == len(request.token_ids)
        plan.keys.append(request.key)
        plan.num_tokens.append(num_tokens)
        plan.start_pos.append(start)
        plan.token_ids.extend(request.token_ids[start:end])
        plan.block_tables.append(request.block_ids)
        plan.samples.append(samples)
        plan.sampling.append(request.sampling)
        plan.banned.append(banned_ids(request, self._settings) if samples else ())
        self.rows[request.key] = request
        self.tokens_left -= num_tokens


@dataclass(slots=True)
class Flight:
    """The step that the runner has now."""

    plan: StepPlan
    rows: dict[RequestKey, Request]
    """In the order of the plan's rows."""
    started: list[RequestKey]
    since: float
    dropped: list[Request] = field(default_factory=list)
    """Ended since; the plan still names their blocks."""

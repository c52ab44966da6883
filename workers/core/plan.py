"""The step as data: what the scheduler asks for, what the runner answers, what the step meant.

All three are columns (parallel lists), one entry a row; no object per row. They are the whole contract between
`workers.core.scheduler` and `workers.runner`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core.records import FinishReason, TokenLogprobs
from headrace.ids import RequestKey
from headrace.sampling import SamplingParams


@dataclass(slots=True)
class StepPlan:
    """One iteration. Decode rows come first, then prefill rows; a decode row is a row with one token.

    Row i computes tokens [start_pos[i], start_pos[i] + num_tokens[i]) of its sequence: their ids are the next
    num_tokens[i] entries of `token_ids`; KV of earlier positions is in `block_tables[i]`, which also has room for
    these.

    In a plan that was made while the one before it was on its way, a decode row may have -1 - k for its token: the
    k-th that the plan before samples, in the order of its StepResult.token_ids.
    """

    step_id: int
    keys: list[RequestKey] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    start_pos: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    block_tables: list[Sequence[int]] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    """True when the row's last token yields a logit to sample from."""
    sampling: list[SamplingParams] = field(default_factory=list)
    banned: list[tuple[int, ...]] = field(default_factory=list)
    """Token ids that may not be sampled in this row (eos and stop ids while min_tokens is not reached)."""
    histories: list[Sequence[int] | None] = field(default_factory=list)
    """The request's input and output, of which the first start_pos[i] + num_tokens[i] count; None where the row does
    not sample or its `sampling` needs no history. Where the row's token is one of the step before, the list may still
    lack that token, which is the last. The scheduler's own list, as block tables are: it only grows until the step is
    applied, while another one is planned or applied too."""
    prompt_lens: list[int] = field(default_factory=list)
    """Input tokens of the request: output begins there, whatever attempt or preemption the row belongs to."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """Whole blocks to copy to host memory, (pool block, host block), before anything else."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """Whole blocks to copy back, (host block, pool block), after those."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Whole-block copies (source, target) in the pool, after those and before the rows."""
    memory: MemoryChange = field(default_factory=lambda: MemoryChange())
    """Once what was swapped out is copied, and before anything else is written."""
    num_decode_rows: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.keys)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(self.num_tokens[self.num_decode_rows :])


@dataclass(slots=True)
class MemoryChange:
    """Blocks that are out of use from this step on, whose memory goes back to the system; and blocks whose memory is
    taken again, in use once the step is over."""

    retired: list[int] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)
    host_retired: list[int] = field(default_factory=list)
    host_restored: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.retired or self.restored or self.host_retired or self.host_restored)


@dataclass(slots=True)
class StepResult:
    """`token_ids` has one entry for each row with `samples` true, in row order. Durations in seconds."""

    token_ids: list[int]
    run_s: float = 0.0
    sample_s: float = 0.0
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """Of the rows whose `sampling` asks, by index in token_ids."""


@dataclass(slots=True)
class StepEvents:
    """What a step changed, for the shell to publish: all columns over request keys."""

    started: list[RequestKey] = field(default_factory=list)
    """First scheduled in this plan's schedule()."""
    token_keys: list[RequestKey] = field(default_factory=list)
    token_offsets: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Of the tokens of requests that ask, by index in these three columns."""
    computed: list[RequestKey] = field(default_factory=list)
    """Requests whose prefill went on: a lease on them may announce more blocks."""
    prefilled: list[RequestKey] = field(default_factory=list)
    """hand_off requests that just sampled their first token and now hold their blocks for a reader."""
    finished: list[tuple[RequestKey, FinishReason]] = field(default_factory=list)

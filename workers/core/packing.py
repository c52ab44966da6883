"""One step while it is being filled: the budgets that are left, the columns so far. Thrown away with the step."""

from __future__ import annotations

from math import ceil

from headrace.core.predictor import StepPredictor, StepShape
from headrace.ids import RequestKey
from workers.core.batch import DecodeBatch, Ints
from workers.core.host_tier import Copy
from workers.core.limits import banned_ids
from workers.core.plan import StepPlan
from workers.core.request import HostCopy, Request
from workers.core.settings import ChunkMode, SchedulerSettings

_RESCUE_SHARE = 2.0
"""One over the part of the steps which `itl_quantile` lets miss the target that prefills without room may use."""


class Packing:
    """`plan` is valid once `num_rows` is not 0 or blocks are swapped or memory changes; decode rows must be added
    before prefill rows.

    floor_tokens: prompt tokens that decodes leave room for, the share that prefills have at least. Of a time budget
    they have the same share where decodes alone take more than all of it; where decodes just hold it, in a few steps.
    """

    def __init__(
        self, step_id: int, settings: SchedulerSettings, predictor: StepPredictor | None, floor_tokens: int
    ) -> None:
        self.plan = StepPlan(step_id)
        self.decode_rows: slice | Ints = slice(0, 0)
        self.prefills: list[Request] = []
        self.tokens_left = settings.max_num_batched_tokens
        self.floor_left = floor_tokens
        self.limit_s = float("inf")
        self._decodes_s = 0.0
        self.swapped_in: list[HostCopy] = []
        self.landing: dict[RequestKey, int] = {}
        """Requests that get blocks from the host, and the tokens that they had before."""
        self.restored: list[Copy] = []
        """Blocks of the host tier that are read."""
        self.copied: list[int] = []
        """Blocks that are copied from."""
        self._settings = settings
        self._predictor = predictor
        self._decode_context = 0
        self._prefill_tokens = 0
        self._prefill_context = 0
        self._sampled = 0

    @property
    def num_rows(self) -> int:
        return self.plan.num_decode_rows + len(self.prefills)

    @property
    def full(self) -> bool:
        return self.tokens_left == 0 or self.num_rows >= self._settings.max_num_seqs

    @property
    def shape(self) -> StepShape:
        return StepShape(
            self.plan.num_decode_rows,
            self._decode_context,
            len(self.prefills),
            self._prefill_tokens,
            self._prefill_context,
            self._sampled,
        )

    def add_decodes(self, batch: DecodeBatch, rows: slice | Ints, now: float) -> None:
        """Rows of the batch, all of which have room for one more token. Nobody's plan yet: see `DecodeBatch.depart`."""
        plan = self.plan
        num = batch.planned_tokens(rows)
        count = len(num)
        if isinstance(rows, slice):
            plan.keys, plan.sampling, plan.block_tables = (
                batch.keys[rows],
                batch.sampling[rows],
                list(batch.tables[rows]),
            )
        else:
            plan.keys = [batch.keys[i] for i in rows]
            plan.sampling = [batch.sampling[i] for i in rows]
            plan.block_tables = [batch.tables[i] for i in rows]
        plan.num_tokens = [1] * count
        plan.start_pos = (num - 1).tolist()
        plan.token_ids = batch.next_ids(rows)
        plan.samples = [True] * count
        plan.banned = [()] * count
        early = num < batch.min_tokens_at[rows]
        if early.any():
            for index in early.nonzero()[0].tolist():
                place = index if isinstance(rows, slice) else int(rows[index])
                plan.banned[index] = banned_ids(batch.requests[place], self._settings)
        plan.histories, plan.prompt_lens = [None] * count, [0] * count
        if batch.num_with_history:
            for index, place in enumerate(range(count) if isinstance(rows, slice) else rows.tolist()):
                if plan.sampling[index].needs_history:
                    request = batch.requests[place]
                    plan.histories[index], plan.prompt_lens[index] = request.history, request.num_input
        plan.num_decode_rows = count
        batch.scheduled_at[rows] = now
        self.decode_rows = rows
        self.tokens_left -= count
        self._decode_context = int(num.sum())
        self._sampled = count
        if count and self._settings.itl_target_s and self._predictor is not None and self._predictor.ready:
            self.limit_s = self._settings.itl_target_s
            self._decodes_s = self._predictor.predict_s(self.shape, self._settings.itl_quantile)

    def chunk(self, request: Request) -> int:
        """How many tokens of the request's prefill this step may take now; 0: none."""
        settings = self._settings
        most = min(request.unplanned_tokens, self.chunk_limit(), self.tokens_left)
        if self.full or most <= 0:
            return 0
        if settings.chunk_mode != ChunkMode.ADAPTIVE or self._predictor is None or self.limit_s == float("inf"):
            return most
        shape, quantile = self.shape, settings.itl_quantile
        fits = self._predictor.chunk_for(shape, request.planned_tokens, most, self.limit_s, quantile)
        # Decodes that hold the target keep it: of their steps no more are given up than the quantile lets miss anyway.
        is_lost = self._decodes_s > self.limit_s
        if not is_lost and (fits or self.plan.step_id % ceil(_RESCUE_SHARE / (1.0 - quantile))):
            return fits
        share_s = self._decodes_s + settings.min_prefill_share * self.limit_s
        return self._predictor.chunk_for(shape, request.planned_tokens, most, max(self.limit_s, share_s), quantile)

    def chunk_limit(self) -> int:
        """Longest chunk by the mode alone."""
        settings = self._settings
        limit = settings.long_prefill_token_threshold
        if settings.chunk_mode == ChunkMode.BUCKETED:
            rows = max(1, settings.max_num_seqs // 8)
            while self.plan.num_decode_rows > rows and limit > settings.block_size:
                limit, rows = limit // 2, rows * 2
        return limit

    def add_prefill(self, request: Request, num_tokens: int) -> None:
        """The next chunk of a request that has its blocks."""
        plan = self.plan
        start = request.planned_tokens
        end = start + num_tokens
        samples = end == request.num_tokens
        plan.keys.append(request.key)
        plan.num_tokens.append(num_tokens)
        plan.start_pos.append(start)
        plan.token_ids.extend(request.token_ids[start:end])
        plan.block_tables.append(request.block_ids)
        plan.samples.append(samples)
        plan.sampling.append(request.sampling)
        plan.banned.append(banned_ids(request, self._settings) if samples else ())
        plan.histories.append(request.history if samples and request.sampling.needs_history else None)
        plan.prompt_lens.append(request.num_input)
        self.prefills.append(request)
        self.tokens_left -= num_tokens
        self.floor_left = max(0, self.floor_left - num_tokens)
        self._prefill_tokens += num_tokens
        self._prefill_context += num_tokens * (start + num_tokens // 2)
        self._sampled += samples

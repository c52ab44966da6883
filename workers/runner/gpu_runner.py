"""The runner that computes on a device: fused weights, paged KV and sampling there, steps fed from the host ahead of
time. The same code runs on a CPU, for tests.

A step is enqueued by `submit` and its tokens are read by `collect`; what one step sampled the next one reads on the
device. So two steps may be under way, and the device does not wait for the host between them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch

from headrace.errors import InvariantError, StartupError
from headrace.ids import RequestKey
from headrace.paths import cache_root
from headrace.sampling import SamplingParams
from kernels.gpu_ops import DeviceOps
from kernels.gpu_rows import DeviceRows, RowBuffers, check_rows, fill_rows, layout_for
from kernels.shapes import PoolShape
from kvtransfer.core.identity import root_hash
from kvtransfer.core.layout import KvLayout
from workers.core.plan import StepPlan, StepResult
from workers.model.config import load_config
from workers.model.gpu_decoder import DeviceDecoder, DeviceWorkspace
from workers.model.gpu_weights import RandomWeights, load_device_weights
from workers.model.identity import identity_fields
from workers.model.loaders import Weights
from workers.model.weight_format import WeightFormat
from workers.runner.gpu_inputs import StepUnderWay, choose_device, choose_dtype, device_edits, upload
from workers.runner.gpu_memory import BlockMemory, blocks_that_fit
from workers.runner.graphs import GraphTable, batch_buckets, width_buckets
from workers.runner.sample import asking_rows, sampling_table

log = logging.getLogger("headrace.workers.gpu_runner")

MAX_UNDER_WAY = 2
ARITHMETIC = "device engine 1"
"""Raise the number when a change of kernels or decoder changes the bits of KV."""
_SHORT_PREFILL_TOKENS = 8
_BLOCK_METADATA_BYTES = 256
"""What the scheduler's records of one block take, roughly."""


class GpuRunner:
    """See `Runner`. One engine thread owns it."""

    exact_rows = ""

    def __init__(
        self,
        model_path: str | Path,
        max_model_len: int,
        *,
        device: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_bytes: int = 0,
        gpu_memory_utilization: float = 0.9,
        max_batched_tokens: int = 512,
        max_seqs: int = 64,
        weight_format: WeightFormat = WeightFormat.AUTO,
        host_blocks: int | None = None,
        swap_bytes: int = 0,
        cuda_graphs: bool = True,
        batch_invariant: bool = False,
        use_triton: bool = True,
        load_format: str = "auto",
    ) -> None:
        """Loads the weights, then takes the pool's memory: `num_blocks`, or what `kv_cache_bytes` holds, or what is
        left in a share of the device's memory. Host blocks: `host_blocks`, or what `swap_bytes` holds. load_format
        dummy: random weights of config.json's shapes, for measurements; the folder needs no others.

        Raises StartupError, one line, for everything that keeps the model from being served.
        """
        self.model_path = Path(model_path)
        self.config = c = load_config(self.model_path)
        if max_model_len > c.max_positions:
            raise StartupError(f"max_model_len {max_model_len} is over the model's own limit of {c.max_positions}")
        self.max_model_len, self.eos_token_ids = max_model_len, c.eos_token_ids
        self.device, self.weight_format = choose_device(device), weight_format
        self.max_seqs, self.max_batched_tokens = max_seqs, max_batched_tokens
        files = RandomWeights(self.model_path, self.device) if load_format == "dummy" else Weights(self.model_path)
        self.dtype = choose_dtype(weight_format, files, self.device)
        self.weight_storage = str(self.dtype).removeprefix("torch.")
        self.layout = KvLayout(c.layers, c.kv_heads, c.head_dim, block_size, self.dtype.itemsize)
        try:
            self._ops = DeviceOps(self.device, batch_invariant=batch_invariant, use_triton=use_triton)
            weights = load_device_weights(c, files, self.device, self.dtype, max_model_len)
            space = DeviceWorkspace(c, max_batched_tokens, max_seqs, self.device, self.dtype)
        except ValueError as error:
            raise StartupError(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise StartupError(f"too little device memory for the weights and {max_batched_tokens} tokens") from error
        block_bytes = self.layout.block_bytes
        self.num_blocks = num_blocks if num_blocks is not None else kv_cache_bytes // block_bytes
        if self.num_blocks < 1 and self.device.type == "cuda" and not kv_cache_bytes:
            self.num_blocks = blocks_that_fit(gpu_memory_utilization, block_bytes, self.device)
        held = self.num_blocks * block_size
        if num_blocks is None and 0 < held < max_model_len:
            raise StartupError(
                f"the KV pool holds {held:,} tokens, below max_model_len {max_model_len:,}; lower max_model_len, or "
                "raise kv_cache_bytes or gpu_memory_utilization"
            )
        if self.num_blocks < 1:
            raise StartupError(f"the KV pool must hold at least one block of {block_bytes:,} bytes")
        self.host_blocks = host_blocks if host_blocks is not None else swap_bytes // block_bytes
        self.host_copy_block_s = 0.0
        self._memory = BlockMemory(self.num_blocks, self.host_blocks, block_bytes, self.device)
        self.kv_pool, self.lane_pool = self._memory.kv_pool, self._memory.lane_pool
        self.host_pool = self._memory.host_pool
        self._shape = PoolShape(self.num_blocks, c.kv_heads, c.layers, block_size, c.head_dim)
        try:
            self._shape.check()
        except ValueError as error:
            raise StartupError(str(error)) from error
        pool = self._shape.view(self._memory.bytes[: self._memory.kv_bytes].view(self.dtype))
        self._decoder = DeviceDecoder(c, weights, pool, self._ops, space)
        self._space, self._weight_bytes = space, weights.num_bytes
        self.read_bytes = weights.read_bytes
        """Of weights, by each step."""
        max_blocks = self.layout.blocks_for(max_model_len)
        self._buffers = RowBuffers(
            layout_for(max_seqs, max_batched_tokens, max_blocks, max_seqs).num_bytes, self.device
        )
        self.graphs = GraphTable(
            batch_buckets(max_seqs),
            width_buckets(max_blocks, block_size),
            self._buffers,
            self._forward_decode,
            self._sample_decode,
        )
        if not cuda_graphs:
            self.graphs.turn_off("off")
        elif self.device.type == "cuda" and not self._ops.capturable:
            self.graphs.turn_off("torch_kernels")
        pinned = self.device.type == "cuda"
        self._answers = [torch.zeros(max_seqs, dtype=torch.int64, pin_memory=pinned) for _ in range(MAX_UNDER_WAY)]
        self._under_way: deque[StepUnderWay] = deque()
        self._submitted = 0
        self._num_fed = 0
        self._last_end = 0.0

    # ---- steps

    def run(self, plan: StepPlan) -> StepResult:
        """One step; see `Runner.run`. Raises InvariantError while another one is under way."""
        if self._under_way:
            raise InvariantError(f"step {plan.step_id}: run with {len(self._under_way)} steps under way")
        self.submit(plan)
        return self.collect()

    def submit(self, plan: StepPlan) -> None:
        """Begin a step. A token id -1 - k is the k-th token that the plan submitted before this one samples.

        The plan is not changed and not needed afterwards. Raises InvariantError for an impossible plan, or with two
        steps under way.
        """
        if len(self._under_way) >= MAX_UNDER_WAY:
            raise InvariantError(f"step {plan.step_id}: {MAX_UNDER_WAY} steps are under way already")
        step = StepUnderWay(time.perf_counter())
        self._memory.move(plan)
        try:
            self._compute(plan, step)
        except ValueError as error:
            raise InvariantError(f"step {plan.step_id}: {error}") from error
        if self.device.type == "cuda":
            step.done = torch.cuda.Event()
            step.done.record()
        step.enqueued = time.perf_counter()
        self._under_way.append(step)

    def collect(self) -> StepResult:
        """Wait for the oldest step. Its `run_s` counts from when it began or the step before it was over."""
        if not self._under_way:
            raise InvariantError("no step is under way")
        step = self._under_way.popleft()
        if step.done is not None:
            step.done.synchronize()
        end = time.perf_counter()
        run_s, self._last_end = end - max(step.began, self._last_end), end
        return step.result(run_s)

    def _compute(self, plan: StepPlan, step: StepUnderWay) -> None:
        num_fed, self._num_fed = self._num_fed, 0
        if not plan.keys:
            return
        columns = check_rows(
            self.layout.block_size,
            self.max_model_len,
            plan.start_pos,
            plan.num_tokens,
            plan.block_tables,
            plan.token_ids,
            plan.samples,
            self.config.vocab_size,
            num_fed,
        )
        count = columns.num_sampled
        if columns.rows > self.max_seqs or columns.tokens > self.max_batched_tokens:
            raise ValueError(f"{columns.rows} rows and {columns.tokens} tokens are more than this runner was made for")
        table = sampling_table(plan)
        bucket = self.graphs.choose(columns)
        sizes = (columns.rows, columns.tokens, columns.width, count)
        layout = bucket.layout if bucket else layout_for(*sizes)
        host = self._buffers.next_host(layout)
        fill_rows(host, columns, self._shape)
        host["settings"][:count] = table.settings
        host["settings"][count:] = 0.0  # greedy; what lay there may be anything
        self._buffers.send(layout)
        rows = bucket.rows if bucket else self._buffers.rows(layout, columns.num_decode, columns.max_tokens)
        if bucket is not None:
            bucket.forward.replay()
        else:
            self._decoder.forward(rows)
        if not count:
            return
        logits, tokens = self._space.logits[:count], self._space.tokens[:count]
        step.asking = asking_rows(plan)
        raw = logits[upload(list(step.asking), torch.int64, self.device)] if step.asking else None
        edits = device_edits(table, self.device)
        if bucket is not None and edits is None:
            bucket.sample.replay()
        else:
            if edits is not None:
                self._ops.resolve(edits.histories, self._space.tokens, edits.histories)
            self._ops.sample(logits, rows.settings[:count], tokens, edits)
        self._num_fed = count
        self._submitted += 1
        step.tokens = self._answers[self._submitted % MAX_UNDER_WAY][:count]
        step.tokens.copy_(tokens, non_blocking=True)
        if raw is not None:
            self._score(raw, step)

    def _score(self, raw: torch.Tensor, step: StepUnderWay) -> None:
        chosen = self._space.tokens[upload(list(step.asking), torch.int64, self.device)]
        width = min(max(step.asking.values()), self.config.vocab_size)
        values, ids = self._ops.logprobs(raw, chosen, width)
        step.logprobs = values.to("cpu", non_blocking=True), ids.to("cpu", non_blocking=True)

    def _forward_decode(self, rows: DeviceRows) -> None:
        self._decoder.forward(rows, all_sampled=True)

    def _sample_decode(self, rows: DeviceRows) -> None:
        count = rows.num_rows
        self._ops.sample(self._space.logits[:count], rows.settings, self._space.tokens[:count])

    # ---- start

    def warm_up(self) -> None:
        """Run a long and a short prefill, whose kernels differ, and a decode step; record the graphs, time copies."""
        most = min(self.layout.block_size * self.num_blocks, self.max_model_len, self.max_batched_tokens)
        table = list(range(self.layout.blocks_for(most)))
        for count in sorted({most, min(most, _SHORT_PREFILL_TOKENS), 1}, reverse=True):
            columns = [RequestKey(0)], [count], [0], [0] * count, [table], [True]
            self.run(StepPlan(0, *columns, [SamplingParams(max_tokens=1)], [()]))
        if self.graphs.off_reason == "not_recorded":
            self._buffers.device_bytes.zero_()  # empty rows, whose KV goes to block 0
            self.graphs.record(self.device)
        self.graphs.counters.clear()
        self.host_copy_block_s = self._memory.time_copies()

    @property
    def counters(self) -> Mapping[str, float]:
        """See `Runner.counters`: steps by graph, rows and padding in them, steps that ran as they are by reason."""
        return self.graphs.counters

    def memory_plan(self) -> dict[str, int]:
        """Bytes by use (C1); all but host_kv and block_metadata are the device's."""
        return {
            "weights": self._weight_bytes,
            "workspace": self._space.num_bytes + self._buffers.num_bytes,
            "graphs": self.graphs.num_bytes,
            "kv": self._memory.kv_bytes,
            "lane_probe": self._memory.lane_bytes - self._memory.kv_bytes,
            "host_kv": self._memory.host.nbytes,
            "block_metadata": self.num_blocks * _BLOCK_METADATA_BYTES,
        }

    def kernels(self) -> dict[str, str]:
        """Operation -> implementation that runs it."""
        return self._ops.chosen()

    def identity_fields(self) -> Mapping[str, bytes | str | int]:
        """See `Runner.identity_fields`."""
        fields = identity_fields(self.model_path, self.config, self.layout, self.weight_format, cache_root())
        attention = f"{ARITHMETIC}; {fields['attention']}"
        return {**fields, "attention": attention, "kv_dtype": self.weight_storage}

    def fingerprint(self) -> bytes:
        """See `Runner.fingerprint`."""
        return root_hash(self.identity_fields())

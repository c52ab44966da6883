"""The runner that computes: decoder, KV pool and sampler behind the step contract."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import numpy as np
import torch

from headrace.control_groups import available_bytes
from headrace.errors import InvariantError, StartupError
from headrace.ids import RequestKey
from headrace.paths import cache_root
from headrace.sampling import SamplingParams
from kernels.ops import LogprobScorer, PoolShape, Program, Sampler, step_rows
from kvtransfer.core.identity import root_hash
from kvtransfer.core.layout import KvLayout
from kvtransfer.probe import probe_area
from workers.core.plan import MemoryChange, StepPlan, StepResult
from workers.model.config import load_config
from workers.model.decoder import Decoder
from workers.model.identity import identity_fields
from workers.model.loaders import Weights
from workers.model.matrices import storage_text
from workers.model.weight_format import WeightFormat
from workers.runner.exact import exact_self_test
from workers.runner.pool import allocate_pool, release_pages, touch_pages
from workers.runner.sample import asking_rows, sampling_table, score_rows

_DTYPE_BYTES = 4
_PAGE_BYTES = 4096
_LOGITS_ROWS = 64
"""Rows of logits to begin with; a step that samples more makes the buffer grow."""
_COPY_TRIALS = 8
"""Blocks that the warm-up copies to the host and back."""
_BLOCK_METADATA_BYTES = 256
"""What the scheduler's records of one block take, roughly."""


class TorchRunner:
    """Float32 on CPU. Not thread safe: one engine thread owns it; `threads` sets torch's team for the whole process."""

    def __init__(
        self,
        model_path: str | Path,
        max_model_len: int,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        threads: int = 1,
        exact: bool = False,
        max_batched_tokens: int = 512,
        max_seqs: int = 64,
        weight_format: WeightFormat = WeightFormat.AUTO,
        host_blocks: int | None = None,
        swap_bytes: int = 0,
    ) -> None:
        """Loads weights and takes the pool's memory: `num_blocks`, or as many blocks as `kv_cache_bytes` holds.

        Beside the pool it has host memory for KV that the pool has no room for: `host_blocks`, or as many as
        `swap_bytes` holds. Its pages are taken when first used.

        Raises StartupError, one line, for everything that keeps the model from being served.
        """
        self.model_path = Path(model_path)
        self.config = load_config(self.model_path)
        self.exact = exact
        self._max_batched_tokens = max_batched_tokens
        self.weight_format = weight_format
        self.max_model_len = max_model_len
        self.eos_token_ids = self.config.eos_token_ids
        self.layout = KvLayout(self.config.layers, self.config.kv_heads, self.config.head_dim, block_size, _DTYPE_BYTES)
        if max_model_len > self.config.max_positions:
            limit = self.config.max_positions
            raise StartupError(f"max_model_len {max_model_len} is over the model's own limit of {limit}")
        self.num_blocks = num_blocks if num_blocks is not None else (kv_cache_bytes or 0) // self.layout.block_bytes
        if self.num_blocks < 1:
            raise StartupError(f"the KV pool must hold at least one block of {self.layout.block_bytes:,} bytes")
        c = self.config
        self._shape = PoolShape(self.num_blocks, c.kv_heads, c.layers, block_size, c.head_dim)
        try:
            self._shape.check()
        except ValueError as error:
            raise StartupError(str(error)) from error
        torch.set_num_threads(threads)
        self.host_blocks = host_blocks if host_blocks is not None else swap_bytes // self.layout.block_bytes
        block_bytes = self.layout.block_bytes
        self.lane_pool = allocate_pool(
            probe_area(self.num_blocks, block_bytes).end * block_bytes, self.host_blocks * block_bytes
        )
        self.kv_pool = self.lane_pool[: self.num_blocks * block_bytes]
        self._pool = torch.from_numpy(self.kv_pool).view(torch.float32)
        self._blocks = self.kv_pool.reshape(self.num_blocks, self.layout.block_bytes)
        self.host_copy_block_s = 0.0
        self.host_pool = np.empty(self.host_blocks * self.layout.block_bytes, np.uint8)
        self._host = self.host_pool.reshape(self.host_blocks, self.layout.block_bytes)
        self._check_weights_fit()
        try:
            self._decoder = Decoder(
                c,
                self.model_path,
                self._pool,
                self._shape,
                weight_format=weight_format,
                max_positions=max_model_len,
                max_tokens=max_batched_tokens,
                max_sampled=min(max_seqs, _LOGITS_ROWS),
                threads=threads,
            )
        except (MemoryError, OSError) as error:
            raise StartupError(f"too little memory for the weights ({available_bytes():,} bytes available)") from error
        self._sampler = Sampler(c.vocab_size, threads)
        self._scorer = LogprobScorer(c.vocab_size, threads)
        storages = self._decoder.storage_bytes()
        self.weight_storage = storage_text(storages)
        self.exact_rows = exact_self_test(threads, c, storages) if exact else ""

    def run(self, plan: StepPlan) -> StepResult:
        """One step; see `Runner.run`. The plan is not changed."""
        begin = time.perf_counter()
        for block, target in plan.swap_out:
            self._host[target] = self._blocks[block]
        if plan.memory:
            self._change_memory(plan.memory)
        for source, block in plan.swap_in:
            self._blocks[block] = self._host[source]
        for source, target in plan.copies:
            self._blocks[target] = self._blocks[source]
        if not plan.keys:
            return StepResult([])
        try:
            rows = step_rows(
                self._shape,
                self.config.heads,
                plan.start_pos,
                plan.num_tokens,
                plan.block_tables,
                plan.token_ids,
                plan.samples,
            )
            logits = self._decoder.forward(rows)
        except ValueError as error:
            raise InvariantError(f"step {plan.step_id}: {error}") from error
        middle = time.perf_counter()
        asking = asking_rows(plan)
        raw = logits[list(asking)] if asking else None  # a copy: choosing changes them
        tokens = self._sampler.choose(logits, sampling_table(plan))
        logprobs = score_rows(self._scorer, raw, asking, tokens) if raw is not None else {}
        return StepResult(tokens, middle - begin, time.perf_counter() - middle, logprobs)

    def _change_memory(self, change: MemoryChange) -> None:
        block_bytes = self.layout.block_bytes
        for memory, retired, restored in (
            (self.kv_pool, change.retired, change.restored),
            (self.host_pool, change.host_retired, change.host_restored),
        ):
            release_pages(memory, retired, block_bytes)
            touch_pages(memory, restored, block_bytes)

    def warm_up(self) -> None:
        """Touch the pool's pages, run a prefill and a decode step without sampling being kept, time block copies."""
        self.kv_pool[::_PAGE_BYTES] = 0  # new pages are zero: writing all of them would only do the system's work again
        tokens = min(self.layout.block_size * min(self.num_blocks, 2), self.max_model_len, self._max_batched_tokens)
        table = list(range(self.layout.blocks_for(tokens)))
        for start, count in ((0, tokens - 1), (tokens - 1, 1)):
            if count:
                self.run(
                    StepPlan(
                        0,
                        [RequestKey(0)],
                        [count],
                        [start],
                        [0] * count,
                        [table],
                        [True],
                        [SamplingParams(max_tokens=1)],
                        [()],
                    )
                )

        self.host_copy_block_s = self._time_copies()

    def _time_copies(self) -> float:
        """Median seconds to copy one block to the host or back."""
        took = []
        for trial in range(min(_COPY_TRIALS, self.num_blocks) if self.host_blocks else 0):
            host = trial % self.host_blocks
            for target, source in ((self._host[host], self._blocks[trial]), (self._blocks[trial], self._host[host])):
                target[:] = source  # a page's first touch is paid once, not by every copy
                begin = time.perf_counter()
                target[:] = source
                took.append(time.perf_counter() - begin)
        return median(took) if took else 0.0

    @property
    def counters(self) -> Mapping[str, float]:
        """See `Runner.counters`: none."""
        return {}

    def memory_plan(self) -> dict[str, int]:
        """Bytes by use (C1)."""
        return self._decoder.memory_plan() | {
            "kv": self.kv_pool.nbytes,
            "lane_probe": self.lane_pool.nbytes - self.kv_pool.nbytes,
            "host_kv": self._host.nbytes,
            "block_metadata": self.num_blocks * _BLOCK_METADATA_BYTES,
        }

    def kernels(self) -> dict[str, str]:
        """Operation -> implementation that runs it."""
        return Program.chosen()

    def identity_fields(self) -> Mapping[str, bytes | str | int]:
        """See `Runner.identity_fields`."""
        return identity_fields(self.model_path, self.config, self.layout, self.weight_format, cache_root())

    def fingerprint(self) -> bytes:
        """See `Runner.fingerprint`."""
        return root_hash(self.identity_fields())

    def _check_weights_fit(self) -> None:
        needed = self.weight_format.bytes_of(Weights(self.model_path))
        free = available_bytes()
        if needed > free:
            raise StartupError(f"too little memory for the weights: {needed:,} bytes needed, {free:,} available")

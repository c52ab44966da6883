"""A runner without a model: the next token is a hash of the row's whole history, read back from the pool through its
block table.

Each slot keeps (token id, position), so a block with foreign, stale or missing content changes every token after it,
as real KV would. Needs no torch; a step costs microseconds unless `step_s` says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import numpy as np

from headrace.core.records import TokenLogprobs
from headrace.errors import InvariantError
from headrace.sampling import SamplingParams, uniform
from kvtransfer.core.identity import KEY_SCHEMA_VERSION, root_hash
from kvtransfer.core.layout import KvLayout
from kvtransfer.probe import probe_area
from workers.core.plan import StepPlan, StepResult


def fake_next_token(
    history: Sequence[int], params: SamplingParams, banned: Sequence[int] = (), vocab_size: int = 512
) -> int:
    """What FakeRunner samples after `history` (prompt + output so far), when the pool holds exactly that history."""
    return _next(_log_of(history), params, banned, vocab_size)


def fake_logprobs(history: Sequence[int], token_id: int, num_top: int, vocab_size: int = 512) -> TokenLogprobs:
    """What FakeRunner tells of `token_id`, which it samples after `history`: the whole history decides."""
    return _score(_log_of(history), token_id, num_top, vocab_size)


def _log_of(history: Sequence[int]) -> np.ndarray:
    log = np.empty((len(history), 2), np.int32)
    log[:, 0] = history
    log[:, 1] = np.arange(len(history))
    return log


def _next(log: np.ndarray, params: SamplingParams, banned: Sequence[int], vocab_size: int) -> int:
    draw = 0.0 if params.greedy else uniform(params.seed, params.branch, len(log))
    base = blake2b(log.tobytes() + repr(draw).encode(), digest_size=8)
    token = int.from_bytes(base.digest(), "little") % vocab_size
    while token in banned:
        token = (token + 1) % vocab_size
    return token


def _score(log: np.ndarray, token_id: int, num_top: int, vocab_size: int) -> TokenLogprobs:
    """The likeliest id is a hash of the log, less likely ones follow by one each in equal steps, which it decides too.
    Exact in float32.
    """
    digest = blake2b(log.tobytes(), digest_size=5, person=b"logprobs").digest()
    first, step = int.from_bytes(digest[:4], "little") % vocab_size, (1 + digest[4]) / 256
    places = range(min(num_top, vocab_size))
    return TokenLogprobs(
        -step * (1 + (token_id - first) % vocab_size),
        tuple((first + place) % vocab_size for place in places),
        tuple(-step * (1 + place) for place in places),
    )


class FakeRunner:
    """See `Runner`. `step_s`: seconds that a step takes, slept through `sleep`."""

    def __init__(
        self,
        max_model_len: int = 4096,
        *,
        block_size: int = 16,
        num_blocks: int = 256,
        vocab_size: int = 512,
        eos_token_ids: tuple[int, ...] = (2,),
        host_blocks: int = 0,
        step_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.host_blocks = host_blocks
        self.host_copy_block_s = 0.0
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.exact_rows = "any"
        self.weight_storage = ""
        self.step_s = step_s
        self._sleep = sleep
        self.layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype_bytes=4)
        block_bytes = self.layout.block_bytes
        self.lane_pool = np.zeros(probe_area(num_blocks, block_bytes).end * block_bytes, np.uint8)
        self.kv_pool = self.lane_pool[: num_blocks * block_bytes]
        # [block, token | position, slot]: the k part holds the token, the v part its position.
        self._log = self.kv_pool.view(np.int32).reshape(num_blocks, 2, block_size)
        self._log[:] = -1
        self.host_pool = np.zeros(host_blocks * self.layout.block_bytes, np.uint8)
        self._host = self.host_pool.view(np.int32).reshape(host_blocks, 2, block_size)

    def run(self, plan: StepPlan) -> StepResult:
        """One step; see `Runner.run`."""
        for block, target in plan.swap_out:
            self._host[target] = self._log[block]
        self._log[plan.memory.retired + plan.memory.restored] = -1
        self._host[plan.memory.host_retired + plan.memory.host_restored] = -1
        for source, block in plan.swap_in:
            self._log[block] = self._host[source]
        for source, target in plan.copies:
            self._log[target] = self._log[source]
        if self.step_s:
            self._sleep(self.step_s)
        tables = [np.asarray(table, np.int64) for table in plan.block_tables]
        done = 0
        for start, count, table in zip(plan.start_pos, plan.num_tokens, tables, strict=True):
            self._write(plan.token_ids[done : done + count], start, table)
            done += count
        if done != len(plan.token_ids):
            raise InvariantError(f"step {plan.step_id}: {len(plan.token_ids)} token ids for {done} tokens")
        tokens: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for i, wanted in enumerate(plan.samples):
            if wanted:
                log, params = self._read(plan.start_pos[i] + plan.num_tokens[i], tables[i]), plan.sampling[i]
                token_id = _next(log, params, plan.banned[i], self.vocab_size)
                if params.logprobs is not None:
                    logprobs[len(tokens)] = _score(log, token_id, params.logprobs, self.vocab_size)
                tokens.append(token_id)
        return StepResult(tokens, self.step_s, logprobs=logprobs)

    def warm_up(self) -> None:
        """Nothing to warm."""

    def identity_fields(self) -> Mapping[str, bytes | str | int]:
        """See `Runner.identity_fields`."""
        return {
            "key_schema": KEY_SCHEMA_VERSION,
            "weights": f"fake:{self.vocab_size}",
            "quantization": "none",
            "tokenizer": "fake",
            "chat_template": "",
            "tool_schema": "none",
            "attention": "fake",
            "kv_dtype": "int32",
            "kv_layout": self.layout.describe(),
        }

    def fingerprint(self) -> bytes:
        """See `Runner.fingerprint`."""
        return root_hash(self.identity_fields())

    @property
    def counters(self) -> Mapping[str, float]:
        """See `Runner.counters`: none."""
        return {}

    def memory_plan(self) -> dict[str, int]:
        """Bytes by use."""
        return {"weights": 0, "workspace": 0, "kv": self.kv_pool.nbytes, "block_metadata": 0}

    def _write(self, token_ids: Sequence[int], start: int, table: np.ndarray) -> None:
        size = self.layout.block_size
        at = np.arange(start, start + len(token_ids))
        if len(at) == 0 or at[-1] >= self.max_model_len or at[-1] // size >= len(table):
            raise InvariantError(f"a row of {len(token_ids)} tokens at {start} does not fit {len(table)} blocks")
        if table.min() < 0 or table.max() >= self.num_blocks or min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise InvariantError("a block or token id is out of range")
        self._log[table[at // size], 0, at % size] = token_ids
        self._log[table[at // size], 1, at % size] = at

    def _read(self, count: int, table: np.ndarray) -> np.ndarray:
        size = self.layout.block_size
        at = np.arange(count)
        return np.ascontiguousarray(self._log[table[at // size], :, at % size])

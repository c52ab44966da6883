"""The decoding requests as columns: what each step changes of a row is changed for all rows at once.

A row is a place in dense arrays; the last row moves into a place that is left. While a step is on its way who leaves is
dead, and goes when the last step that names it is over: only then do places change, and `moves` counts it.

    a decoding request has computed all its tokens but the last, so that three numbers make its row of the next step:
    num_tokens, last_token and its block table. While a step with the row is on its way, the row of the step behind it
    is one token longer, and its token is the one that the other samples

Does not: allocate blocks, choose rows, or know what a token means to a client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from headrace.core.records import FinishReason
from headrace.errors import InvariantError
from headrace.ids import RequestKey
from headrace.sampling import SamplingParams
from workers.core.request import Request
from workers.core.settings import SchedulerSettings

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

_COLUMNS = ("num_tokens", "capacity", "last_token", "num_input", "min_tokens_at", "ends_at", "expected_at", "tenant",
            "priority", "scheduled_at", "stops_on_eos", "ahead", "sample", "step_id")  # fmt: skip


class DecodeBatch:
    """Columns are valid up to `len(self)`; only this class writes them, but `capacity` and `scheduled_at`."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._flying = 0
        self._dead: list[Request] = []
        self.moves = 0
        """Rows that have left their places to others."""
        self._num_with_stops = 0
        self._num_predicted = 0
        self.num_with_history = 0
        """Rows whose sampling looks at the tokens before."""
        self.requests: list[Request] = []
        self.keys: list[RequestKey] = []
        self.tables: list[list[int]] = []
        self.sampling: list[SamplingParams] = []
        self._appends: list[Callable[[int], None]] = []
        size = 64
        self.num_tokens: Ints = np.zeros(size, np.int64)
        self.capacity: Ints = np.zeros(size, np.int64)
        """Tokens that the block table has room for."""
        self.last_token: Ints = np.zeros(size, np.int64)
        self.num_input: Ints = np.zeros(size, np.int64)
        self.min_tokens_at: Ints = np.zeros(size, np.int64)
        """num_tokens up to which nothing may end the request."""
        self.ends_at: Ints = np.zeros(size, np.int64)
        """num_tokens at which it ends by length."""
        self.expected_at: Ints = np.zeros(size, np.int64)
        """num_tokens at which the gateway's history expects it to end; num_tokens itself where it knows nothing."""
        self.tenant: Ints = np.zeros(size, np.int64)
        self.priority: Ints = np.zeros(size, np.int64)
        self.scheduled_at: Floats = np.zeros(size)
        """When its last row was planned."""
        self.stops_on_eos: Bools = np.zeros(size, np.bool_)
        self.ahead: Ints = np.zeros(size, np.int64)
        """Steps on their way that have the row: tokens by which the next one is longer."""
        self.sample: Ints = np.zeros(size, np.int64)
        """Place of its token in the result of the last of them."""
        self.step_id: Ints = np.zeros(size, np.int64)
        """The last step that has, or had, the row; -1: none."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_alive(self) -> int:
        return len(self.requests) - len(self._dead)

    def add(self, request: Request, now: float) -> None:
        """A request that has just become a decode: all its tokens but the last are computed."""
        row = len(self.requests)
        if row == len(self.num_tokens):
            for name in _COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        sampling = request.sampling
        request.row = row
        self.requests.append(request)
        self.keys.append(request.key)
        self.tables.append(request.block_ids)
        self.sampling.append(sampling)
        self._appends.append(request.token_ids.append)
        self._num_with_stops += bool(sampling.stop_token_ids)
        self.num_with_history += sampling.needs_history
        self.num_tokens[row] = request.num_tokens
        self.capacity[row] = len(request.block_ids) * self._settings.block_size
        self.last_token[row] = request.token_ids[-1]
        self.num_input[row] = request.num_input
        self.min_tokens_at[row] = request.num_input + sampling.min_tokens
        self.ends_at[row] = min(request.num_input + sampling.max_tokens, self._settings.max_model_len)
        known = request.expected_output_tokens if request.predicted_output_tokens else 0
        self._num_predicted += bool(request.predicted_output_tokens)
        self.expected_at[row] = request.num_tokens + known
        self.tenant[row] = request.tenant_index
        self.priority[row] = request.priority
        self.scheduled_at[row] = now
        self.stops_on_eos[row] = not sampling.ignore_eos
        self.ahead[row], self.sample[row], self.step_id[row] = 0, 0, -1

    def remove(self, request: Request) -> None:
        """Its last step is planned; while a step is on its way the row stays, dead."""
        if self._flying:
            self._dead.append(request)
        else:
            self._remove(request)

    def _remove(self, request: Request) -> None:
        self.moves += 1
        row, last = request.row, len(self.requests) - 1
        request.last_scheduled_at = float(self.scheduled_at[row])
        request.row = -1
        self._num_with_stops -= bool(request.sampling.stop_token_ids)
        self.num_with_history -= request.sampling.needs_history
        self._num_predicted -= bool(request.predicted_output_tokens)
        columns: tuple[list[Any], ...] = (self.requests, self.keys, self.tables, self.sampling, self._appends)
        for column in columns:
            tail = column.pop()
            if row != last:
                column[row] = tail
        if row != last:
            self.requests[row].row = row
            for name in _COLUMNS:
                values = getattr(self, name)
                values[row] = values[last]

    def depart(self, rows: slice | Ints, step_id: int) -> None:
        """A step with these rows is on its way."""
        self._flying += 1
        self.ahead[rows] += 1
        self.sample[rows] = np.arange(len(self.ahead[rows]))
        self.step_id[rows] = step_id

    def land(self, rows: slice | Ints) -> None:
        """The rows' step is over: its tokens are about to be taken in."""
        self.ahead[rows] -= 1

    def settle(self) -> None:
        """They are: dead rows go, but those that the step behind names."""
        self._flying -= 1
        dead, self._dead = self._dead, []
        for request in dead:
            if self.ahead[request.row]:
                self._dead.append(request)
            else:
                self._remove(request)

    def open_rows(self, excluded: Iterable[Request]) -> slice | Ints:
        """Rows that the next step may have: alive, not `excluded`, and not certain to end with the step on its way."""
        count = len(self.requests)
        if not self._flying:
            return slice(0, count)
        is_open = self.num_tokens[:count] + self.ahead[:count] < self.ends_at[:count]
        is_open[self.dead_rows()] = False
        is_open[[request.row for request in excluded if request.row >= 0]] = False
        return slice(0, count) if is_open.all() else np.flatnonzero(is_open)

    def rows_of(self, requests: list[Request]) -> Ints:
        return np.fromiter((request.row for request in requests), np.int64, len(requests))

    def planned_tokens(self, rows: slice | Ints) -> Ints:
        """num_tokens of each row when the step on its way is over."""
        planned: Ints = self.num_tokens[rows] + self.ahead[rows]
        return planned

    def next_ids(self, rows: slice | Ints) -> list[int]:
        """The token that each row computes next, as in StepPlan.token_ids."""
        fed = self.ahead[rows] > 0
        ids: list[int] = np.where(fed, -1 - self.sample[rows], self.last_token[rows]).tolist()
        return ids

    def dead_rows(self) -> list[int]:
        """Of requests that left while a step was on its way."""
        return [request.row for request in self._dead]

    def take_in(self, rows: slice | Ints, tokens: list[int]) -> Ints:
        """The rows' next tokens (all rows alive). Returns their numbers of output tokens before."""
        for append, token in zip(self._at(self._appends, rows), tokens, strict=True):
            append(token)
        before = self.num_tokens[rows]
        offsets: Ints = before - self.num_input[rows]
        self.num_tokens[rows] = before + 1
        self.last_token[rows] = tokens
        return offsets

    def ended(self, rows: slice | Ints) -> list[tuple[Request, FinishReason]]:
        """Which of the rows end with their last token, and why: the rule of `limits.end_reason`, for all at once."""
        num = self.num_tokens[rows]
        over = num >= self.ends_at[rows]
        ripe = num > self.min_tokens_at[rows]
        last = self.last_token[rows]
        eos = np.zeros_like(over)
        for token_id in self._settings.eos_token_ids:
            eos |= last == token_id
        eos &= ripe & self.stops_on_eos[rows]
        stopped: list[int] = []
        if self._num_with_stops:
            chosen = self._at(self.requests, rows)
            stopped = [
                i for i, r in enumerate(chosen) if ripe[i] and not eos[i] and last[i] in r.sampling.stop_token_ids
            ]
        elif not (over | eos).any():
            return []
        chosen = self._at(self.requests, rows)
        reasons = {int(i): FinishReason.LENGTH for i in np.flatnonzero(over)}
        reasons |= {i: FinishReason.STOP for i in stopped}
        reasons |= {int(i): FinishReason.EOS for i in np.flatnonzero(eos)}
        return [(chosen[i], reasons[i]) for i in sorted(reasons)]

    def at(self, rows: slice | Ints) -> list[Request]:
        return self._at(self.requests, rows)

    @staticmethod
    def _at(column: list[Any], rows: slice | Ints) -> list[Any]:
        return column[rows] if isinstance(rows, slice) else [column[i] for i in rows]

    def grow(self, places: Ints, blocks: list[int]) -> None:
        """One more block for each of these rows."""
        for place, block in zip(places, blocks, strict=True):
            self.tables[place].append(block)
        self.capacity[places] += self._settings.block_size

    def with_full_blocks(self) -> list[Request]:
        """Requests whose last computed token was the last of a block."""
        computed = self.num_tokens[: len(self.requests)] - 1
        return [self.requests[i] for i in np.flatnonzero(computed % self._settings.block_size == 0)]

    def blocks_needed_next(self) -> int:
        """Blocks that the rows lack when the steps on their way, one at least, have brought each a token."""
        n = len(self.requests)
        return int(np.count_nonzero(self.num_tokens[:n] + np.maximum(self.ahead[:n], 1) > self.capacity[:n]))

    def growth_tokens(self) -> int:
        """Tokens that the rows are still expected to grow by."""
        if not self._num_predicted:
            return 0
        n = len(self.requests)
        return int(np.maximum(self.expected_at[:n] - self.num_tokens[:n], 0).sum())

    def context_tokens(self) -> int:
        """Tokens that the rows attend to."""
        return int(self.num_tokens[: len(self.requests)].sum())

    def expected_tokens(self) -> int:
        """Output tokens that the rows are still expected to yield, see `Request.expected_output_tokens`."""
        n = len(self.requests)
        left = self.expected_at[:n] - self.num_tokens[:n]
        return int(np.where(left > 0, left, self.ends_at[:n] - self.num_tokens[:n]).sum())

    def check_integrity(self) -> None:
        """Raises InvariantError unless the columns say what the requests say."""
        for row, request in enumerate(self.requests):
            if request.row != row or self.keys[row] != request.key:
                raise InvariantError(f"row {row} of the batch is not its request's")
            if request in self._dead:
                continue
            room = len(request.block_ids) * self._settings.block_size
            if self.tables[row] is not request.block_ids or self.capacity[row] != room:
                raise InvariantError(f"request {request.key}: the batch has another block table")
            if self.num_tokens[row] != request.num_tokens or self.last_token[row] != request.token_ids[-1]:
                raise InvariantError(f"request {request.key}: the batch has other tokens")

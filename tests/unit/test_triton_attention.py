"""The attention kernels against plain torch in float64, in Triton's interpreter or on a GPU when there is one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels import reference

pytest.importorskip("triton", minversion="3.8")

from kernels.triton.attention_decode import Scratch, decode_attention
from kernels.triton.attention_prefill import prefill_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
LAYER = 1


class Rows:
    """Rows of `start_pos` cached and `num_tokens` own tokens.

    Blocks lie in random order. All that no row has written is NaN: free blocks, other layers, the slots behind a row's
    last token, and the outputs.
    """

    def __init__(
        self,
        start_pos: Sequence[int],
        num_tokens: Sequence[int],
        dim: int,
        group: int,
        block: int,
        kv_heads: int = 1,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.start_pos, self.num_tokens = list(start_pos), list(num_tokens)
        lengths = [a + b for a, b in zip(start_pos, num_tokens, strict=True)]
        counts = [-(-n // block) for n in lengths]
        num_blocks = sum(counts) + 3
        pool = torch.full((num_blocks, kv_heads, LAYER + 2, 2, block, dim), NAN)
        free = iter(torch.randperm(num_blocks).tolist())
        self.blocks = [[next(free) for _ in range(n)] for n in counts]
        # Padding points at a block that is all NaN.
        tables = torch.full((len(lengths), max(counts) + 2), next(free), dtype=torch.int32)
        for i, (ids, length) in enumerate(zip(self.blocks, lengths, strict=True)):
            tables[i, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            for n, at in enumerate(ids):
                used = min(block, length - n * block)
                pool[at, :, LAYER, :, :used] = torch.randn(kv_heads, 2, used, dim)
        self.pool = pool.to(dtype).to(DEVICE)
        self.tables = tables.to(DEVICE)
        self.lengths = self.ints(lengths)
        self.starts = self.ints([sum(num_tokens[:i]) for i in range(len(num_tokens) + 1)])
        # Queries and outputs lie in wider lines, as in a fused QKV projection.
        heads, total = group * kv_heads, sum(num_tokens)
        self.q = torch.randn(total, heads + 2 * kv_heads, dim).to(dtype).to(DEVICE)[:, :heads]
        self.out = torch.full((total, heads + 16, dim), NAN, dtype=dtype, device=DEVICE)[:, :heads]

    @staticmethod
    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def expected(self, window: int = 0) -> Tensor:
        pool = self.pool.double().cpu()
        return reference.attention(
            self.q.double().cpu(), pool, LAYER, self.start_pos, self.num_tokens, self.blocks, window
        )

    def prefill(self, window: int = 0, invariant: bool = False, more: int = 0) -> Tensor:
        prefill_attention(
            self.q,
            self.pool,
            LAYER,
            self.tables,
            self.starts,
            self.ints(self.start_pos),
            self.out,
            max_tokens=max(self.num_tokens) + more,
            window=window,
            invariant=invariant,
        )
        return self.out

    def decode(self, window: int = 0, splits: int = 0, scratch: Scratch | None = None) -> Tensor:
        decode_attention(
            self.q,
            self.pool,
            LAYER,
            self.tables,
            self.lengths,
            self.out,
            window=window,
            splits=splits,
            scratch=scratch,
        )
        return self.out


def decode_rows(lengths: Sequence[int], *args: int, **kwargs: object) -> Rows:
    """Rows that decode their last position."""
    return Rows([n - 1 for n in lengths], [1] * len(lengths), *args, **kwargs)  # type: ignore[arg-type]


def close(actual: Tensor, expected: Tensor, tolerance: float = 3e-6) -> None:
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dim", "group", "block", "lengths"),
    [
        (64, 1, 16, [1, 17, 200]),
        (64, 16, 32, [129]),
        (96, 3, 64, [65]),
        (128, 4, 16, [64, 500]),
        (128, 7, 32, [31]),
        (256, 8, 16, [33]),
        (256, 2, 64, [129]),
    ],
)
def test_decode_equals_the_reference_for_every_kind_of_head(
    dim: int, group: int, block: int, lengths: list[int]
) -> None:
    rows = decode_rows(lengths, dim, group, block, kv_heads=2 if block == 16 else 1)
    close(rows.decode(), rows.expected())


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_any_number_of_splits_gives_the_reference(splits: int) -> None:
    rows = decode_rows([1, 257, 700], 64, 4, 16)
    close(rows.decode(splits=splits), rows.expected())


def test_pieces_too_many_for_one_program_are_merged_by_the_second_kernel() -> None:
    rows = decode_rows([3, 270, 0], 256, 16, 64)
    close(rows.decode(splits=9)[:2], rows.expected()[:2])


@pytest.mark.parametrize("window", [1, 16, 100, 1000])
def test_decode_sees_the_latest_positions_of_its_window_alone(window: int) -> None:
    rows = decode_rows([5, 101, 400], 64, 2, 16)
    # What lies before a window is NaN too: it may have been given back.
    for ids, length in zip(rows.blocks, rows.lengths.tolist(), strict=True):
        expected_first = max(length - window, 0)
        for n, at in enumerate(ids):
            gone = min(max(expected_first - n * 16, 0), 16)
            rows.pool[at, :, LAYER, :, :gone] = 0
    expected = rows.expected(window)
    for ids, length in zip(rows.blocks, rows.lengths.tolist(), strict=True):
        for n, at in enumerate(ids):
            gone = min(max(max(length - window, 0) - n * 16, 0), 16)
            rows.pool[at, :, LAYER, :, :gone] = NAN
    close(rows.decode(window=window, splits=2), expected)


def test_empty_rows_give_zeros_and_leave_the_others_alone() -> None:
    rows = decode_rows([40, 300, 20], 64, 4, 16)
    expected = rows.expected()
    rows.lengths[0] = rows.lengths[2] = 0
    out = rows.decode(splits=3)
    assert not out[[0, 2]].any()
    close(out[1:2], expected[1:2])


def test_scratch_serves_one_launch_after_another_whatever_it_held() -> None:
    rows = decode_rows([600, 300], 64, 4, 16)
    scratch = Scratch.make(2, 4, 64, 3, DEVICE)
    scratch.parts.fill_(NAN)
    scratch.weights.fill_(NAN)
    for splits in (3, 2):
        rows.out.fill_(NAN)
        close(rows.decode(splits=splits, scratch=scratch), rows.expected())
        assert not scratch.arrived.any()


def test_with_fixed_splits_a_row_is_the_same_bit_for_bit_in_every_batch() -> None:
    together = decode_rows([600, 90], 64, 3, 16)
    outputs = together.decode(splits=2).clone()
    for i, length in enumerate([600, 90]):
        alone = decode_rows([length], 64, 3, 16)
        alone.q, alone.pool, alone.tables = together.q[i : i + 1], together.pool, together.tables[i : i + 1]
        assert torch.equal(alone.decode(splits=2)[0], outputs[i])


def test_half_precision_stays_within_its_rounding() -> None:
    rows = decode_rows([300, 65], 64, 4, 16, dtype=torch.float16)
    close(rows.decode(splits=2), rows.expected(), 2e-3)
    chunks = Rows([70], [30], 64, 4, 16, dtype=torch.float16)
    close(chunks.prefill(), chunks.expected(), 2e-3)


@pytest.mark.parametrize(
    ("dim", "group", "block", "start_pos", "num_tokens"),
    [
        (64, 1, 16, [0, 37, 0], [50, 20, 1]),
        (64, 16, 32, [70], [9]),
        (96, 3, 64, [5, 0], [19, 30]),
        (128, 4, 16, [131, 17], [33, 0]),
        (128, 7, 32, [64, 31], [5, 1]),
        (256, 8, 16, [33], [10]),
        (256, 2, 64, [0, 63], [16, 2]),
    ],
)
def test_prefill_equals_the_reference_at_any_offset_for_every_kind_of_head(
    dim: int, group: int, block: int, start_pos: list[int], num_tokens: list[int]
) -> None:
    rows = Rows(start_pos, num_tokens, dim, group, block, kv_heads=2 if block == 16 else 1)
    close(rows.prefill(), rows.expected())


@pytest.mark.parametrize("window", [1, 20, 64])
def test_prefill_sees_the_window_of_each_query(window: int) -> None:
    # Some queries of the second row see nothing of the first tile of keys.
    rows = Rows([0, 120, 33], [40, 25, 1], 64, 2, 16, dtype=torch.float16)
    close(rows.prefill(window=window), rows.expected(window), 2e-3)


def test_tokens_of_no_row_are_left_alone() -> None:
    rows = Rows([10, 0, 0], [20, 0, 12], 64, 4, 16)
    expected = rows.expected()
    rows.starts[3] = 25
    out = rows.prefill(more=40)
    close(out[:25], expected[:25])
    assert out[25:].isnan().all()


def test_an_invariant_prefill_of_a_row_is_the_same_bit_for_bit_in_every_batch() -> None:
    together = Rows([0, 50], [90, 5], 64, 4, 16, dtype=torch.float16)
    outputs = together.prefill(invariant=True).clone()
    alone = Rows([50], [5], 64, 4, 16, dtype=torch.float16)
    alone.q, alone.pool, alone.tables = together.q[90:], together.pool, together.tables[1:]
    assert torch.equal(alone.prefill(invariant=True), outputs[90:])

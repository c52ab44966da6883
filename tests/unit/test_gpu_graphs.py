"""Which recorded graph a step gets, what is padding in it, and what is counted; and how rows lie in device memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kernels.gpu_rows import DeviceRows, RowBuffers, RowColumns, check_rows, fill_rows, layout_for
from kernels.ops import PoolShape
from workers.runner.graphs import GraphTable, batch_buckets, width_buckets

SHAPE = PoolShape(num_blocks=50, kv_heads=1, layers=1, block_size=16, head_dim=16)
CPU = torch.device("cpu")


def columns_of(*rows: tuple[int, int, list[int]], samples: bool = True, fed: int = 0) -> RowColumns:
    """Rows of (start, tokens, table)."""
    starts, counts, tables = (list(column) for column in zip(*rows, strict=True))
    ids = list(range(sum(counts)))
    return check_rows(16, 4096, starts, counts, tables, ids, [samples] * len(rows), 512, fed)


def sent(columns: RowColumns, rows: int, tokens: int, width: int, sampled: int) -> DeviceRows:
    layout = layout_for(rows, tokens, width, sampled)
    buffers = RowBuffers(layout.num_bytes, CPU)
    for _ in range(3):  # leaves the last step's bytes where padding comes
        buffers.device_bytes.fill_(93)
        for host in buffers._host:
            host.fill_(93)
    fill_rows(buffers.next_host(layout), columns, SHAPE)
    buffers.send(layout)
    return buffers.rows(layout, columns.num_decode, columns.max_tokens)


def table_of(batches: tuple[int, ...], widths: tuple[int, ...]) -> tuple[GraphTable, list[tuple[int, int]]]:
    """Recorded over a forward that notes the sizes of its rows."""
    ran: list[tuple[int, int]] = []
    buffers = RowBuffers(layout_for(batches[-1], batches[-1], widths[-1], batches[-1]).num_bytes, CPU)
    table = GraphTable(batches, widths, buffers, lambda rows: ran.append(tuple(rows.tables.shape)), lambda rows: None)
    table.record(CPU)
    return table, ran


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 12, 64, 100, 256])
def test_every_batch_has_a_bucket_that_is_less_than_twice_as_large(most: int) -> None:
    buckets = batch_buckets(most)
    assert buckets[-1] == most and list(buckets) == sorted(set(buckets))
    for rows in range(1, most + 1):
        bucket = next(size for size in buckets if size >= rows)
        assert bucket < 2 * rows
        assert rows <= 8 or bucket <= 1.5 * rows


@pytest.mark.parametrize(("blocks", "size"), [(1, 16), (64, 16), (65, 16), (8192, 16), (256, 64)])
def test_widths_reach_from_a_thousand_tokens_to_the_longest_context(blocks: int, size: int) -> None:
    buckets = width_buckets(blocks, size)
    assert buckets[-1] == blocks and buckets[0] == min(blocks, 1024 // size)
    assert len(buckets) <= 5


def test_a_step_gets_the_smallest_bucket_that_holds_it_and_its_padding_is_counted() -> None:
    table, ran = table_of((1, 2, 4), (2, 8))
    for rows, blocks, wanted in ((1, 1, (1, 2)), (2, 2, (2, 2)), (3, 2, (4, 2)), (3, 3, (4, 8)), (4, 8, (4, 8))):
        bucket = table.choose(columns_of(*[(16 * blocks - 1, 1, list(range(blocks)))] * rows))
        assert bucket is not None
        bucket.forward.replay()
        assert ran.pop() == wanted
    assert table.counters["graph_hits_4"] == 3
    assert (table.counters["graph_rows"], table.counters["graph_padding_rows"]) == (13, 2)


def test_a_step_that_no_graph_fits_runs_as_it_is_and_its_reason_is_counted() -> None:
    table, _ = table_of((1, 2), (2,))
    decode = (5, 1, [3])
    for columns in (
        columns_of(decode, (0, 7, [4])),
        columns_of(decode, samples=False),
        columns_of(*[decode] * 3),
        columns_of((40, 1, [1, 2, 3])),
    ):
        assert table.choose(columns) is None
    table.turn_off("off")
    assert table.choose(columns_of(decode)) is None
    assert dict(table.counters) == {
        "graph_eager_prefill": 1,
        "graph_eager_unsampled": 1,
        "graph_eager_size": 2,
        "graph_eager_off": 1,
    }


def test_rows_in_device_memory_say_what_the_plan_says() -> None:
    columns = columns_of((20, 1, [7, 9]), (0, 1, [4]), (30, 5, [2, 30, 11]))
    rows = sent(columns, 3, 7, 3, 3)
    assert (rows.num_decode, rows.max_tokens, rows.num_rows, rows.num_tokens) == (2, 5, 3, 7)
    assert rows.tables.tolist() == [[7, 9, 0], [4, 0, 0], [2, 30, 11]]
    assert rows.lengths.tolist() == [21, 1, 35]
    assert rows.starts.tolist() == [0, 1, 2, 7]
    assert rows.start_pos.tolist() == [20, 0, 30]
    assert rows.positions.tolist() == [20, 0, 30, 31, 32, 33, 34]
    assert rows.slots.tolist() == [9 * 16 + 4, 64, 30 * 16 + 14, 30 * 16 + 15, 11 * 16, 11 * 16 + 1, 11 * 16 + 2]
    assert rows.sampled.tolist() == [0, 1, 6]
    assert rows.token_ids.tolist() == list(range(7))


def test_what_a_layout_has_too_much_is_rows_of_length_zero_that_write_nothing() -> None:
    rows = sent(columns_of((20, 1, [7, 9]), (0, 1, [4])), 4, 4, 5, 4)
    assert rows.tables.tolist() == [[7, 9, 0, 0, 0], [4, 0, 0, 0, 0], [0] * 5, [0] * 5]
    assert rows.lengths.tolist() == [21, 1, 0, 0]
    assert rows.slots.tolist() == [148, 64, -1, -1]
    assert rows.starts.tolist() == [0, 1, 2, 2, 2]
    assert rows.positions.tolist() == [20, 0, 0, 0] and rows.token_ids.tolist() == [0, 1, 0, 0]


def test_tensors_of_a_layout_do_not_overlap_and_are_aligned() -> None:
    layout = layout_for(5, 23, 7, 3)
    spans = sorted(
        (view.data_ptr(), view.data_ptr() + view.nbytes)
        for view in layout.tensors(torch.zeros(layout.num_bytes, dtype=torch.uint8)).values()
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert all((begin - spans[0][0]) % 16 == 0 for begin, _ in spans)


def test_a_step_may_be_filled_while_the_copy_of_the_one_before_is_not_over() -> None:
    layout = layout_for(1, 1, 1, 1)
    buffers = RowBuffers(layout.num_bytes, CPU)
    first, second = buffers.next_host(layout), buffers.next_host(layout)
    first["slots"][0], second["slots"][0] = 1, 2
    assert first["slots"][0] == 1
    with pytest.raises(ValueError, match="more than"):
        buffers.next_host(layout_for(4, 4, 4, 4))


@pytest.mark.parametrize(
    "wrong",
    [
        {"start_pos": [-1]},
        {"num_tokens": [0], "token_ids": []},
        {"block_tables": [[]]},
        {"token_ids": [512]},
        {"token_ids": [-3]},
        {"samples": []},
        {"token_ids": [1, 2]},
        {"start_pos": [64], "block_tables": [[1, 2, 3, 4, 5]]},
    ],
)
def test_columns_that_cannot_be_run_are_refused(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "start_pos": [3],
        "num_tokens": [1],
        "block_tables": [[1]],
        "token_ids": [-2],
        "samples": [True],
    }
    check_rows(16, 64, **good, vocab=512, num_fed=2)
    with pytest.raises(ValueError):
        check_rows(16, 64, **(good | wrong), vocab=512, num_fed=2)


def test_a_block_outside_the_pool_is_refused() -> None:
    layout = layout_for(1, 1, 1, 1)
    host = RowBuffers(layout.num_bytes, CPU).next_host(layout)
    for block in (-1, 50):
        with pytest.raises(ValueError, match="outside the pool"):
            fill_rows(host, columns_of((0, 1, [block])), SHAPE)
    assert np.issubdtype(host["tables"].dtype, np.int32)

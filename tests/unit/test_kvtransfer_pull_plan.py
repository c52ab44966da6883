"""Which heads move between groups of different parallel degrees: each once, from where it is to where it belongs."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from kvtransfer.core.layout import KvLayout
from kvtransfer.core.pull_plan import head_range, sources_of

GROUPS = [
    (heads, reader_degree, holder_degree)
    for heads, reader_degree, holder_degree in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4))
]


def layout_of(num_kv_heads: int) -> KvLayout:
    return KvLayout(num_layers=3, num_kv_heads=num_kv_heads, head_dim=4, block_size=2, dtype_bytes=2)


@pytest.mark.parametrize(("heads", "reader_degree", "holder_degree"), GROUPS)
def test_every_head_of_a_reader_comes_exactly_once_and_from_where_it_lies(
    heads: int, reader_degree: int, holder_degree: int
) -> None:
    layout = layout_of(heads)
    for reader in range(reader_degree):
        own_from, own_to = head_range(heads, reader_degree, reader)
        received: list[int | None] = [None] * (own_to - own_from) * layout.head_bytes
        for holder, cut in sources_of(reader, reader_degree, holder_degree, layout):
            held_from, held_to = head_range(heads, holder_degree, holder)
            held = [held_from * layout.head_bytes + at for at in range((held_to - held_from) * layout.head_bytes)]
            moved = held[cut.remote_offset : cut.remote_offset + cut.num_bytes]
            target = slice(cut.local_offset, cut.local_offset + cut.num_bytes)
            assert len(moved) == cut.num_bytes == len(received[target])
            assert set(received[target]) == {None}, "a head came twice"
            received[target] = moved
        assert received == list(range(own_from * layout.head_bytes, own_to * layout.head_bytes))


@pytest.mark.parametrize(("heads", "reader_degree", "holder_degree"), GROUPS)
def test_replicas_share_the_work_and_nobody_is_asked_for_less_than_it_has_in_one_piece(
    heads: int, reader_degree: int, holder_degree: int
) -> None:
    asked: Counter[tuple[int, int]] = Counter()
    for reader in range(reader_degree):
        sources = sources_of(reader, reader_degree, holder_degree, layout_of(heads))
        assert len({holder for holder, _ in sources}) == len(sources)
        for holder, _ in sources:
            head = max(head_range(heads, holder_degree, holder)[0], head_range(heads, reader_degree, reader)[0])
            asked[head, holder] += 1
    replicas = max(1, holder_degree // heads)
    for head in {head for head, _ in asked}:
        times = sorted(count for (of, _), count in asked.items() if of == head)
        assert times[-1] == -(-sum(times) // replicas)


def test_equal_degrees_move_whole_blocks_between_equal_ranks() -> None:
    for heads, degree in product((2, 8), (1, 2, 4)):
        layout = layout_of(heads)
        for rank in range(degree):
            ((holder, cut),) = sources_of(rank, degree, degree, layout)
            first, end = head_range(heads, degree, rank)
            assert (holder, cut.remote_offset, cut.local_offset) == (rank, 0, 0)
            assert cut.num_bytes == (end - first) * layout.head_bytes


def test_the_heads_of_a_group_are_all_heads_and_replicas_are_neighbours() -> None:
    assert [head_range(8, 2, rank) for rank in range(2)] == [(0, 4), (4, 8)]
    assert [head_range(2, 4, rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize(("heads", "degree", "rank"), [(8, 3, 0), (3, 2, 0), (3, 4, 0), (8, 0, 0), (0, 1, 0)])
def test_heads_and_ranks_that_do_not_divide_are_refused_with_the_numbers(heads: int, degree: int, rank: int) -> None:
    with pytest.raises(ValueError, match=f"{heads} KV heads cannot be shared by {degree} ranks"):
        head_range(heads, degree, rank)
    if heads:
        for degrees in ((degree, 1), (1, degree)):
            with pytest.raises(ValueError, match=f"{heads} KV heads cannot be shared by {degree} ranks"):
                sources_of(rank, *degrees, layout_of(heads))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_its_group_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is none of 2"):
        head_range(8, 2, rank)

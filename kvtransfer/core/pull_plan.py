"""Which ranks of a holder a rank of a reader reads, and which part of each block, when their parallel degrees differ.

A rank's pool has the KV heads of `head_range` of every block, and a block is `[kv_head, ...]` (`layout.py`): any head
range of it is one run of bytes, so one cut a block is all that ever moves.

    8 KV heads      rank 0      rank 1      rank 2      rank 3
    degree 4        [0, 2)      [2, 4)      [4, 6)      [6, 8)
    degree 2        [0, 4)                  [4, 8)                  rank 0 reads all of the holder's ranks 0 and 1
    2 KV heads
    degree 4        [0, 1)      [0, 1)      [1, 2)      [1, 2)      replicas: readers are spread over them

Does not read anything: numbers only.
"""

from __future__ import annotations

from kvtransfer.core.layout import Cut, KvLayout


def head_range(num_kv_heads: int, degree: int, rank: int) -> tuple[int, int]:
    """[first, end) of the KV heads that `rank` of `degree` has. With fewer heads than ranks each head has the same
    number of neighbouring ranks. Raises ValueError when heads and ranks do not divide.
    """
    if num_kv_heads < 1 or degree < 1 or (num_kv_heads % degree and degree % num_kv_heads):
        raise ValueError(f"{num_kv_heads} KV heads cannot be shared by {degree} ranks")
    if not 0 <= rank < degree:
        raise ValueError(f"rank {rank} is none of {degree}")
    if num_kv_heads >= degree:
        share = num_kv_heads // degree
        return rank * share, (rank + 1) * share
    head = rank // (degree // num_kv_heads)
    return head, head + 1


def sources_of(reader_rank: int, reader_degree: int, holder_degree: int, layout: KvLayout) -> list[tuple[int, Cut]]:
    """(holder rank, cut of each block) that a reader's rank pulls, in the order of heads: each of its heads exactly
    once. `layout` is the whole model's. Among holders that have the same heads, the reader's replicas take different
    ones.

    Raises ValueError when heads and ranks do not divide.
    """
    heads, head_bytes = layout.num_kv_heads, layout.head_bytes
    begin, end = head_range(heads, reader_degree, reader_rank)
    replicas = max(1, holder_degree // heads)
    pulls: list[tuple[int, Cut]] = []
    head = begin
    while head < end:
        first_holder = head * holder_degree // heads
        holder = first_holder + reader_rank % replicas
        held_from, held_to = head_range(heads, holder_degree, holder)
        until = min(end, held_to)
        cut = Cut((head - held_from) * head_bytes, (head - begin) * head_bytes, (until - head) * head_bytes)
        pulls.append((holder, cut))
        head = until
    return pulls

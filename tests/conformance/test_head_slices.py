"""Groups of ranks of different parallel degrees exchange heads: each rank a real process with a pool of its heads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection

import numpy as np
import pytest

from headrace.ids import random_ids
from kvtransfer.core.layout import KvLayout
from kvtransfer.core.pull_plan import head_range, sources_of
from kvtransfer.transports.base import PoolBytes
from tests.lanes import PROCESSES, Reader, make, needs_nixl

DEGREES, HEADS, NUM_BLOCKS, MOVED = (1, 2, 4), (2, 8), 64, 40
Names = dict[tuple[int, int], tuple[str, bytes]]
"""What a rank is called in each group, and how its pool is reached."""
GROUPS = [(heads, degree) for heads, degree in product(HEADS, DEGREES)]


def layout_of(heads: int) -> KvLayout:
    return KvLayout(num_layers=2, num_kv_heads=heads, head_dim=8, block_size=4, dtype_bytes=4)


def head_of_block(heads: int, block: int, head: int) -> PoolBytes:
    """[head_bytes] of a head of the whole model in a block of a holder; no byte is 0."""
    return np.random.default_rng((heads, block, head)).integers(1, 256, layout_of(heads).head_bytes, np.uint8)


@dataclass(frozen=True, slots=True)
class Job:
    """What one rank of a reading group does: pull its heads of these blocks from a whole holding group."""

    heads: int
    reader_degree: int
    holders: tuple[tuple[str, bytes], ...]
    """Name and descriptor of each of its ranks."""
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]


class Rank:
    """One rank of every group: a pool for each number of heads and each degree that it is part of."""

    def __init__(self, lane: str, rank: int) -> None:
        self.rank = rank
        self.pools: dict[tuple[int, int], Reader] = {}
        for heads, degree in GROUPS:
            if rank < degree:
                first, end = head_range(heads, degree, rank)
                transport = make(lane, random_ids(f"rank{rank}"), 20.0)
                block_bytes = (end - first) * layout_of(heads).head_bytes
                self.pools[heads, degree] = Reader(transport, NUM_BLOCKS, block_bytes)

    async def start(self, filled: bool) -> Names:
        names: Names = {}
        for (heads, degree), pool in self.pools.items():
            first, end = head_range(heads, degree, self.rank)
            for block in range(NUM_BLOCKS if filled else 0):
                pool.block(block)[:] = np.concatenate([head_of_block(heads, block, head) for head in range(first, end)])
            await pool.transport.start(pool.memory, pool.block_bytes)
            names[heads, degree] = (pool.transport.peer_id, pool.transport.descriptor())
        return names

    async def do(self, job: Job) -> str:
        """What came out wrong, or ""."""
        pool = self.pools[job.heads, job.reader_degree]
        pool.memory[:] = 0
        pulls = []
        for holder, cut in sources_of(self.rank, job.reader_degree, len(job.holders), layout_of(job.heads)):
            peer = await pool.transport.connect(*job.holders[holder])
            pulls.append(pool.transport.pull(peer, job.remote_blocks, job.local_blocks, cut))
        await asyncio.gather(*(pull.done for pull in pulls))
        first, end = head_range(job.heads, job.reader_degree, self.rank)
        came_from = dict(zip(job.local_blocks, job.remote_blocks, strict=True))
        for block in range(NUM_BLOCKS):
            have = pool.block(block).reshape(end - first, -1)
            for head in range(first, end):
                remote = came_from.get(block)
                want = 0 if remote is None else head_of_block(job.heads, remote, head)
                if not np.all(have[head - first] == want):
                    return f"rank {self.rank}: head {head} of block {block} is not that of block {remote}"
        return ""


def rank_program(pipe: Connection, lane: str, number: int, filled: bool) -> None:
    async def serve() -> None:
        rank = Rank(lane, number)
        pipe.send(await rank.start(filled))
        while (job := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send(await rank.do(job))

    asyncio.run(serve())


class RankProcess:
    def __init__(self, lane: str, rank: int, filled: bool) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=rank_program, args=(theirs, lane, rank, filled), daemon=True)
        self._process.start()
        theirs.close()

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self.pipe.close()


@pytest.fixture(scope="module", params=["tcp", pytest.param("ucx", marks=needs_nixl)])
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[list[RankProcess], list[Names]]]:
    """(the reading ranks, what each holding rank is called)."""
    holders = [RankProcess(request.param, rank, True) for rank in range(max(DEGREES))]
    readers = [RankProcess(request.param, rank, False) for rank in range(max(DEGREES))]
    names = [holder.pipe.recv() for holder in holders]
    for reader in readers:
        reader.pipe.recv()
    yield readers, names
    for process in (*holders, *readers):
        process.end()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("reader_degree", "holder_degree"), list(product(DEGREES, DEGREES)))
def test_a_group_of_any_degree_reads_every_head_of_one_of_any_other(
    ranks: tuple[list[RankProcess], list[Names]],
    heads: int,
    reader_degree: int,
    holder_degree: int,
) -> None:
    readers, names = ranks
    rng = random.Random(heads * 100 + reader_degree * 10 + holder_degree)
    job = Job(
        heads,
        reader_degree,
        tuple(names[rank][heads, holder_degree] for rank in range(holder_degree)),
        tuple(rng.sample(range(NUM_BLOCKS), MOVED)),
        tuple(rng.sample(range(NUM_BLOCKS), MOVED)),
    )
    for reader in readers[:reader_degree]:
        reader.pipe.send(job)
    assert [reader.pipe.recv() for reader in readers[:reader_degree]] == [""] * reader_degree

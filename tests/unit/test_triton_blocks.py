"""Copies of blocks on a device: the bytes that the ids say, and no others."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", minversion="3.8")

from kernels.triton.blocks import copy_blocks, gather_blocks, scatter_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def ids(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


# A block of several chunks; words of 4 bytes; single bytes.
@pytest.mark.parametrize("width", [40960, 36, 7])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_targets_get_their_sources_and_all_other_blocks_stay(width: int, dtype: torch.dtype) -> None:
    room = random_bytes(9, width + 64)
    pool, wanted = room[:, :width], room.clone()
    wanted[[4, 0, 7], :width] = wanted[[1, 8, 1], :width]
    copy_blocks(pool, ids(1, 8, -1, 1, 3, dtype=dtype), ids(4, 0, 5, 7, -1, dtype=dtype))
    assert torch.equal(room, wanted)


# (bytes of a block, first byte, bytes of the range): 8-byte words, 4-byte words by the offset, bytes by the width.
@pytest.mark.parametrize(("width", "first", "size"), [(40960, 0, 40960), (4096, 2048, 1024), (64, 12, 20), (64, 1, 33)])
def test_a_range_of_each_block_goes_to_staging_memory_and_comes_back(width: int, first: int, size: int) -> None:
    pool, chosen = random_bytes(6, width), ids(5, 0, 2)
    staging = torch.zeros(4, size, dtype=torch.uint8, device=DEVICE)
    gather_blocks(pool, chosen, staging[:3], first)
    assert torch.equal(staging[:3], pool[chosen, first : first + size])
    assert not staging[3].any()

    other = random_bytes(6, width, seed=1)
    wanted = other.clone()
    wanted[chosen, first : first + size] = staging[:3]
    scatter_blocks(staging[:3], other, chosen, first)
    assert torch.equal(other, wanted)


def test_padding_in_the_ids_copies_nothing() -> None:
    pool = random_bytes(3, 128)
    staging = random_bytes(2, 128, seed=1)
    before = staging.clone()
    gather_blocks(pool, ids(-1, 2), staging)
    assert torch.equal(staging[0], before[0]) and torch.equal(staging[1], pool[2])
    wanted = pool.clone()
    scatter_blocks(before, pool, ids(-1, -1))
    assert torch.equal(pool, wanted)


def test_no_ids_are_no_work_and_a_range_past_the_block_is_refused() -> None:
    pool = random_bytes(3, 64)
    wanted = pool.clone()
    copy_blocks(pool, ids(), ids())
    gather_blocks(pool, ids(), pool[:0])
    scatter_blocks(pool[:0], pool, ids())
    for move in (
        lambda: gather_blocks(pool, ids(1), random_bytes(1, 32), 40),
        lambda: scatter_blocks(random_bytes(1, 65), pool, ids(1)),
    ):
        with pytest.raises(ValueError, match="do not lie"):
            move()
    assert torch.equal(pool, wanted)

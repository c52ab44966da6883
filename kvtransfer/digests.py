"""Short digests of blocks, against bytes that change on the way. They prove nothing against somebody who means harm."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvtransfer.transports.base import PoolBytes

INLINE_BYTES = 1 << 20
"""So much may be digested on an event loop; more belongs in a thread."""


def block_digests(memory: PoolBytes, blocks: Sequence[int], block_bytes: int) -> list[int]:
    """XXH3-64 of each block's bytes in a pool."""
    view = memory.data
    return [xxhash.xxh3_64_intdigest(view[block * block_bytes : (block + 1) * block_bytes]) for block in blocks]


def changed_blocks(memory: PoolBytes, blocks: Sequence[int], block_bytes: int, digests: Sequence[int]) -> list[int]:
    """Those of the blocks whose bytes have another digest."""
    found = block_digests(memory, blocks, block_bytes)
    return [block for block, ours, told in zip(blocks, found, digests, strict=True) if ours != told]

"""This worker's cached blocks while peers read them: pinned for as long as the peer's lease is open.

A peer asks by the blocks' full names, whose chain begins with the tenant's namespace: who knows a name may have the
block. It gets the leading run that is on the device, or nothing, at once: nobody waits for room here while it holds
blocks there. What lies below the device is `workers.core.staging`'s.

Does not: talk, or know whose the blocks were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from headrace.errors import InvariantError
from headrace.ids import RequestKey
from workers.core.blocks import BlockPool
from workers.core.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class _Pin:
    owner: str
    blocks: tuple[int, ...]


class FetchPins:
    def __init__(self, pool: BlockPool, cache: PrefixCache) -> None:
        self._pool = pool
        self._cache = cache
        self._pins: dict[RequestKey, _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._pins

    @property
    def keys(self) -> list[RequestKey]:
        return list(self._pins)

    def get(self, key: RequestKey) -> tuple[int, ...]:
        """Empty when there is no such pin."""
        pin = self._pins.get(key)
        return () if pin is None else pin.blocks

    def pin(self, key: RequestKey, reader: str, hashes: Sequence[bytes], spare_blocks: int) -> tuple[int, ...]:
        """Blocks of the leading run of `hashes` that is cached and can be pinned with `spare_blocks` left available.

        Empty and no change when there is none. `key`: a name of its own; `reader`: whom an audit shows.
        """
        if key in self._pins:
            raise InvariantError(f"pin {key} is taken")
        room = max(0, self._pool.available_blocks - spare_blocks)
        blocks: list[int] = []
        for block in self._cache.match(hashes):
            room -= self._pool.refs(block) == 0
            if room < 0:
                break
            blocks.append(block)
        if blocks:
            self._pool.incref(blocks)
            self._pins[key] = _Pin(f"lease fetch {reader}", tuple(blocks))
        return tuple(blocks)

    def unpin(self, key: RequestKey) -> bool:
        """The lease is over. False when it was already."""
        pin = self._pins.pop(key, None)
        if pin is None:
            return False
        self._pool.decref(reversed(pin.blocks))
        return True

    def blocks(self) -> Iterator[int]:
        """One entry for each reference."""
        return chain.from_iterable(pin.blocks for pin in self._pins.values())

    def holders(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for pin in self._pins.values():
            held[pin.owner] = held.get(pin.owner, 0) + len(pin.blocks)
        return held

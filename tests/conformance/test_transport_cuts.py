"""One suite for every transport: parts of blocks, and blocks of different sizes on the two sides."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from headrace.errors import InvariantError
from headrace.ids import random_ids
from kvtransfer.core.layout import Cut
from kvtransfer.transports import ucx, ucx_agent
from kvtransfer.transports.base import Descriptor, PoolBytes, TransferError, TransferFault
from tests.lanes import LANES, Reader, changed, content, fault_of, make, needs_nixl, over, pair, run

REMOTE_BYTES = 1200
CUTS = {
    "a part to the whole": (600, Cut(300, 0, 600)),
    "the whole to a part": (2400, Cut(0, 1200, 1200)),
    "middle to middle": (900, Cut(77, 501, 299)),
    "one byte at the end": (1000, Cut(1199, 999, 1)),
    "a part at the same place": (1200, Cut(400, 400, 400)),
    "a part at another place": (1200, Cut(0, 800, 400)),
    "everything": (1200, Cut(0, 0, 1200)),
}


def expected_block(remote_block: int, block_bytes: int, cut: Cut) -> PoolBytes:
    block = np.zeros(block_bytes, np.uint8)
    part = content(remote_block, REMOTE_BYTES)[cut.remote_offset : cut.remote_offset + cut.num_bytes]
    block[cut.local_offset : cut.local_offset + cut.num_bytes] = part
    return block


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(("local_bytes", "cut"), CUTS.values(), ids=CUTS)
def test_a_cut_moves_these_bytes_of_each_block_and_nothing_else_changes(lane: str, local_bytes: int, cut: Cut) -> None:
    async def test() -> None:
        rng = random.Random(5)
        async with pair(lane, 512, REMOTE_BYTES, reader_blocks=96, reader_block_bytes=local_bytes) as (reader, remote):
            scattered = [rng.randrange(512) for _ in range(40)], rng.sample(range(96), 40)
            run_of_blocks = list(range(100, 140)), list(range(8, 48))
            for remote_blocks, local_blocks in (scattered, run_of_blocks):
                reader.memory[:] = 0
                pull = await reader.pull_from(remote, remote_blocks, local_blocks, cut)
                assert (await pull.done).bytes == 40 * cut.num_bytes
                await over(pull)
                moved = dict(zip(local_blocks, remote_blocks, strict=True))
                for block in range(96):
                    if block in moved:
                        assert np.array_equal(reader.block(block), expected_block(moved[block], local_bytes, cut))
                    else:
                        assert not reader.block(block).any()

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_two_halves_of_a_block_come_from_two_peers_at_once(lane: str) -> None:
    async def test() -> None:
        async with pair(lane, 512, REMOTE_BYTES, victims=1, reader_blocks=512, reader_block_bytes=2400) as (
            reader,
            left,
            right,
        ):
            blocks = list(range(512))
            pulls = [
                await reader.pull_from(left, blocks, blocks, Cut(0, 0, 1200)),
                await reader.pull_from(right, blocks[::-1], blocks, Cut(0, 1200, 1200)),
            ]
            await asyncio.gather(*(pull.done for pull in pulls))
            for block in blocks:
                halves = reader.block(block).reshape(2, 1200)
                assert np.array_equal(halves[0], content(block, 1200))
                assert np.array_equal(halves[1], content(511 - block, 1200))

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_more_kinds_of_cuts_than_a_lane_prepares_for_are_all_right(lane: str) -> None:
    async def test() -> None:
        async with pair(lane, 512, REMOTE_BYTES, reader_blocks=64) as (reader, remote):
            starts = range(3 * ucx_agent.MAX_LISTS)
            pulls = [await reader.pull_from(remote, [at], [at], Cut(at, at, 100)) for at in starts]
            await asyncio.gather(*(pull.done for pull in pulls))
            for at in starts:
                assert np.array_equal(reader.block(at), expected_block(at, REMOTE_BYTES, Cut(at, at, 100)))

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_whole_blocks_of_unequal_sizes_are_refused_with_both(lane: str) -> None:
    async def test() -> None:
        async with pair(lane, 512, REMOTE_BYTES, reader_blocks=64, reader_block_bytes=600) as (reader, remote):
            pull = await reader.pull_from(remote, [1], [1])
            with pytest.raises(TransferError, match=r"1200.*600") as caught:
                await pull.done
            assert caught.value.kind is TransferFault.FAILED
            await over(pull)
            assert not reader.memory.any()

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_cuts_outside_a_block_are_refused_and_the_next_read_works(lane: str) -> None:
    async def test() -> None:
        async with pair(lane, 512, REMOTE_BYTES, reader_blocks=64, reader_block_bytes=600) as (reader, remote):
            for ours in (Cut(0, 1, 600), Cut(0, -1, 10), Cut(0, 600, 1), Cut(0, 0, 0), Cut(0, 10, -5), Cut(0, 0, 601)):
                with pytest.raises(InvariantError, match="600"):
                    await reader.pull_from(remote, [0], [0], ours)
            for theirs in (Cut(1200, 0, 1), Cut(601, 0, 600), Cut(-1, 0, 10)):
                pull = await reader.pull_from(remote, [0], [0], theirs)
                assert await fault_of(pull) is TransferFault.FAILED
                await over(pull)
            await (await reader.pull_from(remote, [7], [0], Cut(600, 0, 600))).done
            assert np.array_equal(reader.block(0), expected_block(7, 600, Cut(600, 0, 600)))

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_a_peer_does_not_serve_more_than_its_blocks_whatever_its_descriptor_says(lane: str) -> None:
    async def test() -> None:
        async with pair(lane, 512, REMOTE_BYTES, reader_blocks=64) as (reader, remote):
            honest = Descriptor.decode(remote.descriptor, reader.transport.name, remote.peer_id)
            lies = (changed(honest, block_bytes=REMOTE_BYTES << 12), changed(honest, num_blocks=1 << 30))
            for lie, blocks, cut in zip(lies, ([1], [1 << 29]), (Cut(REMOTE_BYTES, 0, 100), None), strict=True):
                with pytest.raises(TransferError) as caught:
                    peer = await reader.transport.connect(remote.peer_id, lie)
                    await reader.transport.pull(peer, blocks, [0], cut).done
                assert caught.value.kind is TransferFault.FAILED
                assert not reader.memory.any()
            await (await reader.pull_from(remote, [7], [0])).done
            reader.assert_holds([7], [0])

    run(test())


@needs_nixl
def test_ucx_moves_a_run_of_whole_blocks_as_one_descriptor_and_cuts_one_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted by NIXL itself: its telemetry says how many descriptors a request had when it was posted."""
    nixl = ucx_agent.load_bindings()
    counts: list[int] = []

    class WithTelemetry(nixl.nixlAgentConfig):  # type: ignore[misc, name-defined]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value or name == "captureTelemetry")

    class CountingAgent(ucx_agent.UcxAgent):
        def _release(self, handle: int) -> None:
            counts.append(self._agent.getXferTelemetry(handle).descCount)
            super()._release(handle)

    async def test() -> None:
        monkeypatch.setattr(nixl, "nixlAgentConfig", WithTelemetry)
        monkeypatch.setattr(ucx, "UcxAgent", CountingAgent)
        holder, transport = make("ucx", random_ids("holder"), 20.0), make("ucx", random_ids("reader"), 20.0)
        source, reader = Reader(holder, 64, 4096), Reader(transport, 64, 4096)
        source.memory[:] = np.random.default_rng(1).integers(0, 256, source.memory.nbytes, np.uint8)
        await holder.start(source.memory, 4096)
        await transport.start(reader.memory, 4096)
        peer = await transport.connect(holder.peer_id, holder.descriptor())
        cases: list[tuple[list[int], list[int], Any, int]] = [
            (list(range(64)), list(range(64)), None, 1),
            ([3, 4, 5, 20, 21], [40, 41, 42, 43, 44], None, 2),
            ([3, 4, 5, 6, 7], [40, 41, 50, 51, 52], None, 2),
            ([8, 7, 6], [1, 2, 3], None, 3),
            (list(range(64)), list(range(64)), Cut(0, 0, 4096), 1),
            (list(range(64)), list(range(64)), Cut(0, 0, 2048), 64),
        ]
        for remote_blocks, local_blocks, cut, descriptors in cases:
            await transport.pull(peer, remote_blocks, local_blocks, cut).done
            assert counts == [descriptors], (remote_blocks, local_blocks, cut)
            counts.clear()
        await transport.close()
        await holder.close()

    run(test())

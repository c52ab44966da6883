"""What the NCCL lane alone has: pieces, groups that cannot be stopped, two backends. On gloo, its twin for CPUs."""

from __future__ import annotations

import asyncio
import random
import threading

import numpy as np
import pytest

from headrace.errors import InvariantError
from headrace.ids import random_ids
from kvtransfer.core.layout import Cut
from kvtransfer.transports import nccl, nccl_link
from kvtransfer.transports.base import TransferError, TransferFault, allocate_pool
from kvtransfer.transports.nccl import NcclTransport, pieces_of
from kvtransfer.transports.nccl_group import Group, Staging
from tests.conformance.test_transport_leftovers import assert_no_more_than, usage
from tests.lanes import MIB, TOKEN, Reader, content, fault_of, filled_pool, make, over, pair, run


@pytest.mark.parametrize("cut", [Cut(0, 0, 300), Cut(100, 50, 64), Cut(7, 0, 65), Cut(0, 30, 1)])
@pytest.mark.parametrize("num_blocks", [0, 1, 7, 100])
def test_pieces_are_bounded_and_cover_each_byte_once(cut: Cut, num_blocks: int) -> None:
    remote, local = random.Random(1).sample(range(1000), num_blocks), random.Random(2).sample(range(1000), num_blocks)
    moved: dict[tuple[int, int], tuple[int, int]] = {}
    for piece in pieces_of(remote, local, cut, 64):
        assert 0 < piece.num_bytes <= 64
        for theirs, ours in zip(piece.remote, piece.local, strict=True):
            for at in range(piece.cut.num_bytes):
                target = (ours, piece.cut.local_offset + at)
                assert target not in moved
                moved[target] = (theirs, piece.cut.remote_offset + at)
    assert moved == {
        (ours, cut.local_offset + at): (theirs, cut.remote_offset + at)
        for theirs, ours in zip(remote, local, strict=True)
        for at in range(cut.num_bytes)
    }


def test_blocks_that_are_longer_than_a_piece_arrive_whole_and_cut() -> None:
    async def test() -> None:
        size = 2 * nccl.PIECE_BYTES + 5
        async with pair("nccl", 3, size) as (reader, remote):
            await (await reader.pull_from(remote, [2, 0], [0, 2])).done
            reader.assert_holds([2, 0], [0, 2])
            assert not reader.block(1).any()
            cut = Cut(3, 1, size - 4)
            assert (await (await reader.pull_from(remote, [1], [1], cut)).done).bytes == size - 4
            assert np.array_equal(reader.block(1)[1:-3], content(1, size)[3:-1])
            assert not reader.block(1)[0] and not reader.block(1)[-3:].any()

    run(test())


class StubbornGroup(Group):
    """A group of which one receive ignores its abort and writes when it is allowed to: what a network may do. With
    `allow_after_a_receive` that is when another group's piece has arrived and is not used yet.
    """

    armed = allow_after_a_receive = False
    allowed, written = threading.Event(), threading.Event()

    def receive(self, staging: Staging, num_bytes: int) -> None:
        if not StubbornGroup.armed:
            super().receive(staging, num_bytes)
            if self.allow_after_a_receive:
                self.allowed.set()
                assert self.written.wait(5)
            return
        StubbornGroup.armed = False
        self.allowed.wait(20)
        staging.bytes[:] = 0xEE
        self.written.set()
        raise TransferError(TransferFault.PEER_LOST, "aborted long ago")


def test_what_a_broken_group_writes_late_reaches_no_block_and_no_other_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(nccl, "Group", StubbornGroup)
        blocks = list(range(64))
        async with pair("nccl", read_timeout_s=1.0) as (reader, remote):
            # 1. its deadline ends the read, for good: the group has only memory of the transport's own
            StubbornGroup.armed = True
            pull = await reader.pull_from(remote, blocks, blocks)
            assert await fault_of(pull) is TransferFault.TIMEOUT
            await over(pull, 0.5)
            # 2. the same blocks come over a new pair, and the old one writes when the first piece has arrived there
            monkeypatch.setattr(StubbornGroup, "allow_after_a_receive", True)
            await (await reader.pull_from(remote, blocks, blocks)).done
            assert StubbornGroup.written.is_set()
            reader.assert_holds(blocks, blocks)
        # 3. nothing is left of either
        assert not any(thread.name.startswith("kv-pair") for thread in threading.enumerate())

    run(test())


def test_close_waits_for_the_thread_of_a_group_that_ignores_its_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(nccl, "Group", StubbornGroup)
        StubbornGroup.allowed.clear()
        StubbornGroup.written.clear()
        async with pair("nccl") as (reader, remote):
            await (await reader.pull_from(remote, [0], [0])).done
            StubbornGroup.armed = True
            pull = await reader.pull_from(remote, [1], [1])
            while StubbornGroup.armed:
                await asyncio.sleep(0.01)
            closing = asyncio.create_task(reader.transport.close())
            assert await fault_of(pull) is TransferFault.CANCELLED
            await asyncio.sleep(0.1)
            assert not closing.done()
            StubbornGroup.allowed.set()
            await closing
            assert not reader.block(1).any()

    run(test())


def test_readers_that_leave_in_mid_read_cost_a_holder_nothing() -> None:
    """Both ends are in this process, so that its threads and sockets are those of both."""

    async def test() -> None:
        holder, blocks = make("nccl", random_ids("holder"), 20.0), list(range(64))
        await holder.start(filled_pool(64, MIB), MIB)

        async def come_and_go() -> None:
            reader = Reader(make("nccl", random_ids("reader"), 20.0), 64, MIB)
            await reader.transport.start(reader.memory, MIB)
            peer = await reader.transport.connect(holder.peer_id, holder.descriptor())
            pull = reader.transport.pull(peer, blocks, blocks)
            while not reader.block(0)[0]:
                await asyncio.sleep(0)
            await reader.transport.close()
            assert await fault_of(pull) is TransferFault.CANCELLED

        await come_and_go()
        await asyncio.sleep(0.3)  # what the holder still does for the first one
        before = usage()
        for _ in range(5):
            await come_and_go()
        await assert_no_more_than(before)
        await holder.close()

    run(test())


def test_another_backend_is_refused_with_the_own_one() -> None:
    async def test() -> None:
        async with pair("nccl") as (reader, remote):
            other = NcclTransport(random_ids("reader"), TOKEN, backend="nccl")
            await other.start(allocate_pool(MIB), MIB)
            with pytest.raises(TransferError, match="backend is gloo"):
                await other.connect(remote.peer_id, remote.descriptor)
            await other.close()
            await (await reader.pull_from(remote, [1], [1])).done

    run(test())
    with pytest.raises(InvariantError, match="pigeon"):
        NcclTransport("reader", TOKEN, backend="pigeon")


def test_a_piece_that_is_longer_than_agreed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with pair("nccl") as (reader, remote):
            blocks = list(range(16))
            with monkeypatch.context() as patch:
                patch.setattr(nccl, "PIECE_BYTES", 8 * MIB)
                assert await fault_of(await reader.pull_from(remote, blocks, blocks)) is TransferFault.FAILED
            await (await reader.pull_from(remote, blocks, blocks)).done
            reader.assert_holds(blocks, blocks)

    run(test())


def test_a_piece_that_is_out_of_time_ends_as_such_and_not_as_given_up() -> None:
    """A future is done as soon as it is cancelled: the link must not take its own cancelling for an answer."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        link = object.__new__(nccl_link.Link)
        link._timeout_s, link.broken = 0.01, loop.create_future()
        link.break_off = link.broken.set_exception  # type: ignore[method-assign]
        with pytest.raises(TransferError) as caught:
            await link._unless_broken(loop.create_future())
        assert caught.value.kind is TransferFault.TIMEOUT

    run(test())

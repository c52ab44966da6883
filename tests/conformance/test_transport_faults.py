"""One suite for every transport: peers that die, stop or lie, reads that are given up."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest

from kvtransfer.core.layout import Cut
from kvtransfer.transports import nccl, tcp, ucx, ucx_agent
from kvtransfer.transports.base import Descriptor, Pull, TransferError, TransferFault, allocate_pool
from kvtransfer.transports.ucx import UcxTransport
from tests.lanes import LANES, MIB, Reader, Remote, changed, fault_of, over, pair, run, start_remote

SMALL = 16 << 10
LONG_READ = 16384
"""Blocks of a read that takes long enough to be broken where a test wants it: small ones, none next to the last one."""


def arrived(reader: Reader) -> float:
    """The share of its blocks that a reader has the first byte of."""
    return float(np.count_nonzero(reader.memory[:: reader.block_bytes])) / reader.num_blocks


async def killed_at(lane: str, reader: Reader, share: float) -> tuple[Remote, Pull]:
    """A peer that was killed when a long read from it had this share of its bytes and lacked others, and the read.

    A machine that is busy elsewhere may let a read end first: then it is tried anew, with another peer.
    """
    remote_blocks, at_share = [block * 7 % 1024 for block in range(LONG_READ)], reader.block(int(share * LONG_READ))
    for _ in range(4):
        reader.memory[:] = 0
        victim = await start_remote(lane, 1024, SMALL)
        pull = await reader.pull_from(victim, remote_blocks, list(range(LONG_READ)))
        while not (at_share[0] and arrived(reader) >= share) and not pull.done.done():
            await asyncio.sleep(0)
        victim.kill()
        await over(pull)
        if pull.done.exception() is not None:
            assert share <= arrived(reader) < 1.0
            return victim, pull
        await victim.close()
    raise AssertionError("the fault always came too late")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_peer_killed_in_mid_read_is_lost_and_others_are_not(lane: str, share: float) -> None:
    async def test() -> None:
        async with pair(lane, 1024, SMALL, reader_blocks=LONG_READ) as (reader, other):
            victim, pull = await killed_at(lane, reader, share)
            assert await fault_of(pull) is TransferFault.PEER_LOST
            # 1. the dead peer stays lost
            with suppress(TransferError):  # from connect, or from the read
                await (await reader.pull_from(victim, [0], [0])).done
                pytest.fail("a read from a dead peer worked")
            # 2. another one is not affected
            blocks = list(range(1024))
            await (await reader.pull_from(other, blocks, blocks)).done
            reader.assert_holds(blocks, blocks)
            await victim.close()

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_a_restarted_peer_is_another_one_and_its_old_name_reads_nothing(lane: str) -> None:
    async def test() -> None:
        async with pair(lane, victims=1) as (reader, _, old):
            peer = await reader.transport.connect(old.peer_id, old.descriptor)
            await reader.transport.pull(peer, [0], [0]).done
            # 1. the process is another one by now: what is known of the old one leads nowhere
            old.kill()
            new = await start_remote(lane, 64, MIB)
            with suppress(TransferError):
                await reader.transport.pull(peer, [1], [1]).done
                pytest.fail("a read from a process that is gone worked")
            # 2. nor does the old name at the new one's address, though somebody answers there
            honest = Descriptor.decode(new.descriptor, reader.transport.name, new.peer_id)
            for descriptor in (new.descriptor, changed(honest, peer_id=old.peer_id)):
                with pytest.raises(TransferError):
                    await reader.transport.connect(old.peer_id, descriptor)
            assert not reader.memory[MIB:].any()
            # 3. under its own name it is read
            await (await reader.pull_from(new, [2], [2])).done
            reader.assert_holds([2], [2])
            await new.close()

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_of_a_read_that_fails_in_a_later_part_nothing_counts_and_the_next_one_is_whole(
    lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer, or NIXL, refuses the tenth of sixteen parts; at least eight have arrived by then."""
    monkeypatch.setattr(tcp, "MAX_BLOCKS_A_REQUEST", 4)
    monkeypatch.setattr(nccl, "PIECE_BYTES", 4 * MIB)
    monkeypatch.setattr(ucx, "POST_BYTES", 4 * MIB)
    posts = 0

    class FailingAgent(ucx_agent.UcxAgent):
        def post(self, *args: Any) -> tuple[ucx_agent.Handle | None, ucx_agent.PostState]:
            nonlocal posts
            posts += 1
            if posts == 10:
                raise TransferError(TransferFault.FAILED, "out of requests")
            return super().post(*args)

    async def test() -> None:
        monkeypatch.setattr(ucx, "UcxAgent", FailingAgent)
        async with pair(lane) as (reader, remote):
            blocks = list(range(64))
            descriptor, remote_blocks = remote.descriptor, blocks
            if not lane.startswith("ucx"):
                honest = Descriptor.decode(remote.descriptor, reader.transport.name, remote.peer_id)
                descriptor, remote_blocks = changed(honest, num_blocks=65), [*blocks[:38], 64, *blocks[39:]]
            peer = await reader.transport.connect(remote.peer_id, descriptor)
            pull = reader.transport.pull(peer, remote_blocks, blocks)
            assert await fault_of(pull) is TransferFault.FAILED
            await over(pull)
            reader.assert_holds(blocks[:32], blocks[:32])
            assert not reader.memory[40 * MIB :].any()
            reader.memory[:] = 0
            await (await reader.pull_from(remote, blocks, blocks)).done
            reader.assert_holds(blocks, blocks)

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_a_stopped_peer_times_out_and_the_read_is_terminal_only_when_it_goes_on(lane: str) -> None:
    async def test() -> None:
        async with pair(lane, read_timeout_s=0.5, victims=1) as (reader, other, stopped):
            blocks = list(range(32))
            await (await reader.pull_from(stopped, [0], [60])).done
            await (await reader.pull_from(other, [0], [61])).done
            stopped.stop()
            pull = await reader.pull_from(stopped, blocks, blocks)
            # 1. it delays nobody else
            await asyncio.wait_for((await reader.pull_from(other, [5], [62])).done, 5)
            if lane == "ucx":
                # shared memory needs no help from the stopped process: the bytes are right, or it is like the others
                try:
                    await asyncio.wait_for(asyncio.shield(pull.done), 5)
                    reader.assert_holds(blocks, blocks)
                except TransferError as error:
                    assert error.kind is TransferFault.TIMEOUT
                stopped.go_on()
                await over(pull)
                return
            # 2. its own deadline ends the wait, not the danger
            assert await fault_of(pull) is TransferFault.TIMEOUT
            if lane in ("tcp", "nccl"):
                await over(pull, 1.0)  # closing the connection is the fence, or the transport's own memory
            else:
                await asyncio.sleep(0.3)
                assert not pull.terminal.done()
            # 3. the peer goes on: the read ends, and then nothing more is written
            stopped.go_on()
            await over(pull)
            reader.memory[:] = 0
            await asyncio.sleep(0.3)
            assert not reader.memory.any()
            # 4. and it can be read again
            pull = await reader.pull_from(stopped, blocks, blocks)
            await pull.done
            reader.assert_holds(blocks, blocks)

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_a_cancelled_read_writes_nothing_once_it_is_terminal(lane: str) -> None:
    async def test() -> None:
        async with pair(lane) as (reader, remote):
            blocks = list(range(64))
            for after in (0, 1, 20):
                pull = await reader.pull_from(remote, blocks, blocks)
                for _ in range(after):
                    await asyncio.sleep(0)
                pull.cancel()
                assert await fault_of(pull) is TransferFault.CANCELLED
                await over(pull)
                reader.memory[:] = 0
                await asyncio.sleep(0.1)
                assert not reader.memory.any()
            pull = await reader.pull_from(remote, blocks, blocks)
            await pull.done
            pull.cancel()  # too late is no error
            reader.assert_holds(blocks, blocks)

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_close_gives_reads_up_even_when_their_peer_is_stopped(lane: str) -> None:
    async def test() -> None:
        async with pair(lane) as (reader, remote):
            await (await reader.pull_from(remote, [0], [0])).done
            remote.stop()
            try:
                pull = await reader.pull_from(remote, list(range(32)), list(range(32)))
                await asyncio.wait_for(reader.transport.close(), 5)
                await asyncio.wait([pull.done], timeout=1)
                assert pull.done.done()
            finally:
                remote.go_on()

    run(test())


class HalfFailingAgent:
    """An agent whose posts of own block 0 fail without proof that they stopped; others are done at once."""

    metadata = b""

    def __init__(self, *_: object) -> None:
        self.closed = False

    def add_peer(self, *_: object) -> None:
        pass

    def post(self, peer_id: str, cut: Cut, remote_blocks: Any, own_blocks: Any) -> tuple[None, ucx_agent.PostState]:
        if 0 in own_blocks:
            raise ucx_agent.UnfencedError(TransferFault.FAILED, "out of requests")
        return None, ucx_agent.PostState.DONE

    def close(self) -> None:
        self.closed = True


def test_a_post_that_fails_halfway_is_never_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(ucx, "UcxAgent", HalfFailingAgent)
        monkeypatch.setattr(ucx, "_UNFENCED", [])
        transport = UcxTransport("reader")
        await transport.start(allocate_pool(4 * 4096), 4096)
        details = msgpack.packb([1, b"metadata"])
        peer = await transport.connect("peer", Descriptor("ucx", "peer", 4, 4096, details).encode())
        # 1. the failed read stays dangerous, the next one is fine
        bad, good = transport.pull(peer, [1], [0]), transport.pull(peer, [1], [1])
        assert await fault_of(bad) is TransferFault.FAILED
        await good.done
        await over(good)
        assert not bad.terminal.done()
        # 2. its agent is kept; a closed transport starts nothing
        await transport.close()
        assert [agent.closed for agent in ucx._UNFENCED] == [False]
        assert await fault_of(transport.pull(peer, [1], [2])) is TransferFault.CANCELLED
        await transport.disconnect(peer)

    run(test())

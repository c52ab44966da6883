"""One suite for every transport. Peers are real processes (this file run as a program), except the memory transport's.

`ucx` uses the lanes UCX picks on this machine (shared memory); `ucx-tcp` forces the ones it uses between machines. Over
400 lines, because one suite is one file: every transport runs all of it, and its peers run this file too.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import msgpack
import numpy as np
import pytest

from headrace.errors import InvariantError, StartupError
from headrace.ids import random_ids
from kvtransfer.core.layout import Cut
from kvtransfer.probe import ProbeArea, probe_area
from kvtransfer.transports import select, ucx, ucx_agent
from kvtransfer.transports.base import (
    Descriptor,
    PoolBytes,
    Pull,
    TransferError,
    TransferFault,
    Transport,
    allocate_pool,
    runs,
)
from kvtransfer.transports.memory import MemoryTransport
from kvtransfer.transports.tcp import TcpTransport
from kvtransfer.transports.ucx import UcxTransport
from workers.runner.pool import release_pages

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "the cluster's token"
MIB = 1 << 20

try:
    ucx_agent.load_bindings()
    NO_NIXL = ""
except ImportError as error:
    NO_NIXL = f"NIXL is not importable: {error}"

needs_nixl = pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL)
UCX_LANES = [pytest.param(lane, marks=needs_nixl) for lane in ("ucx", "ucx-tcp")]
LANES = ["memory", "tcp", *UCX_LANES]


def make(lane: str, peer_id: str, read_timeout_s: float, token: str = TOKEN) -> Transport:
    if lane == "memory":
        return MemoryTransport(peer_id, read_timeout_s)
    if lane == "tcp":
        return TcpTransport(peer_id, token, "127.0.0.1", read_timeout_s)
    os.environ["UCX_TLS"] = "tcp" if lane == "ucx-tcp" else "all"
    return UcxTransport(peer_id, read_timeout_s)


@cache
def content(block: int, block_bytes: int) -> PoolBytes:
    """What a holder's block holds."""
    return (
        np.random.default_rng(block)
        .integers(1, 256, min(block_bytes, 256), dtype=np.uint8)
        .repeat(-(-block_bytes // 256))[:block_bytes]
    )


def filled_pool(num_blocks: int, block_bytes: int) -> PoolBytes:
    pool = allocate_pool(num_blocks * block_bytes)
    for block in range(num_blocks):
        pool[block * block_bytes : (block + 1) * block_bytes] = content(block, block_bytes)
    return pool


class Remote(Protocol):
    peer_id: str
    descriptor: bytes

    def stop(self) -> None: ...
    def go_on(self) -> None: ...
    def kill(self) -> None: ...
    async def close(self) -> None: ...


class ProcessRemote:
    def __init__(self, lane: str, num_blocks: int, block_bytes: int) -> None:
        self.peer_id = random_ids("peer")
        self._process = subprocess.Popen(
            [sys.executable, __file__, lane, self.peer_id, str(num_blocks), str(block_bytes)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.descriptor = bytes.fromhex(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        assert self._process.wait(10) == -signal.SIGKILL

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    async def close(self) -> None:
        if self not in _shared.values():
            self.end()


class MemoryRemote:
    def __init__(self, transport: MemoryTransport) -> None:
        self.peer_id, self.descriptor = transport.peer_id, transport.descriptor()
        self.stop, self.go_on, self.kill, self.close = (
            transport.stall,
            transport.resume,
            transport.die,
            transport.close,
        )


_shared: dict[tuple[str, int, int], ProcessRemote] = {}
"""Peers that no test harms, by lane and pool."""


@pytest.fixture(scope="module", autouse=True)
def end_shared_peers() -> Iterator[None]:
    yield
    for remote in _shared.values():
        remote.end()


async def start_remote(lane: str, num_blocks: int, block_bytes: int, shared: bool) -> Remote:
    if lane != "memory":
        if not shared:
            return ProcessRemote(lane, num_blocks, block_bytes)
        key = (lane, num_blocks, block_bytes)
        return _shared.get(key) or _shared.setdefault(key, ProcessRemote(*key))
    transport = MemoryTransport(random_ids("peer"))
    await transport.start(filled_pool(num_blocks, block_bytes), block_bytes)
    return MemoryRemote(transport)


class Reader:
    def __init__(self, transport: Transport, num_blocks: int, block_bytes: int) -> None:
        self.transport, self.block_bytes = transport, block_bytes
        self.memory = allocate_pool(num_blocks * block_bytes)

    def block(self, block: int) -> PoolBytes:
        return self.memory[block * self.block_bytes : (block + 1) * self.block_bytes]

    def assert_holds(self, remote_blocks: list[int], local_blocks: list[int]) -> None:
        for remote, local in zip(remote_blocks, local_blocks, strict=True):
            assert np.array_equal(self.block(local), content(remote, self.block_bytes)), (remote, local)

    async def pull_from(self, remote: Remote, remote_blocks: list[int], local_blocks: list[int]) -> Pull:
        peer = await self.transport.connect(remote.peer_id, remote.descriptor)
        return self.transport.pull(peer, remote_blocks, local_blocks)


@asynccontextmanager
async def pair(
    lane: str,
    num_blocks: int = 64,
    block_bytes: int = MIB,
    *,
    read_timeout_s: float = 20.0,
    victims: int = 0,
    reader_blocks: int = 0,
) -> AsyncIterator[tuple[Any, ...]]:
    """A reader, a peer that must come to no harm, and peers for harming; all with pools of that size."""
    transport = make(lane, random_ids("reader"), read_timeout_s)
    reader = Reader(transport, reader_blocks or num_blocks, block_bytes)
    await transport.start(reader.memory, block_bytes)
    others = [await start_remote(lane, num_blocks, block_bytes, i == 0) for i in range(1 + victims)]
    try:
        yield (reader, *others)
    finally:
        await transport.close()
        for other in others:
            await other.close()


async def fault_of(pull: Pull, limit_s: float = 15.0) -> TransferFault:
    with pytest.raises(TransferError) as caught:
        await asyncio.wait_for(asyncio.shield(pull.done), limit_s)
    return caught.value.kind


async def over(pull: Pull, limit_s: float = 15.0) -> None:
    await asyncio.wait_for(asyncio.shield(pull.terminal), limit_s)


async def underway(reader: Reader, pull: Pull, local_block: int) -> bool:
    """Waits for a read's first bytes; False when it was over before anybody saw it under way."""
    while not reader.block(local_block)[0]:
        await asyncio.sleep(0)
        if pull.done.done():
            break
    return not pull.done.done()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


# --- bytes


@pytest.mark.parametrize("lane", LANES)
def test_any_blocks_arrive_in_any_order_and_nothing_else_changes(lane: str) -> None:
    async def test() -> None:
        rng = random.Random(1)
        async with pair(lane, 4096, 300) as (reader, remote):
            for _ in range(20):
                reader.memory[:] = 0
                count = rng.randint(1, 64)
                remote_blocks = [rng.randrange(4096) for _ in range(count)]
                local_blocks = rng.sample(range(64), count)
                pull = await reader.pull_from(remote, remote_blocks, local_blocks)
                stats = await pull.done
                await over(pull)
                assert stats.bytes == count * 300 and stats.seconds >= 0
                reader.assert_holds(remote_blocks, local_blocks)
                assert not any(reader.block(b).any() for b in set(range(64)) - set(local_blocks))

    run(test())


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(4096, 300), (64, MIB)], ids=["tiny-blocks", "one-large-run"])
def test_many_tiny_blocks_and_one_large_run(lane: str, num_blocks: int, block_bytes: int) -> None:
    async def test() -> None:
        async with pair(lane, num_blocks, block_bytes) as (reader, remote):
            blocks = list(range(num_blocks))
            if block_bytes == 300:
                random.Random(2).shuffle(blocks)
            await (await reader.pull_from(remote, blocks, list(range(num_blocks)))).done
            reader.assert_holds(blocks, list(range(num_blocks)))

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_concurrent_reads_from_two_peers_do_not_mix(lane: str) -> None:
    async def test() -> None:
        async with pair(lane, victims=1) as (reader, first, second):
            pulls = []
            for i in range(16):
                blocks = [i * 4 + j for j in range(4)]
                pulls.append(await reader.pull_from(first if i % 2 else second, blocks[::-1], blocks))
            await asyncio.gather(*(pull.done for pull in pulls))
            for at in range(0, 64, 4):
                reader.assert_holds(list(range(at + 3, at - 1, -1)), list(range(at, at + 4)))

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_an_empty_read_is_over_at_once(lane: str) -> None:
    async def test() -> None:
        async with pair(lane) as (reader, remote):
            pull = await reader.pull_from(remote, [], [])
            assert (await pull.done).bytes == 0
            await over(pull)

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_pages_that_go_back_to_the_system_are_read_and_written_anew(lane: str) -> None:
    """A pool stays registered while a worker that is short of memory gives a part of it back and takes it again."""

    async def test() -> None:
        peer_id, pool = random_ids("peer"), filled_pool(64, MIB)
        holder = make(lane, peer_id, 20.0)
        await holder.start(pool, MIB)
        async with pair(lane) as (reader, _):
            peer = await reader.transport.connect(peer_id, holder.descriptor())
            for shift in range(3):
                blocks, own = list(range(8, 40)), list(range(10, 42))
                await reader.transport.pull(peer, blocks, own).done
                reader.assert_holds([block + shift for block in blocks], own)
                assert release_pages(pool, blocks, MIB) == release_pages(reader.memory, own, MIB) == 32 * MIB
                assert not any(reader.block(block).any() for block in own)
                for block in blocks:
                    pool[block * MIB : (block + 1) * MIB] = content(block + shift + 1, MIB)
        await holder.close()

    run(test())


# --- refusals


@pytest.mark.parametrize("lane", LANES)
def test_unknown_blocks_are_refused_and_the_next_read_works(lane: str) -> None:
    async def test() -> None:
        async with pair(lane) as (reader, remote):
            for wrong in ([64], [-1], [0, 1 << 31]):
                pull = await reader.pull_from(remote, wrong, list(range(len(wrong))))
                assert await fault_of(pull) is TransferFault.FAILED
                await over(pull)
            for wrong in ([64], [-1], [3, 3]):
                with pytest.raises(InvariantError):
                    await reader.pull_from(remote, [0] * len(wrong), wrong)
            await (await reader.pull_from(remote, [7], [0])).done
            reader.assert_holds([7], [0])

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_descriptors_that_do_not_fit_are_refused(lane: str) -> None:
    async def test() -> None:
        async with pair(lane) as (reader, remote):
            good = Descriptor.decode(remote.descriptor, reader.transport.name, remote.peer_id)
            wrong = {
                "another incarnation": ("someone-else", remote.descriptor),
                "block bytes": (remote.peer_id, changed(good, block_bytes=0)),
                "transport": (remote.peer_id, changed(good, transport="pigeon")),
                "garbage": (remote.peer_id, b"\xc1\x00garbage"),
                "truncated": (remote.peer_id, remote.descriptor[:-5]),
                "empty": (remote.peer_id, b""),
                "types": (remote.peer_id, changed(good, num_blocks="many")),
            }
            if lane != "memory":
                wrong["details"] = (remote.peer_id, changed(good, details=b"\x01"))
            for peer_id, descriptor in wrong.values():
                with pytest.raises(TransferError):
                    await reader.transport.connect(peer_id, descriptor)
            await (await reader.pull_from(remote, [1], [1])).done
            reader.assert_holds([1], [1])

    run(test())


def changed(descriptor: Descriptor, **changes: Any) -> bytes:
    parts = {name: getattr(descriptor, name) for name in Descriptor.__slots__}
    return Descriptor(**(parts | changes)).encode()


def test_tcp_refuses_a_wrong_token_a_stale_name_and_nonsense() -> None:
    async def test() -> None:
        async with pair("tcp") as (reader, remote):
            good = Descriptor.decode(remote.descriptor, "tcp", remote.peer_id)
            # 1. a stranger who guesses the token
            stranger = make("tcp", random_ids("reader"), 5.0, token="guess")
            await stranger.start(allocate_pool(8 * MIB), MIB)
            with pytest.raises(TransferError, match="unauthenticated"):
                await stranger.connect(remote.peer_id, remote.descriptor)
            # 2. and one who asks us to trust him
            with pytest.raises(TransferError, match="refused"):
                await reader.transport.connect(stranger.peer_id, stranger.descriptor())
            await stranger.close()
            # 3. the port belongs to another incarnation by now
            with pytest.raises(TransferError, match="stale"):
                await reader.transport.connect("peer-of-yesterday", changed(good, peer_id="peer-of-yesterday"))
            # 4. nonsense on the port, then a normal read
            host, port = msgpack.unpackb(good.details)
            for nonsense in (b"", b"\xff" * 64, b"\0\0\0\2\xc1\xc1", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\x80"):
                with socket.create_connection((host, port), timeout=5) as sock, suppress(ConnectionResetError):
                    sock.sendall(nonsense)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
            await (await reader.pull_from(remote, [1], [1])).done

    run(test())


# --- faults


@pytest.mark.parametrize("lane", LANES)
def test_a_peer_killed_in_mid_read_is_lost_and_others_are_not(lane: str) -> None:
    async def test() -> None:
        async with pair(lane, victims=1, reader_blocks=256) as (reader, other, victim):
            blocks = list(range(256))
            await (await reader.pull_from(victim, [0], [255])).done
            if lane in ("tcp", "ucx-tcp"):
                victim.stop()  # what is not in flight yet cannot arrive before the kill
            pull = await reader.pull_from(victim, [block % 64 for block in blocks], blocks)
            if lane in ("memory", "ucx"):
                assert await underway(reader, pull, 0), "the fault came too late to prove anything"
            else:
                await asyncio.sleep(0.1)
                assert not pull.done.done()
            victim.kill()
            assert await fault_of(pull) is TransferFault.PEER_LOST
            await over(pull)
            assert not reader.block(254).any()
            # 1. the dead peer stays lost
            with suppress(TransferError):  # from connect, or from the read
                await (await reader.pull_from(victim, [0], [0])).done
                pytest.fail("a read from a dead peer worked")
            # 2. another one is not affected
            await (await reader.pull_from(other, blocks[:64], blocks[:64])).done
            reader.assert_holds(blocks[:64], blocks[:64])

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
            if lane == "tcp":
                await over(pull, 1.0)  # closing the connection is the fence
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


# --- nothing left behind


def usage() -> dict[str, int]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
    }


async def assert_no_more_than(before: dict[str, int]) -> None:
    """Threads of libraries take a moment to go."""
    for _ in range(100):
        now = usage()
        if all(now[name] <= before[name] for name in now):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{before} -> {now}")


@pytest.mark.parametrize("lane", LANES)
def test_a_thousand_reads_leave_nothing_behind(lane: str) -> None:
    async def test() -> None:
        async with pair(lane) as (reader, remote):
            rng = random.Random(3)

            async def reads(count: int) -> None:
                for i in range(count):
                    pull = await reader.pull_from(remote, rng.sample(range(64), 1), rng.sample(range(64), 1))
                    if i % 10 == 9:
                        pull.cancel()
                    await over(pull)
                    assert pull.done.done()
                await asyncio.sleep(0.05)

            await reads(20)
            before = usage()
            await reads(1000)
            await assert_no_more_than(before)

    run(test())


@pytest.mark.parametrize("lane", LANES)
def test_close_returns_everything(lane: str) -> None:
    async def test() -> None:
        async def once() -> None:
            async with pair(lane) as (reader, remote):
                await (await reader.pull_from(remote, [1], [2])).done

        await once()  # what libraries make once for the process
        before = usage()
        await once()
        await assert_no_more_than(before)

    run(test())


# --- choosing


def area_of(num_blocks: int) -> tuple[PoolBytes, ProbeArea]:
    area = probe_area(num_blocks, MIB)
    return allocate_pool(area.end * MIB), area


async def start(name: str, memory: PoolBytes, area: ProbeArea, **options: str) -> select.Lanes:
    return await select.start_lanes(name, memory, MIB, area, peer_id=random_ids("w"), token=TOKEN, **options)


def test_auto_falls_back_to_tcp_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'nixl_cu12'")

    async def test() -> None:
        monkeypatch.setattr(ucx_agent, "load_bindings", missing)
        memory, area = area_of(4)
        lanes = await start("auto", memory, area)
        assert list(lanes.transports) == ["tcp"] and lanes.gbps["tcp"] > 0
        assert "nixl_cu12" in lanes.note and "tcp" in lanes.note
        assert not memory[: 4 * MIB].any()
        await lanes.close()
        with pytest.raises(StartupError, match="nixl_cu12"):
            await start("ucx", memory, area)
        with pytest.raises(StartupError, match="pigeon"):
            await start("pigeon", memory, area)
        with pytest.raises(StartupError, match=r"192\.0\.2\.1"):
            await start("tcp", memory, area, host="192.0.2.1")

    run(test())


@needs_nixl
def test_auto_offers_ucx_first_and_tcp_as_the_last_resort() -> None:
    async def test() -> None:
        memory, area = area_of(64)
        lanes = await start("auto", memory, area)
        assert (list(lanes.transports), lanes.common, lanes.note) == (["ucx", "tcp"], "tcp", "")
        assert all(gbps > 0 for gbps in lanes.gbps.values())
        assert not memory[: 64 * MIB].any()
        await lanes.close()

    run(test())


def test_the_lane_needs_an_address_that_peers_can_reach() -> None:
    async def test() -> None:
        with pytest.raises(StartupError, match="host"):
            await start("tcp", *area_of(1), host="0.0.0.0")

    run(test())


def test_no_transport_needs_torch() -> None:
    code = "import sys, kvtransfer.transports.select; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == 0


def test_runs_cover_all_blocks_in_order() -> None:
    assert list(runs([], 4)) == []
    assert list(runs([3, 4, 5, 9, 8, 7, 8], 2)) == [(3, 2), (5, 1), (9, 1), (8, 1), (7, 2)]


async def hold(lane: str, peer_id: str, num_blocks: int, block_bytes: int) -> None:
    """The program of a peer: prints its descriptor and serves until its standard input ends."""
    transport = make(lane, peer_id, 20.0)
    await transport.start(filled_pool(num_blocks, block_bytes), block_bytes)
    print(transport.descriptor().hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))

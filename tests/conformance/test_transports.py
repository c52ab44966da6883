"""One suite for every transport: what arrives, what is refused, which lane is chosen. Peers are real processes
(`tests/lanes.py`), except the memory transport's.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest

from headrace.errors import InvariantError, StartupError
from headrace.ids import random_ids
from kvtransfer.probe import ProbeArea, probe_area
from kvtransfer.transports import select, ucx_agent
from kvtransfer.transports.base import Descriptor, PoolBytes, TransferError, TransferFault, allocate_pool, runs
from tests.lanes import LANES, MIB, TOKEN, changed, content, fault_of, filled_pool, make, needs_nixl, over, pair, run
from workers.runner.pool import release_pages

ROOT = Path(__file__).resolve().parents[2]

# --- bytes


@pytest.mark.parametrize("lane", LANES)
def test_any_blocks_arrive_in_any_order_and_nothing_else_changes(lane: str) -> None:
    async def test() -> None:
        rng = random.Random(1)
        async with pair(lane, 10_000, 300) as (reader, remote):
            for _ in range(20):
                reader.memory[:] = 0
                count = rng.randint(1, 64)
                remote_blocks = [rng.randrange(10_000) for _ in range(count)]
                local_blocks = rng.sample(range(64), count)
                pull = await reader.pull_from(remote, remote_blocks, local_blocks)
                stats = await pull.done
                await over(pull)
                assert stats.bytes == count * 300 and stats.seconds >= 0
                reader.assert_holds(remote_blocks, local_blocks)
                assert not any(reader.block(b).any() for b in set(range(64)) - set(local_blocks))

    run(test())


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(
    ("num_blocks", "block_bytes"), [(10_000, 300), (64, MIB)], ids=["10,000-tiny-blocks", "one-large-run"]
)
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


@pytest.mark.parametrize("lane", ["tcp", "nccl"])
def test_a_lane_with_a_port_refuses_a_wrong_token_a_stale_name_and_nonsense(lane: str) -> None:
    async def test() -> None:
        async with pair(lane) as (reader, remote):
            good = Descriptor.decode(remote.descriptor, lane, remote.peer_id)
            # 1. a stranger who guesses the token
            stranger = make(lane, random_ids("reader"), 5.0, token="guess")
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
                with socket.create_connection((host, port), timeout=5) as sock, suppress(OSError):
                    sock.sendall(nonsense)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
            await (await reader.pull_from(remote, [1], [1])).done

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

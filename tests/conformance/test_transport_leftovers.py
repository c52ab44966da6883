"""What reads and transports leave behind: nothing."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Iterator

import pytest

from kvtransfer.transports.base import Pool, TransferFault
from tests.lanes import LANES, MIB, fault_of, over, pair, run


def usage() -> dict[str, int]:
    """Without the event loop's own idle helpers (`asyncio_0` and so on): how many it has is a matter of chance."""
    helpers = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")) - helpers,
        "python threads": threading.active_count() - helpers,
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


@pytest.mark.parametrize("lane", ["tcp", "nccl"])
def test_an_error_nobody_foresaw_fails_its_read_and_no_other(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Iterator[memoryview]:
        raise RuntimeError("no such thing was planned")

    async def test() -> None:
        async with pair(lane, 8, MIB) as (reader, other):
            with monkeypatch.context() as patch:
                patch.setattr(Pool, "views", broken)
                pull = await reader.pull_from(other, [0, 1], [0, 1])
                assert await fault_of(pull) is TransferFault.FAILED
                await over(pull)
            await (await reader.pull_from(other, [2, 3], [0, 1])).done
            reader.assert_holds([2, 3], [0, 1])

    run(test())

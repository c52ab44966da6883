"""Memory that shrinks under load: closed workers, other workers, preemption, and the way back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from headrace.core.records import Role
from headrace.errors import Code, HeadraceError
from tests.world import World, expected, spec, world
from workers.core.watermarks import CALM_S, Level, Marks
from workers.memory_watch import MemoryWatch

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
BLOCK_BYTES = 128
MARKS = Marks(low_bytes=40 * BLOCK_BYTES, critical_bytes=20 * BLOCK_BYTES)
PLENTY = 100 * BLOCK_BYTES


class Machine:
    """What one worker sees: `left` beside what its pool has given back, looked at once a second of its own clock."""

    def __init__(self, w: World, name: str) -> None:
        self.left = PLENTY
        self.now = 0.0
        worker = w.workers[name]
        self.scheduler, self.pool = worker.scheduler, worker.pool
        self.watch = MemoryWatch(
            MARKS, worker.hub, worker.scheduler, worker.pool, BLOCK_BYTES, self.available, gives_back=True
        )

    def available(self) -> int:
        return self.left + self.pool.retired_blocks * BLOCK_BYTES

    async def look(self, times: int = 1) -> Level:
        for _ in range(times):
            self.now += 1.0
            self.watch.look(self.now)
            await asyncio.sleep(0.01)
        return self.watch.level


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def closed(w: World) -> int:
    table = w.gateway.router.table
    return int(table.closed[: table.num_slots].sum())


def run(coroutine: object, timeout_s: float = 60.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await coroutine  # type: ignore[misc]

    asyncio.run(bounded())


def test_memory_that_shrinks_under_load_costs_no_request_and_comes_back() -> None:
    async def main() -> None:
        async with world(C, C, num_blocks=64, step_s=0.003) as w:
            machines = [Machine(w, name) for name in w.workers]
            first, second = machines
            requests = [spec([3 + i] * 60, 150, ignore_eos=True) for i in range(8)]
            tasks = [asyncio.create_task(w.ask(request)) for request in requests]
            await until(lambda: all(m.scheduler.load(0, 0.0).decode_rows >= 3 for m in machines))
            # 1. one worker is short: it gives blocks back, and others serve who is new
            first.left = 0
            assert await first.look() is Level.SHED
            await until(lambda: first.pool.retired_blocks and closed(w) == 1)
            assert first.scheduler.stats()["memory_shed"] > 0
            live = w.workers["colocated-0"].hub.live_requests
            late = spec([99] * 20, 5, ignore_eos=True)
            assert (await w.ask(late)).tokens == expected(late)
            assert w.workers["colocated-0"].hub.live_requests <= live
            assert w.workers["colocated-0"].hub.refusals == {}
            # 2. what it gave back is enough: it is closed until that has lasted
            assert first.available() >= MARKS.reopen_bytes
            assert await first.look() is Level.CLOSED
            # 3. so is the other: whoever is new is told to come again
            second.left = 0
            assert await second.look() is Level.SHED
            await until(lambda: closed(w) == 2)
            with pytest.raises(HeadraceError) as caught:
                await w.ask(late)
            assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, "memory_pressure")
            assert caught.value.retry_after_s == CALM_S
            # 4. those that were there end as if nothing had happened
            for request, task in zip(requests, tasks, strict=True):
                assert (await task).tokens == expected(request)
            # 5. memory stays short: smaller pools, open
            for machine in machines:
                assert await machine.look(20) is Level.OPEN
                assert machine.pool.retired_blocks > 0
            await until(lambda: closed(w) == 0)
            assert (await w.ask(late)).tokens == expected(late)
            # 6. memory comes back, and the blocks with it
            for machine in machines:
                machine.left = PLENTY
                await machine.look(60)
                await until(lambda m=machine: not m.pool.retired_blocks)
            again = await asyncio.gather(*(w.ask(request) for request in requests))
            assert [answer.tokens for answer in again] == [expected(request) for request in requests]
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize("short", ["prefill-0", "decode-0"])
def test_a_pair_goes_on_when_one_of_it_is_short_of_memory(short: str) -> None:
    async def main() -> None:
        async with world(P, D, num_blocks=64, step_s=0.003) as w:
            machine = Machine(w, short)
            requests = [spec([3 + i] * 60, 80, ignore_eos=True) for i in range(4)]
            tasks = [asyncio.create_task(w.ask(request)) for request in requests]
            await until(lambda: w.workers["decode-0"].scheduler.load(0, 0.0).decode_rows)
            machine.left = 0
            assert await machine.look() is Level.SHED
            await until(lambda: closed(w) == 1)
            more = spec([88] * 40, 10, ignore_eos=True)
            assert (await w.ask(more)).tokens == expected(more)
            for request, task in zip(requests, tasks, strict=True):
                assert (await task).tokens == expected(request)
            machine.left = PLENTY
            assert await machine.look(70) is Level.OPEN
            await until(lambda: not machine.pool.retired_blocks)
            await w.assert_drained()

    run(main())


def test_a_workers_own_looks_close_it_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with world(C, num_blocks=64, low_memory_bytes=1 << 20, critical_memory_bytes=1 << 19) as w:
            worker = w.workers["colocated-0"]
            worker.memory_watch.available_bytes = lambda: 700 << 10
            with caplog.at_level(logging.WARNING, "headrace.workers.memory_watch"):
                await until(lambda: closed(w))
            [record] = caplog.records
            assert "level=closed was=open available_bytes=716800" in record.getMessage()
            await until(lambda: worker.pool.retired_blocks == 56)
            status = worker.service.status(audit=True)
            assert (status.load.closed, status.load.total_blocks) == ("memory_pressure", 8)
            counters = status.counters
            assert (counters["memory_closed"], counters["memory_shed"], counters["retired_blocks"]) == (1.0, 0.0, 56.0)
            assert status.integrity_error == ""

    run(main())


def test_host_memory_goes_first_and_comes_back_last() -> None:
    async def main() -> None:
        async with world(C, num_blocks=64, swap_bytes=32 * BLOCK_BYTES) as w:
            machine = Machine(w, "colocated-0")
            host = machine.scheduler.host_blocks
            assert host.num_blocks == host.available_blocks == 32
            # 1. somewhat short: cached blocks stay on the device
            machine.left = 30 * BLOCK_BYTES
            assert await machine.look() is Level.CLOSED
            await until(lambda: host.retired_blocks == 32)
            assert (host.available_blocks, machine.pool.retired_blocks) == (0, 0)
            # 2. that was not enough
            await machine.look()
            await until(lambda: machine.pool.retired_blocks == 20)
            machine.left = PLENTY
            while machine.pool.retired_blocks:
                assert host.retired_blocks == 32
                await machine.look()
            await machine.look(60)
            assert (host.retired_blocks, host.available_blocks) == (0, 32)
            await w.assert_drained()

    run(main())


def test_pinned_memory_is_not_given_back_and_nobody_is_preempted_for_it() -> None:
    async def main() -> None:
        async with world(C, num_blocks=64, step_s=0.003) as w:
            worker = w.workers["colocated-0"]
            request = spec([3] * 60, 100, ignore_eos=True)
            task = asyncio.create_task(w.ask(request))
            await until(lambda: worker.scheduler.load(0, 0.0).decode_rows)
            watch = MemoryWatch(MARKS, worker.hub, worker.scheduler, worker.pool, 128, lambda: 0, gives_back=False)
            watch.look(0.0)
            assert worker.scheduler.load(0, 0.0).closed == "memory_pressure"
            assert (await task).tokens == expected(request)
            assert (worker.pool.retired_blocks, worker.scheduler.stats()["preemptions"]) == (0, 0)
            await w.assert_drained()

    run(main())

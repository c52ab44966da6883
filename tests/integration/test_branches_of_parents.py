"""Branches end with the parent that they name, whichever door either came in by."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.core.records import Role
from headrace.errors import Code, HeadraceError
from router.core.flight import FlightState
from tests.both_doors import doors, holder, run, until
from tests.world import spec, world

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
def test_a_cancelled_parent_ends_its_branches_and_theirs(how: str) -> None:
    async def main() -> None:
        async with world(P, D, step_s=0.005) as w:
            long = spec([9] * 20, 900, ignore_eos=True)
            deadline_s = 0.5 if how == "deadline" else None
            parent = asyncio.create_task(w.ask(replace(long, label="root", deadline_s=deadline_s)))
            await until(lambda: w.gateway._live)
            children = [asyncio.create_task(w.ask(replace(long, label=f"child-{i}", parent="root"))) for i in range(2)]
            await until(lambda: len(w.gateway._live) == 3)
            grandchild = asyncio.create_task(w.ask(replace(long, parent="child-0")))
            stranger = asyncio.create_task(w.ask(replace(long, label="root", tenant="other")))
            await until(lambda: len(w.gateway._live) == 5)
            if how == "cancel":
                assert await w.gateway.cancel("t", "root")
            elif how == "disconnect":
                parent.cancel()
            for branch in (*children, grandchild):
                with pytest.raises(HeadraceError) as caught:
                    await branch
                assert caught.value.code is Code.CANCELLED
            assert not stranger.done()
            stranger.cancel()
            await asyncio.gather(parent, stranger, return_exceptions=True)
            await w.assert_drained()

    run(main())


def test_branches_outlive_a_parent_that_ends_well_and_nobody_joins_one_that_is_over() -> None:
    async def main() -> None:
        async with world(C, step_s=0.005) as w, doors(w) as d:
            parent = asyncio.create_task(w.ask(replace(holder("root"), sampling=spec([1], 20).sampling)))
            await until(lambda: w.gateway._live)
            child = asyncio.create_task(d.complete({"x-headrace-parent": "root"}, max_tokens=60))
            await until(lambda: len(w.gateway._live) == 2)
            await parent
            assert (await child).status_code == 200
            late = await d.complete({"x-headrace-parent": "root"})
            assert (late.status_code, late.json()["error"]["param"]) == (409, "parent")
            with pytest.raises(HeadraceError) as caught:
                await d.generate(parent="root")
            assert (caught.value.code, caught.value.field) == (Code.FAILED_PRECONDITION, "parent")
            await w.assert_drained()

    run(main())


def test_a_branch_asked_for_at_one_door_ends_with_a_parent_cancelled_at_the_other() -> None:
    async def main() -> None:
        async with world(C, step_s=0.005) as w, doors(w) as d:
            parent = asyncio.create_task(w.ask(holder("root")))
            await until(lambda: w.gateway._live)
            child = asyncio.create_task(d.complete({"x-headrace-parent": "root"}, max_tokens=900))
            await until(lambda: len(w.gateway._live) == 2)
            assert await asyncio.to_thread(d.grpc.cancel, "root")
            assert (await child).status_code == 499
            with pytest.raises(HeadraceError):
                await parent
            await w.assert_drained()

    run(main())


def test_a_long_line_of_branches_ends_without_deep_recursion() -> None:
    async def main() -> None:
        async with world(C, step_s=0.05) as w:
            line = []
            for i in range(400):
                request = spec([9], 50, ignore_eos=True, parent=f"r{i - 1}" if i else "")
                line.append(asyncio.create_task(w.ask(replace(request, label=f"r{i}"))))
                await asyncio.sleep(0)
            assert len(w.gateway._live) == 400
            await w.gateway.cancel("t", "r0")
            assert all(branch.flight.state is FlightState.ENDED for branch in w.gateway._live.values())
            await asyncio.gather(*line, return_exceptions=True)
            await w.assert_drained()

    run(main())

"""A whole deployment in one process with host and disk tiers: what the worker's account and the metrics say of them,
that a restart of a worker keeps its files, and that a cleared tenant has none.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.core.records import Role
from tests.integration.test_scheduling_world import run, scrape
from tests.world import FAKE_BLOCK_BYTES, World, expected, spec, world
from workers.disk_store import file_bytes

C = Role.COLOCATED
NAME = "colocated-0"
PROMPT = [5 + i % 90 for i in range(100)]


def options(folder: Path) -> dict[str, object]:
    disk = {"disk_cache_bytes": 64 * file_bytes(FAKE_BLOCK_BYTES), "disk_cache_dir": str(folder)}
    return {"num_blocks": 24, "swap_bytes": 64 * FAKE_BLOCK_BYTES} | disk


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


async def until_written(w: World, folder: Path, most: int = 100) -> None:
    """Until what was asked for is on disk, and nothing moves any more."""
    seen = -1
    while seen != len(files(folder)) or not seen:
        seen = len(files(folder))
        await asyncio.sleep(0.3)
    assert seen <= most


def test_the_account_tells_each_tier_and_whose_blocks_they_are(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(C, **options(tmp_path)) as w:  # type: ignore[arg-type]
            request = spec(PROMPT, 6, ignore_eos=True)
            assert (await w.ask(request)).tokens == expected(request)
            await until_written(w, tmp_path)
            await w.assert_drained()
            status = w.workers[NAME].service.status(True)
            assert status.integrity_error == ""
            tiers = {tier.name: tier for tier in status.tiers}
            assert list(tiers) == ["device", "host", "disk"]
            for tier in tiers.values():
                assert tier.capacity_blocks == tier.cached_blocks + tier.used_blocks + tier.free_blocks
            assert (tiers["host"].cached_blocks, tiers["disk"].cached_blocks) == (6, len(files(tmp_path)))
            assert tiers["disk"].block_bytes == file_bytes(FAKE_BLOCK_BYTES)
            assert {owner.tenant for owner in status.tenant_caches} == {"t"}
            assert status.counters["offloads"] == status.counters["spills"] == 6
            metrics = await scrape(w)
            assert metrics["tier_blocks", NAME, "disk", "cached"] == 6
            assert metrics["tier_spills_total", NAME] == 6

    run(main())


def test_a_restarted_worker_still_has_its_files_and_clearing_removes_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(C, **options(tmp_path)) as w:  # type: ignore[arg-type]
            request = spec(PROMPT, 6, ignore_eos=True)
            await w.ask(request)
            await until_written(w, tmp_path)
            await w.workers[NAME].stop()
            await w.start_worker(NAME, C)
            w.push_members()
            await w.connected()
            tiering = w.workers[NAME].scheduler.tiering
            while tiering.tiers.disk_cached < 6:
                await asyncio.sleep(0.02)
            assert (await w.ask(request)).tokens == expected(request)
            while tiering.tiers.counters["promotions"] < 6:
                await asyncio.sleep(0.02)
            await until_written(w, tmp_path)
            w.workers[NAME].hub.clear_cache("t")
            while files(tmp_path):
                await asyncio.sleep(0.02)
            await w.assert_drained()

    run(main())

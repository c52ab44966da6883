"""A worker reads a prefix from a peer that has it in its host memory or on disk alone: the same tokens as computed, and
nothing held afterwards whatever happens on the way.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.records import Role
from headrace.v1 import admin_pb2
from kvtransfer.core.identity import block_hashes, namespace_id, request_root
from kvtransfer.transports.memory import MemoryTransport
from router.admin import AdminService, Presence
from router.auth import Authenticator
from router.core.decision import Decision, Fetch, PlanKind, RouteAsk
from router.core.placement import WorkerKey
from router.metrics import DoorMetrics
from router.siblings import Siblings
from tests.direct import BLOCK_SIZE, FAKE_BLOCK_BYTES, Workers, expected, until, workers
from tests.integration.test_fetch import run, warm
from tests.integration.test_routing_world import ask, chosen, depth, world
from tests.world import World
from workers.core import fetches, staging
from workers.core.staging import StageCopy
from workers.core.tier_actions import Block, Outcome
from workers.disk_store import DiskStore, file_bytes
from workers.main import Worker
from workers.movers import Movers

BLOCKS = 48
"""A quarter of them has room for what a peer asks for."""
PROMPT = random.Random(1).choices(range(3, 260), k=10 * BLOCK_SIZE + 5)
"""Ten full blocks and a bit."""
HOLDER, READER = "colocated-0", "colocated-1"


def options(folder: Path, num_blocks: int = BLOCKS) -> dict[str, object]:
    """The host is so large that everything idle is copied down."""
    disk = {"disk_cache_bytes": 256 * file_bytes(FAKE_BLOCK_BYTES), "disk_cache_dir": str(folder)}
    return {"num_blocks": num_blocks, "swap_bytes": 2 * num_blocks * FAKE_BLOCK_BYTES} | disk


@asynccontextmanager
async def pair(folder: Path, where: str) -> AsyncIterator[Workers]:
    """A reader, and a holder that has PROMPT in one tier below the device alone."""
    async with workers(HOLDER, READER, make_lane=MemoryTransport, **options(folder)) as w:  # type: ignore[arg-type]
        await hold(w, where, HOLDER, PROMPT)
        yield w


async def hold(w: Workers, where: str, name: str, prompt: list[int]) -> None:
    await warm(w, name, prompt)
    root = request_root(w.all[name].hub._identity, b"n" * 16)
    await sink(w.all[name], block_hashes(root, prompt, BLOCK_SIZE), where)


async def sink(worker: Worker, hashes: list[bytes], where: str) -> None:
    """The chain is in one tier below the device alone, and no byte of anything is left above."""
    tiers = worker.scheduler.tiering.tiers
    on_disk = len(hashes) if where == "disk" else 0
    await until(lambda: tiers.run(hashes) == len(hashes) and tiers.disk_cached >= on_disk, 20.0)
    with worker.engine.lock:
        empty_device(worker)
        if where == "disk":
            empty_host(worker)
            assert tiers.host_cached == 0
        assert tiers.run(hashes) == len(hashes)


def empty_device(worker: Worker) -> None:
    blocks = worker.pool.alloc(worker.pool.available_blocks)
    assert blocks is not None
    for block in blocks:
        worker._movers._device[block] = 0xFF
    worker.pool.decref(blocks)


def empty_host(worker: Worker) -> None:
    host = worker.scheduler.host_blocks
    blocks = host.retire(1000)
    for block in blocks:
        worker._movers._host[block] = 0xFF
    host.restore(len(blocks))


class Gate:
    """Holds a thread up until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(20)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Gate:
    """`disk`: reads of files wait for it; `host`: copies to the device for peers do, once begun."""
    made = Gate()
    read, copy_up = DiskStore.read, Movers._copy_up

    def slow_read(self: DiskStore, block: Block, target: memoryview) -> Outcome:
        made.wait()
        return read(self, block, target)

    def slow_copy(self: Movers, copy: StageCopy) -> None:
        made.wait()
        copy_up(self, copy)

    if request.node.callspec.params["where"] == "disk":
        monkeypatch.setattr(DiskStore, "read", slow_read)
    else:
        monkeypatch.setattr(Movers, "_copy_up", slow_copy)
    return made


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gives up for the time that it takes."""
    monkeypatch.setattr(fetches, "LEAST_PATIENCE_S", 60.0)


def read_from(w: World, holder: WorkerKey) -> str:
    """From now on the other worker has what is asked, and fetches its first ten blocks from `holder`; its name."""
    other = next(name for name in w.ready if name != holder.worker_id)
    choose = w.gateway.router.choose

    def fetching(route: RouteAsk, now: float) -> Decision | None:
        plan = choose(route, now)
        assert plan is not None
        target = WorkerKey(other, w.ready[other].incarnation)
        return replace(plan, kind=PlanKind.FETCH_WHOLE, worker=target, whole=True, fetch=Fetch(holder, 10))

    w.gateway.router.choose = fetching  # type: ignore[method-assign]
    return other


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_routed_fetch_of_a_prefix_below_the_device_changes_no_token(where: str, tmp_path: Path) -> None:
    @run
    async def main() -> None:
        async with world(Role.COLOCATED, Role.COLOCATED, **options(tmp_path)) as w:
            # 1. one worker computes it; it leaves that one's device, and the gateway goes on to know it there
            _, cached = await ask(w, PROMPT, label="first")
            assert cached == 0
            holder = chosen(w.gateway, "first").worker
            root = request_root(bytes.fromhex(w.gateway.fingerprint()), namespace_id("t", "", ""))
            await sink(w.workers[holder.worker_id], block_hashes(root, PROMPT, BLOCK_SIZE), where)
            await until(lambda: depth(w.gateway, w, holder.worker_id, PROMPT) == 10)
            # 2. the other one reads it from there
            other = read_from(w, holder)
            _, cached = await ask(w, PROMPT)
            assert cached == 160
            assert w.workers[other].hub.counters["fetched_blocks"] == 10
            assert w.workers[holder.worker_id].scheduler.stats()["staged_blocks"] == 10
            await until(lambda: depth(w.gateway, w, other, PROMPT) == 10)
            await w.assert_drained()

    main()


class Asked:
    """The context of a call without a key."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


@pytest.mark.parametrize("where", ["host", "disk"])
def test_what_is_staged_for_a_live_request_is_no_leak(gate: Gate, where: str, tmp_path: Path) -> None:
    @run
    async def main() -> None:
        async with world(Role.COLOCATED, Role.COLOCATED, **options(tmp_path)) as w:
            # 1. one worker is at it for a request at the other
            await ask(w, PROMPT, label="first")
            holder = chosen(w.gateway, "first").worker
            root = request_root(bytes.fromhex(w.gateway.fingerprint()), namespace_id("t", "", ""))
            await sink(w.workers[holder.worker_id], block_hashes(root, PROMPT, BLOCK_SIZE), where)
            read_from(w, holder)
            asked = asyncio.create_task(ask(w, PROMPT))
            await until(gate.reached.is_set)
            held = w.workers[holder.worker_id].service.status(audit=True).holders
            assert [(h.holder.rpartition(" ")[0], h.blocks) for h in held] == [("staged for", 10)]
            # 2. an audit looks
            doors = DoorMetrics("tiny")
            admin = AdminService(w.gateway, Authenticator([]), Siblings(), Presence(), doors)
            audit = await admin.Audit(admin_pb2.AuditRequest(settle_s=0.05), Asked())  # type: ignore[arg-type]
            gate.opened.set()
            await asked
            assert (audit.clean, list(audit.findings)) == (True, [])
            await w.assert_drained()

    main()


def test_what_is_on_the_device_and_what_is_below_come_as_one(tmp_path: Path) -> None:
    @run
    async def main() -> None:
        async with pair(tmp_path, "disk") as w:
            await w[HOLDER].ask(PROMPT[:70], 1)
            answer = await w[READER].ask(PROMPT, source=w.address(HOLDER))
            assert answer.tokens == expected(PROMPT, 8)
            assert w.counters(READER)["fetched_blocks"] == 10
            assert w.counters(HOLDER)["staged_blocks"] == 6
            await w.assert_drained()

    main()


@pytest.mark.parametrize("how", ["cancelled", "session closed", "deadline", "cleared", "killed"])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_the_reader_may_go_while_the_holder_reads_up(gate: Gate, where: str, how: str, tmp_path: Path) -> None:
    @run
    async def main() -> None:
        async with pair(tmp_path, where) as w:
            # 1. the holder is at it
            time_left_s = 0.5 if how == "deadline" else 60
            handle = await w[READER].submit(PROMPT, source=w.address(HOLDER), time_left_s=time_left_s)
            await until(gate.reached.is_set)
            held = {h.holder: h.blocks for h in w.all[HOLDER].service.status(audit=True).holders}
            assert held == {f"staged for req-{handle}/1": 10}
            # 2. nobody wants it any more
            match how:
                case "cancelled":
                    await w[READER].finish(handle)
                case "session closed":
                    await w[READER].close()
                case "deadline":
                    await w[READER].over(handle)
                case "cleared":
                    w.all[READER].hub.fetcher.clear("t")
                    assert (await w[READER].over(handle)).tokens == expected(PROMPT, 8)
                case "killed":
                    await w.kill(READER)
            await until(lambda: w.all[HOLDER].hub.holder.leases == 0)
            # 3. a block that is being written is nobody's before it is written; of others none is held
            used = w.all[HOLDER].pool.used_blocks
            assert used == (10 if where == "host" else 0)
            assert w.all[HOLDER].service.status(audit=True).integrity_error == ""
            gate.opened.set()
            await w.assert_drained()

    main()


@pytest.mark.parametrize("where", ["disk"])
def test_a_disk_that_takes_too_long_costs_its_peer_a_bounded_time(
    gate: Gate, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_PATIENCE_SHARE", 0.005)

    @run
    async def main() -> None:
        async with pair(tmp_path, where) as w:
            answer = await w[READER].ask(PROMPT, source=w.address(HOLDER))
            assert answer.tokens == expected(PROMPT, 8)
            assert answer.done is not None and answer.done.ledger.cached_tokens == 0
            assert w.counters(HOLDER)["fetch_refused_late"] == 1
            assert w.counters(READER)["fetch_failed_lease_revoked"] == 1
            gate.opened.set()
            await w.assert_drained()

    main()


@pytest.mark.parametrize("good", [0, 4])
def test_a_damaged_file_ends_what_the_peer_gets(good: int, tmp_path: Path) -> None:
    @run
    async def main() -> None:
        async with pair(tmp_path, "disk") as w:
            hashes = block_hashes(request_root(w.all[HOLDER].hub._identity, b"n" * 16), PROMPT, BLOCK_SIZE)
            path = next(p for p in tmp_path.rglob("*") if p.is_file() and hashes[good].hex() in p.name)
            content = bytearray(path.read_bytes())
            content[-5] ^= 1
            path.write_bytes(content)
            answer = await w[READER].ask(PROMPT, source=w.address(HOLDER))
            assert answer.tokens == expected(PROMPT, 8)
            assert answer.done is not None and answer.done.ledger.cached_tokens == good * BLOCK_SIZE
            assert w.counters(HOLDER)["disk_corrupt"] == 1
            await w.assert_drained()

    main()


@pytest.mark.parametrize("where", ["host", "disk"])
def test_two_workers_that_read_from_each_other_both_go_on(where: str, tmp_path: Path) -> None:
    @run
    async def main() -> None:
        rng = random.Random(5)
        theirs = {name: rng.choices(range(3, 260), k=10 * BLOCK_SIZE + 5) for name in (HOLDER, READER)}
        async with workers(HOLDER, READER, make_lane=MemoryTransport, **options(tmp_path)) as w:  # type: ignore[arg-type]
            for name, prompt in theirs.items():
                await hold(w, where, name, prompt)
            pairs = ((HOLDER, READER), (READER, HOLDER))
            asked = [w[to].ask(theirs[peer], source=w.address(peer)) for to, peer in pairs]
            for answer, (_, peer) in zip(await asyncio.gather(*asked), pairs, strict=True):
                assert answer.tokens == expected(theirs[peer], 8)
            assert sum(w.counters(name)["fetched_blocks"] for name in theirs) == 20
            await w.assert_drained()

    main()


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_fetches_between_workers_that_keep_little_on_their_devices(seed: int, tmp_path: Path) -> None:
    """Devices and hosts are emptied now and then, requests and caches are given up: exact tokens for whoever ends."""

    @run
    async def main() -> None:
        rng = random.Random(seed)
        names = ["prefill-0", "decode-0", "colocated-0"]
        bases = [rng.choices(range(3, 260), k=250) for _ in range(3)]
        async with workers(*names, make_lane=MemoryTransport, **options(tmp_path, 64)) as w:  # type: ignore[arg-type]
            for name, base in zip(names, bases, strict=True):
                await hold(w, rng.choice(["host", "disk"]), name, base)

            async def client() -> None:
                for _ in range(10):
                    name, peer = rng.sample(names, 2)
                    prompt = [*rng.choice(bases)[: rng.randrange(100, 250)], *rng.choices(range(3, 260), k=7)]
                    handle = await w[name].submit(prompt, 6, source=w.address(peer))
                    if rng.random() < 0.15:
                        await asyncio.sleep(rng.random() * 0.02)
                        await w[name].finish(handle)
                        continue
                    if rng.random() < 0.05:
                        w.all[name].hub.clear_cache("t")
                    assert (await w[name].over(handle)).tokens == expected(prompt, 6)

            async def forget() -> None:
                while True:
                    await asyncio.sleep(0.05 + 0.15 * rng.random())
                    worker = w.all[rng.choice(names)]
                    with worker.engine.lock:
                        if not worker.scheduler._flights:
                            empty_device(worker)
                            if rng.random() < 0.3:
                                empty_host(worker)

            forgets = asyncio.create_task(forget())
            await asyncio.gather(*(client() for _ in range(6)))
            forgets.cancel()
            await w.assert_drained()
            assert sum(w.counters(name)["staged_blocks"] for name in names) > 0

    main()

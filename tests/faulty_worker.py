"""A worker that does wrong on command: python -m tests.faulty_worker < spec.json, then commands as JSON lines.

It is `workers.main` with three of its parts wrapped from outside: what its lease streams write, its transport's reads
and its runner's steps. Each line on stdin is answered by one line on stdout. `report` counts what has really happened;
a fault that was armed and found no victim is not in it.

    {"do": "message", "verb": V, "kind": K, "count": N}  the next N lease messages of that kind that it sends
                                                         V: drop | duplicate | reorder (goes out behind the next one)
    {"do": "late", "wait_s": S}     the next read of more than nothing moves nothing until its owner gives it up, and
                                    S seconds later writes its target blocks full of noise, then ends
    {"do": "flip"}                  one bit of a block, of a number's exponent, is wrong after the next read
    {"do": "sleep", "seconds": S}   the next step takes so much longer, in the kernel; with "busy": true as Python code
    {"do": "memory", "bytes": N}    what the machine seems to have left; null: the truth
    {"do": "shrink", "keep": N}     all but N blocks of the pool go out of use as they become idle; null: none
    {"do": "advertise", "port": N}  readers find the TCP lane at that port from now on; answers the real one
    {"do": "disarm"}                forgets what has not happened yet
    {"do": "report"}
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

import kvtransfer.adoption
import kvtransfer.holder
import workers.main
from headrace.control_groups import available_bytes
from headrace.process import die_with_parent, log_to_stderr, serve
from kvtransfer.probe import ProbeArea
from kvtransfer.transports.base import PoolBytes, Pull, TransferError, TransferFault
from kvtransfer.transports.select import Lanes
from tests.faulty_streams import MessageFaults, faulty_pump
from workers.core.plan import StepPlan, StepResult
from workers.main import Worker, torch_runner
from workers.runner.base import Runner
from workers.spec import WorkerSpec


class Faults:
    """What is armed and what has happened. The command thread arms, the event loop and the engine thread act."""

    def __init__(self) -> None:
        self.happened: Counter[str] = Counter()
        self.messages = MessageFaults(self.happened)
        self.lanes: Lanes
        self.worker: Worker
        self.memory_bytes: int | None = None
        self._single: dict[str, float] = {}
        """late, flip, sleep, busy: armed once, with a number."""

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "report":
                return dict(self.happened)
            case "disarm":
                self.messages.armed.clear()
                self._single.clear()
            case "message":
                self.messages.arm(command["verb"], command["kind"], command.get("count", 1))
            case "late":
                self._single["late"] = command["wait_s"]
            case "flip":
                self._single["flip"] = 1.0
            case "sleep":
                self._single["busy" if command.get("busy") else "sleep"] = command["seconds"]
            case "memory":
                self.memory_bytes = command["bytes"]
            case "shrink":
                self._shrink(command["keep"])
            case "advertise":
                return {"port": self._advertise(command["port"])}
            case other:
                raise ValueError(f"no such command: {other}")
        return {}

    def take(self, name: str) -> float:
        """The number that a single fault was armed with, once; 0: it is not armed."""
        return self._single.pop(name, 0.0)

    def _shrink(self, keep: int | None) -> None:
        worker = self.worker
        with worker.engine.lock:
            retired = 0 if keep is None else max(0, worker.pool.num_blocks - keep)
            worker.scheduler.resize(retired, worker.scheduler.host_blocks.retired_blocks, shed=False)
            worker.engine.wake()

    def _advertise(self, port: int) -> int:
        transport: Any = self.lanes.transports["tcp"]
        parts = msgpack.unpackb(transport.descriptor())
        at = next(i for i, part in enumerate(parts) if isinstance(part, bytes))
        host, real = msgpack.unpackb(parts[at])
        parts[at] = msgpack.packb([host, port])
        transport.descriptor = lambda: bytes(msgpack.packb(parts))
        return int(real)


class FaultyReads:
    """Takes the place of a transport's `pull`."""

    def __init__(
        self,
        faults: Faults,
        transport: Any,
        memory: PoolBytes,
        block_bytes: int,
        num_blocks: int,
        read_timeout_s: float,
    ) -> None:
        self._faults = faults
        self._real = transport.pull
        self._blocks = memory.reshape(-1, block_bytes)
        self._num_blocks = num_blocks
        self._read_timeout_s = read_timeout_s

    def pull(self, peer: Any, remote_blocks: Sequence[int], local_blocks: Sequence[int], *rest: Any) -> Pull:
        if local_blocks and local_blocks[0] >= self._num_blocks:
            pull: Pull = self._real(peer, remote_blocks, local_blocks, *rest)  # of a probe
            return pull
        if remote_blocks and (wait_s := self._faults.take("late")):
            return self._late(list(local_blocks), wait_s)
        pull = self._real(peer, remote_blocks, local_blocks, *rest)
        return self._flipped(pull, local_blocks[0]) if remote_blocks and self._faults.take("flip") else pull

    def _late(self, blocks: list[int], wait_s: float) -> Pull:
        loop = asyncio.get_running_loop()

        def give_up() -> None:  # out of time, and then told so by its owner
            if not given_up.is_set():
                given_up.set()
                limit.cancel()
                loop.call_later(wait_s, write)

        def write() -> None:
            for block in blocks:
                self._blocks[block] = np.frombuffer(os.urandom(self._blocks.shape[1]), np.uint8)
            self._faults.happened["late blocks"] += len(blocks)
            pull.end()

        def out_of_time() -> None:
            pull.fail(TransferError(TransferFault.TIMEOUT, "nothing moved"))
            give_up()

        given_up = asyncio.Event()
        pull = Pull(loop, give_up)
        limit = loop.call_later(self._read_timeout_s, out_of_time)
        return pull

    def _flipped(self, real: Pull, block: int) -> Pull:
        """The same read, with a bit of one of its target blocks turned before its owner hears that it is done."""
        pull = Pull(asyncio.get_running_loop(), real.cancel)

        def done(future: Any) -> None:
            if future.exception() is not None:
                pull.fail(future.exception())
                return
            self._blocks[block, self._blocks.shape[1] // 2 | 3] ^= 0x40
            self._faults.happened["flip"] += 1
            pull.finish(future.result())

        real.done.add_done_callback(done)
        real.terminal.add_done_callback(lambda _: pull.end())
        return pull


def faulty_runner(faults: Faults, spec: WorkerSpec) -> Runner:
    runner = torch_runner(spec)
    run = runner.run

    def slow(plan: StepPlan) -> StepResult:
        if seconds := faults.take("sleep"):
            time.sleep(seconds)
            faults.happened["sleep"] += 1
        if seconds := faults.take("busy"):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                pass
            faults.happened["sleep"] += 1
        return run(plan)

    runner.run = slow  # type: ignore[method-assign]
    return runner


def install(faults: Faults, spec: WorkerSpec) -> Worker:
    for module in (kvtransfer.adoption, kvtransfer.holder):
        module.pump = faulty_pump(faults.messages, module.pump)  # type: ignore[attr-defined]
    start_lanes = workers.main.start_lanes

    async def start_faulty(name: str, memory: np.ndarray, block_bytes: int, area: ProbeArea, **options: Any) -> Lanes:
        lanes = faults.lanes = await start_lanes(name, memory, block_bytes, area, **options)
        for transport in lanes.transports.values():
            reads = FaultyReads(faults, transport, memory, block_bytes, area.first, spec.read_timeout_s)
            transport.pull = reads.pull  # type: ignore[method-assign]
        return lanes

    def left_bytes() -> int:
        return available_bytes() if faults.memory_bytes is None else faults.memory_bytes

    workers.main.start_lanes = start_faulty  # type: ignore[assignment]
    workers.main.available_bytes = left_bytes  # type: ignore[attr-defined]
    faults.worker = Worker(spec, lambda spec: faulty_runner(faults, spec))
    return faults.worker


def obey_stdin(faults: Faults) -> None:
    """Reads the descriptor itself: a thread that waits inside `sys.stdin` cannot be left behind at exit."""
    waiting = b""
    while data := os.read(0, 1 << 16):
        *lines, waiting = (waiting + data).split(b"\n")
        for line in lines:
            print(json.dumps(faults.obey(json.loads(line))), flush=True)


def main() -> None:
    spec = WorkerSpec.model_validate_json(sys.stdin.readline())
    log_to_stderr(spec.worker_id)
    die_with_parent(spec.controller_pid)
    faults = Faults()

    async def run() -> int:
        worker = install(faults, spec)
        threading.Thread(target=obey_stdin, args=(faults,), name="faults", daemon=True).start()
        return await serve(worker)

    sys.exit(asyncio.run(run()))


if __name__ == "__main__":
    main()

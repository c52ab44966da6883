"""How fast KV goes from one process to another, beside what the machine can do in the same minute.

    lanes      scattered blocks over each lane, against a plain copy of the same blocks within the process and, for TCP,
               against a bare loop of sendall and recv_into between the same two processes
    handoffs   whole hand-offs (lease, reads, Verify, Held) one after the other, and a hundred at a time
    exposed    on a running disaggregated deployment: what a client waits for the transfer of a prompt's KV

A block is as large as the default model's: 16 tokens, 737,280 bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random

import numpy as np

from bench.kv_end import BLOCK_TOKENS, CARD, INCARNATION, TOKEN, EndReady, EndSpec, pool_with_lanes, scattered
from headrace.client import HeadraceClient
from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.layout import KvLayout
from kvtransfer.pairing import PairClient
from kvtransfer.prober import PairedLane
from kvtransfer.service import End, HandOffRecord, HandoffStats, LeaseReader
from kvtransfer.transports.base import PoolBytes, allocate_pool
from kvtransfer.transports.select import Lanes

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=BLOCK_TOKENS, dtype_bytes=4)
BLOCK_BYTES = LAYOUT.block_bytes
POOL_BLOCKS = 800


@dataclass(slots=True)
class _Ends:
    """This process's reader and the other one's holder."""

    spec: EndSpec
    lanes: Lanes
    reader: LeaseReader
    holder: pb.PeerAddress
    bare: socket.socket
    seed: int = 0

    def blocks(self, count: int) -> tuple[list[int], list[int], int]:
        """(the holder's, own ones, seed): other ones each time."""
        self.seed += 1
        return (
            scattered(POOL_BLOCKS, count, self.seed),
            scattered(POOL_BLOCKS, count, self.seed + 1_000_000),
            self.seed,
        )


@asynccontextmanager
async def _two_processes(lane: str, checksums: bool) -> AsyncIterator[_Ends]:
    spec = EndSpec(lane, POOL_BLOCKS, BLOCK_BYTES, checksums, os.getpid())
    other = subprocess.Popen(
        [sys.executable, "-m", "bench.kv_end"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    other.stdin.write(json.dumps(asdict(spec)) + "\n")
    other.stdin.flush()
    lanes = await pool_with_lanes(spec, "reader")
    try:
        ready = EndReady(**json.loads(await asyncio.to_thread(other.stdout.readline)))
        me = pb.PeerAddress(worker_id="reader", incarnation=INCARNATION)
        reader = LeaseReader(PairClient(me, TOKEN, CARD, lanes, 8.0, LAYOUT), block_size=BLOCK_TOKENS)
        holder = pb.PeerAddress(worker_id="holder", incarnation=INCARNATION, address=ready.address)
        bare = socket.create_connection(("127.0.0.1", ready.socket_port))
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield _Ends(spec, lanes, reader, holder, bare)
        bare.close()
        await reader.close()
    finally:
        await lanes.close()
        other.kill()
        other.wait()


# ---- lanes


def lanes(tokens: Sequence[int], rounds: int) -> None:
    asyncio.run(_lanes(tokens, rounds))


async def _lanes(tokens: Sequence[int], rounds: int) -> None:
    print(f"{rounds} rounds in turn, medians of GB/s, least and most in brackets; by: share of what stands behind it")
    async with _two_processes("auto", True) as ends:
        link = await ends.reader.enter(ends.holder)
        pairing = await link.pair()
        source = allocate_pool(ends.lanes.memory.nbytes)
        source[:] = 1
        for many in tokens:
            count = -(-many // BLOCK_TOKENS)
            ways: dict[str, Callable[[list[int], list[int]], Awaitable[object]]] = {
                "copy": partial(_copy, ends, source),
                "bare socket": partial(_receive, ends),
                **{lane.name: partial(_pull, lane) for lane in pairing.lanes},
            }
            speeds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, way in ways.items():
                    theirs, ours, _ = ends.blocks(count)
                    began = time.perf_counter()
                    await way(theirs, ours)
                    speeds[name].append(count * BLOCK_BYTES / (time.perf_counter() - began) / 1e9)
            print(f"{many} tokens, {count} blocks, {count * BLOCK_BYTES / 2**20:.0f} MiB")
            for name, base in (("copy", ""), ("ucx", "copy"), ("bare socket", ""), ("tcp", "bare socket")):
                if name in speeds:
                    shares = [a / b for a, b in zip(speeds[name], speeds.get(base, speeds[name]), strict=True)]
                    print(f"  {name:12} {_spread(speeds[name])}" + (f"   by {base} {_spread(shares)}" if base else ""))
        await ends.reader.leave(link)


async def _copy(ends: _Ends, source: PoolBytes, theirs: list[int], ours: list[int]) -> None:
    memory = ends.lanes.memory
    for remote, local in zip(theirs, ours, strict=True):
        memory[local * BLOCK_BYTES : (local + 1) * BLOCK_BYTES] = source[
            remote * BLOCK_BYTES : (remote + 1) * BLOCK_BYTES
        ]


async def _pull(lane: PairedLane, theirs: list[int], ours: list[int]) -> None:
    await lane.pull(theirs, ours).done


async def _receive(ends: _Ends, theirs: list[int], ours: list[int]) -> None:
    """The event loop is kept: nothing else runs here."""
    ends.bare.sendall(len(theirs).to_bytes(4, "big") + np.asarray(theirs, "<u4").tobytes())
    view = ends.lanes.memory.data
    for block in ours:
        part = view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        while part:
            part = part[ends.bare.recv_into(part) :]


# ---- hand-offs


@dataclass(slots=True)
class _Sink:
    over: asyncio.Event = field(default_factory=asyncio.Event)
    end: End | None = None

    def activated(self, record: HandOffRecord, stats: HandoffStats) -> None:
        self.over.set()

    def ended(self, end: End) -> None:
        self.end = end
        self.over.set()

    def quarantine_over(self) -> None:
        pass


def handoffs(tokens: int, at_a_time: int, rounds: int, checksums: bool) -> None:
    asyncio.run(_handoffs(tokens, at_a_time, rounds, checksums))


async def _handoffs(tokens: int, at_a_time: int, rounds: int, checksums: bool) -> None:
    count = -(-tokens // BLOCK_TOKENS)
    words = f"{at_a_time} hand-offs of {tokens} tokens ({count} blocks), one after the other and all at a time"
    print(f"{words}; checksums {'on' if checksums else 'off'}; {rounds} rounds in turn, GB/s")
    for lane in ("ucx", "tcp"):
        async with _two_processes(lane, checksums) as ends:

            async def one(number: int, ends: _Ends = ends) -> None:
                _, ours, seed = ends.blocks(count)
                sink = _Sink()
                ends.reader.adopt(f"{count}/{seed}/{number}", 0, ends.holder, sink).reserved(ours, 0)
                await sink.over.wait()
                assert sink.end is None, sink.end

            async def in_turn(one: Callable[[int], Awaitable[None]] = one) -> None:
                for number in range(at_a_time):
                    await one(number)

            async def together(one: Callable[[int], Awaitable[None]] = one) -> None:
                await asyncio.gather(*(one(number) for number in range(at_a_time)))

            await one(0)
            alone, many = [], []
            for _ in range(rounds):
                for work, speeds in ((in_turn, alone), (together, many)):
                    began = time.perf_counter()
                    await work()
                    speeds.append(at_a_time * count * BLOCK_BYTES / (time.perf_counter() - began) / 1e9)
            shares = [a / b for a, b in zip(many, alone, strict=True)]
            print(f"  {lane:4} alone {_spread(alone)}   together {_spread(many)}   by alone {_spread(shares)}")


# ---- exposed


def exposed(address: str, tokens: int, rounds: int, seed: int) -> None:
    print(f"{rounds} prompts of {tokens} tokens at {address}, nobody else there, seed {seed}")
    rng = Random(seed)
    shares, hidden, ttfts = [], [], []
    with HeadraceClient(address) as client:
        for number in range(rounds + 1):
            prompt = [rng.randrange(100, 40_000) for _ in range(tokens)]
            began = time.perf_counter()
            chunks = client.stream(prompt, explain=True, no_cache=True, max_tokens=4, ignore_eos=True, temperature=0.0)
            last = next(chunks)
            ttft_s = time.perf_counter() - began
            for chunk in chunks:
                last = chunk
            told = last.explanation
            if told.bytes_moved == 0:
                raise SystemExit("nothing was handed over: serve a disaggregated deployment with mode: disaggregated")
            if number:
                exposed_ms = next(stage.ms for stage in told.to_end if stage.name == "exposed_hand_off")
                shares.append(100 * exposed_ms / (1e3 * ttft_s))
                hidden.append(exposed_ms)
                ttfts.append(1e3 * ttft_s)
    print(f"time to the first token {_spread(ttfts)} ms, exposed {_spread(hidden)} ms: {_spread(shares)} %")


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"

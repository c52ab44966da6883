"""Requests that are moved in a whole deployment: the tokens of a run in which they stayed, the KV taken along, and
nothing held afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from headrace.client import HeadraceClient
from headrace.core.records import Role
from headrace.errors import Code, HeadraceError, Rejected
from headrace.v1 import admin_pb2_grpc
from router.admin import AdminService, Presence
from router.api import GenerationSpec
from router.auth import Authenticator
from router.core.flight import Flight
from router.door import DoorMetrics
from router.siblings import Siblings
from tests.integration.test_recovery_world import Reads, calm_world, counter, prefilled, recoveries
from tests.integration.test_routing_world import until
from tests.integration.test_tool_calls import calling, check, converse
from tests.integration.test_world import run
from tests.world import TOKEN, Answer, World, expected, spec
from workers.core.plan import StepPlan, StepResult
from workers.runner.fake import FakeRunner

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
rng = random.Random(41)
PROMPT = [rng.randrange(3, 260) for _ in range(100)]
KEYS = ("t=secret", "u=other")


@asynccontextmanager
async def patient_world(*roles: Role, **options: object) -> AsyncIterator[World]:
    """Workers would be at the end of everything before the gateway has said a word: their steps wait for the loop."""
    loop, plain = asyncio.get_running_loop(), FakeRunner.run

    async def rounds() -> None:
        for _ in range(4):
            await asyncio.sleep(0.001)

    def run(self: FakeRunner, plan: StepPlan) -> StepResult:
        result = plain(self, plan)
        with contextlib.suppress(TimeoutError):  # the loop waits for the engine's end
            asyncio.run_coroutine_threadsafe(rounds(), loop).result(timeout=1.0)
        return result

    FakeRunner.run = run  # type: ignore[method-assign]
    try:
        async with calm_world(*roles, **options) as w:  # type: ignore[arg-type]
            yield w
    finally:
        FakeRunner.run = plain  # type: ignore[method-assign]


def flight_of(w: World, label: str) -> Flight:
    [branch] = [b for b in w.gateway._live.values() if b.spec.label == label]
    return branch.flight


def has(w: World, label: str, num_tokens: int) -> Callable[[], bool]:
    """Whether the client has so many tokens; True too when the request has ended."""
    return lambda: all(
        len(branch.flight.output_ids) >= num_tokens for branch in w.gateway._live.values() if branch.spec.label == label
    )


def at(w: World, label: str) -> str:
    key = flight_of(w, label).at
    return "" if key is None else key.worker_id


async def moved_at(w: World, request: GenerationSpec, *num_tokens: int, to: str = "") -> tuple[Answer, int]:
    """Asks for it and moves it when the client has so many tokens, or later, when that can be. (answer, moves)"""
    answer, due = Answer(), list(num_tokens)
    async for delta in w.gateway.generate(request):
        answer.tokens += delta.token_ids
        answer.text += delta.text
        if delta.finish_reason:
            answer.finish_reasons.append(delta.finish_reason)
        answer.usage = delta.usage or answer.usage
        if due and len(answer.tokens) >= due[0] and w.gateway.move("", request.tenant, request.label, to).moved:
            del due[0]
    return answer, len(num_tokens) - len(due)


@pytest.mark.parametrize("roles", [(C, C), (P, D, D), (P, D, C)], ids=str)
def test_a_move_takes_the_kv_along_and_changes_no_token(roles: tuple[Role, ...]) -> None:
    async def main() -> None:
        async with patient_world(*roles) as w:
            request = spec(PROMPT, 120, label="it", ignore_eos=True)
            answer, moves = await moved_at(w, request, 40)
            assert moves == 1 and answer.tokens == expected(request) and answer.finish_reasons == ["length"]
            assert answer.usage is not None and answer.usage.completion_tokens == 120
            assert sum(counter(w, name, "fetched_blocks") for name in w.workers) >= (100 + 40 - 1) // 16
            assert prefilled(w) <= len(PROMPT) + 16 + 1, "what was decoded was not computed again"
            assert (w.gateway.counters.moves, w.gateway.counters.retries) == (1, 0)
            await w.assert_drained()

    run(main())


def test_many_requests_are_moved_again_and_again() -> None:
    async def main() -> None:
        chance = random.Random(5)
        async with patient_world(P, D, D, D) as w:
            requests = [
                spec(PROMPT[: chance.randrange(5, 100)], 90, label=f"r{i}", seed=i, temperature=0.7, ignore_eos=True)
                for i in range(12)
            ]
            moves = [sorted(chance.sample(range(10, 70, 15), 3)) for _ in requests]
            clients = [moved_at(w, request, *at) for request, at in zip(requests, moves, strict=True)]
            answers = await asyncio.gather(*clients)
            for request, (answer, _) in zip(requests, answers, strict=True):
                assert answer.tokens == expected(request)
            assert sum(moves for _, moves in answers) > 24 and w.gateway.counters.retries == 0
            await w.assert_drained()

    run(main())


def test_a_worker_is_left_by_all_and_nobody_comes_back() -> None:
    async def main() -> None:
        async with patient_world(P, D, D) as w:
            requests = [spec([*PROMPT, 3 + i], 100, label=f"r{i}", ignore_eos=True) for i in range(8)]
            clients = [asyncio.create_task(w.ask(request)) for request in requests]
            await until(lambda: len(w.gateway._live) == 8 and all(has(w, f"r{i}", 5)() for i in range(8)))
            await until(lambda: w.workers["prefill-0"].hub.live_requests == 0)
            there = sum(at(w, f"r{i}") == "decode-0" for i in range(8))
            assert w.gateway.move("decode-0", None, "") == (there, 0) and there > 0
            await until(lambda: w.workers["decode-0"].hub.live_requests == 0)
            assert {at(w, branch.spec.label) for branch in w.gateway._live.values()} == {"decode-1"}
            for request, client in zip(requests, clients, strict=True):
                assert (await client).tokens == expected(request)
            await w.assert_drained()

    run(main())


def test_a_target_that_has_no_room_costs_a_pause_and_no_attempt() -> None:
    async def main() -> None:
        async with patient_world(C, C, gateway={"max_attempts": 1}) as w:
            request = spec(PROMPT, 80, label="it", ignore_eos=True)
            client = asyncio.create_task(w.ask(request))
            await asyncio.sleep(0)
            await until(has(w, "it", 20))
            old = at(w, "it")
            [new] = set(w.workers) - {old}
            hub = w.workers[new].hub
            hub._scheduler.submit = lambda *_: Rejected("queue_full", 1.0)  # type: ignore[method-assign]
            assert w.gateway.move("", "t", "it") == (1, 0)
            assert (await client).tokens == expected(request)
            assert hub.refusals["queue_full"] == 1
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize("victim", ["old", "new"])
def test_a_worker_that_dies_in_a_move_loses_no_token(victim: str) -> None:
    async def main() -> None:
        async with patient_world(C, C) as w:
            reads = {name: Reads(w, name, hold=True) for name in w.workers}
            request = spec(PROMPT, 80, label="it", ignore_eos=True)
            client = asyncio.create_task(w.ask(request))
            await asyncio.sleep(0)
            await until(has(w, "it", 20))
            old = at(w, "it")
            [new] = set(w.workers) - {old}
            w.gateway.move("", "t", "it")
            await until(lambda: bool(reads[new].held))
            await w.kill(old if victim == "old" else new)
            assert (await client).tokens == expected(request)
            await w.assert_drained()

    run(main())


def test_a_prefill_that_is_moved_begins_elsewhere() -> None:
    async def main() -> None:
        async with calm_world(P, P, D, step_s=0.02) as w:
            request = spec([*PROMPT, *PROMPT, *PROMPT], label="it", ignore_eos=True)
            client = asyncio.create_task(w.ask(request))
            await asyncio.sleep(0)
            await until(lambda: flight_of(w, "it").legs[-1].kind.value == "decode")
            old = flight_of(w, "it").prefill_worker
            assert w.gateway.move(old, None, "") == (1, 0)
            assert flight_of(w, "it").prefill_worker != old
            assert (await client).tokens == expected(request)
            assert not recoveries(w, "it")
            assert (w.gateway.counters.moves, w.gateway.counters.retries) == (1, 0), "a move is no attempt"
            await w.assert_drained()

    run(main())


def test_who_waits_for_a_tool_goes_on_elsewhere() -> None:
    async def main() -> None:
        async with patient_world(C, C) as w:
            request, moved = calling(PROMPT), 0

            async def leave(delta: object) -> None:
                nonlocal moved
                moved += w.gateway.move("", "t", request.label).moved

            told = await converse(w, request, leave)
            assert check(w, request, told) > 1 and moved == len(told[0].pauses)
            assert (w.gateway.counters.moves, w.gateway.counters.retries) == (moved, 0)
            await w.assert_drained()

    run(main())


@asynccontextmanager
async def admin(w: World) -> AsyncIterator[str]:
    """The address of the gateway's admin service."""
    server = grpc.aio.server()
    service = AdminService(w.gateway, Authenticator(KEYS), Siblings(), Presence(), DoorMetrics("tiny"))
    admin_pb2_grpc.add_AdminServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def test_the_admin_service_moves_what_its_caller_may_move() -> None:
    async def main() -> None:
        async with patient_world(C, C, step_s=0.01) as w, admin(w) as address:
            request = spec(PROMPT, 900, label="it", ignore_eos=True)
            client = asyncio.create_task(w.ask(request))
            await asyncio.sleep(0)
            await until(has(w, "it", 10))

            def call(key: str = "", **options: str) -> tuple[int, int]:
                secret = {"api_key": key} if key else {"cluster_token": TOKEN}
                with HeadraceClient(address, timeout_s=5.0, **secret) as caller:  # type: ignore[arg-type]
                    answer = caller.move(options.pop("worker_id", ""), **options)
                    return answer.moved, answer.stay

            old = at(w, "it")
            [new] = set(w.workers) - {old}
            assert await asyncio.to_thread(call, "other", request_id="it") == (0, 0), "a key has its own tenant's"
            assert await asyncio.to_thread(call, "secret", request_id="it", to=new) == (1, 0)
            await until(lambda: at(w, "it") == new and flight_of(w, "it")._move is None)
            assert await asyncio.to_thread(call, worker_id=old) == (0, 0), "it is there no more"
            # The same by the command, which waits for nothing and says what it did.
            command = [
                Path(sys.executable).parent / "headrace",
                "move",
                new,
                f"--address={address}",
                f"--token={TOKEN}",
            ]
            said = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
            assert (said.stdout, said.returncode) == ("1 leave, 0 stay\n", 0), said.stderr
            await until(lambda: at(w, "it") == old and flight_of(w, "it")._move is None)
            for options, code in (({}, Code.INVALID_ARGUMENT), ({"worker_id": "nobody"}, Code.NOT_FOUND)):
                with pytest.raises(HeadraceError) as error:
                    await asyncio.to_thread(call, **options)
                assert error.value.code is code
            client.cancel()
            await asyncio.gather(client, return_exceptions=True)
            await w.assert_drained()

    run(main())

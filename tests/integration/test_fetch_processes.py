"""Fetches between worker processes with a tiny real model in exact mode: output with a fetch equals output without, on
both lanes, and with the holder stopped or killed at any moment.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator

import pytest

from headrace.core.records import Role
from tests.direct import Answer, Session, address_of
from tests.fleet import TOKEN, Fleet, fleet
from tests.model_fixtures import tiny_model
from tests.unit.test_kvtransfer_service import no_nixl

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
LENGTHS = (1, 15, 16, 17, 33, 160, 161, 500, 1200)
MAX_TOKENS = 24


@pytest.fixture(
    scope="module",
    params=["tcp", pytest.param("ucx", marks=pytest.mark.skipif(no_nixl(), reason="NIXL is not importable"))],
)
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One worker of each role; the tests that break one mend it."""
    model = tiny_model(tmp_path_factory.mktemp("tiny"))
    with fleet(model, P, D, C, transport=request.param, liveness_s=2.0) as running:
        yield running


class Direct:
    """A session to each worker that is asked, for the time of a test."""

    def __init__(self, running: Fleet) -> None:
        self._running = running
        self._sessions: dict[str, Session] = {}

    async def __aenter__(self) -> Direct:
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in self._sessions.values():
            await session.close()

    async def submit(self, name: str, prompt: list[int], source: str = "", **options: object) -> tuple[Session, int]:
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = await Session(self._running.ready[name].address, TOKEN).open()
        where = address_of(self._running.ready[source]) if source else None
        return session, await session.submit(prompt, MAX_TOKENS, source=where, **options)  # type: ignore[arg-type]

    async def ask(self, name: str, prompt: list[int], source: str = "", **options: object) -> Answer:
        session, handle = await self.submit(name, prompt, source, **options)
        return await session.over(handle)


def fresh(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(length)]


def test_output_with_a_fetch_equals_output_without(trio: Fleet) -> None:
    async def main() -> None:
        rng = random.Random(1)
        async with Direct(trio) as direct:
            for length in LENGTHS:
                holder, reader = rng.sample(["prefill-0", "decode-0", "colocated-0"], 2)
                base = fresh(rng, length)
                prompt = base + fresh(rng, rng.choice([1, 5, 40]))
                # 1. nobody's cache has any of it: this is the answer
                alone = await direct.ask(reader, prompt, no_cache=True)
                assert len(alone.tokens) == MAX_TOKENS
                # 2. the holder computes the base, the reader gets it from there
                await direct.ask(holder, base)
                answer = await direct.ask(reader, prompt, source=holder)
                assert answer.tokens == alone.tokens
                assert answer.done is not None
                assert answer.done.ledger.cached_tokens == length // 16 * 16
                assert (answer.done.ledger.bytes_moved > 0) == (length >= 16)
                assert answer.done.output_hash == alone.done.output_hash  # type: ignore[union-attr]
        trio.assert_drained()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_holder_stopped_at_any_moment_costs_only_time(trio: Fleet) -> None:
    async def main() -> None:
        rng = random.Random(2)
        for delay_s in (0.0, 0.002, 0.005, 0.01, 0.03):
            async with Direct(trio) as direct:
                prompt = fresh(rng, 1500)
                alone = await direct.ask("colocated-0", prompt, no_cache=True)
                await direct.ask("prefill-0", prompt)
                trio.workers["prefill-0"].signal(signal.SIGSTOP) if not delay_s else None
                session, handle = await direct.submit("decode-0", prompt, source="prefill-0")
                await asyncio.sleep(delay_s)
                trio.workers["prefill-0"].signal(signal.SIGSTOP)
                try:
                    answer = await session.over(handle)
                finally:
                    trio.workers["prefill-0"].signal(signal.SIGCONT)
                assert answer.tokens == alone.tokens
        trio.assert_drained(10.0)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_holder_killed_at_any_moment_costs_only_time(trio: Fleet) -> None:
    async def main() -> None:
        rng = random.Random(3)
        for delay_s in (0.0, 0.005, 0.02):
            async with Direct(trio) as direct:
                prompt = fresh(rng, 1500)
                alone = await direct.ask("colocated-0", prompt, no_cache=True)
                await direct.ask("prefill-0", prompt)
                session, handle = await direct.submit("decode-0", prompt, source="prefill-0")
                await asyncio.sleep(delay_s)
                trio.workers["prefill-0"].kill()
                stale = address_of(trio.ready["prefill-0"])
                answer = await session.over(handle)
                assert answer.tokens == alone.tokens
            # The same name has another incarnation by now: whoever still asks for the old one gets nothing.
            await asyncio.to_thread(trio.restart, "prefill-0")
            async with Direct(trio) as direct:
                prompt = fresh(rng, 100)
                await direct.ask("prefill-0", prompt)
                stale.address = trio.ready["prefill-0"].address
                session = await Session(trio.ready["decode-0"].address, TOKEN).open()
                answer = await session.ask(prompt, MAX_TOKENS, source=stale)
                await session.close()
                assert answer.done is not None and answer.done.ledger.cached_tokens == 0
        await asyncio.to_thread(trio.wait_connected, 3)
        trio.assert_drained(10.0)

    asyncio.run(asyncio.wait_for(main(), 120))

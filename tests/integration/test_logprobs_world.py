"""Log-probabilities in a whole deployment with FakeRunner: those of the undisturbed run, whatever breaks on the way."""

from __future__ import annotations

import asyncio
import random

import pytest

from headrace.core.records import Role, TokenLogprobs
from headrace.errors import Code, HeadraceError
from kvtransfer.core.lease import HandOffRecord
from router.api import GenerationSpec
from tests.integration.test_world import prompt, run
from tests.world import Answer, expected, expected_logprobs, spec, world

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


def check(request: GenerationSpec, answer: Answer) -> None:
    assert answer.tokens == expected(request)
    assert answer.logprobs == expected_logprobs(request)


@pytest.mark.parametrize("roles", [(C,), (P, D), (P, P, D, D), (P, D, C)], ids=str)
def test_every_mode_tells_the_same_and_only_who_asks_is_told(roles: tuple[Role, ...]) -> None:
    async def main() -> None:
        rng = random.Random(1)
        async with world(*roles, gateway={"exact": True}) as w:
            requests = [
                spec(prompt(rng, length), logprobs=num_top, temperature=temperature, seed=3)
                for length in (1, 16, 33, 300)
                for num_top in (None, 0, 1, 20)
                for temperature in (0.0, 0.8)
            ]
            for request, answer in zip(requests, await asyncio.gather(*map(w.ask, requests)), strict=True):
                check(request, answer)
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize(("victim", "tokens_before"), [("decode-0", 100), ("prefill-0", 1)])
def test_a_lost_worker_leaves_no_gap_and_no_double(victim: str, tokens_before: int) -> None:
    async def main() -> None:
        rng = random.Random(2)
        async with world(P, P, D, D, step_s=0.004, gateway={"exact": True, "max_attempts": 20}) as w:
            requests = [spec(prompt(rng, rng.randrange(1, 120)), 40, logprobs=2, ignore_eos=True) for _ in range(16)]
            clients = [asyncio.create_task(w.ask(request)) for request in requests]
            while sum(len(branch.flight.output_ids) for branch in w.gateway._live.values()) < tokens_before:
                await asyncio.sleep(0.005)
            await w.kill(victim)
            w.push_members()
            for request, client in zip(requests, clients, strict=True):
                check(request, await client)
            assert w.gateway.counters.retries > 0, "the loss must have hit something"
            await w.assert_drained()

    run(main())


def test_preempted_requests_go_on_as_if_undisturbed() -> None:
    async def main() -> None:
        rng = random.Random(3)
        # Steps take long enough for all to be there before the first has ended.
        async with world(C, num_blocks=24, step_s=0.005, gateway={"exact": True}) as w:
            requests = [spec(prompt(rng, rng.randrange(40, 90)), 60, logprobs=1, ignore_eos=True) for _ in range(12)]
            for request, answer in zip(requests, await asyncio.gather(*map(w.ask, requests)), strict=True):
                check(request, answer)
            status = w.workers["colocated-0"].service.status(audit=False)
            assert status.counters["preemptions"] > 0, "memory must have been short"
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize("exact", [True, False])
def test_a_hand_off_that_changes_what_was_told_fails_an_exact_deployment(
    monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """The gateway has the prefill worker's own word, or has the reader's first: either way the two are compared."""
    import workers.hub

    def changed(*fields: object) -> HandOffRecord:
        record = HandOffRecord(*fields)  # type: ignore[arg-type]
        return HandOffRecord(
            record.output_ids, record.num_tokens, record.finished, record.ledger, (TokenLogprobs(-0.5),)
        )

    monkeypatch.setattr(workers.hub, "HandOffRecord", changed)

    async def main() -> None:
        async with world(P, D, gateway={"exact": exact}) as w:
            request = spec(list(range(5, 40)), logprobs=0)
            if exact:
                with pytest.raises(HeadraceError) as raised:
                    await w.ask(request)
                assert raised.value.code is Code.INTERNAL
            else:
                assert (await w.ask(request)).tokens == expected(request)
            await w.assert_drained()

    run(main())

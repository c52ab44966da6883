"""Tool calls through a whole deployment: the output is the same as if the tool had answered at once, whatever happened
to the blocks and the workers while it ran, and nothing is held afterwards.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from headrace.core.records import Role
from headrace.errors import Code, HeadraceError
from headrace.v1.worker_pb2 import SessionResponse
from router import frames
from router.api import Delta, Explanation, GenerationSpec, ToolWait, Usage
from router.gateway import Gateway
from router.session import WorkerSession
from router.text import IncrementalDetokenizer
from tests.doors_fixtures import EOS
from tests.integration.test_world import prompt, run
from tests.world import VOCAB, World, spec, world
from workers.core.plan import StepPlan, StepResult
from workers.core.request import Keep
from workers.core.suspension import Suspension
from workers.hub import Hub
from workers.runner.fake import FakeRunner, fake_next_token
from workers.sessions import GatewaySession

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
ON = tuple("abcdfgijkmnpqstuvxyz0123456789")
"""Characters of no merged token: one token in nine ends a call."""


@dataclass
class Told:
    """What one client saw of one choice, and what it answered."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    pauses: list[int] = field(default_factory=list)
    """Tokens at each pause."""
    finish_reason: str = ""
    usage: Usage | None = None
    explanation: Explanation | None = None


def calling(prompt_ids: list[int], max_tokens: int = 48, n: int = 1, **options: object) -> GenerationSpec:
    wait = ToolWait(ON, "search")
    made = spec(prompt_ids, max_tokens, **({"ignore_eos": True} | options))
    branches = tuple(replace(made.sampling[0], branch=i) for i in range(n))
    return replace(made, label=f"job-{prompt_ids[0]}-{max_tokens}", tool_wait=wait, sampling=branches)


def answer_to(at: int, index: int = 0) -> list[int]:
    """What the tool says to the call that ended with output token `at`; now and then nothing."""
    return [3 + (at * 7 + index + i) % 250 for i in range((0, 1, 16, 37)[at % 4])]


def expected(w: World, request: GenerationSpec, index: int = 0) -> tuple[list[int], list[int], int]:
    """(output, pauses, tokens answered) of a run without a deployment."""
    params = request.sampling[index]
    history, out, pauses, answered = list(request.prompt_ids), [], [], 0
    detokenizer = IncrementalDetokenizer(w.gateway.text)
    while len(out) < params.max_tokens:
        token = fake_next_token(history, params, (), VOCAB)
        out.append(token)
        history.append(token)
        if token == EOS and not params.ignore_eos:
            break
        if any(char in ON for char in detokenizer.push([token])) and len(out) < params.max_tokens:
            pauses.append(len(out))
            history += answer_to(len(out), index)
            answered += len(answer_to(len(out), index))
            detokenizer.flush()
    return out, pauses, answered


async def converse(
    w: World, request: GenerationSpec, while_paused: Callable[[Delta], object] | None = None
) -> list[Told]:
    """Answers each call, at once or after `while_paused`."""
    told = [Told() for _ in request.sampling]
    async for delta in w.gateway.generate(request):
        mine = told[delta.index]
        mine.tokens += delta.token_ids
        mine.text += delta.text
        if delta.paused:
            mine.pauses.append(len(mine.tokens))
            if while_paused is not None:
                await while_paused(delta)  # type: ignore[misc]
            answer = answer_to(len(mine.tokens), delta.index)
            w.gateway.resume("t", request.label, delta.index, answer, "token_ids")
        mine.finish_reason = delta.finish_reason or mine.finish_reason
        mine.usage, mine.explanation = delta.usage or mine.usage, delta.explanation or mine.explanation
    return told


def check(w: World, request: GenerationSpec, told: list[Told]) -> int:
    """Raises unless every choice is as expected. Returns how often they paused."""
    answered = 0
    for index, mine in enumerate(told):
        out, pauses, mine_answered = expected(w, request, index)
        answered += mine_answered
        assert (mine.tokens, mine.pauses) == (out, pauses)
        assert mine.finish_reason in ("length", "stop")
    usage = next(mine.usage for mine in told if mine.usage is not None)
    assert usage.prompt_tokens == len(request.prompt_ids) + answered
    assert usage.completion_tokens == sum(len(mine.tokens) for mine in told)
    return sum(len(mine.pauses) for mine in told)


@pytest.mark.parametrize("roles", [(C,), (P, D), (P, P, D, D)], ids=str)
@pytest.mark.parametrize("step_s", [0.0, 0.003])
def test_a_paused_answer_goes_on_as_if_the_tool_had_answered_at_once(roles: tuple[Role, ...], step_s: float) -> None:
    async def main() -> None:
        rng = random.Random(4)
        async with world(*roles, step_s=step_s, gateway={"max_live_requests": 64}) as w:
            requests = [calling(prompt(rng, rng.randrange(1, 90)), 30 + i, n=1 + i % 3) for i in range(8)]
            requests += [calling(prompt(rng, 20), 60 + i, temperature=0.8, seed=i, ignore_eos=False) for i in range(4)]
            told = await asyncio.gather(*(converse(w, request) for request in requests))
            pauses = sum(check(w, request, mine) for request, mine in zip(requests, told, strict=True))
            assert pauses > 20
            await w.assert_drained()

    run(main())


class Lockstep:
    """Steps that begin only when the gateway has all tokens of those before, and the workers all its pauses: what is
    sampled behind a call is a step or two, however slow this machine's event loop is.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counts: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        run, put, frame = FakeRunner.run, GatewaySession.put, Gateway.frame

        def counted_put(session: GatewaySession, message: SessionResponse) -> None:
            self._counts["sampled"] += len(message.tokens.handle)
            put(session, message)

        def counted_frame(gateway: Gateway, session: WorkerSession, message: SessionResponse) -> None:
            self._counts["received"] += len(message.tokens.handle)
            frame(gateway, session, message)

        def paced_run(runner: FakeRunner, plan: StepPlan) -> StepResult:
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._settled(), self._loop).result(5)
            return run(runner, plan)

        monkeypatch.setattr(GatewaySession, "put", counted_put)
        monkeypatch.setattr(Gateway, "frame", counted_frame)
        monkeypatch.setattr(FakeRunner, "run", paced_run)
        self._count(monkeypatch, frames, "pause", "paused")
        self._count(monkeypatch, Hub, "pause", "heard")

    def _count(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counted(*args: object) -> object:
            self._counts[what] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, counted)

    async def _settled(self) -> None:
        counts = self._counts
        while counts["received"] < counts["sampled"] or counts["heard"] < counts["paused"]:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("keep", Keep)
@pytest.mark.parametrize("roles", [(C,), (P, D)], ids=str)
def test_it_makes_no_difference_what_became_of_the_blocks(
    roles: tuple[Role, ...], keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Suspension, "_keep", lambda *_: keep)

    async def main() -> None:
        rng = random.Random(5)
        Lockstep(monkeypatch)
        async with world(*roles, num_blocks=96, swap_bytes=64 * 2 * 16 * 4) as w:
            requests = [calling(prompt(rng, rng.randrange(1, 60)), 30 + i) for i in range(12)]
            told = await asyncio.gather(*(converse(w, request) for request in requests))
            pauses = sum(check(w, request, mine) for request, mine in zip(requests, told, strict=True))
            counters = [worker.service.status(audit=False).counters for worker in w.workers.values()]
            paused = sum(c["paused"] for c in counters)
            assert sum(c[f"tool_{keep}"] for c in counters) == paused
            # But for calls in the first tokens of a hand-off, and in the last ones of an output.
            assert paused >= 0.8 * pauses > 30
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize("roles", [(C,), (P, D)], ids=str)
def test_the_time_of_the_tool_is_a_stage_of_the_ledger_and_the_ledgers_add_up(roles: tuple[Role, ...]) -> None:
    async def main() -> None:
        async with world(*roles, step_s=0.002) as w:
            request = replace(calling(prompt(random.Random(7), 40), 40), explain=True)
            [told] = await converse(w, request, lambda _: asyncio.sleep(0.05))
            check(w, request, [told])
            line = told.explanation
            assert line is not None
            assert sum(ms for _, ms in line.to_first_token) == pytest.approx(line.ttft_ms, abs=1.0)
            assert sum(ms for _, ms in line.to_end) == pytest.approx(line.total_ms - line.ttft_ms, abs=1.0)
            stages = dict(line.to_end)
            assert stages["tool_wait"] >= 45.0 * len(told.pauses) > 0.0
            assert all(ms >= 0.0 for _, ms in [*line.to_first_token, *line.to_end])
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize("dies", ["colocated-0", "decode-0", "prefill-0"])
def test_a_worker_that_dies_while_the_tool_runs_costs_nothing_but_time(dies: str) -> None:
    """However often: the request computed nothing then, so that neither its attempts nor its crashes count."""
    role = {"colocated-0": C, "decode-0": D, "prefill-0": P}[dies]

    async def main() -> None:
        async with world(*((C, C) if role is C else (P, P, D, D)), step_s=0.001) as w:

            async def die(_: Delta) -> None:
                await w.restart(dies, role)
                await w.connected()

            request = replace(calling(prompt(random.Random(8), 40), 120), explain=True)
            [told] = await converse(w, request, die)
            assert len(told.pauses) > w.gateway.spec.max_attempts
            check(w, request, [told])
            line = told.explanation
            assert line is not None
            assert sum(ms for _, ms in line.to_end) == pytest.approx(line.total_ms - line.ttft_ms, abs=1.0)
            await w.assert_drained()

    run(main())


@pytest.mark.parametrize("roles", [(C,), (P, D)], ids=str)
@pytest.mark.parametrize("how", ["cancel", "leave", "deadline", "close"])
def test_a_paused_request_ends_as_any_other(roles: tuple[Role, ...], how: str) -> None:
    async def main() -> None:
        async with world(*roles, step_s=0.001) as w:
            request = calling(prompt(random.Random(9), 40), 60)
            if how == "deadline":
                request = replace(request, deadline_s=0.5)
            answers = w.gateway.generate(request)
            ended = None
            try:
                async for delta in answers:
                    if delta.paused:
                        assert w.gateway.gate.admission.held.live_requests == 0
                        assert w.gateway.gate.admission.held.paused_requests == 1
                        if how == "leave":
                            await answers.aclose()
                        elif how == "cancel":
                            assert await w.gateway.cancel("t", request.label)
                        elif how == "close":
                            await w.gateway.close()
            except HeadraceError as error:
                ended = error.code
            codes = {"cancel": Code.CANCELLED, "deadline": Code.DEADLINE_EXCEEDED, "close": Code.UNAVAILABLE}
            assert ended == codes.get(how)
            await w.assert_drained()

    run(main())


def test_an_answer_that_nobody_waits_for_or_that_is_too_long_changes_nothing() -> None:
    async def main() -> None:
        async with world(C, step_s=0.001) as w:
            request = calling(prompt(random.Random(10), 40), 50, n=2)

            def refused(label: str, index: int, count: int) -> tuple[Code, str | None, str | None, str]:
                with pytest.raises(HeadraceError) as caught:
                    w.gateway.resume("t", label, index, [3] * count, "token_ids")
                error = caught.value
                return error.code, error.field, error.reason, error.message

            async def provoke(delta: Delta) -> None:
                assert refused("nobody", 0, 1)[:3] == (Code.NOT_FOUND, "request_id", "unknown_request")
                assert refused(request.label, 2, 1)[:3] == (Code.NOT_FOUND, "index", "unknown_index")
                *what, message = refused(request.label, delta.index, 990)
                assert what == [Code.INVALID_ARGUMENT, "token_ids", "too_long"]
                assert (
                    "990" in message
                    and str(1023 - 40 - len(told_tokens[delta.index]) - answered[delta.index]) in message
                )
                with pytest.raises(HeadraceError) as foreign:
                    w.gateway.resume("another", request.label, delta.index, [3], "token_ids")
                assert foreign.value.code is Code.NOT_FOUND

            told_tokens: list[list[int]] = [[], []]
            answered = [0, 0]
            pauses = 0
            async for delta in w.gateway.generate(request):
                told_tokens[delta.index] += delta.token_ids
                if delta.paused:
                    pauses += 1
                    await provoke(delta)
                    answer = answer_to(len(told_tokens[delta.index]), delta.index)
                    w.gateway.resume("t", request.label, delta.index, answer, "token_ids")
                    answered[delta.index] += len(answer)
                    again = refused(request.label, delta.index, 1)
                    assert again[:3] == (Code.FAILED_PRECONDITION, "index", "not_paused")
            assert pauses > 3
            assert told_tokens == [expected(w, request, index)[0] for index in (0, 1)]
            await w.assert_drained()

    run(main())


def test_an_id_that_is_in_use_cannot_be_resumed_by_and_is_refused() -> None:
    async def main() -> None:
        async with world(C, step_s=0.001) as w:
            request = calling(prompt(random.Random(11), 40), 60)
            async for delta in w.gateway.generate(request):
                if delta.paused:
                    with pytest.raises(HeadraceError) as caught:
                        await anext(aiter(w.gateway.generate(request)))
                    assert (caught.value.code, caught.value.field) == (Code.FAILED_PRECONDITION, "request_id")
                    break
            await asyncio.sleep(0)
            await w.assert_drained()

    run(main())


def test_paused_requests_are_in_nobodys_way() -> None:
    """Old law of active requests: with room for one of a tenant, who waits for a tool would keep the next one out."""

    async def main() -> None:
        limits = {"tenants": {"t": {"max_concurrent_requests": 1}}, "max_live_requests": 1}
        async with world(C, max_num_seqs=1, gateway=limits) as w:
            first = calling(prompt(random.Random(12), 40), 60)

            async def another(_: Delta) -> None:
                while w.workers["colocated-0"].service._load(0).running_requests:
                    await asyncio.sleep(0.001)
                answer = await w.ask(spec([5, 6, 7, 8], 20, ignore_eos=True))
                assert len(answer.tokens) == 20

            [told] = await converse(w, first, another)
            check(w, first, [told])
            await w.assert_drained()

    run(main())

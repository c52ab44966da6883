"""A real model's requests that are moved while they decode: everything that a client sees is as if they had stayed, and
what moves is the KV.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from headrace.core.records import Role, TokenLogprobs
from headrace.sampling import SamplingParams
from headrace.v1 import worker_pb2 as pb
from router.api import Delta, GenerationSpec
from router.core.legs import LegKind
from router.detokenizer import IncrementalDetokenizer
from router.session import WorkerSession
from router.text import TextModel
from tests.integration.test_tool_calls_model import model_world
from tests.integration.test_world import run
from tests.model_fixtures import tiny_model
from tests.world import World

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
MAX_TOKENS, BLOCK = 48, 16
PLAIN = SamplingParams(MAX_TOKENS, ignore_eos=True, logprobs=3)
SAMPLED = replace(PLAIN, temperature=0.9, top_p=0.95, top_k=80, min_p=0.01)
SHAPED = replace(SAMPLED, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, min_tokens=20)
MAY_END = replace(SHAPED, ignore_eos=False, logit_bias=((2, 3.0),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@dataclass
class Seen:
    """All that one client is told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)

    def take(self, delta: Delta) -> None:
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs
        self.text += delta.text
        if delta.finish_reason:
            self.finish_reasons.append(delta.finish_reason)
        if delta.usage is not None:
            self.usage = (delta.usage.prompt_tokens, delta.usage.completion_tokens)


async def ask(w: World, spec: GenerationSpec) -> Seen:
    seen = Seen()
    async for delta in w.gateway.generate(spec):
        seen.take(delta)
    return seen


class Mover:
    """Moves each request at the token frames that are told; sees what the workers compute for it then."""

    def __init__(self, w: World, due: dict[str, list[int]]) -> None:
        self.seams: dict[str, list[int]] = defaultdict(list)
        """Tokens that the client had at each move."""
        self.computed: list[int] = []
        """Tokens of input that each move cost its target."""
        self._w, self._due = w, {label: list(tokens) for label, tokens in due.items()}
        self._frame = w.gateway.frame
        w.gateway.frame = self.frame  # type: ignore[method-assign]

    def frame(self, session: WorkerSession, frame: pb.SessionResponse) -> None:
        gateway = self._w.gateway
        if frame.WhichOneof("kind") == "prefilled" and frame.prefilled.handle in gateway._legs:
            branch, leg = gateway._legs[frame.prefilled.handle]
            if leg.kind is LegKind.WHOLE and leg is not branch.flight.legs[0]:
                self.computed.append(frame.prefilled.ledger.computed_tokens)
        self._frame(session, frame)
        for branch in list(gateway._live.values()):
            label, have = branch.spec.label, len(branch.flight.output_ids)
            due = self._due.get(label)
            if due and have >= due[0] and gateway.move("", branch.spec.tenant, label).moved:
                self.seams[label].append(have)
                del due[0]


def specs(count: int, seed: int) -> list[GenerationSpec]:
    rng = random.Random(seed)
    made = []
    for number in range(count):
        sampling = replace((PLAIN, SAMPLED, SHAPED, MAY_END)[number % 4], seed=number)
        prompt = tuple(rng.randrange(3, 500) for _ in range(rng.randrange(3, 70)))
        made.append(GenerationSpec("t", f"r{number}", prompt, (sampling,)))
    return made


def across(text: TextModel, token_ids: list[int], first: int, chance: random.Random) -> tuple[int, str] | None:
    """(n, a string that the text has for the first time where its first n tokens end, half before and half behind);
    it begins behind the `first` tokens."""
    detokenizer = IncrementalDetokenizer(text)
    pieces = [detokenizer.push([token_id]) for token_id in token_ids]
    places = list(range(first + 4, len(pieces) - 4))
    chance.shuffle(places)
    for n in places:
        before, behind = pieces[n - 2] + pieces[n - 1], pieces[n] + pieces[n + 1]
        found, begins = before + behind, sum(map(len, pieces[: n - 2]))
        is_whole = pieces[n - 1] and pieces[n] and "\ufffd" not in found
        if is_whole and "".join(pieces).find(found) == begins:
            return n, found
    return None


@pytest.mark.parametrize(
    ("count", "roles"),
    [
        (40, (P, D, D)),
        (16, (C, C)),
        pytest.param(200, (P, D, D), marks=pytest.mark.chaos),
        pytest.param(200, (C, C, C), marks=pytest.mark.chaos),
    ],
    ids=str,
)
def test_moved_requests_say_what_they_would_have_said(folder: Path, count: int, roles: tuple[Role, ...]) -> None:
    async def main() -> None:
        chance = random.Random(count)
        asked = specs(count, count)
        due = {spec.label: [chance.randrange(2, 40)] for spec in asked}
        # 1. Undisturbed; every third one again, with a stop string that will lie across the seam.
        async with model_world(folder, C) as w:
            stayed: list[Seen] = await asyncio.gather(*(ask(w, spec) for spec in asked))
            for number in range(0, count, 3):
                first = asked[number].sampling[0].min_tokens
                if (found := across(w.gateway.text, stayed[number].tokens, first, chance)) is not None:
                    due[f"r{number}"] = [found[0]]
                    asked[number] = replace(asked[number], stop=(found[1],))
            stopping = {spec.label for spec in asked if spec.stop}
            assert len(stopping) > count / 6
            again = await asyncio.gather(*(ask(w, spec) for spec in asked if spec.stop))
            assert {tuple(seen.finish_reasons) for seen in again} == {("stop",)}
        stopped = dict(zip(sorted(stopping, key=lambda label: int(label[1:])), again, strict=True))
        stayed = [stopped.get(spec.label, seen) for spec, seen in zip(asked, stayed, strict=True)]
        for number in range(1, count, 4):
            if f"r{number}" not in stopping:
                due[f"r{number}"] = sorted(chance.sample(range(2, 40, 9), 2))
        # 2. Moved.
        async with model_world(folder, *roles) as w:
            mover = Mover(w, due)
            moved = await asyncio.gather(*(ask(w, spec) for spec in asked))
            for spec, here, there in zip(asked, stayed, moved, strict=True):
                assert there == here, (spec.label, spec.stop, mover.seams[spec.label])
            counters = [worker.service.status(audit=False).counters for worker in w.workers.values()]
            await w.assert_drained()
        assert all(mover.seams[label] == due[label] for label in stopping), "each string lay across its seam"
        moves = sum(map(len, mover.seams.values()))
        assert moves >= 0.9 * count, "some end before their turn comes"
        assert (w.gateway.counters.retries, w.gateway.counters.failed) == (0, 0)
        # 3. The KV moved: no more than a block was computed anew.
        assert sum(c.get("fetched_blocks", 0) for c in counters) >= moves / 2
        if not any(value for c in counters for name, value in c.items() if name.startswith("fetch_failed")):
            assert mover.computed and max(mover.computed) <= BLOCK + 1

    run(main(), timeout_s=300.0)

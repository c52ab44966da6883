"""Tool calls of a real model behind gateway, sessions, leases and schedulers: exactly the output of a run in which the
same answers came at once, on one scheduler, without a cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.records import Role
from headrace.ids import counting_ids
from headrace.sampling import SamplingParams
from router.api import GenerationSpec, ToolWait
from router.gateway import Gateway
from router.text import TextModel
from tests.doors_fixtures import gateway_spec
from tests.integration.test_preemption import Rig, Wish
from tests.integration.test_tool_calls import Told, answer_to, converse
from tests.integration.test_world import run
from tests.model_fixtures import tiny_model
from tests.world import TOKEN, World
from workers.core.plan import StepPlan, StepResult
from workers.core.request import Keep
from workers.core.suspension import Suspension
from workers.runner.torch_runner import TorchRunner
from workers.spec import WorkerSpec

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
LEN, BLOCKS = 1024, 256
ON = ("a", "e", "3", "z")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def rig(folder: Path) -> Rig:
    return Rig(folder, 1)


class PatientRunner(TorchRunner):
    """The tiny model would be at its end before the gateway has said a word: each step waits for the event loop."""

    loop: asyncio.AbstractEventLoop

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        with contextlib.suppress(TimeoutError):  # the loop waits for the engine's end
            asyncio.run_coroutine_threadsafe(_rounds(), self.loop).result(timeout=1.0)
        return result


async def _rounds() -> None:
    for _ in range(6):
        await asyncio.sleep(0.001)


@asynccontextmanager
async def model_world(folder: Path, *roles: Role) -> AsyncIterator[World]:
    loop = asyncio.get_running_loop()

    def runner(spec: WorkerSpec) -> TorchRunner:
        made = PatientRunner(folder, LEN, block_size=16, num_blocks=BLOCKS, host_blocks=BLOCKS, threads=1, exact=True)
        made.loop = loop
        return made

    running = World(runner, liveness_s=8.0)  # type: ignore[arg-type]
    text = TextModel.load(str(folder))
    spec = gateway_spec(max_model_len=LEN, cluster_token=TOKEN, liveness_s=8.0)
    running.gateway = Gateway(spec, text, ids=counting_ids())
    try:
        for at, role in enumerate(roles):
            await running.start_worker(f"{role.value}-{roles[:at].count(role)}", role)
        running.push_members()
        await running.connected()
        yield running
    finally:
        await running.gateway.close()
        for worker in running.workers.values():
            await worker.stop()
        text.close()


def wishes(text: TextModel) -> list[GenerationSpec]:
    """Greedy and sampled, penalties that count input and output apart, and texts of calls made likely."""
    rng = random.Random(6)
    calls = tuple((text.encode(char)[0], 5.0) for char in ON)
    plain = SamplingParams(40, ignore_eos=True, logit_bias=calls)
    sampled = replace(plain, temperature=0.8, top_p=0.95, seed=11)
    penal = replace(sampled, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2)
    made = []
    for number, (sampling, length) in enumerate(itertools.product((plain, sampled, penal), (5, 24, 40))):
        prompt = tuple(rng.randrange(3, 500) for _ in range(length))
        wait = ToolWait(ON, "search")
        made.append(GenerationSpec("t", f"job-{number}", prompt, (sampling,), tool_wait=wait))
    return made


def at_once(rig: Rig, spec: GenerationSpec, told: Told) -> list[int]:
    pauses = {at: (Keep.KEEP, answer_to(at)) for at in told.pauses}
    wish = Wish(list(spec.prompt_ids), spec.sampling[0], no_cache=True, pauses=pauses)
    (request,), _ = rig.run([wish])
    return request.output_ids


@pytest.mark.parametrize("keep", Keep)
@pytest.mark.parametrize("roles", [(C,), (P, D)], ids=["colocated", "disaggregated"])
def test_the_model_goes_on_as_if_its_tools_had_answered_at_once(
    folder: Path, rig: Rig, roles: tuple[Role, ...], keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Suspension, "_keep", lambda *_: keep)
    found: list[tuple[GenerationSpec, Told]] = []

    async def main() -> None:
        async with model_world(folder, *roles) as w:
            specs = wishes(w.gateway.text)
            told = await asyncio.gather(*(converse(w, spec) for spec in specs))
            found.extend((spec, mine) for spec, (mine,) in zip(specs, told, strict=True))
            counters = [worker.service.status(audit=False).counters for worker in w.workers.values()]
            assert sum(c[f"tool_{keep}"] for c in counters) == sum(c["paused"] for c in counters) > 5
            await w.assert_drained()

    run(main())
    assert sum(len(mine.pauses) for _, mine in found) > 20
    for spec, mine in found:
        assert mine.tokens == at_once(rig, spec, mine)

"""The fake runner's tokens follow from the pool's content: right KV gives the written-down function, wrong KV does
not.
"""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import InvariantError, StartupError
from headrace.sampling import SamplingParams
from tests.model_fixtures import GREEDY, plan_of
from workers.runner.fake import FakeRunner, fake_next_token
from workers.runner.pool import allocate_pool


def _generate(runner: FakeRunner, prompt: list[int], table: list[int], chunk: int, tokens: int) -> list[int]:
    history, done = list(prompt), 0
    while True:
        part = history[done : done + chunk]
        (token,) = runner.run(plan_of([(done, part, table)])).token_ids
        done += len(part)
        if done == len(history):
            history.append(token)
        if len(history) == len(prompt) + tokens:
            return history[len(prompt) :]


def test_tokens_do_not_depend_on_chunks_or_blocks_and_match_the_function() -> None:
    prompt = list(range(3, 40))
    wanted, history = [], list(prompt)
    for _ in range(5):
        wanted.append(fake_next_token(history, GREEDY))
        history.append(wanted[-1])
    for chunk, table in ((100, [0, 1, 2]), (1, [9, 4, 30]), (7, [2, 1, 0])):
        assert _generate(FakeRunner(), prompt, table, chunk, 5) == wanted


def test_wrong_content_in_any_block_changes_the_token() -> None:
    prompt, table = list(range(3, 40)), [5, 6, 7]
    right = fake_next_token([*prompt, 9], GREEDY)
    for block in table:
        runner = FakeRunner()
        runner.run(plan_of([(0, prompt, table)]))
        runner.kv_pool.reshape(runner.num_blocks, -1)[block, 0] ^= 1
        assert runner.run(plan_of([(len(prompt), [9], table)])).token_ids != [right]


def test_copied_and_transferred_blocks_carry_the_history() -> None:
    prompt = list(range(3, 35))
    runner, other = FakeRunner(), FakeRunner()
    runner.run(plan_of([(0, prompt, [1, 2])]))
    plan = plan_of([(32, [9], [4, 2, 3])])
    plan.copies = [(1, 4)]
    right = [fake_next_token([*prompt, 9], GREEDY)]
    assert runner.run(plan).token_ids == right
    size = runner.layout.block_bytes
    for source, target in ((1, 20), (2, 10)):
        other.kv_pool[target * size : (target + 1) * size] = runner.kv_pool[source * size : (source + 1) * size]
    assert other.run(plan_of([(32, [9], [20, 10, 0])])).token_ids == right
    assert runner.fingerprint() == other.fingerprint() != FakeRunner(block_size=32).fingerprint()


def test_bans_and_seeds_are_respected() -> None:
    first = fake_next_token([1, 2, 3], GREEDY)
    assert fake_next_token([1, 2, 3], GREEDY, [first]) != first
    seeds = {fake_next_token([1, 2, 3], SamplingParams(9, temperature=1.0, seed=s)) for s in range(20)}
    assert len(seeds) > 10


def test_an_impossible_plan_is_a_broken_invariant() -> None:
    for row in ((0, [1] * 17, [0]), (0, [1], [9999]), (0, [600], [0]), (0, [], [0])):
        with pytest.raises(InvariantError):
            FakeRunner().run(plan_of([row]))


def test_a_pool_starts_at_a_huge_page_and_too_large_ones_say_how_much_there_is() -> None:
    pool = allocate_pool(5 << 20)
    assert pool.nbytes == 5 << 20
    assert pool.ctypes.data % (2 << 20) == 0
    assert pool.dtype == np.uint8
    assert not pool.any()
    with pytest.raises(StartupError, match=r"bytes needed.*available"):
        allocate_pool(1 << 50)

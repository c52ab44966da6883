"""Tool calls over real sockets between real processes: the client's `stream` and `resume`, and a worker that is killed
while the tool runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from headrace.client import HeadraceClient
from headrace.core.records import Role
from headrace.errors import Code, HeadraceError
from tests.fleet import Fleet, fleet
from tests.model_fixtures import tiny_model

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
PROMPT = [7 + 3 * i for i in range(40)]
ON = ("a", "e", "3", "z")
ANSWER = [300 - i for i in range(21)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def options(model: Path) -> dict[str, object]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    calls = {tokenizer.encode(char, add_special_tokens=False).ids[0]: 8.0 for char in ON}
    return {"temperature": 0.8, "seed": 5, "ignore_eos": True, "logit_bias": calls}


@pytest.fixture(scope="module", params=[(C, C), (P, D, D)], ids=["colocated", "disaggregated"])
def running(request: pytest.FixtureRequest, model: Path) -> Iterator[Fleet]:
    with fleet(model, *request.param) as made:
        yield made


def talk(
    client: HeadraceClient, options: dict[str, object], name: str, while_paused: Callable[[], object] = lambda: None
) -> tuple[list[int], list[int], int]:
    """(tokens, tokens at each pause, prompt tokens of the usage); each call is answered with ANSWER."""
    tokens: list[int] = []
    pauses: list[int] = []
    usage = 0
    for chunk in client.stream(
        PROMPT, max_tokens=40, request_id=name, tool_wait={"on": ON, "tool": "search"}, timeout_s=60, **options
    ):
        for choice in chunk.choices:
            tokens += choice.token_ids
            if choice.paused:
                assert choice.text[-1] in ON
                pauses.append(len(tokens))
                while_paused()
                assert client.resume(name, ANSWER) == len(ANSWER)
        usage = chunk.usage.prompt_tokens or usage
    return tokens, pauses, usage


def in_pieces(client: HeadraceClient, options: dict[str, object], pauses: list[int]) -> list[int]:
    """What comes out when each answer is there before its piece begins, without a cache."""
    history, out = list(PROMPT), []
    for at in [*pauses, 40]:
        if at > len(out):
            piece = client.generate(history, max_tokens=at - len(out), no_cache=True, timeout_s=60, **options)
            out += piece.choices[0].token_ids
            history += piece.choices[0].token_ids
        history += ANSWER
    return out


def test_the_stream_goes_on_behind_each_answer(running: Fleet, options: dict[str, object]) -> None:
    with running.client() as client:
        tokens, pauses, usage = talk(client, options, "job-1")
        assert pauses and tokens == in_pieces(client, options, pauses)
        assert usage == len(PROMPT) + len(pauses) * len(ANSWER)
        with pytest.raises(HeadraceError) as caught:
            client.resume("job-1", "late")
        assert (caught.value.code, caught.value.reason) == (Code.NOT_FOUND, "unknown_request")
    running.assert_drained()
    running.assert_accounts_close()


def test_a_worker_that_is_killed_while_the_tool_runs_changes_no_token(
    running: Fleet, options: dict[str, object]
) -> None:
    victim = "colocated-0" if "colocated-0" in running.workers else "decode-0"

    def kill_once() -> None:
        if running.workers[victim].process.poll() is None:
            running.workers[victim].kill()

    with running.client() as client:
        tokens, pauses, _ = talk(client, options, "job-2", kill_once)
        assert pauses and tokens == in_pieces(client, options, pauses)
        running.restart(victim)
        running.wait_connected(len(running.ready))
    running.assert_drained()
    running.assert_accounts_close()

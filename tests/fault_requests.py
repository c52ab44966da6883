"""Requests for long fault runs, and what became of each: every token must be that of the quiet deployment, once."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace.client import HeadraceClient
from headrace.errors import HeadraceError

DEADLINE_S = 120.0
"""Of each request: far beyond what faults cost, so that a hang is a lost request."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int


def distinct_requests(
    count: int, seed: int, vocabulary: int, outputs: tuple[int, int] = (4, 24), greedy_share: float = 0.5
) -> list[Request]:
    """Prompts of 16-400 tokens, short ones more often, of outputs too; those that are not greedy have a seed."""
    rng = random.Random(seed)

    def length(low: int, high: int) -> int:
        return round(low * (high / low) ** rng.random())

    return [
        Request(
            tuple(rng.randrange(10, vocabulary) for _ in range(length(16, 400))),
            length(*outputs),
            temperature=0.0 if rng.random() < greedy_share else 0.9,
            seed=i,
        )
        for i in range(count)
    ]


@dataclass(slots=True)
class Answer:
    token_ids: list[int]
    error: str
    """"" when it ended in good order."""
    ended_at: float
    asked_again: int
    """Refusals before a first token while no worker was there."""


class Streams:
    """Sends requests as streams and judges the answers. `expected` comes from the deployment before any fault."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.expected: list[list[int]] = []
        self._salts = itertools.count()

    def learn(self, client: HeadraceClient, width: int = 6) -> None:
        with ThreadPoolExecutor(width) as pool:
            answers = list(pool.map(lambda i: self.send(client, i, salt=""), range(len(self.requests))))
        assert not any(answer.error for answer in answers), [a.error for a in answers if a.error][:3]
        self.expected = [answer.token_ids for answer in answers]
        assert [len(tokens) for tokens in self.expected] == [r.max_tokens for r in self.requests]
        assert len({tuple(tokens) for tokens in self.expected}) > len(self.requests) // 2, "answers must tell requests"

    def salt(self) -> str:
        """Nobody has the blocks of a request with this salt: all of its KV is computed, and moves."""
        return f"cold-{next(self._salts)}"

    def send(self, client: HeadraceClient, index: int, salt: str) -> Answer:
        request = self.requests[index]
        options = {"temperature": request.temperature, "seed": request.seed, "max_tokens": request.max_tokens}
        end, refused = time.monotonic() + DEADLINE_S, 0
        got: list[int] = []
        while True:
            try:
                left_s = max(1.0, end - time.monotonic())
                for chunk in client.stream(
                    request.prompt_ids, ignore_eos=True, cache_salt=salt, timeout_s=left_s, **options
                ):
                    for choice in chunk.choices:
                        got += choice.token_ids
                return Answer(got, "", time.monotonic(), refused)
            except HeadraceError as error:
                if error.reason == "no_worker" and not got and time.monotonic() < end:
                    refused += 1
                    time.sleep(0.2)
                    continue
                return Answer(got, f"{error.code}: {error.message} ({error.reason})", time.monotonic(), refused)

    def judge(self, index: int, answer: Answer) -> str:
        """ "" when the answer is exactly the expected one; otherwise lost, duplicate or wrong, and how."""
        expected, got = self.expected[index], answer.token_ids
        if got == expected and not answer.error:
            return ""
        at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
        if at is None and len(got) <= len(expected):
            return f"lost: request {index} has {len(got)} of {len(expected)} tokens; {answer.error or 'no error'}"
        if at is None or got[at] in expected[max(0, at - 1) : at]:
            return f"duplicate: request {index} repeats a token at {at}"
        return f"wrong: request {index} differs at {at}"


def verdicts(found: list[str]) -> Counter[str]:
    return Counter(line.partition(":")[0] for line in found)

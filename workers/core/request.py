"""One attempt of a request on one worker: its record, its states and the one table of legal edges.

    whole       WAITING -> PREFILLING -> DECODING -> FINISHED
    hand_off    WAITING -> PREFILLING -> TRANSFERRING -> FINISHED        (prefill worker: blocks wait for their reader)
    adopted     WAITING -> TRANSFERRING -> DECODING -> FINISHED          (decode worker: blocks are being pulled)

                 +----------- TRANSFERRING <-----------+
                 |             ^                       |
    WAITING -----+-------------|--> PREFILLING --------+
                 |             |     |  ^   |
                 v             |     |  |   +--> PREEMPTED <--+
             (adopted) --------+     |  +----------+          |
                                     v                        |
                                   DECODING ------------------+
                                     |
                                     v
    PREFILLING, DECODING, PREEMPTED --> TOOL_WAIT --> PREFILLING | PREEMPTED
    every state ----------------> FINISHED

There are no phases inside: a request is a list of token ids (prompt + output) and a counter of those whose KV is in its
blocks. A step lets the counter catch up; the row that reaches the end samples the next token. A request that resumes
after a preemption, on another worker, or with outputs of an earlier attempt is therefore no special case.

Does not: allocate, choose, or read a clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from headrace.core.records import FinishReason, TokenLogprobs, WorkerLedger
from headrace.errors import InvariantError
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from workers.core.stages import StageClock


@dataclass(frozen=True, slots=True)
class HostCopy:
    """KV of a request's first `num_tokens` tokens, one host block for each block of the table that it had."""

    blocks: tuple[int, ...]
    num_tokens: int
    preemption: int
    """The preemption that made it: a copy of an earlier one is stale."""


class Keep(StrEnum):
    """What becomes of a request's blocks while its client runs a tool."""

    KEEP = "keep"
    OFFLOAD = "offload"
    DROP = "drop"


class State(StrEnum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    TOOL_WAIT = "tool_wait"
    FINISHED = "finished"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING, State.TRANSFERRING, State.FINISHED}),
    State.PREFILLING: frozenset({State.DECODING, State.TRANSFERRING, State.PREEMPTED, State.TOOL_WAIT, State.FINISHED}),
    State.TRANSFERRING: frozenset({State.DECODING, State.FINISHED}),
    State.DECODING: frozenset({State.PREEMPTED, State.TOOL_WAIT, State.FINISHED}),
    State.PREEMPTED: frozenset({State.PREFILLING, State.TOOL_WAIT, State.FINISHED}),
    State.TOOL_WAIT: frozenset({State.PREFILLING, State.PREEMPTED, State.FINISHED}),
    State.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """SPEC A2 and A3 of one attempt. The shell builds it with the upper fields and may keep it for as long as it likes
    (the ledger stays readable after the end); the lower ones are the scheduler's and read-only for everybody else.

    Instants are monotonic seconds of this process, None until they happen. A request equals only itself.
    """

    key: RequestKey
    request_id: RequestId
    attempt: int
    prompt_ids: list[int]
    sampling: SamplingParams
    root: bytes
    """h_0 of the block chain: model identity and tenant namespace."""
    resumed_ids: list[int] = field(default_factory=list)
    """Output of earlier attempts; `output_ids` goes on from it."""
    resumed_inserts: list[tuple[int, list[int]]] = field(default_factory=list)
    """(output tokens before it, tokens) of what tools answered in earlier attempts, in order."""
    no_cache: bool = False
    """Neither reads nor writes the prefix cache."""
    hand_off: bool = False
    """Stop after the first token and keep the blocks for a reader."""
    adopted: bool = False
    """KV comes from a prefill worker instead of from a prefill here."""
    deadline: float | None = None
    fetch_blocks: int = 0
    """Leading full blocks that the shell can read from another worker; 0: none."""
    tenant: str = ""
    priority: int = 0
    """The client's, as vLLM has it: lower is earlier."""
    endpoint: str = ""
    task: str = ""
    steps_left: int | None = None
    """Steps that the client's agent may still take after this one; None: not told."""
    tenant_service: float = 0.0
    """Weighted tokens that the tenant has had of all workers, as the gateway counts them."""
    predicted_output_tokens: int = 0
    """Length that the whole output, over all attempts, is expected not to exceed; 0: not predicted."""
    adapter: str = ""
    grammar: str = ""
    session: Hashable = None
    """The shell's tag of the gateway session that it came over; opaque."""

    state: State = field(default=State.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    fetching: bool = field(default=False, init=False)
    """Waits for a read of its prefix, see `workers.core.fetches`."""
    arrival: int = field(default=0, init=False)
    """Order of acceptance on this worker."""
    token_ids: list[int] = field(init=False)
    """Prompt, output, and what tools have added: all in order."""
    inserts: list[tuple[int, int]] = field(default_factory=list, init=False)
    """(position, count) of tokens in token_ids after the prompt that are no output."""
    num_input: int = field(default=0, init=False)
    """Tokens in token_ids that are no output."""
    block_ids: list[int] = field(default_factory=list, init=False)
    """Block table. Replaced, never cleared: a plan keeps reading the list that it was given."""
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    """Chained hashes of full blocks of token_ids, as far as they were needed."""
    stored_blocks: int = field(default=0, init=False)
    """Leading blocks that the prefix cache was offered or gave."""
    emitted: int = field(init=False)
    """Output tokens that StepEvents or an earlier attempt have delivered; while decoding: all, unless `unsaid`."""
    unsaid: bool = field(default=False, init=False)
    """Handed-over output is still to be repeated to the client."""
    handed_logprobs: tuple[TokenLogprobs, ...] = field(default=(), init=False)
    """Of the output tokens that a hand-off brings to the reader, until it has repeated them; () unless it asks."""
    lost_tokens: int = field(default=0, init=False)
    """computed_tokens at the last preemption, the most of all: below it, a computed token is a recomputed one."""
    preemptions: int = field(default=0, init=False)
    preempted_at: float | None = field(default=None, init=False)
    """While it waits to return."""
    protected_tokens: int = field(default=0, init=False)
    """No victim again before it has computed so many."""
    host: HostCopy | None = field(default=None, init=False)
    """KV that waits in host memory."""
    expects_blocks_until: float = field(default=0.0, init=False)
    """Until then blocks of its prompt may still come from disk; 0: none is on its way."""
    tenant_index: int = field(default=0, init=False)
    level: int = field(default=0, init=False)
    """Of the feedback queue."""
    row: int = field(default=-1, init=False)
    """Place in the batch of decodes, -1 outside."""
    follows: bool = field(default=False, init=False)
    """Waits for what another prefill computes, see `workers.core.following`."""
    known_cached: int = field(default=0, init=False)
    """Tokens that the cache had for it when it came."""
    late: bool = field(default=False, init=False)
    """Cannot meet its deadline any more, and is served all the same: after everybody else."""
    priority_reason: str = field(default="arrival", init=False)
    """Why it was last chosen before others."""
    traced: bool = field(default=False, init=False)
    """Its life is recorded, see `workers.core.journal`."""
    pinned: bool = field(default=False, init=False)
    """A reader's lease is open on the blocks: not a victim."""
    accepted_at: float = field(default=0.0, init=False)
    first_scheduled_at: float | None = field(default=None, init=False)
    last_scheduled_at: float | None = field(default=None, init=False)
    first_token_at: float | None = field(default=None, init=False)
    finished_at: float | None = field(default=None, init=False)
    clock: StageClock = field(default_factory=StageClock, init=False)
    under_way: int = field(default=0, init=False)
    """Prompt tokens behind the computed ones that steps on their way compute."""
    _computed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_ids]
        self.num_input = len(self.prompt_ids)
        self.emitted = len(self.resumed_ids)
        done = 0
        for before, answer in self.resumed_inserts:
            if not done <= before <= self.emitted:
                raise ValueError("a tool's answer is not among the output")
            self.token_ids += self.resumed_ids[done:before]
            self.insert(answer)
            done = before
        self.token_ids += self.resumed_ids[done:]

    @property
    def computed_tokens(self) -> int:
        """How many of token_ids have their KV in block_ids. While decoding: all but the last."""
        return len(self.token_ids) - 1 if self.state is State.DECODING else self._computed

    @computed_tokens.setter
    def computed_tokens(self, value: int) -> None:
        self._computed = value

    @property
    def output_ids(self) -> list[int]:
        """Output so far, over all attempts. A new list; O(output)."""
        output, start = [], len(self.prompt_ids)
        for position, count in self.inserts:
            output += self.token_ids[start:position]
            start = position + count
        return output + self.token_ids[start:]

    @property
    def history(self) -> list[int]:
        """All tokens, input before output: penalties count, they do not look at the order."""
        if not self.inserts:
            return self.token_ids
        output = self.output_ids
        inserted = [token for at, count in self.inserts for token in self.token_ids[at : at + count]]
        return [*self.prompt_ids, *inserted, *output]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_input

    @property
    def resumed(self) -> bool:
        return bool(self.resumed_ids)

    @property
    def ledger(self) -> WorkerLedger:
        return self.clock.ledger

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens

    @property
    def planned_tokens(self) -> int:
        """How many are computed when the steps on their way are over. Not while decoding."""
        return self.computed_tokens + self.under_way

    @property
    def unplanned_tokens(self) -> int:
        """Tokens that no step computes yet. Not while decoding."""
        return len(self.token_ids) - self.planned_tokens

    @property
    def expected_output_tokens(self) -> int:
        """Output tokens that are still expected: by the gateway's prediction where it has one and it still holds."""
        most = self.sampling.max_tokens - self.num_output
        predicted = self.predicted_output_tokens - self.num_output
        return max(0, min(most, predicted) if predicted > 0 else most)

    @property
    def certain_output_tokens(self) -> int:
        """Output tokens that will still come whatever is sampled: all where nothing but the length ends the request."""
        sampling = self.sampling
        runs_to_the_end = sampling.ignore_eos and not sampling.stop_token_ids
        certain = sampling.max_tokens if runs_to_the_end else max(1, sampling.min_tokens)
        return max(0, certain - self.num_output)

    @property
    def overran(self) -> bool:
        """The output is longer than the gateway's history had it."""
        return 0 < self.predicted_output_tokens < self.num_output

    @property
    def rank(self) -> int:
        """Class for scores, lower goes first: an output that overran its prediction counts one class less."""
        return self.priority + self.overran

    @property
    def reserved_output_tokens(self) -> int:
        """Output tokens that may still come."""
        return max(0, self.sampling.max_tokens - self.num_output)

    @property
    def service_tokens(self) -> int:
        """Accumulated service: tokens computed for it on this worker, recomputed ones too."""
        return self.ledger.computed_tokens + self.computed_tokens - self._computed

    def leave_batch(self) -> None:
        """Writes down what a decoding request's columns have stood for."""
        self.ledger.computed_tokens = self.service_tokens
        self._computed = self.computed_tokens
        if not self.unsaid:
            self.emitted = self.num_output

    def append(self, token_id: int) -> None:
        """One more output token."""
        self.token_ids.append(token_id)

    def insert(self, token_ids: list[int]) -> None:
        """What a tool answered: tokens to compute that are no output."""
        self.inserts.append((len(self.token_ids), len(token_ids)))
        self.token_ids += token_ids
        self.num_input += len(token_ids)

    def cut(self, num_output: int) -> None:
        """Forget what was sampled beyond `num_output` output tokens, and that KV of it was computed. The last token
        that is left counts as not computed, so that there is always something to go on from.

        Not while decoding. Raises InvariantError when a tool has answered behind that place.
        """
        end = self.num_input + num_output
        if end >= len(self.token_ids):
            return
        if self.inserts and end < sum(self.inserts[-1]):
            raise InvariantError(f"request {self.key}: a call ends before the last tool's answer")
        del self.token_ids[end:]
        self._computed = min(self._computed, end - 1)
        self.emitted = min(self.emitted, num_output)
        if self.host is not None:
            self.host = replace(self.host, num_tokens=min(self.host.num_tokens, end - 1))


def advance(record: Request, to: State, now: float) -> None:
    """Move along an edge of TRANSITIONS; nobody else assigns a state. Raises InvariantError on any other edge."""
    if to not in TRANSITIONS[record.state]:
        raise InvariantError(f"request {record.key}: no edge {record.state} -> {to}")
    if record.state is State.DECODING:
        record.leave_batch()
    record.state = to
    if to is State.FINISHED:
        record.finished_at = now
        record.clock.enter(None, now)

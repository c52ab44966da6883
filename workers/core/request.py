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
                                     |  |
                                     |  +--> TOOL_WAIT --> PREFILLING | PREEMPTED
                                     v
    every state ----------------> FINISHED

There are no phases inside: a request is a list of token ids (prompt + output) and a counter of those whose KV is in its
blocks. A step lets the counter catch up; the row that reaches the end samples the next token. A request that resumes
after a preemption, on another worker, or with outputs of an earlier attempt is therefore no special case.

Does not: allocate, choose, or read a clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.records import FinishReason, WorkerLedger
from headrace.errors import InvariantError
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from workers.core.stages import StageClock


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
    State.PREFILLING: frozenset({State.DECODING, State.TRANSFERRING, State.PREEMPTED, State.FINISHED}),
    State.TRANSFERRING: frozenset({State.DECODING, State.FINISHED}),
    State.DECODING: frozenset({State.PREEMPTED, State.TOOL_WAIT, State.FINISHED}),
    State.PREEMPTED: frozenset({State.PREFILLING, State.FINISHED}),
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
    output_ids: list[int] = field(default_factory=list)
    """Output so far, over all attempts; grows here."""
    no_cache: bool = False
    """Neither reads nor writes the prefix cache."""
    hand_off: bool = False
    """Stop after the first token and keep the blocks for a reader."""
    adopted: bool = False
    """KV comes from a prefill worker instead of from a prefill here."""
    deadline: float | None = None
    tenant: str = ""
    priority: int = 0
    adapter: str = ""
    grammar: str = ""
    session: Hashable = None
    """The shell's tag of the gateway session that it came over; opaque."""

    state: State = field(default=State.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    arrival: int = field(default=0, init=False)
    """Order of acceptance on this worker."""
    token_ids: list[int] = field(init=False)
    """prompt_ids + output_ids."""
    computed_tokens: int = field(default=0, init=False)
    """How many of token_ids have their KV in block_ids."""
    block_ids: list[int] = field(default_factory=list, init=False)
    """Block table. Replaced, never cleared: a plan keeps reading the list that it was given."""
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    """Chained hashes of full blocks of token_ids, as far as they were needed."""
    stored_blocks: int = field(default=0, init=False)
    """Leading blocks that the prefix cache was offered or gave."""
    emitted: int = field(init=False)
    """Output tokens that StepEvents or an earlier attempt have delivered."""
    lost_tokens: int = field(default=0, init=False)
    """computed_tokens at the last preemption, the most of all: below it, a computed token is a recomputed one."""
    pinned: bool = field(default=False, init=False)
    """A reader's lease is open on the blocks: not a victim."""
    accepted_at: float = field(default=0.0, init=False)
    first_scheduled_at: float | None = field(default=None, init=False)
    last_scheduled_at: float | None = field(default=None, init=False)
    first_token_at: float | None = field(default=None, init=False)
    last_token_at: float | None = field(default=None, init=False)
    finished_at: float | None = field(default=None, init=False)
    clock: StageClock = field(default_factory=StageClock, init=False)

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_ids, *self.output_ids]
        self.emitted = len(self.output_ids)

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
    def reserved_output_tokens(self) -> int:
        """Output tokens that may still come."""
        return max(0, self.sampling.max_tokens - len(self.output_ids))

    @property
    def service_tokens(self) -> int:
        """Accumulated service: tokens computed for it on this worker, recomputed ones too."""
        return self.ledger.computed_tokens

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        self.token_ids.append(token_id)


def advance(record: Request, to: State, now: float) -> None:
    """Move along an edge of TRANSITIONS; nobody else assigns a state. Raises InvariantError on any other edge."""
    if to not in TRANSITIONS[record.state]:
        raise InvariantError(f"request {record.key}: no edge {record.state} -> {to}")
    record.state = to
    if to is State.FINISHED:
        record.finished_at = now
        record.clock.enter(None, now)

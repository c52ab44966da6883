"""What is written down of a request's life on one worker, for those who ask later where its time went.

    prefilled, whole     submitted -> scheduled.. -> first_token -> scheduled.. -> finished
    prefilled, hand_off  submitted -> scheduled.. -> first_token -> handed_off -> finished
    adopted              submitted -> reserved -> adopted -> scheduled.. -> finished
    on the way           preempted (-> swapped_in) -> scheduled..,  paused -> resumed,  deadline_lost -> finished
    not let in           refused

A life begins with `submitted` and ends with `finished`, each once, or is one `refused`. `scheduled` is written for each
chunk of a prefill; of decodes for the first row after anything else, and for every `DECODE_EVERY`th output token.

The fields are those of the scheduler article's section 28, and what tells requests and workers apart. In every
`scheduled` record of a prefill

    prefilled_tokens + scheduled_tokens + remaining_prompt_tokens = tokens to prefill (recomputed output too)

Who is recorded depends on the request id alone, so that all workers record the same requests. A record has counts, a
hash, the tenant's name and reason codes; no text and no token id.

Does not: write, read clocks, or change a request or a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

from headrace.core.records import FinishReason
from headrace.ids import RequestId, RequestKey
from workers.core.batch import DecodeBatch
from workers.core.blocks import BlockPool
from workers.core.flights import Flight
from workers.core.preemption import Score
from workers.core.request import Request, State

DECODE_EVERY = 64
"""Output tokens of a decode from one of its `scheduled` records to the next."""


class Event(StrEnum):
    SUBMITTED = "submitted"
    REFUSED = "refused"
    SCHEDULED = "scheduled"
    FIRST_TOKEN = "first_token"
    HANDED_OFF = "handed_off"
    """Prefilled here; the blocks wait for their reader."""
    RESERVED = "reserved"
    """An adoption has its blocks; they are being pulled."""
    ADOPTED = "adopted"
    """All of its KV is here."""
    PREEMPTED = "preempted"
    SWAPPED_IN = "swapped_in"
    PAUSED = "paused"
    RESUMED = "resumed"
    DEADLINE_LOST = "deadline_lost"
    FINISHED = "finished"


PHASES: dict[State, str] = {
    State.WAITING: "waiting",
    State.PREFILLING: "prefill",
    State.TRANSFERRING: "transfer",
    State.DECODING: "decode",
    State.PREEMPTED: "preempted",
    State.TOOL_WAIT: "tool_wait",
    State.FINISHED: "finished",
}


class Record(NamedTuple):
    """One event, as things stand when it happens: before the blocks of a preempted or finished request are given up."""

    time_s: float
    """Since the worker's start; never falls from one record to the next."""
    request_id: RequestId
    event: Event
    phase: str
    scheduled_tokens: int
    """Of the request, in the step that is planned; 0 in all other events."""
    prefilled_tokens: int
    """Tokens whose KV is here, before that step."""
    remaining_prompt_tokens: int
    """Tokens that come before the next sampled one, after that step; not the last output, which a decode row brings."""
    active_decodes: int
    """Requests that decode here now."""
    token_budget: int
    """Tokens of a step, at most."""
    predicted_iteration_ms: float | None
    """Of the step that was planned last; None: no prediction."""
    free_kv_blocks: int
    """Blocks that somebody could get now, those with cached KV that nobody uses among them."""
    priority_reason: str
    """Why it was last chosen before others."""
    attempt: int
    tenant: str
    priority: int
    """The request's class: lower is earlier."""
    cache_identity: str
    """Chained hash of the prompt's last full block, in hex; empty without one, and outside the cache."""
    reason: str
    """refused: why; preempted: how it will come back; paused: what becomes of its blocks; finished: a FinishReason."""
    held_blocks: int
    preemptions: int
    output_tokens: int
    """Over all attempts."""
    cached_tokens: int
    """Taken from the prefix cache when it was let in."""
    cost_ms: dict[str, float] | None
    """preempted: the terms of its score, see `workers.core.preemption`; paused: of what becomes of its blocks, see
    `workers.core.tool_wait`. None: chosen without them, or another event."""


@dataclass(frozen=True, slots=True)
class Tracing:
    """What a worker is told about recording. `record` is called under the scheduler's lock and must not wait."""

    record: Callable[[Record], None]
    sample_rate: float
    """Share of requests that are recorded, 0..1."""
    started_at: float = 0.0
    """Monotonic seconds."""

    def samples(self, request_id: RequestId) -> bool:
        """Whether the request is recorded: the same answer in every process."""
        if not self.sample_rate:
            return False
        digest = blake2b(request_id.encode(), digest_size=8, person=b"headrace/journal").digest()
        return int.from_bytes(digest, "little") < self.sample_rate * 2.0**64


OFF = Tracing(record=lambda record: None, sample_rate=0.0)
"""Records nobody."""


@dataclass(slots=True)
class _Life:
    request: Request
    cache_identity: str
    due: int = -1
    """The step before which its decode rows need no look; -1: its last record is not of a decode row."""


class Journal:
    """Callers ask for `request.traced` before they call, so that those who are not recorded cost nothing."""

    def __init__(self, tracing: Tracing, pool: BlockPool, batch: DecodeBatch, token_budget: int) -> None:
        self._tracing = tracing
        self._pool = pool
        self._batch = batch
        self._token_budget = token_budget
        self._time_s = 0.0
        self._predicted_ms: float | None = None
        self._lives: dict[RequestKey, _Life] = {}
        self._fresh: dict[RequestKey, _Life] = {}
        """Will decode next; that row is to be recorded."""
        self._due: dict[int, list[_Life]] = {}
        """By step, decodes that may have come to their next record then, unless another event came between."""
        self._steps = 0

    def samples(self, request_id: RequestId) -> bool:
        """See `Tracing.samples`."""
        return self._tracing.samples(request_id)

    @property
    def idle(self) -> bool:
        """Nobody here is recorded: `step` has nothing to do."""
        return not self._lives

    def submitted(self, request: Request, cache_identity: bytes, now: float) -> None:
        self._lives[request.key] = _Life(request, cache_identity.hex())
        self.note(Event.SUBMITTED, request, now)

    def refused(self, request: Request, reason: str, now: float) -> None:
        """Asks itself whether the request is one to record: a refused one never gets to be `traced`."""
        if self._tracing.samples(request.request_id):
            self.note(Event.REFUSED, request, now, reason)

    def adopted(self, request: Request, now: float) -> None:
        self.note(Event.ADOPTED, request, now)
        self._fresh[request.key] = self._lives[request.key]

    def preempted(self, request: Request, way: str, score: Score | None, now: float) -> None:
        """Call it while the request still has its blocks."""
        terms = None if score is None else {name: round(ms, 3) for name, ms in asdict(score).items()}
        self.note(Event.PREEMPTED, request, now, way, cost_ms=terms)

    def finished(self, request: Request, reason: FinishReason, now: float) -> None:
        """Call it while the request still has its blocks."""
        self.note(Event.FINISHED, request, now, reason)
        del self._lives[request.key]
        self._fresh.pop(request.key, None)

    def step(self, flight: Flight, now: float) -> None:
        """A step begins. O(prefill rows + records that are due)."""
        self._steps += 1
        self._predicted_ms = round(1000.0 * flight.predicted_s, 3) or None
        for life in list(self._fresh.values()):
            if life.request.state is State.DECODING and flight.names(life.request, self._batch):
                self._note_row(life, now)
            elif life.request.state not in (State.DECODING, State.PREFILLING):
                del self._fresh[life.request.key]
        for life in self._due.pop(self._steps, ()):
            if life.due != self._steps:
                continue
            left = -life.request.num_output % DECODE_EVERY
            if left == 0 and flight.names(life.request, self._batch):
                self._note_row(life, now)
            else:
                self._look_again(life, max(1, left))
        chunks = flight.plan.num_tokens[flight.plan.num_decode_rows :]
        for request, num_tokens in zip(flight.prefills, chunks, strict=True):
            if request.key in self._lives:
                self.note(Event.SCHEDULED, request, now, scheduled_tokens=num_tokens)
                if num_tokens == request.uncomputed_tokens and not request.hand_off:
                    self._fresh[request.key] = self._lives[request.key]

    def note(
        self,
        event: Event,
        request: Request,
        now: float,
        reason: str = "",
        *,
        scheduled_tokens: int = 0,
        cost_ms: dict[str, float] | None = None,
    ) -> None:
        """Records one event as things stand."""
        life = self._lives.get(request.key)
        if life is not None:
            life.due = -1
        computed, num_output = request.computed_tokens, request.num_output
        remaining = request.num_tokens - computed - scheduled_tokens
        if remaining == 1 and num_output and not scheduled_tokens:
            remaining = 0
        self._time_s = max(self._time_s, now - self._tracing.started_at)
        self._tracing.record(
            Record(
                self._time_s,
                request.request_id,
                event,
                PHASES[request.state],
                scheduled_tokens,
                computed,
                remaining,
                len(self._batch) - len(self._batch.dead_rows()),
                self._token_budget,
                self._predicted_ms,
                self._pool.available_blocks,
                request.priority_reason,
                request.attempt,
                request.tenant,
                request.priority,
                "" if life is None else life.cache_identity,
                reason,
                len(request.block_ids),
                request.preemptions,
                num_output,
                request.ledger.cached_tokens,
                cost_ms,
            )
        )

    def _note_row(self, life: _Life, now: float) -> None:
        self.note(Event.SCHEDULED, life.request, now, scheduled_tokens=1)
        self._fresh.pop(life.request.key, None)
        self._look_again(life, DECODE_EVERY - life.request.num_output % DECODE_EVERY)

    def _look_again(self, life: _Life, left: int) -> None:
        """A step brings a request one output token at most: none of the next `left - 1` steps needs a look."""
        life.due = self._steps + left
        self._due.setdefault(life.due, []).append(life)

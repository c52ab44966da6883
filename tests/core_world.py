"""A worker's core in a box: builders with defaults, and a toy runner with a KV that can be checked.

As in a real model, the toy KV of a position depends on all tokens up to it and is computed from what the row *reads*
through its block table; every slot that a row reads is compared with what it must be. A block that is shared, reused or
cached too early cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, pairwise

from headrace.core.fairness import ServiceCounters
from headrace.core.predictor import Profile, StepPredictor
from headrace.core.records import FinishReason, TokenLogprobs
from headrace.core.step_shape import FEATURES_VERSION, KNOTS, NUM_FEATURES, StepShape
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from workers.core.blocks import BlockPool
from workers.core.journal import OFF, Tracing
from workers.core.limits import banned_ids, end_reason
from workers.core.plan import StepEvents, StepPlan, StepResult
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request, State
from workers.core.scheduler import Scheduler
from workers.core.settings import SchedulerSettings
from workers.core.tool_wait import Call

EOS = 0
ROOT = b"r" * 16


def make_settings(**changes: object) -> SchedulerSettings:
    values: dict[str, object] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "long_prefill_token_threshold": 64,
        "block_size": 4,
        "max_waiting_requests": 100,
        "max_waiting_tokens": 10_000,
        "watermark_blocks": 0,
        "max_model_len": 1_000,
        "eos_token_ids": (EOS,),
        "policy": "decode_first",
        "min_progress_tokens": 1,
    }
    return SchedulerSettings(**(values | changes))  # type: ignore[arg-type]


def toy_logprobs(token: int, position: int) -> TokenLogprobs:
    """Of a token at its place among input and output."""
    return TokenLogprobs(-float(token), (position,), (-0.5,))


def place_of(request: Request, offset: int) -> int:
    """Where among all its tokens the request's output at `offset` is."""
    place = len(request.prompt_ids) + offset
    for at, num_tokens in request.inserts:
        place += num_tokens if at <= place else 0
    return place


def toy_token(history: Sequence[int], vocab: int, banned: Sequence[int] = ()) -> int:
    """The toy model: a token in [0, vocab) that depends on every token of the history and is not banned."""
    digest = blake2b(b"".join(t.to_bytes(4, "little") for t in history), digest_size=8).digest()
    token = int.from_bytes(digest, "little") % vocab
    while token in banned:
        token = (token + 1) % vocab
    return token


def alone(request: Request, settings: SchedulerSettings, vocab: int) -> list[int]:
    """Output of a run with nobody else, endless memory and no scheduler at all."""
    twin = Request(RequestKey(-1), request.request_id, 0, list(request.prompt_ids), request.sampling, request.root)
    while True:
        twin.append(toy_token(twin.token_ids, vocab, banned_ids(twin, settings)))
        if end_reason(twin, settings) is not None:
            return twin.output_ids


def chain(tokens: Sequence[int]) -> list[int]:
    """The toy KV of each position."""
    kv: list[int] = []
    for token in tokens:
        kv.append(link(kv[-1] if kv else 0, token))
    return kv


def link(before: int, token: int) -> int:
    return (before * 1_000_003 + token + 1) % (2**61 - 1)


def linear_cost(token_s: float) -> Callable[[StepShape], float]:
    """A machine that takes so many seconds for each token, prompt or output."""
    return lambda shape: token_s * shape.rows


def linear_predictor(token_s: float) -> StepPredictor:
    """Knows that machine, and that its steps never vary."""
    widths = (last - first for first, last in pairwise((0, *KNOTS, 2 * KNOTS[-1])))
    adders = (1e-12,) * (NUM_FEATURES - len(KNOTS) - 1)
    profile = Profile({}, FEATURES_VERSION, (*(token_s * width for width in widths), *adders), (1.0,), {}, 1)
    return StepPredictor(profile)


class ToyRunner:
    """`kv[block][slot]`; -1 where nothing was ever written."""

    def __init__(self, num_blocks: int, block_size: int, vocab: int) -> None:
        self.kv = [[-1] * block_size for _ in range(num_blocks)]
        self.host: dict[int, list[int]] = {}
        self.block_size = block_size
        self.vocab = vocab
        self.sampled: list[int] = []
        """By the last step."""

    def read(self, table: Sequence[int], position: int) -> int:
        return self.kv[table[position // self.block_size]][position % self.block_size]

    def write(self, table: Sequence[int], position: int, value: int) -> None:
        self.kv[table[position // self.block_size]][position % self.block_size] = value

    def run(self, plan: StepPlan, truth: dict[RequestKey, list[int]]) -> StepResult:
        """`truth`: each row's own tokens, kept apart from the scheduler; the row must see exactly them. A row with a
        token of the step before may be one further: that is not taken in yet, or never will be."""
        at, ids, logprobs = 0, [], {}
        fed = [token < 0 for token in plan.token_ids]
        token_ids = [self.sampled[-1 - token] if token < 0 else token for token in plan.token_ids]
        for block, target in plan.swap_out:
            self.host[target] = list(self.kv[block])
        for block in [*plan.memory.retired, *plan.memory.restored]:
            self.kv[block] = [-1] * self.block_size
        for block in [*plan.memory.host_retired, *plan.memory.host_restored]:
            self.host[block] = [-1] * self.block_size
        for source, block in plan.swap_in:
            self.kv[block] = list(self.host[source])
        for source, target in plan.copies:
            self.kv[target] = list(self.kv[source])
        for row in range(plan.num_rows):
            start, num = plan.start_pos[row], plan.num_tokens[row]
            assert num >= 1
            assert row >= plan.num_decode_rows or num == 1
            before = self.read(plan.block_tables[row], start - 1) if start else 0
            for position, token in enumerate(token_ids[at : at + num], start):
                before = link(before, token)
                self.write(plan.block_tables[row], position, before)
            at += num
        assert at == len(plan.token_ids)
        for row, key in enumerate(plan.keys):
            end = plan.start_pos[row] + plan.num_tokens[row]
            own = truth[key][:end]
            if row < plan.num_decode_rows and fed[row] and len(own) == end - 1:
                own.append(token_ids[row])
            seen = [self.read(plan.block_tables[row], position) for position in range(end)]
            assert seen == chain(own), f"row {row} of step {plan.step_id} reads KV that is not its own"
            assert plan.samples[row] == (end >= len(truth[key]))
            if plan.samples[row]:
                token = toy_token(own, self.vocab, plan.banned[row])
                if plan.sampling[row].logprobs is not None:
                    logprobs[len(ids)] = toy_logprobs(token, end)
                ids.append(token)
        self.sampled = ids
        return StepResult(ids, sample_s=0.25, logprobs=logprobs)


@dataclass
class World:
    """One worker: scheduler, toy runner and a clock that moves `cost` seconds a step."""

    settings: SchedulerSettings = field(default_factory=make_settings)
    num_blocks: int = 64
    vocab: int = 50
    now: float = 0.0
    predictor: StepPredictor | None = None
    tracing: Tracing = OFF
    service: ServiceCounters | None = None
    cost: Callable[[StepShape], float] = lambda _: 1.0

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.settings.block_size)
        self.cache = PrefixCache(self.pool)
        self.scheduler = Scheduler(
            self.settings, self.pool, self.cache, self.predictor, self.service, tracing=self.tracing
        )
        self.runner = ToyRunner(self.num_blocks, self.settings.block_size, self.vocab)
        self.truth: dict[RequestKey, list[int]] = {}
        self.seen: dict[RequestKey, Request] = {}
        self.delivered: dict[RequestKey, list[int]] = {}
        """What StepEvents delivered, on top of what an earlier attempt had."""
        self.ended: dict[RequestKey, FinishReason] = {}
        self._results: dict[int, StepResult] = {}
        self._calls: dict[RequestKey, int] = {}
        self._keys = count(1)

    def make(
        self,
        prompt: int | Sequence[int],
        max_tokens: int = 4,
        *,
        output: Sequence[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = True,
        stop: tuple[int, ...] = (),
        root: bytes = ROOT,
        hand_off: bool = False,
        adopted: bool = False,
        no_cache: bool = False,
        deadline: float | None = None,
        asks: bool | None = None,
        **fields: object,
    ) -> Request:
        """`prompt`: token ids, or a length of a prompt like no other. `fields`: further ones of Request.

        `asks` for log-probabilities: by default every other request does.
        """
        key = RequestKey(next(self._keys))
        ids = [1000 * int(key) + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
        asks = key % 2 == 0 if asks is None else asks
        logprobs = 0 if asks else None
        sampling = SamplingParams(max_tokens, min_tokens, ignore_eos=ignore_eos, stop_token_ids=stop, logprobs=logprobs)
        request = Request(
            key,
            RequestId(f"req-{key}"),
            0,
            ids,
            sampling,
            root,
            resumed_ids=list(output),
            hand_off=hand_off,
            adopted=adopted,
            no_cache=no_cache,
            deadline=deadline,
            **fields,  # type: ignore[arg-type]
        )
        self.truth[key] = [*ids, *output]
        self.seen[key] = request
        self.delivered[key] = list(output)
        return request

    def submit(self, *args: object, **kwargs: object) -> Request:
        request = self.make(*args, **kwargs)  # type: ignore[arg-type]
        assert self.scheduler.submit(request, self.now) is None
        return request

    def adopt(self, *args: object, **kwargs: object) -> Request:
        request = self.make(*args, adopted=True, **kwargs)  # type: ignore[arg-type]
        assert self.scheduler.adopt(request, self.now) is None
        return request

    def pull(self, request: Request, num_tokens: int | None = None) -> None:
        """Let the KV of the request's first tokens land in the blocks that it does not share."""
        content = chain(self.truth[request.key])
        for position in range(request.stored_blocks * self.settings.block_size, num_tokens or request.num_tokens):
            self.runner.write(request.block_ids, position, content[position])

    def activate(self, request: Request) -> None:
        """Hand over the token that the prefill worker would have sampled."""
        num_tokens = request.num_tokens
        token = toy_token(self.truth[request.key], self.vocab, banned_ids(request, self.settings))
        self.truth[request.key].append(token)
        told = () if request.sampling.logprobs is None else (toy_logprobs(token, num_tokens),)
        assert self.scheduler.activate(request.key, [*request.output_ids, token], num_tokens, self.now, told)

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        return plan

    def compute(self, plan: StepPlan) -> None:
        """Now, and not when the plan is applied. In the order of the plans."""
        self._results[plan.step_id] = self.runner.run(plan, self.truth)

    def apply(self, plan: StepPlan) -> StepEvents:
        if plan.step_id not in self._results:
            self.compute(plan)
        result = self._results.pop(plan.step_id)
        self.now += self.cost(StepShape.of(plan.num_tokens, plan.start_pos, plan.samples, plan.num_decode_rows))
        events = self.scheduler.apply(plan, result, self.now)
        self.scheduler.check_integrity()
        rows = zip(events.token_keys, events.token_offsets, events.token_ids, strict=True)
        for row, (key, offset, token) in enumerate(rows):
            assert offset == len(self.delivered[key])
            asks = self.seen[key].sampling.logprobs is not None
            told = toy_logprobs(token, place_of(self.seen[key], offset)) if asks else None
            assert events.token_logprobs.get(row) == told
            self.delivered[key].append(token)
            if self.seen[key].num_input + offset == len(self.truth[key]):
                self.truth[key].append(token)
        self.ended |= dict(events.finished)
        self._take_paused()
        return events

    def call(self, request: Request, num_output: int, **outlook: object) -> None:
        """The request's output is a tool call up to there; what comes behind is nobody's."""
        assert self.scheduler.pause(request.key, Call(num_output, **outlook), self.now)  # type: ignore[arg-type]
        self._calls[request.key] = num_output
        self._take_paused()

    def answer(self, request: Request, token_ids: list[int]) -> None:
        assert self.scheduler.resume(request.key, token_ids, self.now)
        self.truth[request.key] += token_ids

    def _take_paused(self) -> None:
        paused, self.scheduler.paused = self.scheduler.paused, []
        for key, _ in paused:
            if (num_output := self._calls.pop(key, None)) is not None:
                del self.truth[key][self.seen[key].num_input + num_output :]
                del self.delivered[key][num_output:]

    def step(self) -> StepEvents | None:
        self.scheduler.reserve_adoptions(self.now)
        plan = self.schedule()
        return None if plan is None else self.apply(plan)

    def run(self, limit: int = 10_000) -> int:
        """Step until nothing can run; returns the number of steps."""
        for steps in range(limit):
            if self.step() is None:
                return steps
        raise AssertionError(f"still busy after {limit} steps")

    def assert_output_as_alone(self, request: Request) -> None:
        assert self.delivered[request.key] == alone(request, self.settings, self.vocab)

    def assert_drained(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.requests == {}
        assert self.pool.used_blocks == 0
        assert self.pool.quarantined_blocks == 0
        assert self.pool.available_blocks == self.num_blocks
        assert self.scheduler.holders() == {}
        load = self.scheduler.load(0, self.now)
        assert (load.waiting_requests, load.waiting_tokens, load.running_requests, load.adopting_requests) == (0,) * 4
        assert all(request.state in (State.FINISHED, State.WAITING) for request in self.seen.values())

"""A prefill and a decode worker with tiny pools: KV moves block by block while it is computed, outputs never change.

The gateway's part is the few lines of `Pair`: it adopts on `started`, drops repeated tokens after comparing them, and
submits what is left again when a hand-off is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.records import FinishReason
from headrace.ids import RequestKey
from headrace.sampling import SamplingParams
from tests.core_world import ROOT, World, alone, make_settings
from workers.core.request import Request, State


@dataclass
class Call:
    """One request as the gateway sees it."""

    prompt: list[int]
    sampling: SamplingParams
    output: list[int] = field(default_factory=list)
    done: FinishReason | None = None
    attempts: int = 0


class Pair:
    def __init__(self, calls: list[Call], p: World, d: World, random: Random, loss: float) -> None:
        self.calls, self.p, self.d, self.random, self.loss = calls, p, d, random, loss
        self.call_of: dict[tuple[str, RequestKey], Call] = {}
        self.source: dict[RequestKey, Request] = {}
        """Adoption at D -> the request at P that it reads from."""
        self.pulled: dict[RequestKey, int] = {}
        for call in calls:
            self.start(call)

    def start(self, call: Call) -> None:
        call.attempts += 1
        request = self.make(self.p, call, hand_off=True)
        self.call_of["p", request.key] = call
        assert self.p.scheduler.submit(request, self.p.now) is None

    @staticmethod
    def make(world: World, call: Call, *, hand_off: bool = False, adopted: bool = False) -> Request:
        sampling = call.sampling
        return world.make(
            call.prompt,
            sampling.max_tokens,
            output=call.output,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            stop=sampling.stop_token_ids,
            hand_off=hand_off,
            adopted=adopted,
            asks=sampling.logprobs is not None,
        )

    def run(self) -> None:
        for _ in range(3_000):
            if all(call.done for call in self.calls):
                return
            self.step_p()
            for key in self.d.scheduler.reserve_adoptions(self.d.now):
                self.pulled[key] = self.d.seen[key].stored_blocks
                self.p.scheduler.pin(self.source[key].key)
            self.move_blocks()
            self.deliver("d", self.d)
        raise AssertionError("not done: " + ", ".join(f"{r.key} {r.state}" for r in self.p.seen.values()))

    def step_p(self) -> None:
        for key in self.deliver("p", self.p):
            call = self.call_of["p", key]
            adopted = self.make(self.d, call, adopted=True)
            # P may have sampled already; what D is told is what the gateway knew when it wrote the message.
            self.call_of["d", adopted.key] = call
            self.source[adopted.key] = self.p.seen[key]
            assert self.d.scheduler.adopt(adopted, self.d.now) is None

    def deliver(self, side: str, world: World) -> list[RequestKey]:
        plan = world.schedule()
        if plan is None:
            return []
        known = {key: list(world.delivered[key]) for key in plan.keys}
        events = world.apply(plan)
        for key in known:
            call, output = self.call_of[side, key], world.delivered[key]
            shared = min(len(output), len(call.output))
            assert output[:shared] == call.output[:shared]
            call.output += output[shared:]
        for key, reason in events.finished:
            self.call_of[side, key].done = reason
            self.drop_adoption_from(world, key)
        return [key for key in events.started if key not in dict(events.finished)] if side == "p" else []

    def move_blocks(self) -> None:
        """Pull what is complete; after the last block D decodes and P is free. Or the holder is lost on the way."""
        for key, next_block in sorted(self.pulled.items()):
            here, there = self.d.seen[key], self.source[key]
            if there.state is State.PREEMPTED:
                continue
            if self.random.random() < self.loss and self.call_of["d", key].attempts < 3:
                self.lose(key)
                continue
            complete = there.computed_tokens // self.p.settings.block_size
            if there.state is State.TRANSFERRING:
                complete = self.p.pool.blocks_for(there.computed_tokens)
            for index in range(next_block, complete):
                self.d.runner.kv[here.block_ids[index]] = list(self.p.runner.kv[there.block_ids[index]])
            self.pulled[key] = max(next_block, complete)
            if there.state is State.TRANSFERRING:
                self.d.truth[key] = list(there.token_ids)
                computed, told = there.computed_tokens, there.handed_logprobs
                assert self.d.scheduler.activate(key, there.output_ids, computed, self.d.now, told)
                assert self.p.scheduler.release_handed_off(there.key, self.p.now)
                del self.pulled[key]

    def drop_adoption_from(self, world: World, key: RequestKey) -> None:
        """A request that ended with its first token has nothing to move."""
        for adoption, source in self.source.items():
            if world is self.p and source.key == key:
                self.d.scheduler.finish_adoption(adoption, FinishReason.HANDED_OFF, [], self.d.now)
                self.pulled.pop(adoption, None)

    def lose(self, key: RequestKey) -> None:
        targets = self.d.scheduler.requests[key].block_ids[self.pulled.pop(key) :]
        self.d.scheduler.finish_adoption(key, FinishReason.ERROR, targets, self.d.now)
        self.d.scheduler.release_quarantine(key)
        self.p.scheduler.finish(self.source[key].key, FinishReason.ERROR, self.p.now)
        self.start(self.call_of["d", key])


@given(
    seed=st.integers(0, 10_000),
    num_calls=st.integers(1, 10),
    p_blocks=st.integers(8, 16),
    d_blocks=st.integers(8, 16),
    loss=st.sampled_from([0.0, 0.0, 0.2]),
    chunk=st.integers(2, 12),
)
@settings(max_examples=60, deadline=None)
def test_outputs_of_a_pair_are_those_of_a_run_alone(
    seed: int, num_calls: int, p_blocks: int, d_blocks: int, loss: float, chunk: int
) -> None:
    random = Random(seed)
    limits = make_settings(max_num_batched_tokens=16, max_num_seqs=6, long_prefill_token_threshold=chunk)
    p, d = World(limits, p_blocks, vocab=9), World(limits, d_blocks, vocab=9)
    calls = []
    for _ in range(num_calls):
        shared = list(range(1, random.randint(1, 14)))
        prompt = [*shared, *(random.randint(1, 2) for _ in range(random.randint(1, 4)))]
        min_tokens = random.choice([0, 0, 3])
        sampling = SamplingParams(
            random.randint(max(1, min_tokens), 12),
            min_tokens,
            ignore_eos=random.random() < 0.5,
            stop_token_ids=(7,),
            logprobs=random.choice([None, 0]),
        )
        calls.append(Call(prompt, sampling))
    Pair(calls, p, d, random, loss).run()
    for call in calls:
        twin = Request(RequestKey(-1), p.seen[RequestKey(1)].request_id, 0, call.prompt, call.sampling, ROOT)
        assert call.output == alone(twin, limits, 9)
    if loss == 0.0 and d.scheduler.stats()["preemptions"] == 0:
        # The decode worker computes one token for each but the first (PDS-08).
        for request in d.seen.values():
            assert request.ledger.computed_tokens == max(0, len(request.output_ids) - 1)
    for world in (p, d):
        world.assert_drained()


@given(seed=st.integers(0, 100_000))
@settings(max_examples=60, deadline=None)
def test_kv_16_cache_hits_change_no_output_over_random_prefix_trees(seed: int) -> None:
    random = Random(seed)
    world = World(make_settings(max_num_seqs=4, long_prefill_token_threshold=6), num_blocks=20, vocab=9)
    nodes = [[random.randint(1, 3) for _ in range(random.randint(1, 6))]]
    for _ in range(15):
        nodes.append([*random.choice(nodes), *(random.randint(1, 3) for _ in range(random.randint(1, 6)))][:40])
    requests = []
    for node in random.choices(nodes, k=20):
        requests.append(world.submit(node, max_tokens=random.randint(1, 10)))
        if random.random() < 0.5:
            world.step()
    world.run()
    for request in requests:
        world.assert_output_as_alone(request)
    world.assert_drained()

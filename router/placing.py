"""Around the router of one gateway: names blocks as the workers do, keeps requests that wait for a place, and tells the
router what became of its plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.records import WorkerLedger, cache_key
from headrace.ids import RequestId
from headrace.paths import cache_root
from headrace.v1.inference_pb2 import RoutingDecision
from kvtransfer.core.identity import block_hashes, namespace_id, request_root
from router.answer import Branch
from router.api import GenerationSpec
from router.core.decision import Decision
from router.core.placement import WorkerKey
from router.core.policies import Chance, Policy
from router.core.prefix_index import PrefixIndex
from router.core.recovery import MOVED
from router.core.router import Router
from router.explanations import Explanations, Routed, explained
from router.generations import Generations
from router.spec import GatewaySpec

TRIES = 4
"""Requests of one prefix that are tried in vain before the others of it are left until the next time."""
RETRY_GAP_S = 0.01
"""Load reports come more often than anything changes for those who wait."""


@dataclass(frozen=True, slots=True)
class Names:
    """What a prompt's blocks are called."""

    namespace: bytes
    hashed_for: str = ""
    """Fingerprint of the workers that name blocks so; "": there are no names yet, or never."""
    hashes: list[bytes] = field(default_factory=list)
    """Of its full blocks."""
    keys: tuple[int, ...] = ()
    """The same as the router has them."""


class Placing:
    """`fingerprint`: of the workers that are there, hex, '' without any."""

    def __init__(self, spec: GatewaySpec, chance: Chance, fingerprint: Callable[[], str]) -> None:
        self.router = Router(
            chance, spec.routing, Policy(spec.routing_policy), PrefixIndex(max_entries=spec.max_index_entries)
        )
        self.plans: Counter[tuple[str, str]] = Counter()
        """What was sent, by (kind, reason) of its plan."""
        self.on_first_token: Callable[[Decision, float, float], None] = lambda plan, realised_ms, regret_ms: None
        """Told each attempt's first token, with the regret of its plan; set by whoever keeps metrics."""
        self.queued: dict[RequestId, Branch] = {}
        """Requests without a plan, in the order in which they are tried."""
        self._spec = spec
        self._fingerprint = fingerprint
        self._generations = Generations(_generations_path(spec))
        self._explanations = Explanations()
        self._tried_at = float("-inf")

    # ---- names

    def names(self, spec: GenerationSpec) -> Names:
        """Of a call's prompt, the same for all its choices."""
        generation = self._generations.of(spec.tenant)
        namespace = namespace_id(spec.tenant, spec.cache_salt, self._spec.cache_namespace_secret, generation)
        fingerprint = self._fingerprint()
        if spec.no_cache or not fingerprint:
            return Names(namespace)
        hashes = block_hashes(_root(fingerprint, namespace), spec.prompt_ids, self._spec.block_size)
        return Names(namespace, fingerprint, hashes, tuple(map(cache_key, hashes)))

    def cleared(self, tenant: str | None) -> None:
        """From now on the tenant's blocks (None: everybody's) have other names, so that no order of arrival lets a new
        request, of whichever gateway, hit or fetch what was cached before. Raises OSError when that cannot be kept on
        disk, BlockingIOError while another gateway is at it: nothing has changed then."""
        self._generations.next(tenant)

    def name_blocks(self, branch: Branch) -> None:
        """Brings the flight's keys up to date: what it has by now, as the workers name it."""
        flight, fingerprint = branch.flight, self._fingerprint()
        if flight.no_cache or not fingerprint:
            return
        size = self._spec.block_size
        if branch.hashed_for == fingerprint and len(branch.hashes) >= flight.num_tokens // size:
            return
        known = branch.hashes if branch.hashed_for == fingerprint else ()
        branch.hashes = block_hashes(_root(fingerprint, branch.namespace), flight.token_ids, size, known)
        branch.hashed_for = fingerprint
        flight.keys = tuple(map(cache_key, branch.hashes))

    # ---- who waits

    def to_try(self, now: float) -> Iterator[Branch]:
        """Whom to place again, now that something may have changed; whoever is still queued when the next one is asked
        for was tried in vain. Many that begin alike wait for the same thing: some of them stand for all, in turns.
        """
        if now - self._tried_at < RETRY_GAP_S:
            return
        self._tried_at = now
        in_vain: Counter[int | None] = Counter()
        for request_id, branch in list(self.queued.items()):
            front = branch.flight.keys[0] if branch.flight.keys else None
            if in_vain[front] >= TRIES or request_id not in self.queued:
                continue
            yield branch
            if request_id in self.queued:
                in_vain[front] += 1
                self.queued[request_id] = self.queued.pop(request_id)

    # ---- what became of plans

    def learn_from_first(self, branch: Branch) -> None:
        """The first token of an attempt: what the plan promised against what came of it."""
        flight = branch.flight
        if flight.attempt in branch.learned or flight.attempt not in flight.realised_ms:
            return
        branch.learned.add(flight.attempt)
        plan = next((d for at, d in flight.decisions if at == flight.attempt), None)
        # How long a move takes says nothing about queues and prefills.
        if isinstance(plan, Decision) and plan.reason != MOVED:
            realised_ms = flight.realised_ms[flight.attempt]
            self.on_first_token(plan, realised_ms, self.router.completed(plan, realised_ms))

    def learn_lane(self, worker: WorkerKey, ledger: WorkerLedger) -> None:
        block_bytes = self._spec.kv_bytes_per_token * self._spec.block_size
        if ledger.bytes_moved and block_bytes:
            self.router.transferred(worker, ledger.bytes_moved // block_bytes, ledger.transfer_s * 1e3)

    def ended(self, spec: GenerationSpec, branches: list[Branch]) -> None:
        """Remembers why a call's choices went where they went."""
        choices = [Routed.of(branch.flight) for branch in branches]
        self._explanations.keep(spec.tenant, (spec.label, spec.answer_id), choices)

    def explain(self, live: list[Branch], tenant: str, label: str) -> list[RoutingDecision] | None:
        """Of the `live` choices of a call, else of the latest call of that name that has ended."""
        choices = [Routed.of(branch.flight) for branch in live] or self._explanations.find(tenant, label)
        return list(explained(choices, self.router, self._spec.block_size)) if choices else None


def _generations_path(spec: GatewaySpec) -> Path | None:
    if spec.keeps_generations:
        return cache_root() / "kv" / "generations.json"
    return Path(spec.run_dir) / "generations.json" if spec.run_dir else None


def _root(fingerprint: str, namespace: bytes) -> bytes:
    return request_root(bytes.fromhex(fingerprint), namespace)

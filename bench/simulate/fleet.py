"""Workers of a virtual cluster as gateways see them: steps by events, load reports and cache changes that come late.

Each worker is the production scheduler on the cluster's clock (`bench.simulate.worker.Stepper`). What it publishes
waits in a list with the instant at which it arrives; a gateway that decides takes what has arrived by then, so that
nothing costs an event of its own.

Does not: route, or know what a request is to a client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from bench.simulate.worker import Step, Stepper
from headrace.core.predictor import Profile, StepPredictor, StepShape
from headrace.core.records import CacheChange, Role, WorkerLoad
from headrace.core.step_shape import FEATURES_VERSION, KNOTS, NUM_FEATURES, CostTable
from headrace.ids import RequestKey
from router.core.placement import WorkerKey
from workers.core.plan import StepPlan
from workers.core.settings import SchedulerSettings

if TYPE_CHECKING:
    from bench.simulate.calls import Leg

REPORT_GAP_S = 0.05
"""Load reports follow changes at this distance at least."""


def gpu_coefficients(slower: float = 1.0, step_s: float = 0.006) -> tuple[float, ...]:
    """`bench.simulate.worker.gpu_cost` as a profile's coefficients, [NUM_FEATURES]; `slower`: times as slow;
    step_s: of a step without rows, before that.
    """
    pieces = [2e-5 * max(0, after - max(256, before)) for before, after in pairwise(KNOTS)]
    adders = (0.0, 44e-9, 0.0, 1.3e-9, 0.0)
    seconds = (step_s, *pieces, 2e-5 * KNOTS[-1], *adders)
    # A profile has no coefficient of 0: each operation costs something.
    return tuple(slower * max(value, 1e-12) for value in seconds)


class KnownCosts(StepPredictor):
    """A predictor that is right from the start and learns nothing, since learning is slow beside a virtual step."""

    def __init__(self, coefficients: Sequence[float]) -> None:
        super().__init__(Profile({}, FEATURES_VERSION, tuple(coefficients), (1.0,), {}, NUM_FEATURES))

    def observe(self, shape: StepShape, seconds: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    settings: SchedulerSettings
    num_blocks: int
    coefficients: tuple[float, ...]
    """Seconds of each of `headrace.core.step_shape.FEATURES`."""
    role: Role = Role.COLOCATED
    lane: str = "lane"
    slower: float = 1.0
    """Steps take so many times as long as `coefficients` say."""
    dies_at: float | None = None


@dataclass(slots=True)
class Report:
    arrives_at: float
    load: WorkerLoad
    submit_seq: tuple[int, ...]
    """Of each gateway."""


@dataclass(slots=True)
class Published:
    """What a worker has told everybody, each with its instant of arrival; gateways keep their places."""

    changes: list[tuple[float, CacheChange]] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)


class ClusterWorker(Stepper):
    """`begin_step` and `end_step` keep to the cluster's clock; everything else that changes the scheduler calls
    `changed` first, so that a report that was due before is one of the time before."""

    def __init__(self, name: str, spec: WorkerSpec, num_gateways: int, wire_s: float, seed: int) -> None:
        table = CostTable([spec.slower * value for value in spec.coefficients])
        predictor = KnownCosts([spec.slower * value for value in spec.coefficients])
        super().__init__(spec.settings, spec.num_blocks, table.cost_s, seed=seed, predictor=predictor)
        self.key = WorkerKey(name, "0")
        self.spec = spec
        self.alive = True
        self.legs: dict[RequestKey, Leg] = {}
        """What is here."""
        self.step: tuple[StepPlan, Step] | None = None
        """On its way."""
        self.submit_seq = [0] * num_gateways
        self.published = Published()
        self.prefilled_tokens = 0
        """Prompt tokens computed here, recomputed ones too."""
        self.busy_s = 0.0
        self.lane_free_at = 0.0
        """When what it has to send is sent."""
        self._wire_s = wire_s
        self._costs = tuple(spec.slower * value for value in spec.coefficients)
        self._changed_at = 0.0
        self._reported_at = -REPORT_GAP_S
        self._stale = True
        self._told = (0, 0)
        """Epoch and number of the last change that was published."""
        self.publish_changes(0.0)

    # ---- steps

    def begin_step(self, now: float) -> tuple[StepPlan, Step] | None:
        self.changed(now)
        self.step = self.begin(now)
        if self.step is not None:
            step = self.step[1]
            self.prefilled_tokens += step.shape.prefill_tokens
            self.busy_s += step.end_s - step.begin_s
        return self.step

    # ---- what gateways learn

    def changed(self, now: float) -> None:
        """Something is about to change at `now`."""
        self.report(now)
        self._changed_at = now
        self._stale = True

    def report(self, now: float) -> None:
        """Publishes the load if a report of it was due by `now`."""
        due = max(self._changed_at, self._reported_at + REPORT_GAP_S)
        if not self._stale or due > now or not self.alive:
            return
        self._stale = False
        self._reported_at = due
        load = replace(self.scheduler.load(0, due), step_costs=self._costs)
        self.published.reports.append(Report(due + self._wire_s, load, tuple(self.submit_seq)))

    def publish_changes(self, now: float) -> None:
        log = self.cache.log
        if self._told != (log.epoch, log.seq):
            self.published.changes.append((now + self._wire_s, log.changes(*self._told, most=log.seq)))
            self._told = (log.epoch, log.seq)

    # ---- prefixes from elsewhere

    def cached_run(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of `hashes` that are here."""
        return len(self.cache.match(hashes))

    def take_in_prefix(self, root: bytes, hashes: Sequence[bytes]) -> None:
        """Blocks read from a peer are in the cache now, as far as there is room beside what is in use."""
        have = self.cache.match(hashes)
        self.pool.incref(have)
        blocks = self.pool.alloc(min(len(hashes) - len(have), self.pool.available_blocks)) or []
        for index, block in enumerate(blocks, len(have)):
            self.cache.insert(hashes[index], block, hashes[index - 1] if index else root, index)
        self.pool.decref(reversed([*have, *blocks]))

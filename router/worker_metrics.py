"""The workers' series for Prometheus: each one's last load report, and its own account of what its scheduler did, what
its steps took, whom it served and refused.

Workers are asked for their accounts when somebody scrapes, at most once a second however many scrape; one that does not
answer has no samples of these until it does. Counters begin again with a worker's new incarnation, as Prometheus
expects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.clock import Clock, monotonic
from headrace.core.records import WorkerLoad
from headrace.v1 import worker_pb2 as pb
from router.gateway import Gateway

REFRESH_GAP_S = 1.0
ANSWER_S = 1.0
"""A worker that takes longer to answer is left out."""
_LABELS = ("model_name", "pool", "worker")


def _usage(load: WorkerLoad) -> float:
    return 1.0 - (load.free_blocks + load.evictable_blocks) / load.total_blocks if load.total_blocks else 0.0


_LOADS: tuple[tuple[str, str, Callable[[WorkerLoad], float]], ...] = (
    ("num_requests_running", "Requests in the batch", lambda load: load.running_requests),
    ("num_requests_waiting", "Requests that wait for a prefill", lambda load: load.waiting_requests),
    ("num_requests_adopting", "Requests whose KV is on its way", lambda load: load.adopting_requests),
    ("waiting_prompt_tokens", "Prompt tokens not yet computed", lambda load: load.waiting_tokens),
    ("kv_cache_usage_perc", "Blocks that cannot be given out, 0 to 1", _usage),
)
"""(name without prefix, text, what it is of a load report)."""
_COUNTERS = (
    ("preemptions", "preemptions", "Requests that gave their blocks up for others"),
    ("swapped_out_requests", "swapped_out", "Requests whose KV was copied to the host"),
    ("swapped_in_requests", "swapped_in", "Requests whose KV came back from the host"),
    ("routed_requests", "routed", "Preempted requests that were sent to another worker"),
    ("deadline_lost_requests", "deadline_lost", "Waiting requests refused because their deadline could not be kept"),
    ("paused_requests", "paused", "Pauses of requests for a tool"),
    ("tool_keep", "tool_keep", "Pauses through which blocks were kept"),
    ("tool_offload", "tool_offload", "Pauses whose blocks were copied to the host"),
    ("tool_drop", "tool_drop", "Pauses whose blocks were given up"),
    ("memory_closed", "memory_closed", "Times that a worker took no new requests because memory was short"),
    ("memory_shed_requests", "memory_shed", "Requests that were preempted because memory was short"),
    ("retired_kv_blocks", "retired_blocks", "KV blocks whose memory was given back to the system"),
    ("restored_kv_blocks", "restored_blocks", "KV blocks whose memory was taken again"),
    ("recomputed_tokens", "recomputed_tokens", "Tokens computed again after a preemption"),
    ("scheduled_prefill_tokens", "prefill_tokens", "Tokens computed in chunks of prefills"),
    ("scheduled_decode_tokens", "decode_tokens", "Tokens computed in rows of decodes"),
    ("partial_prefills", "partial_prefills", "Chunks that were not the last of their prompt"),
    ("graph_rows", "graph_rows", "Rows of steps that replayed a recorded graph"),
    ("graph_padding_rows", "graph_padding_rows", "Rows of those graphs that were left over"),
    ("prefix_cache_lookups", "prefix_lookups", "Requests that looked for their prefix"),
    ("prefix_cache_hit_tokens", "cached_tokens_hit", "Tokens that the prefix cache had"),
    ("prefix_cache_evictions", "evictions", "Cached blocks given up for others"),
    ("tier_offloads", "offloads", "Blocks copied from the device to the host ahead of their eviction"),
    ("tier_restores", "restores", "Blocks copied from the host back to the device"),
    ("tier_staged", "staged_blocks", "Blocks copied from the host to the device for other workers to read"),
    ("tier_spills", "spills", "Blocks written to disk"),
    ("tier_promotions", "promotions", "Blocks read from disk into the host"),
    ("tier_host_evictions", "host_evictions", "Blocks dropped from the host for others"),
    ("tier_disk_evictions", "disk_evictions", "Blocks dropped from disk for others"),
    ("tier_disk_corrupt", "disk_corrupt", "Files that were not what was written, and were dropped"),
    ("tier_disk_errors", "disk_errors", "Reads and writes that the disk failed"),
    ("tier_host_hit_tokens", "host_hit_tokens", "Tokens that the host had"),
    ("tier_disk_hit_tokens", "disk_hit_tokens", "Tokens that the disk had"),
    ("lease_revocations", "lease_revocations", "Leases taken back because blocks were short"),
    ("handoffs", "handoffs", "Requests taken over with their KV"),
    ("kv_moved_bytes", "bytes_moved", "KV read from other workers"),
    ("kv_transfer_seconds", "transfer_s", "Time in which reads of KV were in flight"),
)
"""(name without prefix and suffix, key of the worker's counters, text)."""
_LABELED = (
    ("graph_steps", "rows", "graph_hits_", "Steps that replayed a recorded graph, by the rows that it has"),
    ("graph_eager_steps", "reason", "graph_eager_", "Steps that ran without one, by reason"),
)
"""(name without prefix and suffix, label, prefix of the keys of the worker's counters, text)."""
_GAUGES = (
    ("predictor_error_ratio", "predictor_error", "Median absolute error of predicted step times, as a share"),
    ("predictor_samples", "predictor_samples", "Steps that the predictor has learned from"),
    ("queue_predicted_seconds", "queue_s", "Predicted time of the prefills that wait"),
    ("reserved_kv_tokens", "reserved_kv_tokens", "Prompts and expected outputs of all that is at the worker"),
    ("host_kv_blocks", "host_blocks", "Blocks of host memory, for preempted requests and cached blocks"),
    ("host_kv_free_blocks", "free_host_blocks", "Those that preempted requests may take"),
)
"""(name without prefix, field of the worker's account, text)."""
_PAIRS = (
    ("kv_pair_read_bytes", "bytes", CounterMetricFamily, "KV that a worker has read from another"),
    ("kv_pair_transfer_seconds", "transfer_s", CounterMetricFamily, "Time in which such reads were in flight"),
    ("kv_pair_exposed_seconds", "exposed_s", CounterMetricFamily, "Of it, what requests waited for behind the prefill"),
    ("kv_pair_reads", "reads", CounterMetricFamily, "Such reads"),
    ("kv_pair_stalls", "stalls", CounterMetricFamily, "Times that one moved nothing for a while"),
    ("kv_pair_retries", "retries", CounterMetricFamily, "Reads that were made again after they failed"),
    ("kv_pair_failures", "failures", CounterMetricFamily, "Reads that failed for good"),
    ("kv_pair_corrupt_blocks", "corrupt_blocks", CounterMetricFamily, "Blocks that came with other bytes"),
    ("kv_pair_lane_gbps", "lane_gbps", GaugeMetricFamily, "Speed of the pair's lane as measured, 10^9 bytes a second"),
)
"""(name without prefix and suffix, field of the worker's PairStatus, kind, text)."""
_HISTOGRAMS = (
    ("step_seconds", "A step from its planning to its result"),
    ("step_predicted_seconds", "The same as predicted, of steps that were"),
    ("step_time_ratio", "Actual by predicted time of a step"),
    ("schedule_seconds", "Planning of a step on the host"),
    ("apply_seconds", "Taking in of a step's result on the host"),
    ("prefill_chunk_tokens", "Tokens of a chunk of prefill"),
)


class WorkerMetrics(Collector):
    """Registers itself; await `refresh` before a scrape."""

    def __init__(self, gateway: Gateway, registry: CollectorRegistry, clock: Clock = monotonic) -> None:
        self._gateway = gateway
        self._clock = clock
        self._model = gateway.spec.served_model_name
        self._answers: list[pb.WorkerStatusResponse] = []
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")
        registry.register(self)

    async def refresh(self) -> None:
        """Everybody who comes while workers are asked, or shortly after, shares the answers."""
        now = self._clock()
        if (self._asking is None or self._asking.done()) and now - self._asked_at >= REFRESH_GAP_S:
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        views = await self._gateway.fleet.accounts(ANSWER_S, audit=False)
        self._answers = [view.status for view in views if view.HasField("status")]

    def collect(self) -> Iterator[Metric]:
        loads, answers = self._gateway.fleet.loads(), self._answers
        for name, text, value in _LOADS:
            gauge = GaugeMetricFamily(f"headrace_{name}", text, labels=_LABELS)
            for worker, role, load in loads:
                gauge.add_metric((self._model, role.value, worker.worker_id), float(value(load)))
            yield gauge
        for name, key, text in _COUNTERS:
            counter = CounterMetricFamily(f"headrace_{name}", text, labels=_LABELS)
            for answer in answers:
                counter.add_metric(self._labels(answer), answer.counters.get(key, 0.0))
            yield counter
        for name, field, text in _GAUGES:
            gauge = GaugeMetricFamily(f"headrace_{name}", text, labels=_LABELS)
            for answer in answers:
                gauge.add_metric(self._labels(answer), float(getattr(answer, field)))
            yield gauge
        for name, text in _HISTOGRAMS:
            histogram = HistogramMetricFamily(f"headrace_{name}", text, labels=_LABELS)
            for answer in answers:
                told = answer.histograms.get(name)
                if told is None:
                    continue
                histogram.add_metric(self._labels(answer), _buckets(told.bounds, told.counts), told.sum)
            yield histogram
        text = "Blocks of a tier of the cache: cached, used or free"
        tiers = GaugeMetricFamily("headrace_tier_blocks", text, labels=(*_LABELS, "tier", "state"))
        for answer in answers:
            for tier in answer.tiers:
                states = {"cached": tier.cached_blocks, "used": tier.used_blocks, "free": tier.free_blocks}
                for state, blocks in states.items():
                    tiers.add_metric((*self._labels(answer), tier.name, state), float(blocks))
        yield tiers
        for name, field, family, text in _PAIRS:
            pairs = family(f"headrace_{name}", text, labels=(*_LABELS, "holder", "lane"))
            for answer in answers:
                for pair in answer.pairs:
                    pairs.add_metric((*self._labels(answer), pair.holder_id, pair.lane), float(getattr(pair, field)))
            yield pairs
        for name, label, prefix, text in _LABELED:
            counter = CounterMetricFamily(f"headrace_{name}", text, labels=(*_LABELS, label))
            for answer in answers:
                for key, value in sorted(answer.counters.items()):
                    if key.startswith(prefix):
                        counter.add_metric((*self._labels(answer), key.removeprefix(prefix)), value)
            yield counter
        yield self._by("worker_refusals", "reason", CounterMetricFamily, "refusals", "Requests refused by a worker")
        text = "Weighted tokens that a worker has served, by its share; those that had most"
        yield self._by("worker_tenant_service", "tenant", GaugeMetricFamily, "tenant_service", text)

    def _by(
        self,
        name: str,
        label: str,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        field: str,
        text: str,
    ) -> Metric:
        metric = family(f"headrace_{name}", text, labels=(*_LABELS, label))
        for answer in self._answers:
            for key, value in sorted(getattr(answer, field).items()):
                metric.add_metric((*self._labels(answer), key), float(value))
        return metric

    def _labels(self, answer: pb.WorkerStatusResponse) -> tuple[str, str, str]:
        return (self._model, answer.role, answer.worker_id)


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """As Prometheus has them: each counts all values up to its bound."""
    edges = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    return [(edge, float(count)) for edge, count in zip(edges, accumulate(counts), strict=True)]

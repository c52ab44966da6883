"""What the gateway knows beyond its doors, for Prometheus: where the time of requests went, what was decided about
them, and what tenants have had. No series of a worker: every gateway has those (`router.worker_metrics`).
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.core.decision import Decision
from router.core.flight import Flight
from router.gateway import Gateway

_RATIO = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 4, 10)
MAX_TENANTS = 32
_GAP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 30)


class FleetMetrics(Collector):
    """Registers itself; the gateway calls `ended` for each branch that ended in good order."""

    def __init__(self, gateway: Gateway, registry: CollectorRegistry) -> None:
        self._gateway = gateway
        self._model = gateway.spec.served_model_name
        self._stages = Counter(
            "headrace_stage_seconds",
            "Time of completed requests by stage; each ledger sums to its interval",
            ("model_name", "ledger", "stage"),
            registry=registry,
        )
        self._second_gap = Histogram(
            "headrace_second_token_gap_seconds",
            "First to second token: hand-off and decode queue show here",
            ("model_name",),
            registry=registry,
            buckets=_GAP_S,
        ).labels(self._model)
        self._regret = Histogram(
            "headrace_routing_regret_seconds",
            "Time to the first token beyond what the fastest plan was predicted to take",
            ("model_name",),
            registry=registry,
            buckets=_GAP_S,
        ).labels(self._model)
        self._promised = Histogram(
            "headrace_routing_promise_ratio",
            "Time to the first token as it was, by what the chosen plan was predicted to take",
            ("model_name",),
            registry=registry,
            buckets=_RATIO,
        ).labels(self._model)
        gateway.placing.on_first_token = self.first_token
        registry.register(self)

    def first_token(self, plan: Decision, realised_ms: float, regret_ms: float) -> None:
        """Of an attempt; `realised_ms` from when it was sent."""
        self._regret.observe(regret_ms / 1e3)
        if plan.predicted_ttft_ms > 0.0:
            self._promised.observe(realised_ms / plan.predicted_ttft_ms)

    def ended(self, flight: Flight) -> None:
        line = flight.timeline
        for ledger, stages in (("to_first_token", line.to_first_token()), ("to_end", line.to_end())):
            for stage, seconds in stages:
                self._stages.labels(self._model, ledger, stage).inc(max(seconds, 0.0))
        if line.first_token is not None and line.second_token is not None:
            self._second_gap.observe(line.second_token - line.first_token)

    def collect(self) -> Iterator[Metric]:
        gateway = self._gateway
        counters = gateway.counters
        outcomes = CounterMetricFamily("headrace_branches", "Branches by outcome", labels=("model_name", "outcome"))
        for outcome in ("accepted", "completed", "failed", "cancelled", "retries"):
            outcomes.add_metric((self._model, outcome), float(getattr(counters, outcome)))
        yield outcomes
        admissions = CounterMetricFamily(
            "headrace_admissions",
            "Choices by what admission decided and why",
            labels=("model_name", "action", "reason"),
        )
        for (action, reason), count in sorted(gateway.gate.decisions.items()):
            admissions.add_metric((self._model, action, reason), float(count))
        yield admissions
        index = gateway.router.index
        for name, text, value in (
            ("prefix_index_entries", "Pairs of a block and a worker that has it", index.entries),
            ("prefix_index_bytes", "Memory of the prefix index, estimated", index.memory_bytes),
        ):
            gauge = GaugeMetricFamily(f"headrace_{name}", text, labels=("model_name",))
            gauge.add_metric((self._model,), float(value))
            yield gauge
        plans = CounterMetricFamily(
            "headrace_routing_plans", "Plans by their kind and why", labels=("model_name", "kind", "reason")
        )
        for (kind, reason), count in sorted(gateway.placing.plans.items()):
            plans.add_metric((self._model, kind, reason), float(count))
        yield plans
        text = "Weighted tokens that a tenant has had of all workers, by its share; those that had most"
        service = GaugeMetricFamily("headrace_tenant_service", text, labels=("model_name", "tenant"))
        for tenant, tokens in gateway.gate.service.most_served(MAX_TENANTS).items():
            service.add_metric((self._model, tenant), tokens)
        yield service

"""What a worker's graphs did, at /metrics: by the rows of a graph, and by the reason for none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from headrace.v1 import worker_pb2 as pb
from router.worker_metrics import WorkerMetrics


def test_steps_of_graphs_are_told_by_their_rows_and_others_by_their_reason() -> None:
    gateway: Any = SimpleNamespace(spec=SimpleNamespace(served_model_name="m"), fleet=SimpleNamespace(loads=lambda: []))
    registry = CollectorRegistry()
    counters = {"graph_hits_8": 3.0, "graph_hits_16": 2.0, "graph_eager_prefill": 4.0, "graph_padding_rows": 5.0}
    metrics = WorkerMetrics(gateway, registry)
    metrics._answers = [pb.WorkerStatusResponse(worker_id="w", role="decode", counters=counters)]
    worker = {"model_name": "m", "pool": "decode", "worker": "w"}
    told = {
        name: registry.get_sample_value(name, worker | labels)
        for name, labels in (
            ("headrace_graph_steps_total", {"rows": "8"}),
            ("headrace_graph_eager_steps_total", {"reason": "prefill"}),
            ("headrace_graph_padding_rows_total", {}),
        )
    }
    assert list(told.values()) == [3.0, 4.0, 5.0]
    assert registry.get_sample_value("headrace_graph_steps_total", worker | {"rows": "16"}) == 2.0

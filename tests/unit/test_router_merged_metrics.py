"""One text of several gateways' metrics, read back by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.merged_metrics import merged


def text(accepted: int, *, with_tools: bool = False) -> str:
    """A gateway's: a counter, one without labels, and perhaps one that others do not have."""
    registry = CollectorRegistry()
    Counter("headrace_branches", "By outcome", ("outcome",), registry=registry).labels('odd "x}').inc(accepted)
    Counter("plain", "No labels", registry=registry).inc(accepted)
    if with_tools:
        Counter("headrace_tools", "Of one alone", ("tool",), registry=registry).labels("t").inc()
    return generate_latest(registry).decode()


def values(whole: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = list(text_string_to_metric_families(whole))
    assert len({family.name for family in families}) == len(families), "a family stands in two places"
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_gateways_series_stand_apart_and_one_that_did_not_answer_is_down() -> None:
    whole = merged({"gateway-1": text(3, with_tools=True), "gateway-0": text(5), "gateway-2": None})
    assert whole.count("# HELP plain_total ") == whole.count("# TYPE plain_total ") == 1
    assert values(whole) == {
        ("headrace_branches_total", (("gateway", "gateway-0"), ("outcome", 'odd "x}'))): 5.0,
        ("headrace_branches_total", (("gateway", "gateway-1"), ("outcome", 'odd "x}'))): 3.0,
        ("plain_total", (("gateway", "gateway-0"),)): 5.0,
        ("plain_total", (("gateway", "gateway-1"),)): 3.0,
        ("headrace_tools_total", (("gateway", "gateway-1"), ("tool", "t"))): 1.0,
        ("headrace_gateway_up", (("gateway", "gateway-0"),)): 1.0,
        ("headrace_gateway_up", (("gateway", "gateway-1"),)): 1.0,
        ("headrace_gateway_up", (("gateway", "gateway-2"),)): 0.0,
    }


def test_who_is_asked_changes_no_series() -> None:
    texts = {f"gateway-{i}": text(i, with_tools=i == 1) for i in range(3)}
    assert merged(texts) == merged(dict(reversed(texts.items())))

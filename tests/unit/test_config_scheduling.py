"""Every setting of a pool's scheduler from the file to the scheduler, in the units of each place."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import get_args

import pytest
import yaml

from cluster.config import ConfigError, Deployment, load_config, resolve
from cluster.config.scheduling import SchedulingConfig, ServiceWeightsConfig
from headrace.core.fairness import ServiceWeights
from headrace.errors import StartupError
from tests.unit.cluster_builders import GIB, machine, model
from workers.core.policies import POLICIES
from workers.core.settings import Batching, ChunkMode, SchedulerSettings
from workers.main import scheduler_settings
from workers.runner.fake import FakeRunner
from workers.spec import WorkerSpec

SCHEDULING = {
    "policy": "fair",
    "batching": "window",
    "batch_window_ms": 70,
    "chunk_mode": "bucketed",
    "itl_target_ms": 120.5,
    "itl_quantile": 0.9,
    "max_decode_rows": 7,
    "min_prefill_share": 0.25,
    "next_token_deadline_ms": 1500,
    "age_boost_ms_per_s": 110,
    "ttft_target_ms": 2500,
    "urgency_horizon_ms": 1250,
    "nearly_complete_boost_ms": 550,
    "class_weight_ms": 1100,
    "mlfq_quantum_tokens": 600,
    "fairness_weight_ms": 1.5,
    "lost_deadline": "best_effort",
    "min_progress_tokens": 17,
    "nearly_finished_bonus_ms": 650,
    "deadline_penalty_ms": 2100,
    "tenant_cache_share": 0.75,
    "overlap": "off",
    "service_weights": {"input_token": 1.5, "output_token": 2.5, "cached_token": 0.5, "kv_block_s": 0.25},
}
POOL = {
    "role": "colocated",
    "replicas": 2,
    "max_num_batched_tokens": 300,
    "max_num_seqs": 32,
    "long_prefill_token_threshold": 128,
    "max_waiting_requests": 50,
    "max_waiting_tokens": 7000,
    "max_queue_s": 4.5,
    "max_reserved_kv_tokens": 9000,
    "swap_bytes": "100MiB",
    "disk_cache_bytes": 77 * 232 + 5,
    "profile": "profiles/mine.json",
    "scheduling": SCHEDULING,
}
EXPECTED = SchedulerSettings(
    max_num_batched_tokens=300,
    max_num_seqs=32,
    long_prefill_token_threshold=128,
    block_size=16,
    max_waiting_requests=50,
    max_waiting_tokens=7000,
    watermark_blocks=2,
    max_model_len=8192,
    eos_token_ids=(2,),
    max_queue_s=4.5,
    max_reserved_kv_tokens=9000,
    batching="window",
    batch_window_s=0.07,
    policy="fair",
    chunk_mode="bucketed",
    itl_target_s=0.1205,
    itl_quantile=0.9,
    max_decode_rows=7,
    min_prefill_share=0.25,
    next_token_deadline_s=1.5,
    age_boost_ms_per_s=110,
    ttft_target_s=2.5,
    urgency_horizon_s=1.25,
    nearly_complete_boost_ms=550,
    class_weight_ms=1100,
    mlfq_quantum_tokens=600,
    fairness_weight_ms=1.5,
    lost_deadline="best_effort",
    host_blocks=142,
    host_copy_block_s=0.5,
    disk_blocks=77,
    min_progress_tokens=17,
    nearly_finished_bonus_ms=650,
    deadline_penalty_ms=2100,
    tenant_cache_share=0.75,
    route_when_preempted=True,
)


def deploy(tmp_path: Path, available_bytes: int = 22 * GIB, **config: object) -> Deployment:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(config))
    return resolve(load_config(str(file)), model(), machine(available_bytes=available_bytes), lambda: "s")


def settings_of(spec: WorkerSpec) -> SchedulerSettings:
    runner = FakeRunner(host_blocks=spec.swap_bytes // (46_080 * spec.block_size))
    runner.host_copy_block_s = 0.5
    return scheduler_settings(WorkerSpec.model_validate_json(spec.model_dump_json()), runner)


def test_every_setting_reaches_the_scheduler_in_its_units(tmp_path: Path) -> None:
    assert {field.name for field in fields(SchedulerSettings)} == set(asdict(EXPECTED))
    defaults = {f.name: f.default for f in fields(SchedulerSettings) if f.default is not MISSING}
    assert [name for name, default in defaults.items() if getattr(EXPECTED, name) == default] == []
    assert SCHEDULING.keys() == SchedulingConfig.model_fields.keys()
    assert not SCHEDULING.items() & SchedulingConfig().model_dump(exclude={"service_weights"}).items()
    spec = deploy(tmp_path, pools=[POOL]).workers[1]
    assert settings_of(spec) == EXPECTED
    assert spec.profile_path == str(Path("profiles/mine.json").absolute())
    assert spec.overlap == "off"


def test_defaults_are_the_schedulers_own(tmp_path: Path) -> None:
    spec = deploy(tmp_path, pools=[{"role": "colocated", "swap_bytes": 0, "profile": "none"}]).workers[0]
    settings = settings_of(spec)
    for setting in fields(SchedulerSettings):
        if setting.default is not MISSING and setting.name != "host_copy_block_s":
            assert getattr(settings, setting.name) == setting.default, setting.name
    assert spec.service == ServiceWeights()
    assert ServiceWeightsConfig().model_dump().items() <= asdict(ServiceWeights()).items()
    assert spec.profile_path == "none"


def test_names_that_may_be_written_are_those_that_the_scheduler_knows() -> None:
    written = {name: get_args(SchedulingConfig.model_fields[name].annotation) for name in ("policy", "batching")}
    assert set(written["policy"]) == POLICIES.keys()
    assert set(written["batching"]) == set(Batching)
    assert set(get_args(SchedulingConfig.model_fields["chunk_mode"].annotation)) == set(ChunkMode)


def test_every_pool_has_its_own_scheduler(tmp_path: Path) -> None:
    pools = [
        {"role": "prefill", "scheduling": {"policy": "deadline", "chunk_mode": "fixed"}},
        {"role": "decode", "replicas": 2, "scheduling": {"policy": "fcfs", "itl_target_ms": 80}, "swap_bytes": 0},
    ]
    prefill, decode, _ = (settings_of(spec) for spec in deploy(tmp_path, pools=pools).workers)
    assert (prefill.policy, prefill.chunk_mode, prefill.itl_target_s) == ("deadline", "fixed", 0.0)
    assert (decode.policy, decode.chunk_mode, decode.itl_target_s) == ("fcfs", "adaptive", 0.08)
    # Only where another worker of the pool could take it is a victim sent away.
    assert (prefill.route_when_preempted, decode.route_when_preempted) == (False, True)
    assert (prefill.host_blocks > 0, decode.host_blocks) == (True, 0)


def test_weights_of_service_and_shares_of_tenants_are_the_same_at_gateway_and_workers(tmp_path: Path) -> None:
    tenants = {"default": {"weight": 0.5}, "big": {"weight": 4}, "plain": {}}
    pools = [{"role": role, "scheduling": {"service_weights": {"cached_token": 0.3}}} for role in ("prefill", "decode")]
    deployment = deploy(tmp_path, gateway={"tenants": tenants}, pools=pools)
    expected = ServiceWeights(cached_token=0.3, tenants={"big": 4.0, "plain": 1.0}, default_tenant=0.5)
    for spec in (*deployment.gateways, *deployment.workers):
        assert type(spec).model_validate_json(spec.model_dump_json()).service == expected
    del pools[1]["scheduling"]
    with pytest.raises(ConfigError, match="service_weights must be the same everywhere"):
        deploy(tmp_path, pools=pools)


def test_host_blocks_take_a_quarter_of_the_pool_and_give_way_where_memory_is_short(tmp_path: Path) -> None:
    block = 46_080 * 16
    pool = {"role": "colocated", "kv_cache_bytes": "1GiB"}
    roomy = deploy(tmp_path, pools=[pool]).workers[0]
    assert roomy.swap_bytes == roomy.kv_cache_bytes // 4 // block * block
    # 513 MiB of weights, 384 MiB beside them, 1 GiB of KV: of 2 GiB, 127 MiB are left.
    short = deploy(tmp_path, available_bytes=2 * GIB, pools=[pool]).workers[0]
    assert 0 < short.swap_bytes < 128 << 20
    with pytest.raises(StartupError) as caught:
        deploy(tmp_path, available_bytes=2 * GIB, pools=[pool | {"swap_bytes": "256MiB"}])
    assert str(caught.value) == (
        "not enough memory: 1 worker(s) need 2.1 GiB (KV 1023.8 MiB, host KV 255.9 MiB, weights 513.1 MiB each), "
        "2.0 GiB available; lower kv_cache_bytes, swap_bytes or the number of workers"
    )


@pytest.mark.parametrize(("written", "meant"), [("on", "on"), ("off", "off"), ("'on'", "on"), ("auto", "auto")])
def test_overlap_is_on_or_off_with_or_without_quotes(tmp_path: Path, written: str, meant: str) -> None:
    """YAML takes a bare `on` for a truth value."""
    file = tmp_path / "c.yaml"
    file.write_text(f"pools: [{{role: colocated, scheduling: {{overlap: {written}}}}}]\n")
    assert load_config(str(file)).pools[0].scheduling.overlap == meant


def test_flags_reach_every_pool_and_leave_its_other_settings(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    pools = [{"role": "prefill", "scheduling": {"ttft_target_ms": 5}}, {"role": "decode"}]
    file.write_text(yaml.safe_dump({"pools": pools}))
    config = load_config(str(file), pool_overrides={"scheduling.policy": "fair", "scheduling.itl_target_ms": 90.0})
    assert [pool.scheduling.policy for pool in config.pools] == ["fair", "fair"]
    assert [pool.scheduling.itl_target_ms for pool in config.pools] == [90.0, 90.0]
    assert [pool.scheduling.ttft_target_ms for pool in config.pools] == [5, 2000.0]
    with pytest.raises(ConfigError, match=r"^options: pools\.0\.scheduling\.policy: must be one of 'fcfs'"):
        load_config("m", pool_overrides={"scheduling.policy": "best"})


@pytest.mark.parametrize(
    ("pool", "fault"),
    [
        ({"max_waiting_requests": 0}, "max_waiting_requests: must be at least 1"),
        ({"max_queue_s": 0}, "max_queue_s: must be above 0"),
        ({"max_reserved_kv_tokens": 0}, "max_reserved_kv_tokens: must be at least 1"),
        ({"swap_bytes": "1 XB"}, "swap_bytes: must be a number of bytes or a size such as 512MiB"),
        ({"profile": ""}, "profile: must have at least 1 character(s)"),
        ({"scheduling": {"polcy": "fcfs"}}, "scheduling.polcy: unknown field; did you mean 'policy'?"),
        ({"scheduling": {"policy": "best"}}, "scheduling.policy: must be one of 'fcfs', 'decode_first'"),
        (
            {"scheduling": {"batching": "none"}},
            "scheduling.batching: must be one of 'continuous'",
        ),
        (
            {"scheduling": {"chunk_mode": "x"}},
            "scheduling.chunk_mode: must be one of 'fixed'",
        ),
        ({"scheduling": {"batch_window_ms": -1}}, "scheduling.batch_window_ms: must be at least 0"),
        ({"scheduling": {"itl_target_ms": "5"}}, "scheduling.itl_target_ms: must be a finite number"),
        ({"scheduling": {"itl_quantile": 1}}, "scheduling.itl_quantile: must be below 1"),
        ({"scheduling": {"min_prefill_share": 1.5}}, "scheduling.min_prefill_share: must be at most 1"),
        ({"scheduling": {"mlfq_quantum_tokens": 0}}, "scheduling.mlfq_quantum_tokens: must be at least 1"),
        (
            {"scheduling": {"lost_deadline": "wait"}},
            "scheduling.lost_deadline: must be one of 'reject'",
        ),
        ({"scheduling": {"max_decode_rows": 65}}, "scheduling.max_decode_rows 65 is above max_num_seqs 64"),
        (
            {"scheduling": {"service_weights": {"input_token": -1}}},
            "scheduling.service_weights.input_token: must be at least 0",
        ),
    ],
)
def test_a_bad_value_names_its_field_and_limit(pool: dict[str, object], fault: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"pools": [{"role": "colocated"} | pool]}))
    with pytest.raises(ConfigError) as caught:
        load_config(str(file))
    (line,) = caught.value.lines
    said = line.removeprefix(f"{file}: pools.0")
    assert said[1:].lstrip().startswith(fault), line


def test_whatever_the_limits_let_through_makes_a_scheduler(tmp_path: Path) -> None:
    """The two places that check must agree: a file that is accepted never fails at a worker's start."""
    extremes = [
        {"itl_quantile": 0.001, "min_prefill_share": 0, "mlfq_quantum_tokens": 1, "max_decode_rows": 64},
        {"itl_quantile": 0.999, "min_prefill_share": 1, "batch_window_ms": 0, "min_progress_tokens": 0},
    ]
    for scheduling in extremes:
        spec = deploy(tmp_path, pools=[{"role": "colocated", "scheduling": scheduling}]).workers[0]
        assert settings_of(spec).itl_quantile == scheduling["itl_quantile"]

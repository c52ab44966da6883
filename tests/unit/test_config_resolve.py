"""Every `auto` becomes one number, on purpose; what does not fit is refused with the numbers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ConfigError, Deployment, load_config, masked_yaml, read_model_facts, resolve
from headrace.errors import StartupError
from headrace.ids import counting_ids
from router.spec import EndpointSpec, FallbackSpec, GatewaySpec
from tests.unit.cluster_builders import GIB, machine, model, model_folder
from workers.model.weight_format import WeightFormat
from workers.spec import WorkerSpec


def deploy(
    flags: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    *,
    cores: int = 2,
    available_bytes: int = 22 * GIB,
    facts: Any = None,
    **replicas: int,
) -> Deployment:
    config = load_config("org/model", flags, pool_overrides=pool, replicas=replicas)
    new_id = counting_ids()
    return resolve(config, facts or model(), machine(cores, available_bytes), lambda: new_id("secret"))


@pytest.mark.parametrize(
    ("cores", "replicas", "threads"),
    [
        (2, {"prefill": 1, "decode": 1}, [1, 1]),
        (2, {"colocated": 1}, [2]),
        (2, {"prefill": 2, "decode": 2}, [1, 1, 1, 1]),
        (8, {"prefill": 1, "decode": 2}, [2, 2, 2]),
        (1, {"prefill": 1, "decode": 1}, [1, 1]),
    ],
)
def test_cores_are_divided_between_the_workers(cores: int, replicas: dict[str, int], threads: list[int]) -> None:
    assert [worker.threads for worker in deploy(cores=cores, **replicas).workers] == threads


def test_explicit_threads_leave_the_rest_to_the_other_pools(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("pools: [{role: prefill, threads: 6}, {role: decode}]")
    deployment = resolve(load_config(str(file)), model(), machine(cores=8), lambda: "s")
    assert [worker.threads for worker in deployment.workers] == [6, 2]


def test_one_gateway_is_at_the_clients_ports() -> None:
    (gateway,) = deploy().gateways
    assert (gateway.gateway_id, gateway.grpc_port, gateway.http_port) == ("gateway-0", 50_051, 8000)
    assert gateway.shared_grpc_port is gateway.shared_http_port is None


def test_several_gateways_share_the_clients_ports_and_differ_in_names_and_own_ports() -> None:
    gateways = deploy({"gateway.replicas": 3, "gateway.grpc_port": 7000, "gateway.http_port": 7100}).gateways
    assert [(each.gateway_id, each.grpc_port, each.http_port) for each in gateways] == [
        ("gateway-0", 7001, 7101),
        ("gateway-1", 7002, 7102),
        ("gateway-2", 7003, 7103),
    ]
    alike = [each.model_copy(update={"gateway_id": "", "grpc_port": 0, "http_port": 0}) for each in gateways]
    assert alike[0] == alike[1] == alike[2]
    assert {(each.shared_grpc_port, each.shared_http_port) for each in gateways} == {(7000, 7100)}


def test_any_free_port_for_several_gateways_is_any_free_port_for_each() -> None:
    flags = {"gateway.replicas": 2, "gateway.grpc_port": 0, "gateway.http_port": 0}
    assert {(each.grpc_port, each.shared_grpc_port) for each in deploy(flags).gateways} == {(0, 0)}


def test_workers_have_stable_names_and_one_secret() -> None:
    deployment = deploy(prefill=2, decode=1)
    assert [worker.worker_id for worker in deployment.workers] == ["prefill-0", "prefill-1", "decode-0"]
    tokens = {deployment.gateways[0].cluster_token, *(worker.cluster_token for worker in deployment.workers)}
    assert tokens == {"secret-1"}
    assert deployment.gateways[0].served_model_name == "model"


@pytest.mark.parametrize("exact", [True, False])
def test_the_gateway_holds_workers_to_what_they_promise(exact: bool) -> None:
    deployment = deploy({"exact": exact})
    assert {spec.exact for spec in (*deployment.workers, *deployment.gateways)} == {exact}


def test_the_automatic_kv_pool_is_a_gibibyte_or_a_tenth_of_the_memory_in_whole_blocks() -> None:
    block = 46_080 * 16
    assert deploy(colocated=1).workers[0].kv_cache_bytes == GIB // block * block
    small = deploy(colocated=1, available_bytes=4 * GIB).workers[0]
    assert small.kv_cache_bytes == int(0.1 * 4 * GIB) // block * block
    share = deploy(pool={"kv_cache_fraction": 0.2}, colocated=1).workers[0]
    assert share.kv_cache_bytes == int(0.2 * 22 * GIB) // block * block


def test_max_model_len_is_the_models_or_what_the_smallest_pool_holds() -> None:
    assert deploy().gateways[0].max_model_len == 8192
    assert deploy(pool={"kv_cache_bytes": "46080000"}).gateways[0].max_model_len == 992  # 62 whole blocks of 16
    # an explicit length raises the automatic pool
    long = model(max_position_embeddings=131_072)
    deployment = deploy({"model.max_model_len": 40_000}, facts=long, colocated=1)
    assert deployment.gateways[0].max_model_len == 40_000
    assert deployment.workers[0].kv_cache_bytes == 40_000 * 46_080


@pytest.mark.parametrize(
    ("flags", "pool", "fault"),
    [
        ({"model.max_model_len": 9000}, {}, "model.max_model_len: must be at most the model's own limit, 8192"),
        (
            {"model.max_model_len": 4096},
            {"kv_cache_bytes": "100MiB"},
            "pools.0.kv_cache_bytes: holds 2272 tokens, below max_model_len 4096; must be at least 180.0 MiB",
        ),
        ({}, {"kv_cache_bytes": "1MiB"}, "pools.0.kv_cache_bytes: must be at least two blocks of this model, 1.4 MiB"),
    ],
)
def test_what_does_not_fit_the_model_names_the_limit(flags: dict[str, Any], pool: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deploy(flags, pool)
    assert caught.value.lines == (fault,)


def test_too_little_memory_is_one_line_with_the_sums() -> None:
    with pytest.raises(StartupError) as caught:
        deploy(pool={"kv_cache_bytes": "1GiB"}, available_bytes=3 * GIB)
    assert str(caught.value) == (
        "not enough memory: 2 worker(s) need 3.8 GiB (KV 2.0 GiB, weights 513.1 MiB each), 3.0 GiB available; "
        "lower kv_cache_bytes or the number of workers"
    )


@pytest.mark.parametrize(
    ("pool", "available_gib", "marks"),
    [
        ({}, 64, (512 << 20, 256 << 20)),
        ({}, 4, (int(0.03 * 4 * GIB), int(0.03 * 4 * GIB) // 2)),
        ({"low_memory_bytes": 0}, 64, (0, 0)),
        ({"low_memory_bytes": "100MiB"}, 64, (100 << 20, 50 << 20)),
        ({"critical_memory_bytes": "1GiB"}, 64, (2 << 30, 1 << 30)),
        ({"low_memory_bytes": "2GiB", "critical_memory_bytes": 0}, 64, (2 << 30, 0)),
    ],
)
def test_memory_marks_follow_the_machine_or_are_as_they_were_written(
    pool: dict[str, Any], available_gib: int, marks: tuple[int, int]
) -> None:
    for worker in deploy(pool=pool, available_bytes=available_gib * GIB).workers:
        assert (worker.low_memory_bytes, worker.critical_memory_bytes) == marks


def test_a_critical_mark_above_the_low_one_is_refused_with_both() -> None:
    with pytest.raises(ConfigError, match="critical_memory_bytes 3000 is above low_memory_bytes 2000"):
        deploy(pool={"low_memory_bytes": 2000, "critical_memory_bytes": 3000})


def test_the_event_log_is_off_by_default_and_reaches_every_worker_with_a_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {worker.event_log_path for worker in deploy().workers} == {""}
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "c.yaml"
    file.write_text("events: {path: logs, sample_rate: 0.25, max_bytes: 1MiB, max_files: 2}")
    workers = resolve(load_config(str(file)), model(), machine(), lambda: "s").workers
    assert len(workers) == 2
    for worker in workers:
        assert worker.event_log_path == str(tmp_path / "logs")
        assert (worker.event_log_sample_rate, worker.event_log_max_bytes, worker.event_log_max_files) == (
            0.25,
            1 << 20,
            2,
        )


def test_limits_of_tenants_reach_the_gateway_and_an_automatic_bucket_holds_ten_seconds(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "gateway:\n"
        "  limits: {max_waiting_tokens: 900, max_queue_s: 2.5, refuse_lost_deadlines: true}\n"
        "  tenants:\n"
        "    default: {max_concurrent_requests: 3, max_live_kv_bytes: 1MiB}\n"
        "    big: {weight: 4.0, tokens_per_s: 12.5}\n"
        "    small: {tokens_per_s: 1.0, burst_tokens: 7}\n"
    )
    gateway = resolve(load_config(str(file)), model(), machine(), lambda: "s").gateways[0]
    assert (gateway.max_waiting_tokens, gateway.max_queue_s, gateway.refuse_lost_deadlines) == (900, 2.5, True)
    assert gateway.kv_bytes_per_token == model().kv_bytes_per_token
    assert gateway.tenants["default"].max_live_kv_bytes == 1 << 20
    assert (gateway.service.tenants, gateway.tenants["big"].burst_tokens) == ({"big": 4.0, "small": 1.0}, 125)
    assert gateway.tenants["small"].burst_tokens == 7
    assert GatewaySpec.model_validate_json(gateway.model_dump_json()) == gateway


def test_caps_of_endpoints_reach_the_gateway_and_default_holds_for_the_others(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "gateway:\n  endpoints:\n    default: {max_context_tokens: 4096}\n    chat: {max_uncached_tokens: 900}\n"
    )
    gateway = resolve(load_config(str(file)), model(), machine(), lambda: "s").gateways[0]
    assert gateway.endpoint("completions") == EndpointSpec(max_context_tokens=4096)
    assert gateway.endpoint("chat") == EndpointSpec(max_uncached_tokens=900)
    assert deploy().gateways[0].endpoint("chat") == EndpointSpec()


def test_a_fallback_reaches_the_gateway_and_its_key_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "gateway:\n"
        "  limits: {refuse_lost_deadlines: true}\n"
        "  degradation:\n"
        "    lost_deadline: fallback\n"
        "    fallback: {url: 'http://there:8000/v1/', api_key: geheim}\n"
    )
    deployment = resolve(load_config(str(file)), model(), machine(), lambda: "s")
    degradation = deployment.gateways[0].degradation
    assert degradation.fallback == FallbackSpec(url="http://there:8000/v1", api_key="geheim")
    assert degradation.routed == {"deadline_lost"}
    assert "geheim" not in masked_yaml(deployment) and "there:8000" in masked_yaml(deployment)
    assert GatewaySpec.model_validate_json(deployment.gateways[0].model_dump_json()) == deployment.gateways[0]


def test_what_becomes_of_failed_hand_offs_reaches_every_gateway() -> None:
    assert deploy().gateways[0].on_transfer_failure == "auto"
    told = deploy({"kv_transfer.on_failure": "local_recompute", "gateway.replicas": 2})
    assert [gateway.on_transfer_failure for gateway in told.gateways] == ["local_recompute"] * 2
    with pytest.raises(ConfigError, match="on_failure"):
        deploy({"kv_transfer.on_failure": "hope"})


def test_without_a_word_nobody_is_limited_but_by_the_number_of_live_requests() -> None:
    gateway = deploy().gateways[0]
    assert gateway.tenants == {} and gateway.max_live_requests == 1024 and not gateway.refuse_lost_deadlines
    assert gateway.max_waiting_requests is gateway.max_waiting_tokens is gateway.max_queue_s is None


def test_what_is_shown_has_no_secret() -> None:
    deployment = deploy({"gateway.api_keys": ["alice=geheim"], "cluster.token": "geheim-geheim-geheim"})
    text = masked_yaml(deployment)
    assert "geheim" not in text
    assert "threads: 1" in text and "max_model_len: 8192" in text


def test_facts_come_from_the_headers(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    facts = read_model_facts(folder, WeightFormat.AUTO)
    # 2 layers x 2 KV heads x 16 x (key, value) x 4 bytes; one 4x4 tensor
    assert (facts.kv_bytes_per_token, facts.weight_bytes, facts.max_position_embeddings) == (512, 64, 128)
    for weight_format, size in ((WeightFormat.FLOAT16, 32), (WeightFormat.INT8, 16 + 4 * 4)):
        assert read_model_facts(folder, weight_format).weight_bytes == size


@pytest.mark.parametrize(
    ("flags", "weight_format", "told"),
    [
        ({}, "auto", ""),
        ({"model.dtype": "float32"}, "float32", "float32"),
        ({"model.dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"model.quantization": "int8"}, "int8", "int8"),
        ({"model.quantization": "int8", "model.dtype": "auto"}, "int8", "int8"),
    ],
)
def test_one_format_of_the_weights_for_all_workers(flags: dict[str, Any], weight_format: str, told: str) -> None:
    deployment = deploy(flags)
    assert {worker.weight_format for worker in deployment.workers} == {WeightFormat(weight_format)}
    assert deployment.gateways[0].dtype == told
    assert f"weight_format: {weight_format}" in masked_yaml(deployment)
    assert WorkerSpec.model_validate_json(deployment.workers[0].model_dump_json()) == deployment.workers[0]


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json: must hold a JSON object"),
        (
            lambda f: (f / "config.json").write_text(json.dumps({"hidden_size": 8})),
            "not the configuration of a decoder",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: weights are missing"),
        (_cut, "model.safetensors: truncated (136 bytes, tensor 'w' ends at 137)"),
        (lambda f: (f / "model.safetensors").write_bytes(b"GGUF"), "not a safetensors file, or truncated"),
        (
            lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62)),
            "not a safetensors file, or truncated",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"), "corrupt safetensors header"),
    ],
)
def test_a_broken_model_folder_is_one_line(tmp_path: Path, spoil: Any, said: str) -> None:
    folder = model_folder(tmp_path)
    spoil(folder)
    with pytest.raises(StartupError) as caught:
        read_model_facts(folder, WeightFormat.AUTO)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)

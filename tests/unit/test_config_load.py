"""Configuration files and flags: what is accepted, and what every fault says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ConfigError, load_config
from cluster.config.units import format_bytes, parse_bytes

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"

FAULTS = [
    ("gatway: {}", "gatway: unknown field; did you mean 'gateway'?"),
    ("pools: [{role: colocated, replica: 2}]", "pools.0.replica: unknown field; did you mean 'replicas'?"),
    ("cluster: {zzz: 1}", "cluster.zzz: unknown field; known are backend, address, token,"),
    ("pools: [{role: colocated, replicas: 0}]", "pools.0.replicas: must be at least 1"),
    ("pools: [{role: colocated, replicas: 257}]", "pools.0.replicas: must be at most 256"),
    ("pools: [{role: colocated, replicas: true}]", "pools.0.replicas: must be an integer"),
    ("pools: [{role: colocated, replicas: '2'}]", "pools.0.replicas: must be an integer"),
    ("pools: [{role: colocated, threads: 1.5}]", "pools.0.threads: must be an integer"),
    ("pools: [{role: decoder}]", "pools.0.role: must be one of 'prefill', 'decode' or 'colocated'"),
    ("pools: [{replicas: 1}]", "pools.0.role: is required"),
    ("pools: []", "pools: must have at least 1 entry"),
    ("pools: 3", "pools: must be a list"),
    ("pools: [{role: prefill}]", "pools: a prefill pool needs a decode pool"),
    ("pools: [{role: decode}]", "pools: a decode pool needs a prefill pool"),
    (
        "pools: [{role: prefill, block_size: 32}, {role: decode}]",
        "pools: block_size must be the same everywhere; KV blocks move between pools unchanged",
    ),
    ("pools: [{role: colocated, block_size: 17}]", "pools.0.block_size: must be one of 8, 16, 32, 64 or 128"),
    (
        "pools: [{role: colocated, kv_cache_bytes: 12QB}]",
        "pools.0.kv_cache_bytes: must be a number of bytes or a size such as 512MiB",
    ),
    ("pools: [{role: colocated, kv_cache_fraction: 1.5}]", "pools.0.kv_cache_fraction: must be at most 0.9"),
    (
        "pools: [{role: colocated, kv_cache_bytes: 1GiB, kv_cache_fraction: 0.1}]",
        "pools.0: kv_cache_bytes and kv_cache_fraction exclude each other",
    ),
    (
        "pools: [{role: colocated, max_num_seqs: 64, max_num_batched_tokens: 32}]",
        "pools.0: max_num_seqs 64 is above max_num_batched_tokens 32; a step has at least one token a sequence",
    ),
    ("model: {path: ''}", "model.path: must have at least 1 character(s)"),
    ("model: {dtype: half}", "model.dtype: must be one of 'auto', 'float32', 'float16' or 'bfloat16'"),
    ("model: {quantization: int4}", "model.quantization: must be one of 'none' or 'int8'"),
    (
        "model: {quantization: int8, dtype: float16}",
        "model: quantization int8 and dtype float16 exclude each other; leave one out",
    ),
    ("model: {max_model_len: 0}", "model.max_model_len: must be at least 1"),
    ("model: [x]", "model: must be a mapping"),
    ("events: {path: ''}", "events.path: must have at least 1 character(s)"),
    ("events: {sample_rate: 1.5}", "events.sample_rate: must be at most 1"),
    ("events: {max_bytes: 1KiB}", "events.max_bytes: must be at least 65536"),
    ("events: {max_files: 0}", "events.max_files: must be at least 1"),
    ("events: {file: x}", "events.file: unknown field; "),
    ("gateway: {http_port: 70000}", "gateway.http_port: must be at most 65535"),
    ("gateway: {http_port: 9, grpc_port: 9}", "gateway: grpc_port and http_port are both 9; they must differ"),
    ("gateway: {replicas: 0}", "gateway.replicas: must be at least 1"),
    ("gateway: {replicas: -1}", "gateway.replicas: must be at least 1"),
    ("gateway: {replicas: 1000}", "gateway.replicas: must be at most 64"),
    ("gateway: {replicas: two}", "gateway.replicas: must be an integer"),
    (
        "gateway: {replicas: 4, http_port: 8000, grpc_port: 8004}",
        "gateway: grpc_port 8004 and http_port 8000 must be more than 4 apart: each gateway has ports of its own",
    ),
    (
        "gateway: {replicas: 2, http_port: 65534}",
        "gateway: http_port 65534: with 2 gateways it must be at most 65533, for their own ports",
    ),
    ("gateway: {api_keys: x}", "gateway.api_keys: must be a list"),
    ("gateway: {api_keys: [a, a]}", "gateway.api_keys: the same key is listed twice"),
    ("gateway: {api_keys: ['']}", "gateway.api_keys: a key must be printable"),
    ("gateway: {api_keys: ['=a']}", "gateway.api_keys: write KEY or TENANT=KEY"),
    ("gateway: {mode: fast}", "gateway.mode: must be one of 'auto', 'disaggregated' or 'colocated'"),
    (
        "gateway: {mode: disaggregated}\npools: [{role: colocated}]",
        "gateway.mode: disaggregated needs a prefill and a decode pool",
    ),
    ("gateway: {limits: {max_n: 5000}}", "gateway.limits.max_n: must be at most 1024"),
    ("gateway: {limits: {max_nn: 5}}", "gateway.limits.max_nn: unknown field; did you mean 'max_n'?"),
    ("gateway: {limits: {output_quantile: 1.0}}", "gateway.limits.output_quantile: "),
    ("gateway: {tenants: [a]}", "gateway.tenants: must be a mapping"),
    ("gateway: {tenants: {a b: {}}}", "gateway.tenants.a b: must have 1 to 64 letters"),
    (
        "gateway: {tenants: {weight: {wieght: 2}}}",
        "gateway.tenants.weight.wieght: unknown field; did you mean 'weight'?",
    ),
    ("gateway: {endpoints: {chat: {max_context_tokens: 1}}}", "gateway.endpoints.chat.max_context_tokens: must be at"),
    ("gateway: {endpoints: {chat: {max_uncached_tokens: 0}}}", "gateway.endpoints.chat.max_uncached_tokens: must be"),
    ("gateway: {endpoints: {chat: {max_tokens: 5}}}", "gateway.endpoints.chat.max_tokens: unknown field; "),
    ("gateway: {endpoints: {talk: {}}}", "gateway.endpoints.talk: must be one of 'chat', 'completions', 'generate' or"),
    ("gateway: {degradation: {overload: fallback}}", "gateway.degradation: overload: fallback needs a fallback to be"),
    (
        "gateway: {degradation: {fallback: {url: 'http://there/v1'}}}",
        "gateway.degradation: fallback: nothing is sent there; set lost_deadline or overload to fallback",
    ),
    (
        "gateway: {degradation: {overload: fallback, fallback: {url: there/v1}}}",
        "gateway.degradation.fallback.url: must be http:// or https://, a host, a port of 1..65535 if any, and a path",
    ),
    (
        'gateway: {degradation: {overload: fallback, fallback: {url: "http://there/v1", model: "a\\nb"}}}',
        "gateway.degradation.fallback.model: must be printable ASCII",
    ),
    (
        "gateway: {degradation: {overload: fallback, fallback: {url: 'http://there/v1', max_requests: 0}}}",
        "gateway.degradation.fallback.max_requests: must be at least 1",
    ),
    (
        "gateway: {degradation: {lost_deadline: best_effort}}",
        "gateway: degradation.lost_deadline: best_effort needs limits.refuse_lost_deadlines: true",
    ),
    ("gateway: {degradation: {overload: best_effort}}", "gateway.degradation.overload: must be one of 'reject' or"),
    ("gateway: {tenants: {a: {weight: 0}}}", "gateway.tenants.a.weight: must be above 0"),
    ("gateway: {tenants: {a: {burst_tokens: 5}}}", "gateway.tenants.a: burst_tokens needs tokens_per_s"),
    ("kv_transfer: {read_timeout_s: .inf}", "kv_transfer.read_timeout_s: must be a finite number"),
    ("kv_transfer: {read_timeout_s: 0}", "kv_transfer.read_timeout_s: must be above 0"),
    ("cluster: {token: short}", "cluster.token: "),
    ("cluster: {backend: process, address: auto}", "cluster: address names a Ray cluster and needs backend: ray"),
    ("exact: 1", "exact: must be true or false"),
    ("exact: true\nexact: false", "line 2, column 1: 'exact' is given twice"),
    ("a: [", "line 1, column 5: "),
    ("- 1", "must be a mapping with the keys model, gateway"),
]


def faults_of(tmp_path: Path, text: str) -> tuple[str, ...]:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(file))
    return tuple(line.removeprefix(f"{file}: ") for line in caught.value.lines)


@pytest.mark.parametrize(("text", "fault"), FAULTS)
def test_each_fault_is_one_line_with_field_and_limit(tmp_path: Path, text: str, fault: str) -> None:
    lines = faults_of(tmp_path, text)
    assert len(lines) == 1
    assert lines[0].startswith(fault)
    assert "\n" not in lines[0]


@pytest.mark.parametrize(
    "url",
    [
        "http:///v1",
        "http://:80/v1",
        "http://host:abc/v1",
        "http://host:0/v1",
        "http://host:99999/v1",
        "http://[::1/v1",
        "http://[zz]/v1",
        "http://host\n/v1",
        "http://host/v1\n",
        "http://ho\tst/v1",
        "http://host/v 1",
        "http://user:geheim@host/v1",
        "ftp://host/v1",
    ],
)
def test_an_address_that_no_request_could_be_sent_to_is_a_fault_of_the_file(tmp_path: Path, url: str) -> None:
    text = f"gateway: {{degradation: {{overload: fallback, fallback: {{url: {json.dumps(url)}}}}}}}"
    [line] = faults_of(tmp_path, text)
    assert line.startswith("gateway.degradation.fallback.url: must be http:// or https://, a host, a port of 1..65535")
    assert "geheim" not in line


@pytest.mark.parametrize(
    "url", ["http://host/v1", "https://host:8000/v1/", "http://[::1]:80/v1", "http://10.0.0.1/a/v1"]
)
def test_an_address_with_or_without_a_port_is_taken(tmp_path: Path, url: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"gateway: {{degradation: {{overload: fallback, fallback: {{url: '{url}', api_key: 'a b=+/'}}}}}}")
    there = load_config(str(file)).gateway.degradation.fallback
    assert there is not None and there.url == url


@pytest.mark.parametrize("key", ["geheim\n", "ge\theim", "geheim ", "gehèim", "geheim\x7f"])
def test_a_key_that_no_header_can_carry_is_told_and_not_shown(tmp_path: Path, key: str) -> None:
    there = json.dumps({"url": "http://host/v1", "api_key": key})
    lines = faults_of(tmp_path, f"gateway: {{degradation: {{overload: fallback, fallback: {there}}}}}")
    assert lines == ("gateway.degradation.fallback.api_key: must be printable ASCII, without spaces around it",)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    lines = faults_of(tmp_path, "exact: 1\ngateway: {mode: x, http_port: -1}\n")
    assert [line.split(":")[0] for line in lines] == ["gateway.http_port", "gateway.mode", "exact"]


def test_a_secret_is_never_echoed(tmp_path: Path) -> None:
    lines = faults_of(tmp_path, "gateway: {api_keys: ['geheim ', x]}\ncluster: {token: geheim}")
    assert not any("geheim" in line for line in lines)


def test_a_missing_file_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^nowhere\.yaml: no such file$"):
        load_config("nowhere.yaml")


@pytest.mark.parametrize("name", ["quickstart", "colocated", "2p2d"])
def test_the_shipped_configurations_are_valid(name: str) -> None:
    config = load_config(str(CONFIGS / f"{name}.yaml"))
    roles = [(pool.role, pool.replicas) for pool in config.pools]
    assert (
        roles
        == {
            "quickstart": [("prefill", 1), ("decode", 1)],
            "colocated": [("colocated", 1)],
            "2p2d": [("prefill", 2), ("decode", 2)],
        }[name]
    )


def test_without_a_source_the_default_model_is_served_by_one_prefill_and_one_decode_worker() -> None:
    config = load_config()
    assert config.model.path == "smollm2-135m-instruct"
    assert [(pool.role, pool.replicas) for pool in config.pools] == [("prefill", 1), ("decode", 1)]


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ({"prefill": 2}, [("prefill", 2), ("decode", 1)]),
        ({"decode": 3, "prefill": 2}, [("prefill", 2), ("decode", 3)]),
        ({"colocated": 2}, [("colocated", 2)]),
        ({"colocated": 1, "prefill": 1, "decode": 1}, [("prefill", 1), ("decode", 1), ("colocated", 1)]),
        ({"prefill": 0, "decode": 0, "colocated": 1}, [("colocated", 1)]),
    ],
)
def test_replica_flags_choose_the_topology(replicas: dict[str, int], expected: list[tuple[str, int]]) -> None:
    config = load_config("m", replicas=replicas)
    assert [(pool.role, pool.replicas) for pool in config.pools] == expected


def test_flags_lie_over_the_file_and_keep_its_other_settings(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "gateway: {http_port: 1, host: 0.0.0.0}\npools: [{role: colocated, max_num_seqs: 7, kv_cache_fraction: 0.2}]\n"
    )
    flags: dict[str, Any] = {"gateway.http_port": 2, "exact": True}
    config = load_config(str(file), flags, pool_overrides={"kv_cache_bytes": "1 GiB"}, replicas={"colocated": 2})
    assert (config.gateway.http_port, config.gateway.host, config.exact) == (2, "0.0.0.0", True)
    (pool,) = config.pools
    assert (pool.replicas, pool.max_num_seqs, pool.kv_cache_bytes, pool.kv_cache_fraction) == (2, 7, 1 << 30, None)


def test_a_bad_flag_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"^options: pools\.0\.threads: must be at least 1"):
        load_config("m", pool_overrides={"threads": 0})


@pytest.mark.parametrize(
    ("text", "size"),
    [(5, 5), ("0", 0), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("2 GB", 2 * 10**9), ("7 b", 7), ("1kib", 1024)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 XB", "1e9", -1, 1.5, True, None, "1 2 MiB"])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="such as 512MiB"):
        parse_bytes(text)


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1 << 20, 3 << 29, 1 << 41)] == [
        "0 B",
        "1023 B",
        "1.0 MiB",
        "1.5 GiB",
        "2.0 TiB",
    ]

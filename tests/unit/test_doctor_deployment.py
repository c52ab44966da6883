"""What the doctor says of a configured deployment, and of whose packages are imported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.doctor.deployment import (
    AddressFacts,
    FolderFacts,
    RayFacts,
    SecretFacts,
    VersionFacts,
    judge_address,
    judge_folder,
    judge_ports,
    judge_ray,
    judge_secrets,
    judge_versions,
)
from headrace.core.findings import Finding, Level
from headrace.installation import PackageFacts, judge_packages

DOOR = AddressFacts("gateway.host", "127.0.0.1", may_be_wildcard=True, resolved="127.0.0.1")
PEER = AddressFacts("kv_transfer.host", "node-1", may_be_wildcard=False, resolved="10.0.0.1")
SECRETS = SecretFacts(is_loopback=False, num_api_keys=1, config_mode=0o600, kept_secret_fault="")
PRIVATE = RayFacts("ray", address=None, mode=None, token_source="")
JOINED = RayFacts("ray", address="10.0.0.1:6379", mode="token", token_source="/t", token_mode=0o600)
VERSIONS = VersionFacts(
    python=(3, 11),
    found={"torch": "2.13.0+cpu", "nixl-cu12": "1.5.1"},
    pinned={"torch": "2.13.0", "nixl-cu12": "1.5.1"},
    required=frozenset({"torch"}),
)
FOLDER = FolderFacts("/cache", is_writable=True, free_bytes=1 << 30)
OURS = PackageFacts("/h/kernels/__init__.py", "/h/kernels/__init__.py", "", ("headrace",))

CASES = [
    (judge_address(DOOR), Level.OK, "127.0.0.1, a connection from here works"),
    (judge_address(replace(DOOR, host="0.0.0.0")), Level.OK, "every interface"),
    (judge_address(PEER), Level.OK, "node-1 is 10.0.0.1"),
    (judge_address(replace(PEER, host="0.0.0.0")), Level.FAIL, "no address that peers can reach"),
    (judge_address(replace(PEER, error="Name or service not known")), Level.FAIL, "Name or service not known"),
    (judge_ports([], ["grpc a:1", "http a:2"]), Level.OK, "grpc a:1, http a:2: free"),
    (judge_ports(["gateway.http_port: taken"], ["http a:2"]), Level.FAIL, "gateway.http_port: taken"),
    (judge_secrets(SECRETS), Level.OK, "1 API key(s)"),
    (judge_secrets(replace(SECRETS, config_mode=0o644)), Level.WARN, "others may read it (0644)"),
    (judge_secrets(replace(SECRETS, config_mode=None)), Level.OK, "1 API key(s)"),
    (judge_secrets(replace(SECRETS, num_api_keys=0)), Level.WARN, "clients of other machines can connect"),
    (judge_secrets(replace(SECRETS, num_api_keys=0, is_loopback=True)), Level.OK, "this machine only"),
    (judge_secrets(replace(SECRETS, kept_secret_fault="/s: readable")), Level.FAIL, "/s: readable"),
    (judge_ray(replace(PRIVATE, backend="process", mode="disabled")), Level.OK, "not used"),
    (judge_ray(PRIVATE), Level.OK, "a token of its own"),
    (judge_ray(replace(PRIVATE, token_source="RAY_AUTH_TOKEN")), Level.OK, "the token of RAY_AUTH_TOKEN"),
    (judge_ray(replace(PRIVATE, mode="disabled")), Level.WARN, "without a token"),
    (judge_ray(replace(PRIVATE, token_source="/t", token_fault="is empty")), Level.FAIL, "/t: is empty"),
    (judge_ray(replace(PRIVATE, token_source="/t", token_mode=0o644)), Level.WARN, "others may read the token"),
    (judge_ray(JOINED), Level.OK, "with the token of /t"),
    (judge_ray(replace(JOINED, token_source="", token_mode=None)), Level.FAIL, "there is no token"),
    (judge_ray(replace(JOINED, token_fault="is empty")), Level.FAIL, "/t: is empty"),
    (judge_ray(replace(JOINED, mode=None)), Level.WARN, "wants one"),
    (judge_ray(replace(JOINED, address_error="nothing answers")), Level.FAIL, "nothing answers"),
    (judge_versions(VERSIONS), Level.OK, "torch 2.13.0+cpu"),
    (judge_versions(replace(VERSIONS, python=(3, 10))), Level.FAIL, "must be at least 3.11"),
    (judge_versions(replace(VERSIONS, required=frozenset({"torch", "ray"}))), Level.FAIL, "missing: ray"),
    (judge_versions(replace(VERSIONS, found={"torch": "2.13.0"})), Level.WARN, "no NIXL"),
    (judge_versions(replace(VERSIONS, pinned={"torch": "2.12.0"})), Level.WARN, "torch 2.13.0+cpu, tested with 2.12.0"),
    (judge_folder(FOLDER), Level.OK, "1.0 GiB free"),
    (judge_folder(replace(FOLDER, is_writable=False)), Level.FAIL, "cannot be written"),
    (judge_folder(replace(FOLDER, needed_bytes=2 << 30)), Level.WARN, "2.0 GiB of cached blocks may come"),
    (judge_packages({"kernels": OURS}), Level.OK, "kernels"),
    (judge_packages({"kernels": replace(OURS, found="")}), Level.FAIL, "kernels is not importable"),
    (judge_packages({"kernels": replace(OURS, found="/s/kernels/__init__.py")}), Level.FAIL, "shadowed by /s/kernels"),
    (
        judge_packages({"kernels": replace(OURS, in_working_folder="/w/kernels/__init__.py")}),
        Level.FAIL,
        "in worker processes by /w/kernels",
    ),
    (judge_packages({"kernels": replace(OURS, in_working_folder=OURS.expected)}), Level.OK, "kernels"),
    (
        judge_packages({"kernels": replace(OURS, distributions=("headrace", "kernels"))}),
        Level.WARN,
        "kernels has a package kernels too",
    ),
]


@pytest.mark.parametrize(("finding", "level", "says"), CASES, ids=[f"{case[0].check}: {case[2]}" for case in CASES])
def test_each_state_of_a_deployment_has_its_line(finding: Finding, level: Level, says: str) -> None:
    assert finding.level is level
    assert says in finding.found
    assert bool(finding.advice) == (level is not Level.OK)

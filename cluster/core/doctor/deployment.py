"""Judges whether the configured deployment can start here: addresses, ports, secrets, Ray, versions, folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config.units import format_bytes
from headrace.core.findings import Finding, fail, ok, warn

MIN_PYTHON = (3, 11)
READABLE_BY_OTHERS = 0o077
WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class AddressFacts:
    field: str
    """Of the configuration."""
    host: str
    may_be_wildcard: bool
    """Clients come from anywhere; peers need an address."""
    resolved: str = ""
    error: str = ""
    """Why it does not resolve, or why a connection to it from here fails."""


@dataclass(frozen=True, slots=True)
class SecretFacts:
    is_loopback: bool
    """Clients come from this machine only."""
    num_api_keys: int
    config_mode: int | None
    """Of a configuration file that holds secrets; None where there is none."""
    kept_secret_fault: str
    """Why the secret of kept caches cannot be used; "" where it can, or is not needed."""


@dataclass(frozen=True, slots=True)
class RayFacts:
    backend: str
    address: str | None
    """Of the cluster to join; None: a private one."""
    mode: str | None
    """RAY_AUTH_MODE."""
    token_source: str
    """Where Ray will find a token: a variable's name or a path; "" where nowhere."""
    token_fault: str = ""
    """Why what is named there cannot be used."""
    token_mode: int | None = None
    """Of the token's file."""
    address_error: str = ""
    """Why nothing answers at `address`."""


@dataclass(frozen=True, slots=True)
class VersionFacts:
    python: tuple[int, int]
    found: Mapping[str, str]
    """Version of each package that is installed."""
    pinned: Mapping[str, str]
    """As constraints.txt has it; only packages that are named here are compared."""
    required: frozenset[str]
    """Without these nothing starts."""


@dataclass(frozen=True, slots=True)
class FolderFacts:
    path: str
    is_writable: bool
    """It, or the folder in which it would be made."""
    free_bytes: int
    needed_bytes: int = 0


def judge_address(facts: AddressFacts) -> Finding:
    check = f"address {facts.field}"
    if facts.host in WILDCARDS:
        if facts.may_be_wildcard:
            return ok(check, f"{facts.host}: every interface of this machine")
        advice = "give this node's own address"
        return fail(check, f"{facts.host!r} is no address that peers can reach", advice)
    if facts.error:
        return fail(check, f"{facts.host}: {facts.error}", "an address of this machine, and no firewall before it")
    shown = facts.host if facts.resolved in ("", facts.host) else f"{facts.host} is {facts.resolved}"
    return ok(check, f"{shown}, a connection from here works")


def judge_ports(faults: Sequence[str], wanted: Sequence[str]) -> Finding:
    """faults: one a port that cannot be had. wanted: all of them, for people."""
    check = "ports"
    if faults:
        return fail(check, "; ".join(faults), "end what listens there (ss -ltnp), or take other ports; 0: any free one")
    return ok(check, f"{', '.join(wanted)}: free")


def judge_secrets(facts: SecretFacts) -> Finding:
    check = "keys and tokens"
    keys = f"{facts.num_api_keys} API key(s)" if facts.num_api_keys else "no API key"
    if facts.kept_secret_fault:
        return fail(check, facts.kept_secret_fault, "chmod 600; deleted, there is a new one and kept blocks are lost")
    if facts.config_mode is not None and facts.config_mode & READABLE_BY_OTHERS:
        found = f"{keys}; the file holds secrets and others may read it ({facts.config_mode:04o})"
        return warn(check, found, "chmod 600 the configuration file")
    if not facts.num_api_keys and not facts.is_loopback:
        found = "no API key, and clients of other machines can connect"
        return warn(check, found, "set gateway.api_keys, or gateway.host: 127.0.0.1")
    return ok(check, f"{keys}{', clients of this machine only' if facts.is_loopback else ''}")


def judge_ray(facts: RayFacts) -> Finding:
    check = "Ray"
    if facts.backend != "ray":
        return ok(check, f"not used: backend {facts.backend}")
    if facts.address_error:
        return fail(check, f"{facts.address}: {facts.address_error}", "start it, or leave cluster.address out")
    wants_token = (facts.mode or "").lower() == "token"
    if facts.token_fault and (wants_token or facts.address is None):
        return fail(check, f"{facts.token_source}: {facts.token_fault}", "name a file that holds the cluster's token")
    if facts.token_mode is not None and facts.token_mode & READABLE_BY_OTHERS:
        found = f"others may read the token in {facts.token_source} ({facts.token_mode:04o})"
        return warn(check, found, f"chmod 600 {facts.token_source}")
    return _judge_private(check, facts) if facts.address is None else _judge_joined(check, facts, wants_token)


def _judge_private(check: str, facts: RayFacts) -> Finding:
    if (facts.mode or "token").lower() != "token":
        found = f"RAY_AUTH_MODE={facts.mode}: the private cluster's ports listen on all interfaces without a token"
        return warn(check, found, "unset RAY_AUTH_MODE")
    token = f"the token of {facts.token_source}" if facts.token_source else "a token of its own"
    return ok(check, f"a private cluster with {token}")


def _judge_joined(check: str, facts: RayFacts, wants_token: bool) -> Finding:
    if wants_token and not facts.token_source:
        found = f"joins {facts.address}: RAY_AUTH_MODE=token, but there is no token"
        return fail(check, found, "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's")
    if not wants_token:
        found = f"joins {facts.address} without a token; since Ray 2.60 `ray start --head` wants one"
        advice = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH, unless that cluster was started with tokens disabled"
        return warn(check, found, advice)
    return ok(check, f"joins {facts.address} with the token of {facts.token_source}")


def judge_versions(facts: VersionFacts) -> Finding:
    check = "versions"
    shown = [f"Python {'.'.join(map(str, facts.python))}"]
    shown += [f"{name} {version}" for name, version in facts.found.items()]
    found = ", ".join(shown)
    again = "pip install -e '.[ucx]' -c constraints.txt"
    if facts.python < MIN_PYTHON:
        return fail(check, f"{found}: Python must be at least {'.'.join(map(str, MIN_PYTHON))}", "make install")
    missing = sorted(facts.required - facts.found.keys())
    if missing:
        return fail(check, f"{found}; missing: {', '.join(missing)}", again)
    if not any(name.startswith("nixl") for name in facts.found):
        return warn(check, f"{found}; no NIXL: KV moves over TCP", again)
    # A build such as 2.13.0+cpu is that version.
    others = [
        f"{name} {version}, tested with {facts.pinned[name]}"
        for name, version in facts.found.items()
        if name in facts.pinned and version.partition("+")[0] != facts.pinned[name]
    ]
    if others:
        return warn(check, "; ".join(others), again)
    return ok(check, found)


def judge_folder(facts: FolderFacts) -> Finding:
    check = f"folder {facts.path}"
    if not facts.is_writable:
        return fail(check, "cannot be written", "give it to this user, or name another one (HEADRACE_CACHE)")
    free = format_bytes(facts.free_bytes)
    if facts.free_bytes < facts.needed_bytes:
        found = f"{free} free, {format_bytes(facts.needed_bytes)} of cached blocks may come"
        return warn(check, found, "a smaller disk_cache_bytes, or another disk_cache_dir")
    return ok(check, f"writable, {free} free")

"""Gathers what `cluster.core.doctor.deployment` judges. Binds and dials for a moment, writes nothing."""

from __future__ import annotations

import os
import socket
import sys
from importlib import metadata
from pathlib import Path

from cluster import client_ports
from cluster.config import ServeConfig, kept_secret
from cluster.core.doctor.deployment import (
    WILDCARDS,
    AddressFacts,
    FolderFacts,
    RayFacts,
    SecretFacts,
    VersionFacts,
)
from headrace.errors import StartupError
from headrace.installation import ROOT
from headrace.paths import cache_root

_DIAL_S = 2.0
_VERSIONED = ("torch", "numpy", "numba", "grpcio", "msgpack", "ray", "nixl-cu12", "nixl-cu13")
_RAY_CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")
"""Where Ray keeps the address of a cluster that was started on this machine."""
_RAY_PORT = 6379


def peer_host(config: ServeConfig) -> str:
    """Where workers of this node will listen."""
    if config.kv_transfer.host is not None:
        return config.kv_transfer.host
    return "127.0.0.1" if config.cluster.address is None else _own_address()


def read_addresses(config: ServeConfig) -> list[AddressFacts]:
    """May take a name server's time."""
    return [
        _read_address("gateway.host", config.gateway.host, may_be_wildcard=True),
        _read_address("kv_transfer.host", peer_host(config), may_be_wildcard=False),
    ]


def read_port_faults(config: ServeConfig) -> list[str]:
    """A line for each door whose port cannot be had, in the launcher's words."""
    faults = []
    for other in ("http_port", "grpc_port"):
        one_door = config.gateway.model_copy(update={other: 0})
        try:
            with client_ports.held(one_door):
                pass
        except StartupError as error:
            faults.append(str(error))
    return faults


def wanted_ports(config: ServeConfig) -> list[str]:
    gateway = config.gateway
    ports = {"grpc": gateway.grpc_port, "http and metrics": gateway.http_port}
    several = f", and {gateway.replicas} behind it" if gateway.replicas > 1 else ""
    return [f"{name} {gateway.host}:{port or 'any'}{several if port else ''}" for name, port in ports.items()]


def read_secrets(config: ServeConfig, source: str | None) -> SecretFacts:
    gateway, fallback = config.gateway, config.gateway.degradation.fallback
    has_secrets = any(
        (gateway.api_keys, gateway.cache_namespace_secret, config.cluster.token, fallback and fallback.api_key)
    )
    is_file = source is not None and source.endswith((".yaml", ".yml"))
    return SecretFacts(
        is_loopback=gateway.host in ("localhost", "::1") or gateway.host.startswith("127."),
        num_api_keys=len(gateway.api_keys),
        config_mode=_mode(Path(source)) if has_secrets and is_file and source is not None else None,
        kept_secret_fault=_kept_secret_fault(config),
    )


def read_ray(config: ServeConfig) -> RayFacts:
    source, file = _ray_token()
    fault = ""
    if file is not None:
        try:
            fault = "" if file.read_text().strip() else "is empty"
        except OSError as error:
            fault = f"cannot be read ({error.strerror})"
    address = config.cluster.address
    return RayFacts(
        backend=config.cluster.backend,
        address=address,
        mode=os.environ.get("RAY_AUTH_MODE"),
        token_source=source,
        token_fault=fault,
        token_mode=_mode(file) if file is not None else None,
        address_error="" if address is None else _dial_ray(address),
    )


def read_versions(config: ServeConfig) -> VersionFacts:
    found = {}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    pinned = {}
    constraints = ROOT / "constraints.txt"
    for line in constraints.read_text().splitlines() if constraints.is_file() else ():
        name, is_exact, version = line.partition("==")
        if is_exact:
            pinned[name.strip().lower()] = version.strip()
    optional = {"nixl-cu12", "nixl-cu13"} | (set() if config.cluster.backend == "ray" else {"ray"})
    return VersionFacts(sys.version_info[:2], found, pinned, frozenset(_VERSIONED) - optional)


def read_folders(config: ServeConfig) -> list[FolderFacts]:
    """The cache, and where the configuration has blocks and events written on this machine."""
    needed: dict[Path, int] = {cache_root(): 0}
    for pool in config.pools:
        if pool.disk_cache_bytes:
            folder = Path(pool.disk_cache_dir).absolute() if pool.disk_cache_dir else cache_root() / "kv"
            needed[folder] = needed.get(folder, 0) + pool.disk_cache_bytes * pool.replicas
    if config.events.path:
        needed.setdefault(Path(config.events.path).absolute(), 0)
    return [_read_folder(path, num_bytes) for path, num_bytes in needed.items()]


def _read_folder(path: Path, needed_bytes: int) -> FolderFacts:
    there = next(place for place in (path, *path.parents) if place.exists())
    stat = os.statvfs(there)
    is_writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return FolderFacts(str(path), is_writable, stat.f_bavail * stat.f_frsize, needed_bytes)


def _read_address(field: str, host: str, may_be_wildcard: bool) -> AddressFacts:
    if host in WILDCARDS:
        return AddressFacts(field, host, may_be_wildcard)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.create_server((host, 0), family=family) as listener:
            socket.create_connection((host, listener.getsockname()[1]), timeout=_DIAL_S).close()
    except OSError as error:
        return AddressFacts(field, host, may_be_wildcard, error=_reason(error))
    return AddressFacts(field, host, may_be_wildcard, resolved=str(address[0]))


def _own_address() -> str:
    """As Ray finds its node's address: the one from which packets would leave. Sends none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])


def _dial_ray(address: str) -> str:
    """Why nothing answers there; "" when something does."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
        if not address:
            try:
                address = _RAY_CLUSTER_FILE.read_text().strip()
            except OSError:
                return "no Ray cluster runs on this machine, and RAY_ADDRESS is not set"
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]") or address, int(port or _RAY_PORT)), timeout=_DIAL_S).close()
    except OSError as error:
        return f"nothing answers ({_reason(error)})"
    except ValueError:
        return "is not host:port"
    return ""


def _ray_token() -> tuple[str, Path | None]:
    """Where Ray looks, in its order: what it is called, and the file if it is one."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN", None
    if named := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return named, Path(named).expanduser()
    default = Path.home() / ".ray" / "auth_token"
    return (str(default), default) if default.exists() else ("", None)


def _kept_secret_fault(config: ServeConfig) -> str:
    path = cache_root() / "kv" / "namespace_secret"
    keeps = any(pool.disk_cache_bytes for pool in config.pools) and config.gateway.cache_namespace_secret is None
    if not keeps or not path.exists():
        return ""
    try:
        kept_secret(path, str)
    except StartupError as error:
        return str(error)
    return ""


def _reason(error: OSError) -> str:
    """Without what Python adds: the address is told beside it. A resolver's errors have numbers of their own."""
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return None

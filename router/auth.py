"""Who asks: API keys to tenants. Keys live in memory as hashes and are compared in constant time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from hmac import compare_digest

import grpc

from headrace.errors import Code, HeadraceError, StartupError

DEFAULT_TENANT = "default"
CLUSTER_TOKEN_KEY = "x-headrace-cluster"
"""gRPC metadata key of the deployment's own token (controller to gateway)."""
Metadata = Iterable[tuple[str, str | bytes]]
_TENANT_KEY = re.compile(r"([A-Za-z0-9_.\-]{1,64})=(.*[^=].*)", re.DOTALL)
"""`tenant=key`; a bare key that only ends in `=` (base64) is not one."""
_MAX_PRESENTED = 4096


class Authenticator:
    """Maps a presented key to its tenant. Without configured keys everybody is the tenant `default`."""

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._tenants: list[tuple[bytes, str]] = []
        for entry in api_keys:
            match = _TENANT_KEY.fullmatch(entry)
            tenant, key = (match[1], match[2]) if match else (DEFAULT_TENANT, entry)
            if not key.strip():
                raise StartupError("an API key is empty")
            self._tenants.append((_hash(key), tenant))

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an `Authorization: Bearer KEY` value. Raises UNAUTHENTICATED without saying what was wrong."""
        if not self._tenants:
            return DEFAULT_TENANT
        presented = _hash(_bearer(authorization))
        found = None
        # Every key is compared whatever the earlier ones said, so that time tells nothing.
        for digest, tenant in self._tenants:
            if compare_digest(digest, presented):
                found = tenant
        if found is None:
            raise HeadraceError(
                Code.UNAUTHENTICATED, "authorization: a valid API key is needed (Bearer)", field="authorization"
            )
        return found

    async def require_grpc(self, context: grpc.aio.ServicerContext) -> str:
        """The tenant of a gRPC call; a call without a valid key is aborted with UNAUTHENTICATED."""
        try:
            return self.tenant(metadata_value(context.invocation_metadata(), "authorization"))
        except HeadraceError as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
            raise


def cluster_token_ok(metadata: Metadata | None, token: str) -> bool:
    """Whether the caller holds the deployment's own token (metadata `x-headrace-cluster`). An empty token admits
    nobody.
    """
    presented = metadata_value(metadata, CLUSTER_TOKEN_KEY)
    return bool(token) and compare_digest(_hash(presented or ""), _hash(token))


def metadata_value(metadata: Metadata | None, key: str) -> str | None:
    """The first text value of a gRPC metadata key."""
    for name, value in metadata or ():
        if name == key and isinstance(value, str):
            return value
    return None


def _bearer(authorization: str | None) -> str:
    if authorization is None or len(authorization) > _MAX_PRESENTED:
        return ""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _hash(key: str) -> bytes:
    return blake2b(key.encode(errors="replace"), digest_size=32, person=b"headrace/key").digest()

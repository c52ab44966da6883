"""The name of a KV block: a chained, domain-separated hash over everything its bytes depend on (SPEC C3).

    model_identity  = H(model,  every field of IDENTITY_FIELDS)       one a deployment; workers with equal ones may pair
    namespace       = H(tenant, secret, tenant, cache_salt)           made by the gateway, which alone knows tenants
    root  = h_0     = H(root,   model_identity, namespace, adapter)
    h_i             = H(block,  h_(i-1), number of tokens, tokens)    one for each full block

A token's position is in the chain: block i's hash contains i predecessors. Every field is length-prefixed and carries
its type, so that no two field lists give the same input. blake2b with 16-byte digests, the domain in its `person`.

Does not: keep any state, know what is cached, or use `hash()` (it differs from process to process).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np

from headrace.errors import InvariantError

DIGEST_BYTES = 16
KEY_SCHEMA_VERSION = 1
"""Raise it when anything in this file changes what a hash means."""

IDENTITY_FIELDS = frozenset(
    {
        "key_schema",
        "weights",
        "quantization",
        "tokenizer",
        "chat_template",
        "tool_schema",
        "attention",
        "kv_dtype",
        "kv_layout",
    }
)
"""C3 without the parts that differ by request (tokens, adapter, tenant, cache_salt): those enter later links."""


def root_hash(fields: Mapping[str, bytes | str | int]) -> bytes:
    """Hash of a deployment's identity, 16 bytes; independent of the mapping's order.

    Raises InvariantError when a field is missing or unknown: a forgotten field would let unlike KV share a name.
    """
    if fields.keys() != IDENTITY_FIELDS:
        raise InvariantError(f"identity fields differ from the schema: {sorted(fields.keys() ^ IDENTITY_FIELDS)}")
    parts: list[bytes | str | int] = []
    for name in sorted(fields):
        parts += (name, fields[name])
    return _digest(b"headrace.model", parts)


def model_identity(
    *,
    weights: bytes | str,
    quantization: str,
    tokenizer: bytes | str,
    chat_template: str,
    tool_schema: str,
    attention: str,
    kv_dtype: str,
    kv_layout: str,
) -> bytes:
    """Identity of what computes KV, 16 bytes. Workers may exchange KV only when theirs are equal.

    `weights`: digest of the weights; `tokenizer`: digest of its files; `chat_template`, `tool_schema`: the text or
    its version; `attention`: everything of RoPE and attention that shapes KV, canonically written (theta, scaling,
    window, heads, qk-norm); `kv_layout`: `KvLayout.describe()`. The parallel degree is no part of it: bytes do not
    depend on it.
    """
    return root_hash(
        {
            "key_schema": KEY_SCHEMA_VERSION,
            "weights": weights,
            "quantization": quantization,
            "tokenizer": tokenizer,
            "chat_template": chat_template,
            "tool_schema": tool_schema,
            "attention": attention,
            "kv_dtype": kv_dtype,
            "kv_layout": kv_layout,
        }
    )


def namespace_id(tenant: str, cache_salt: str, secret: str, generation: int = 0) -> bytes:
    """A tenant's cache namespace, 16 bytes. The deployment's `secret` keeps others from computing it; `generation`
    counts how often the namespace was invalidated: what was cached before has no name any more.
    """
    return _digest(b"headrace.tenant", (secret, tenant, cache_salt, generation))


def request_root(model: bytes, namespace: bytes, adapter: str = "") -> bytes:
    """h_0 of a request's chain, 16 bytes: the model's identity, its namespace and its adapter ("" for none)."""
    return _digest(b"headrace.root", (model, namespace, adapter))


def block_hashes(root: bytes, token_ids: Sequence[int], block_size: int, previous: Sequence[bytes] = ()) -> list[bytes]:
    """Hashes of all full blocks of `token_ids` (16 bytes each); the partial last block has none.

    `previous`: the first hashes of the same chain, computed earlier; only the rest is hashed. Returns a new list.
    Token ids outside 0..2^32-1 raise OverflowError.
    """
    hashes = list(previous[: len(token_ids) // block_size])
    start = len(hashes) * block_size
    end = len(token_ids) // block_size * block_size
    packed = np.asarray(token_ids[start:end], dtype="<u4").tobytes()
    parent = hashes[-1] if hashes else root
    step = block_size * 4
    count = block_size.to_bytes(4, "little")
    for at in range(0, len(packed), step):
        parent = blake2b(
            parent + count + packed[at : at + step], digest_size=DIGEST_BYTES, person=b"headrace.block"
        ).digest()
        hashes.append(parent)
    return hashes


def _digest(domain: bytes, parts: Sequence[bytes | str | int]) -> bytes:
    h = blake2b(digest_size=DIGEST_BYTES, person=domain)
    for part in parts:
        tag, data = _encode(part)
        h.update(tag + len(data).to_bytes(8, "little") + data)
    return h.digest()


def _encode(part: bytes | str | int) -> tuple[bytes, bytes]:
    if isinstance(part, bytes):
        return b"b", part
    if isinstance(part, str):
        return b"s", part.encode("utf-8", "surrogatepass")
    return b"i", str(part).encode()

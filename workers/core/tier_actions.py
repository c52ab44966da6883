"""What the tiers ask of the shell, and in which words it answers. No logic but a tenant's tag."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

TAG_BYTES = 8


def tenant_tag(tenant: str) -> bytes:
    """A tenant as files name it, 8 bytes."""
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=TAG_BYTES, person=b"headrace.tag").digest()


@dataclass(frozen=True, slots=True)
class Block:
    """A full block of a chain, by its content."""

    hash: bytes
    parent: bytes
    """Hash of the block before it, or the chain's root."""
    tag: bytes
    """`tenant_tag` of who owns it."""
    value_ms: float
    """Prefill time that it saves."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy a block from the device to the host. Answer: `Tiers.offloaded`."""

    ticket: int
    device_block: int
    host_block: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Read a block from disk into the host. Answer: `Tiers.promoted`."""

    ticket: int
    host_block: int
    block: Block


@dataclass(frozen=True, slots=True)
class Spill:
    """Write a block from the host to disk. Answer: `Tiers.spilled`."""

    ticket: int
    host_block: int
    block: Block


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete a block's file, if there is one. No answer."""

    hash: bytes


@dataclass(frozen=True, slots=True)
class TierAccount:
    """Blocks of a tier: capacity = cached + used + free, else some are lost."""

    name: str
    """device | host | disk"""
    capacity: int
    cached: int
    """Can be found, and used by nobody."""
    used: int
    """By requests, leases, copies under way."""
    free: int


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    """An error of the disk."""
    CORRUPT = "corrupt"
    """The file is not what was written."""

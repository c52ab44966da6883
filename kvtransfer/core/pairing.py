"""Whether a worker may read another one's KV: what both must have in common, the proof that both belong to the
deployment, and over which lane.

    reader                                             holder
    PairHello(names, nonce)            ------>
                                       <------ PairChallenge(nonce, proof)     it knows the cluster token
    PairProof(proof, card)             ------> so does the reader; the cards agree
                                       <------ PairAccepted(lanes, probe, proof)
    [reads the probe's blocks over each lane]          the bytes are the holder's, and so fast

The token itself never travels. The key that both have afterwards signs the reader's leases, so a lease needs no round
trip more. A card is what `kvtransfer.core.identity` has hashed, in words: two different ones say which part differs.

Does not: know sockets, pools or clocks, nor make random numbers.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

NONCE_BYTES = 16
PROTOCOL = "1"
"""Of leases and pairing. Workers that speak another one are refused, never guessed at."""
MAX_CARD_FIELDS = 64
_SHOWN = 80
_CLEARLY_FASTER = 1.5
"""Short measurements are not better than that: a lane this much slower than another one has something wrong with it."""

Card = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Measured:
    """A lane to a peer that brought the right bytes; gbps in GB/s (10^9 bytes)."""

    lane: str
    gbps: float


def card_of(identity: Mapping[str, bytes | str | int], block_size: int) -> dict[str, str]:
    """`identity`: of the model and its KV, see `Runner.identity_fields`. block_size: tokens."""
    words = {name: value.hex() if isinstance(value, bytes) else str(value) for name, value in identity.items()}
    return {"protocol": PROTOCOL, "block_size": str(block_size), **words}


def mismatch(ours: Card, theirs: Card) -> str:
    """The first part that differs, with both values; "" when KV of one is KV of the other."""
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (name != "protocol", name)):
        mine, other = ours.get(name, "nothing"), theirs.get(name, "nothing")
        if mine != other:
            return f"{_shown(name)}: {_shown(mine)} here, {_shown(other)} there"
    return ""


def fastest(measured: Sequence[Measured]) -> Measured:
    """Of lanes in order of preference, at least one: the first that no later one clearly beats."""
    best = measured[0]
    for lane in measured[1:]:
        if lane.gbps > _CLEARLY_FASTER * best.gbps:
            best = lane
    return best


def pair_key(token: str, reader: str, reader_nonce: bytes, holder: str, holder_nonce: bytes) -> bytes:
    """The key of one pairing; names are of processes: a restarted worker has another."""
    return _sign(token.encode(), b"headrace pair", (reader.encode(), reader_nonce, holder.encode(), holder_nonce))


def proof(key: bytes, side: bytes, said: Mapping[str, bytes | str] | None = None) -> bytes:
    """What only who has the key can say, of what it says beside it."""
    fields: list[bytes] = []
    for name, value in sorted((said or {}).items()):
        fields += (name.encode(), value if isinstance(value, bytes) else value.encode())
    return _sign(key, side, fields)


def pools_said(ranks: Iterable[Mapping[str, bytes]]) -> dict[str, bytes]:
    """What a holder says of how its ranks are reached, by lane, as `proof` signs it."""
    return {f"{rank}/{lane}": pool for rank, lanes in enumerate(ranks) for lane, pool in lanes.items()}


def lease_proof(key: bytes, request_id: str, attempt: int, number: int, hashes: bytes) -> bytes:
    """Signs what a LeaseOpen asks for."""
    return _sign(key, b"lease", (request_id.encode(), attempt.to_bytes(4, "big"), number.to_bytes(4, "big"), hashes))


def is_proof(said: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(said, expected)


def _sign(key: bytes, purpose: bytes, fields: Iterable[bytes]) -> bytes:
    signed = hmac.new(key, digestmod=hashlib.sha256)
    for field in (purpose, *fields):
        signed.update(len(field).to_bytes(8, "big") + field)
    return signed.digest()


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."

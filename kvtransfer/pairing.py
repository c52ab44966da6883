"""Both ends of Worker.Pair, and what comes of it: the key that signs leases and the lanes that work, measured.

The protocol is drawn in `core.pairing`, which decides; a reader pairs with a holder once, whoever asks first.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc

from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.layout import KvLayout
from kvtransfer.core.pairing import (
    MAX_CARD_FIELDS,
    NONCE_BYTES,
    Card,
    Measured,
    fastest,
    is_proof,
    lease_proof,
    mismatch,
    pair_key,
    pools_said,
    proof,
)
from kvtransfer.core.pull_plan import sources_of
from kvtransfer.prober import PairedLane, Prober
from kvtransfer.stream import GONE
from kvtransfer.transports.base import TransferError, peer_name
from kvtransfer.transports.select import Lanes

log = logging.getLogger("headrace.kvtransfer.pairing")

MAX_READERS = 4096
"""Whose keys a holder keeps; the one that paired first goes first, and pairs again when it comes back."""
UNPAIRED = "unpaired"
MIN_PROBE_BYTES = 1 << 20
"""Reading less tells how quick a lane begins, not how fast it is: the preferred one is taken then."""


class PairingFault(Enum):
    REFUSED = "refused"
    """For good: this process will never pair with that one."""
    BROKEN = "broken"
    NO_LANE = "no_lane"


class PairingError(Exception):
    """The holder cannot be read from now."""

    def __init__(self, fault: PairingFault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault


@dataclass(slots=True, eq=False)
class Pairing:
    """One reader's side. Lanes are in the order in which reads use them."""

    key: bytes
    lanes: list[PairedLane]
    digests: bool
    """The holder's digests are of blocks like one's own."""
    note: str = ""
    """Why not the best lane is used."""

    def lease_proof(self, request_id: str, attempt: int, number: int, hashes: bytes) -> bytes:
        return lease_proof(self.key, request_id, attempt, number, hashes)

    def demote(self, lane: PairedLane) -> None:
        """A read over it has failed, or brought other bytes: the others first."""
        if lane is self.lanes[0]:
            self.lanes.append(self.lanes.pop(0))


@dataclass
class PairServer:
    """The holder's side: who has paired, and with which key."""

    me: str
    """This process's name."""
    incarnation: str
    token: str
    card: Card
    lanes: Lanes
    patience_s: float
    others: Sequence[Mapping[str, bytes]] = ()
    """Of ranks 1 and up of this worker's tensor-parallel group: what their `Lanes.descriptors` says."""
    nonces: Callable[[int], bytes] = secrets.token_bytes
    _keys: OrderedDict[str, bytes] = field(default_factory=OrderedDict)

    def signed(self, request: pb.LeaseOpen) -> bool:
        """Is this LeaseOpen from a reader that has paired?"""
        key = self._keys.get(peer_name(request.reader.worker_id, request.reader.incarnation))
        if key is None:
            return False
        asked = request.request_id, request.attempt, request.number, request.block_hashes
        return is_proof(request.proof, lease_proof(key, *asked))

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The body of the servicer's `Pair` method."""
        try:
            async with asyncio.timeout(self.patience_s):
                refusal = await self._pair(context)
        except TimeoutError:
            refusal = grpc.StatusCode.DEADLINE_EXCEEDED, "silence"
        except GONE:
            return
        if refusal is not None:
            await context.abort(*refusal)

    async def _pair(self, context: grpc.aio.ServicerContext[Any, Any]) -> tuple[grpc.StatusCode, str] | None:
        """What the call is refused for, or None."""
        hello = await _next(context.read, "hello")
        if hello is None or len(hello.nonce) != NONCE_BYTES:
            return grpc.StatusCode.INVALID_ARGUMENT, "protocol"
        if hello.holder_incarnation != self.incarnation:
            return grpc.StatusCode.FAILED_PRECONDITION, "stale_incarnation"
        reader, nonce = peer_name(hello.reader.worker_id, hello.reader.incarnation), self.nonces(NONCE_BYTES)
        key = pair_key(self.token, reader, hello.nonce, self.me, nonce)
        await context.write(pb.PairResponse(challenge=pb.PairChallenge(nonce=nonce, proof=proof(key, b"holder"))))
        answer = await _next(context.read, "proof")
        if answer is not None and len(answer.card) > MAX_CARD_FIELDS:
            return grpc.StatusCode.INVALID_ARGUMENT, "protocol"
        if answer is None or not is_proof(answer.proof, proof(key, b"reader", dict(answer.card))):
            return grpc.StatusCode.UNAUTHENTICATED, "the reader does not know the cluster token"
        if different := mismatch(self.card, dict(answer.card)):
            log.error("pair_refused reader=%s holder=%s reason=%s", reader, self.me, different)
            return grpc.StatusCode.FAILED_PRECONDITION, different
        self._keys[reader] = key
        self._keys.move_to_end(reader)
        if len(self._keys) > MAX_READERS:
            self._keys.popitem(last=False)
        area, ranks = self.lanes.area, (self.lanes.descriptors(), *self.others)
        accepted = pb.PairAccepted(
            ranks=[pb.RankPool(lanes=lanes) for lanes in ranks],
            proof=proof(key, b"accepted", pools_said(ranks)),
            probe_block=area.pattern.start,
            probe_blocks=area.num_blocks,
        )
        await context.write(pb.PairResponse(accepted=accepted))
        return None


@dataclass
class PairClient:
    """The reader's side."""

    me: pb.PeerAddress
    token: str
    card: Card
    lanes: Lanes
    patience_s: float
    layout: KvLayout
    """Of the whole model."""
    rank: int = 0
    degree: int = 1
    """This rank of the reader's own tensor-parallel group."""
    nonces: Callable[[int], bytes] = secrets.token_bytes
    prober: Prober = field(init=False)

    def __post_init__(self) -> None:
        self.prober = Prober(self.lanes)

    async def pair(self, stub: Any, holder: pb.PeerAddress) -> Pairing:
        """Proves, compares, connects and measures. Raises PairingError."""
        call = stub.Pair()
        try:
            async with asyncio.timeout(self.patience_s):
                key, accepted = await self._shake_hands(call, holder)
        except TimeoutError as error:
            raise PairingError(PairingFault.BROKEN, "no answer") from error
        except GONE as error:
            raise await _refusal(call) from error
        finally:
            call.cancel()
        return await self._choose(key, accepted, peer_name(holder.worker_id, holder.incarnation))

    async def _shake_hands(self, call: Any, holder: pb.PeerAddress) -> tuple[bytes, pb.PairAccepted]:
        nonce = self.nonces(NONCE_BYTES)
        hello = pb.PairHello(reader=self.me, holder_incarnation=holder.incarnation, nonce=nonce)
        await call.write(pb.PairRequest(hello=hello))
        challenge = await _next(call.read, "challenge")
        if challenge is None:
            raise await _refusal(call)
        names = (self.me.worker_id, self.me.incarnation), (holder.worker_id, holder.incarnation)
        key = pair_key(self.token, peer_name(*names[0]), nonce, peer_name(*names[1]), challenge.nonce)
        if not is_proof(challenge.proof, proof(key, b"holder")):
            raise PairingError(PairingFault.REFUSED, "the holder does not know the cluster token")
        said = pb.PairProof(proof=proof(key, b"reader", dict(self.card)), card=self.card)
        await call.write(pb.PairRequest(proof=said))
        accepted = await _next(call.read, "accepted")
        if accepted is None:
            raise await _refusal(call)
        if not is_proof(accepted.proof, proof(key, b"accepted", pools_said(rank.lanes for rank in accepted.ranks))):
            raise PairingError(PairingFault.BROKEN, "the holder's answer was changed on its way")
        return key, accepted

    async def _choose(self, key: bytes, accepted: pb.PairAccepted, holder: str) -> Pairing:
        """Connects over each lane that both have, reads the probe, and puts the fastest first."""
        try:
            ranks = sources_of(self.rank, self.degree, len(accepted.ranks), self.layout)
        except ValueError as error:
            raise PairingError(PairingFault.REFUSED, str(error)) from error
        working, failures = [], []
        for name, transport in self.lanes.transports.items():
            if any(name not in accepted.ranks[rank].lanes for rank, _ in ranks):
                failures.append(f"{name}: the other side does not offer it")
                continue
            try:
                async with asyncio.timeout(self.patience_s):
                    working.append(await self.prober.measure(transport, holder, accepted, ranks))
            except (TransferError, TimeoutError) as error:
                failures.append(f"{name}: {str(error) or 'no answer'}")
        if not working:
            raise PairingError(PairingFault.NO_LANE, "; ".join(failures) or "no lane in common")
        measured = [Measured(lane.name, lane.gbps) for lane in working]
        tells = accepted.probe_blocks * self.lanes.block_bytes >= MIN_PROBE_BYTES
        best = fastest(measured) if tells else measured[0]
        working.sort(key=lambda lane: lane.name != best.lane)
        told = ", ".join(f"{lane.name} {lane.gbps:.2f} GB/s" for lane in working)
        log.info("paired reader=%s holder=%s lane=%s measured: %s", self.me.worker_id, holder, best.lane, told)
        note = "; ".join(failures)
        if not note and best.lane != self.lanes.first.name:
            note = f"slower: {told}"
        if note:
            log.warning(
                "lane_fallback reader=%s holder=%s lane=%s reason=%s", self.me.worker_id, holder, best.lane, note
            )
        return Pairing(key, working, self.degree == len(accepted.ranks) == 1, note)


async def _next(read: Any, kind: str) -> Any:
    """The next message if it is of that kind; None when it is another one or the stream is over."""
    message = await read()
    if message is grpc.aio.EOF or message.WhichOneof("kind") != kind:
        return None
    return getattr(message, kind)


async def _refusal(call: Any) -> PairingError:
    """What the call's status means; the call is over."""
    code, details = await call.code(), await call.details()
    if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED):
        return PairingError(PairingFault.REFUSED, details)
    return PairingError(PairingFault.BROKEN, code.name)

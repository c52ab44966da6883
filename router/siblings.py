"""The deployment's other gateways, as one of them sees them.

Clients share one address, so a call about a request may reach a gateway that does not have it. That one asks the
others, with the client's own key and a mark; whoever gets a marked call answers for itself alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from headrace.client import MAX_MESSAGE_BYTES, from_rpc_error
from headrace.errors import Code, HeadraceError
from headrace.v1 import admin_pb2 as pb
from headrace.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.auth import CLUSTER_TOKEN_KEY, metadata_value

T = TypeVar("T")

RELAYED_KEY = "x-headrace-relayed"
ASK_S = 2.0
"""A sibling that takes longer has no answer."""
_NOBODY = (Code.NOT_FOUND, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
"""It does not have the request, or cannot be asked."""
_CHANNEL_OPTIONS = [
    # As much as the other one's server sends.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A restarted sibling has the address of the dead one, and must not inherit its broken connection.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    address: str
    channel: grpc.aio.Channel


class Siblings:
    """Follows the controller's membership. Nobody, until told."""

    def __init__(self, cluster_token: str = "") -> None:
        self._token = cluster_token
        self._peers: dict[tuple[str, str, str], _Peer] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def set_members(self, siblings: Iterable[pb.Sibling]) -> None:
        wanted = {(sibling.name, sibling.incarnation, sibling.address) for sibling in siblings}
        for key in self._peers.keys() - wanted:
            task = asyncio.create_task(self._peers.pop(key).channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for key in sorted(wanted - self._peers.keys()):
            name, _, address = key
            self._peers[key] = _Peer(name, address, grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS))

    async def accounts(self, *, metrics: bool = False) -> list[pb.AccountResponse]:
        """Each one's own, by name; without a pid where it did not answer."""
        peers = sorted(self._peers.values(), key=lambda peer: peer.name)
        metadata = [(CLUSTER_TOKEN_KEY, self._token)]
        request = pb.AccountRequest(metrics=metrics)
        calls = [
            admin_pb2_grpc.AdminStub(peer.channel).Account(request, timeout=ASK_S, metadata=metadata) for peer in peers
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [
            answer if isinstance(answer, pb.AccountResponse) else _unanswered(peer)
            for peer, answer in zip(peers, answers, strict=True)
        ]

    async def cancel(self, request: inference_pb2.CancelRequest, context: grpc.aio.ServicerContext) -> bool:
        """Whether one of them had a request of that name."""
        answers = await asyncio.gather(*self._ask("Cancel", request, context), return_exceptions=True)
        return any(isinstance(answer, inference_pb2.CancelResponse) and answer.cancelled for answer in answers)

    async def explain(
        self, request: inference_pb2.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ExplainResponse | None:
        return await _found(self._ask("Explain", request, context))

    async def resume(
        self, request: inference_pb2.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ResumeResponse | None:
        """None where nobody has the request. Raises the HeadraceError of the one that has it and refuses."""
        return await _found(self._ask("Resume", request, context))

    async def move(self, request: pb.MoveRequest, context: grpc.aio.ServicerContext) -> list[pb.MoveResponse]:
        """Of those that answer."""
        answers = await asyncio.gather(*self._ask("Move", request, context), return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, pb.MoveResponse)]

    async def close(self) -> None:
        self.set_members(())
        await asyncio.gather(*self._closing)

    def _ask(self, method: str, request: object, context: grpc.aio.ServicerContext) -> list[Awaitable[Any]]:
        given = context.invocation_metadata()
        if metadata_value(given, RELAYED_KEY) is not None:
            return []
        metadata = [(RELAYED_KEY, "1")]
        for name in ("authorization", CLUSTER_TOKEN_KEY):
            if (secret := metadata_value(given, name)) is not None:
                metadata.append((name, secret))
        of = admin_pb2_grpc.AdminStub if isinstance(request, pb.MoveRequest) else inference_pb2_grpc.InferenceStub
        stubs = [of(peer.channel) for peer in self._peers.values()]
        return [getattr(stub, method)(request, timeout=ASK_S, metadata=metadata) for stub in stubs]


def _unanswered(peer: _Peer) -> pb.AccountResponse:
    return pb.AccountResponse(gateway=pb.GatewayStatus(gateway_id=peer.name, grpc_address=peer.address))


async def _found(calls: list[Awaitable[T]]) -> T | None:
    """The first answer; a hung sibling is not waited for when another one has it, nor one that is a member no more."""
    refusal: HeadraceError | None = None
    asked = [asyncio.ensure_future(call) for call in calls]
    pending = set(asked)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for answer in done:
                if answer.cancelled():  # not by us: its channel was closed
                    continue
                try:
                    return answer.result()
                except grpc.aio.AioRpcError as failure:
                    error = from_rpc_error(failure)
                    if error.code not in _NOBODY:
                        refusal = error
    finally:
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    if refusal is not None:
        raise refusal
    return None

"""The workers as one gateway sees them: a session to each member, whose facts go to the router, and their accounts."""

from __future__ import annotations

import asyncio
import logging

from headrace.core.records import CacheChange, Role, WorkerLoad
from headrace.errors import Code, HeadraceError
from headrace.v1 import admin_pb2
from headrace.v1 import worker_pb2 as pb
from kvtransfer.core.pairing import mismatch
from router.core.placement import WorkerKey
from router.core.router import Router
from router.session import Dial, SessionSink, WorkerSession, dial
from router.spec import GatewaySpec

log = logging.getLogger("headrace.router.fleet")

MAX_MET = 64
"""Holders that a worker pairs with before it is asked to read from them."""
MEET_AGAIN_S = 2.0


class Fleet:
    """Sessions follow the membership that the controller pushes. The sink hears of sessions, the router of workers."""

    def __init__(self, spec: GatewaySpec, sink: SessionSink, router: Router, dial: Dial = dial) -> None:
        self._router = router
        self._spec = spec
        self._sink = sink
        self._dial = dial
        self._sessions: dict[str, WorkerSession] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._version = 0
        self._again: asyncio.TimerHandle | None = None
        self._to_clear: dict[str, set[str | None]] = {}
        """What workers that could not be reached have to forget."""

    @property
    def sessions(self) -> list[WorkerSession]:
        return list(self._sessions.values())

    def set_members(self, version: int, members: list[admin_pb2.Member]) -> bool:
        """Opens and closes sessions so that they match. False: older than the last, and ignored."""
        if version < self._version:
            return False
        self._version = version
        wanted = {member.worker_id: member for member in members}
        for worker_id, session in list(self._sessions.items()):
            member = wanted.get(worker_id)
            if member is None or (member.incarnation, member.address) != (session.key.incarnation, session.address):
                del self._sessions[worker_id]
                session.connected = False
                self._sink.session_lost(session, dead=True)
                task = asyncio.create_task(session.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        spec = self._spec
        for worker_id, member in wanted.items():
            if worker_id not in self._sessions:
                key = WorkerKey(worker_id, member.incarnation)
                self._sessions[worker_id] = WorkerSession(
                    spec.gateway_id, key, member.address, spec.cluster_token, spec.liveness_s, self._sink, self._dial
                )
        return True

    def pair(self) -> None:
        """Judges anew who may exchange KV: workers unlike the first connected one stay connected and unused.

        The router knows those that are used; they are told of each other, and measure their lanes before a request
        needs one.
        """
        first: pb.WorkerHello | None = None
        for session in self.sessions:
            if not session.connected or session.hello is None:
                continue
            first = first or session.hello
            refusal = ""
            if session.hello.fingerprint != first.fingerprint:
                refusal = mismatch(dict(first.card), dict(session.hello.card)) or "fingerprint"
            if refusal and not session.refused:
                log.error(
                    "worker_refused worker=%s unlike=%s reason=%s", session.key.worker_id, first.worker_id, refusal
                )
            session.refused = refusal
            if refusal:
                self._router.worker_down(session.key)
                continue
            hello = session.hello
            self._router.worker_up(
                session.key,
                Role(hello.role),
                hello.total_blocks * hello.block_size,
                hello.block_size,
                hello.lane,
                session.address.rpartition(":")[0],
                session.address,
                hello.chunk_tokens,
            )
        self._introduce()

    def _introduce(self) -> None:
        """Tells workers whom they may be asked to read from; of many only some, the others pair when they must."""
        usable = [session for session in self.sessions if session.usable]
        known = {session.key for session in usable}
        for reader in usable:
            reader.met &= known
            holders = [
                pb.PeerAddress(worker_id=s.key.worker_id, incarnation=s.key.incarnation, address=s.address)
                for s in usable
                if s is not reader and s.key not in reader.met
            ][: MAX_MET - len(reader.met)]
            if holders and reader.send(pb.SessionRequest(peers=pb.Peers(holders=holders))):
                reader.met |= {WorkerKey(holder.worker_id, holder.incarnation) for holder in holders}

    def paired(self, session: WorkerSession, told: pb.Paired) -> None:
        """How a worker reads from another one. Without a lane the router asks for no transfer between the two."""
        holder = WorkerKey(told.holder_id, told.holder_incarnation)
        measured = ", ".join(f"{lane} {gbps:.2f} GB/s" for lane, gbps in told.lane_gbps.items())
        level = logging.WARNING if told.note else logging.INFO
        words = "pair reader=%s holder=%s lane=%s measured=%s note=%s"
        log.log(level, words, session.key.worker_id, told.holder_id, told.lane or "none", measured, told.note)
        self._router.paired(session.key, holder, bool(told.lane))
        if not told.lane and not told.refused:
            session.met.discard(holder)
            if self._again is None:
                self._again = asyncio.get_running_loop().call_later(MEET_AGAIN_S, self._meet_again)

    def _meet_again(self) -> None:
        """Those that could not pair when they were introduced: whoever did not answer then may do so by now."""
        self._again = None
        self._introduce()

    def key(self, field: str, worker_id: str) -> WorkerKey | None:
        """None for no name. Raises HeadraceError (NOT_FOUND, of that field) when no such worker is connected."""
        if not worker_id:
            return None
        session = self._sessions.get(worker_id)
        if session is None or not session.connected:
            raise HeadraceError(Code.NOT_FOUND, f"{field}: no worker of this name is connected", field=field)
        return session.key

    def send(self, worker: WorkerKey, frame: pb.SessionRequest) -> bool:
        """False when the worker's session is down, full, or another process's by now."""
        session = self._sessions.get(worker.worker_id)
        return session is not None and session.key == worker and session.send(frame)

    def report(self, session: WorkerSession, load: WorkerLoad) -> None:
        if not self._router.report(session.key, load):
            session.resync()

    def cache_changed(self, session: WorkerSession, change: CacheChange) -> None:
        if change.is_snapshot:
            session.resyncing = False
        if not self._router.cache_changed(session.key, change):
            session.resync()

    def clear_cache(self, tenant: str | None) -> tuple[list[str], list[str]]:
        """Has the workers forget a tenant's blocks, or all (None). (told, not reached); those are told when they are
        back, under whatever incarnation."""
        told, missing = [], []
        for worker_id, session in sorted(self._sessions.items()):
            (told if session.send(_clear_frame(tenant)) else missing).append(worker_id)
        for worker_id in missing:
            self._to_clear.setdefault(worker_id, set()).add(tenant)
        return told, missing

    def session_up(self, session: WorkerSession) -> None:
        for tenant in self._to_clear.pop(session.key.worker_id, ()):
            session.send(_clear_frame(tenant))
        self.pair()

    def loads(self) -> list[tuple[WorkerKey, Role, WorkerLoad]]:
        """The usable workers' last reports."""
        return [
            (session.key, Role(session.hello.role), self._router.table.load(session.key))
            for session in self._sessions.values()
            if session.usable and session.hello is not None
        ]

    def fingerprint(self) -> str:
        return next((s.hello.fingerprint for s in self.sessions if s.usable and s.hello), "")

    async def accounts(self, timeout_s: float, audit: bool) -> list[admin_pb2.WorkerView]:
        """Every worker's own account; without `status` where it did not answer."""
        sessions = self.sessions
        answers = await asyncio.gather(*(session.status(timeout_s, audit) for session in sessions))
        return [
            admin_pb2.WorkerView(
                worker_id=session.key.worker_id,
                incarnation=session.key.incarnation,
                role=session.hello.role if session.hello else "",
                address=session.address,
                connected=session.connected,
                status=answer,
                refused=session.refused,
            )
            for session, answer in zip(sessions, answers, strict=True)
        ]

    async def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        await asyncio.gather(*(session.close() for session in self.sessions), *self._closing)
        self._sessions.clear()


def _clear_frame(tenant: str | None) -> pb.SessionRequest:
    return pb.SessionRequest(clear_cache=pb.ClearCache(tenant=tenant or "", all=tenant is None))

"""The control loop: facts from processes in, actions of `core.reconcile` out. One per deployment, in the launcher.

The loop itself never waits for a process: each incarnation has a task that reports facts, each action a task that
carries it out. A broken invariant in any of them ends the loop with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cluster.backend import Backend, Handle, Ready, Spec
from cluster.config.resolve import Deployment
from cluster.core import lifecycle
from cluster.core.lifecycle import Kind, LifecyclePolicy, Slot, SlotState
from cluster.core.reconcile import (
    Action,
    Desired,
    Kill,
    MemberView,
    Observed,
    PushMembers,
    Start,
    book,
    members_of,
    observe,
    reconcile,
)
from cluster.peer import Peer
from headrace.clock import Clock, monotonic
from headrace.errors import StartupError
from headrace.ids import IdFactory, random_ids
from router.spec import GatewayReady
from workers.spec import WorkerReady

log = logging.getLogger("headrace.cluster")

TICK_S = 0.25
PROBE_INTERVAL_S = 1.0
CONNECT_TIMEOUT_S = 15.0
FAST_PROBE_INTERVAL_S = 0.2
"""While something is missing: an answer, a process, a session."""
WORKER_GRACE_S = 3.0
"""A worker has nothing to finish once the gateways are gone: this is for closing its sockets and memory in order."""
GATEWAY_CLOSE_S = 5.0
"""Beyond its drain time a gateway needs this long to tell clients and close its doors."""


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One slot as people and scripts see it."""

    slot: str
    kind: Kind
    state: SlotState
    incarnation: str
    pid: int
    ready: Ready | None
    deaths: int
    reason: str


class Controller:
    def __init__(
        self,
        deployment: Deployment,
        backend: Backend,
        *,
        clock: Clock = monotonic,
        new_id: IdFactory = random_ids,
        on_event: Callable[[str], None] = log.warning,
        on_members: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_event` gets one line for people; `on_members` is called when the set of serving processes changed."""
        settings = deployment.cluster
        self._specs: dict[str, Spec] = {spec.gateway_id: spec for spec in deployment.gateways}
        self._specs |= {spec.worker_id: spec for spec in deployment.workers}
        self._token = deployment.gateways[0].cluster_token
        self._backend = backend
        self._clock = clock
        self._new_id = new_id
        self._on_event = on_event
        self._on_members = on_members
        self._policy = LifecyclePolicy(
            liveness_s=settings.liveness_s,
            start_timeout_s=settings.start_timeout_s,
            restart_initial_s=settings.restart_initial_s,
            restart_max_s=settings.restart_max_s,
            restart_reset_s=settings.restart_reset_s,
        )
        gateways = {spec.gateway_id: (Kind.GATEWAY, "") for spec in deployment.gateways}
        workers = {spec.worker_id: (Kind.WORKER, spec.role.value) for spec in deployment.workers}
        self._desired = Desired(slots=gateways | workers)
        self._observed = Observed()
        self._handles: dict[str, Handle] = {}
        self._ready: dict[str, Ready] = {}
        self._peers: dict[str, Peer] = {}
        self._shown: tuple[tuple[str, str], ...] = ()
        self._wake = asyncio.Event()
        self._serving = asyncio.Event()
        self._first_fault: str | None = None

    # ---- the loop

    async def run(self) -> None:
        """Until cancelled. Processes outlive it: `stop` ends them."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                observe(self._desired, self._observed)
                now = self._clock()
                actions = reconcile(self._desired, self._observed, now, self._policy, lambda: self._new_id("inc"))
                book(self._observed, actions, now, self._policy)
                for action in actions:
                    self._carry_out(group, action)
                self._tell()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()

    def _carry_out(self, group: asyncio.TaskGroup, action: Action) -> None:
        match action:
            case Start(slot, incarnation):
                group.create_task(self._live(group, slot, incarnation))
            case Kill(slot, incarnation, reason):
                log.warning("kill slot=%s incarnation=%s reason=%s", slot, incarnation, reason)
                handle = self._handles.get(incarnation)
                if handle is not None:
                    group.create_task(self._backend.kill(handle))
            case PushMembers():
                group.create_task(self._push(action))

    async def _live(self, group: asyncio.TaskGroup, name: str, incarnation: str) -> None:
        """One incarnation from start to exit: reports ready and dead."""
        slot = self._observed.slots[name]
        try:
            handle = await self._backend.start(name, incarnation, self._spec(name, incarnation))
        except (StartupError, OSError) as error:
            self._note_dead(slot, incarnation, str(error))
            return
        self._handles[incarnation] = handle
        probe: asyncio.Task[None] | None = None
        try:
            ready = await self._backend.wait_ready(handle, self._policy.start_timeout_s)
        except StartupError as error:
            self._first_fault = self._first_fault or str(error)
            await self._backend.kill(handle)
        else:
            self._note_ready(slot, incarnation, ready)
            probe = group.create_task(self._probe(slot, incarnation))
        reason = await self._backend.wait_dead(handle)
        if probe is not None:
            probe.cancel()
        self._note_dead(slot, incarnation, reason)

    def _note_ready(self, slot: Slot, incarnation: str, ready: Ready) -> None:
        address = ready.address if isinstance(ready, WorkerReady) else ready.grpc_address
        lifecycle.note_ready(slot, incarnation, address, self._clock())
        self._ready[incarnation] = ready
        self._peers[incarnation] = Peer(slot.kind, address, self._token)
        if isinstance(ready, GatewayReady):
            self._keep_ports(slot.name, ready)
        if self._serving.is_set():
            self._on_event(f"{slot.name}: serving again (process {ready.pid})")
        self._wake.set()

    def _note_dead(self, slot: Slot, incarnation: str, reason: str) -> None:
        lifecycle.note_dead(slot, incarnation, reason, self._clock(), self._policy)
        if slot.incarnation == incarnation and self._serving.is_set():
            wait_s = max(0.0, slot.not_before - self._clock())
            when = f"in {wait_s:.1f} s" if wait_s > 0 else "now"
            self._on_event(f"{slot.name}: ended ({slot.reason}); starting it again {when}")
        self._handles.pop(incarnation, None)
        self._ready.pop(incarnation, None)
        self._peers.pop(incarnation, None)
        self._first_fault = self._first_fault or f"{slot.name}: {reason}"
        self._wake.set()

    def _keep_ports(self, name: str, ready: GatewayReady) -> None:
        """A restarted gateway listens where the first did, also when the OS had chosen the ports."""
        grpc_port = int(ready.grpc_address.rpartition(":")[2])
        http_port = int(ready.http_address.rpartition(":")[2])
        self._specs[name] = self._specs[name].model_copy(update={"grpc_port": grpc_port, "http_port": http_port})

    def _spec(self, name: str, incarnation: str) -> Spec:
        if self._desired.slots[name][0] is Kind.WORKER:
            return self._specs[name].model_copy(update={"incarnation": incarnation})
        # Sessions of a restarted gateway must not be taken for those of the dead one.
        return self._specs[name].model_copy(update={"gateway_id": f"{name}.{incarnation.rpartition('-')[2][:6]}"})

    # ---- probes and pushes

    async def _probe(self, slot: Slot, incarnation: str) -> None:
        peer = self._peers[incarnation]
        try:
            while True:
                began = self._clock()
                answered = await peer.answers()
                lifecycle.note_probe(slot, incarnation, answered, began)
                if slot.kind is Kind.GATEWAY and answered:
                    connected = await peer.connected()
                    if connected is not None:
                        lifecycle.note_connected(slot, incarnation, connected)
                self._wake.set()
                is_calm = answered and self._is_serving()
                await asyncio.sleep(PROBE_INTERVAL_S if is_calm else FAST_PROBE_INTERVAL_S)
        finally:
            await peer.close()

    async def _push(self, action: PushMembers) -> None:
        slot = self._observed.slots[action.slot]
        peer = self._peers.get(action.incarnation)
        siblings = tuple(gateway for gateway in action.gateways if gateway.name != action.slot)
        accepted = peer is not None and await peer.push(action.version, action.members, siblings)
        lifecycle.note_pushed(slot, action.incarnation, action.version, accepted, self._clock(), self._policy)
        self._wake.set()

    # ---- what others see

    def _is_serving(self) -> bool:
        """Every desired process is ready and every gateway, open to clients, holds a session with every worker."""
        slots = self._observed.slots
        workers = {member.incarnation for member in members_of(self._observed)}
        return all(name in slots and slots[name].state is SlotState.READY for name in self._desired.slots) and all(
            workers <= slot.connected for slot in slots.values() if slot.kind is Kind.GATEWAY
        )

    def _tell(self) -> None:
        if self._is_serving():
            self._serving.set()
        shown = tuple(
            (slot.name, slot.incarnation) for slot in self._observed.slots.values() if slot.state is SlotState.READY
        )
        if shown != self._shown:
            self._shown = shown
            if self._serving.is_set():
                self._on_members()

    async def wait_serving(self) -> None:
        """Returns when requests can be answered. Raises StartupError on the first process that fails to start."""
        end = self._clock() + self._policy.start_timeout_s + CONNECT_TIMEOUT_S
        while not self._serving.is_set():
            if self._first_fault is not None:
                raise StartupError(self._first_fault)
            if self._clock() >= end:
                raise StartupError("not every gateway reaches all workers")
            await asyncio.sleep(0.02)

    def processes(self) -> list[ProcessView]:
        """All slots, gateways first, in the order of the configuration."""
        return [self._view(name) for name in self._desired.slots]

    def members(self) -> tuple[MemberView, ...]:
        return members_of(self._observed)

    def _view(self, name: str) -> ProcessView:
        slot = self._observed.slots.get(name) or Slot(name, self._desired.slots[name][0])
        handle = self._handles.get(slot.incarnation)
        ready = self._ready.get(slot.incarnation) if slot.state is SlotState.READY else None
        pid = ready.pid if ready is not None else handle.pid if handle is not None else 0
        return ProcessView(name, slot.kind, slot.state, slot.incarnation, pid, ready, slot.total_deaths, slot.reason)

    async def stop(self, grace_s: float) -> None:
        """After `run` was cancelled: gateways drain first, so that clients get answers while workers still work."""
        handles = list(self._handles.values())
        gateways = [handle for handle in handles if handle.kind is Kind.GATEWAY]
        workers = [handle for handle in handles if handle.kind is Kind.WORKER]
        await asyncio.gather(*(self._backend.stop(handle, grace_s + GATEWAY_CLOSE_S) for handle in gateways))
        await asyncio.gather(*(self._backend.stop(handle, WORKER_GRACE_S) for handle in workers))

"""Every `ray.*` call of the product. Ray places, starts and watches actors; no token and no KV byte passes through it.

Actors never restart by themselves (max_restarts=0): the controller owns that. Their names carry the incarnation, so a
new one never meets the old one's name. Every wait on Ray has its own time limit.

Measured on Ray 2.60: `ray.kill` of a stopped (SIGSTOP) actor reports it dead at once and leaves the process alive, so a
kill here is SIGKILL by process id, on the actor's own node, and an actor counts as dead only when its process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.backend import Handle, Ready, Spec, process_env, ready_type
from cluster.core.lifecycle import Kind
from headrace.errors import StartupError
from workers.spec import WorkerSpec

log = logging.getLogger("headrace.cluster.ray")

REPO_ROOT = Path(__file__).resolve().parent.parent
_CALL_TIMEOUT_S = 5.0
_OPEN_TIMEOUT_S = 60.0
_EXIT_POLL_S = 0.1
_OBJECT_STORE_BYTES = 80 << 20
"""Ray's smallest round size: nothing of ours goes through the object store."""


@dataclass(slots=True)
class _Actor:
    actor: Any
    started: asyncio.Future[str]
    node_id: str = ""
    death: asyncio.Task[str] | None = None


class RayBackend:
    name = "ray"

    def __init__(
        self,
        *,
        address: str | None = None,
        temp_dir: str | None = None,
        namespace: str = "headrace",
        classes: dict[Kind, str] | None = None,
    ) -> None:
        """`address` None starts a private cluster under `temp_dir`; otherwise joins one (`auto`, host:port).

        `classes` maps kinds to `module:Class`, by default the product's actors.
        """
        self._address = address
        self._temp_dir = temp_dir
        self._namespace = namespace
        self._classes = classes or {Kind.WORKER: "workers.actor:WorkerActor", Kind.GATEWAY: "router.actor:GatewayActor"}
        self._handles: dict[str, Handle] = {}
        self._local_node = ""
        self._is_open = False

    async def open(self) -> None:
        if self._address is None:
            _use_private_token()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        opening = asyncio.create_task(asyncio.to_thread(self._init))
        done, _ = await asyncio.wait([opening], timeout=_OPEN_TIMEOUT_S)
        if not done:
            raise StartupError(f"Ray did not start within {_OPEN_TIMEOUT_S:g} s")
        try:
            opening.result()
        except (RayError, ConnectionError, RuntimeError, OSError, ValueError) as error:
            where = f"cannot join the Ray cluster at {self._address}" if self._address else "cannot start Ray"
            raise StartupError(f"{where}: {_first_line(error)}{self._token_hint(error)}") from None

    def _init(self) -> None:
        _silence_ray()
        common: dict[str, Any] = {
            "namespace": self._namespace,
            "log_to_driver": False,
            "logging_level": "ERROR",
            "configure_logging": True,
        }
        if self._address is not None:
            ray.init(address=self._address, **common)
        else:
            # No CPUs: our actors ask for none, so any number of them is placed at once, and Ray prestarts no workers.
            ray.init(
                address="local",
                num_cpus=0,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=self._temp_dir,
                # Ray's default, 15, starves the engine beside anything else that runs on the machine.
                _system_config={"worker_niceness": 0},
                **common,
            )
        self._is_open = True
        self._local_node = ray.get_runtime_context().get_node_id()

    def _token_hint(self, error: Exception) -> str:
        """`ray start --head` clusters want a token since 2.60; joining one without says so in many words."""
        if self._address is None or "auth" not in str(error).lower():
            return ""
        return "; with token authentication set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"

    async def start(self, slot: str, incarnation: str, spec: Spec) -> Handle:
        kind = Kind.WORKER if isinstance(spec, WorkerSpec) else Kind.GATEWAY
        module, class_name = self._classes[kind].split(":")
        cls = getattr(await asyncio.to_thread(__import__, module, fromlist=[class_name]), class_name)
        handle = Handle(slot, incarnation, kind)
        env = {**process_env(spec), "PYTHONPATH": os.pathsep.join([str(REPO_ROOT), *_extra_path()])}
        try:
            actor = (
                ray.remote(cls)
                .options(
                    name=handle.name,
                    namespace=self._namespace,
                    num_cpus=0,
                    max_restarts=0,
                    max_task_retries=0,
                    runtime_env={"env_vars": env},
                    # The gateway's ports are the launcher's to check and the user's to reach.
                    scheduling_strategy=self._own_node() if kind is Kind.GATEWAY else "DEFAULT",
                )
                .remote()
            )
            started = _future(actor.start.remote(spec.model_dump_json()))
        except (RayError, ValueError) as error:
            raise StartupError(f"{slot}: Ray cannot start its actor: {_first_line(error)}") from None
        impl = _Actor(actor, started)
        handle.impl = impl
        self._handles[handle.name] = handle
        impl.death = asyncio.create_task(self._watch(handle, impl))
        return handle

    def _own_node(self) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)

    async def _watch(self, handle: Handle, impl: _Actor) -> str:
        """Waits for the end of the process, not for Ray's opinion."""
        reason = ""
        try:
            handle.pid, impl.node_id = await _future(impl.actor.__ray_call__.remote(_whereabouts))
            await asyncio.wait([impl.started])
            if impl.started.exception() is None:
                await _future(impl.actor.wait.remote())
                reason = "stopped serving"
            else:
                reason = _first_line(impl.started.exception())
        except RayError as error:
            reason = _first_line(error)
        # Nobody else ends an actor whose server stopped or never started.
        await self._end_process(handle, impl)
        self._handles.pop(handle.name, None)
        return reason

    async def wait_ready(self, handle: Handle, timeout_s: float) -> Ready:
        impl: _Actor = handle.impl
        await asyncio.wait([impl.started], timeout=timeout_s)
        if not impl.started.done():
            where = f"process {handle.pid} is up" if handle.pid else "Ray has not placed its actor"
            raise StartupError(f"{handle.slot}: not ready after {timeout_s:g} s ({where})")
        error = impl.started.exception()
        if error is not None:
            raise StartupError(f"{handle.slot}: {_first_line(error)}")
        return ready_type(handle.kind).model_validate_json(impl.started.result())

    async def wait_dead(self, handle: Handle) -> str:
        impl: _Actor = handle.impl
        assert impl.death is not None
        return await asyncio.shield(impl.death)

    async def kill(self, handle: Handle) -> None:
        impl: _Actor = handle.impl
        if impl.death is not None and impl.death.done():
            return
        try:
            await self._send_kill(handle, impl)
        except RayError as error:
            # The reconcile loop sees that the process lives on, and asks again.
            log.warning("kill_failed slot=%s error=%s", handle.slot, _first_line(error))

    async def _send_kill(self, handle: Handle, impl: _Actor) -> None:
        if handle.pid:
            await self._kill_pid(handle.pid, impl.node_id)
        await asyncio.to_thread(ray.kill, impl.actor, no_restart=True)

    async def _end_process(self, handle: Handle, impl: _Actor) -> None:
        with contextlib.suppress(RayError):
            await self._send_kill(handle, impl)
        while handle.pid and impl.node_id == self._local_node and _is_alive(handle.pid):
            await asyncio.sleep(_EXIT_POLL_S)

    async def _kill_pid(self, pid: int, node_id: str) -> None:
        if node_id == self._local_node:
            _kill_here(pid)
            return
        on_node = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        call = ray.remote(_kill_here).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node).remote(pid)
        # A node that cannot run this is gone, and its processes with it.
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(_future(call), _CALL_TIMEOUT_S)

    async def stop(self, handle: Handle, grace_s: float) -> None:
        impl: _Actor = handle.impl
        assert impl.death is not None
        if not impl.death.done():
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(_future(impl.actor.stop.remote()), grace_s)
            await self._send_kill(handle, impl)
        await asyncio.shield(impl.death)

    async def close(self) -> None:
        if not self._is_open:
            return
        for handle in list(self._handles.values()):
            await self.kill(handle)
        deaths = [handle.impl.death for handle in list(self._handles.values())]
        if deaths:
            await asyncio.wait(deaths, timeout=_CALL_TIMEOUT_S)
        for death in deaths:
            death.cancel()
        self._is_open = False
        await asyncio.to_thread(ray.shutdown)


def _silence_ray() -> None:
    """Ray prints a page on standard output about each actor that dies; the controller's one line says it."""
    printer = "print_to_stdstream"
    if hasattr(ray._private.worker, printer):
        setattr(ray._private.worker, printer, lambda data, **_: log.info("ray %s", data.get("lines")))


def _use_private_token() -> None:
    """A private cluster's ports listen on all interfaces; its token lives in this process's environment alone.

    Ray's own default would leave one in the home directory. The mode is left to Ray, which reads it when it is imported
    and turns tokens on for a private cluster unless told otherwise.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") == "token" and not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _has_token() -> bool:
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or (Path.home() / ".ray" / "auth_token").exists()


def _future(ref: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(ref.future())


def _whereabouts(_: object) -> tuple[int, str]:
    return os.getpid(), ray.get_runtime_context().get_node_id()


def _kill_here(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def _extra_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _first_line(error: BaseException | None) -> str:
    """Ray wraps an actor's exception in pages of traceback; the cause is what a person needs."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    for line in lines:
        if line.startswith("The actor is dead because"):
            return line.split(". ")[0]
    return lines[0] if lines else type(cause).__name__

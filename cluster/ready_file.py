"""The JSON file by which scripts find a running deployment."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from cluster.controller import ProcessView
from cluster.core.lifecycle import Kind
from cluster.peer import reachable
from router.spec import GatewayReady
from workers.spec import WorkerReady


def render(model: str, launcher_pid: int, processes: Sequence[ProcessView]) -> str:
    """`{model, pid, grpc, http, gateway, workers}`: only processes that serve; grpc and http are where to connect."""
    gateways = [view for view in processes if view.kind is Kind.GATEWAY and isinstance(view.ready, GatewayReady)]
    gateway = gateways[0] if gateways else None
    ready = gateway.ready if gateway is not None else None
    return json.dumps(
        {
            "model": model,
            "pid": launcher_pid,
            "grpc": reachable(ready.grpc_address) if isinstance(ready, GatewayReady) else None,
            "http": f"http://{reachable(ready.http_address)}" if isinstance(ready, GatewayReady) else None,
            "gateway": {"pid": gateway.pid, "incarnation": gateway.incarnation, "restarts": gateway.deaths}
            if gateway is not None
            else None,
            "workers": [
                {**view.ready.model_dump(mode="json"), "restarts": view.deaths}
                for view in processes
                if isinstance(view.ready, WorkerReady)
            ],
        },
        indent=2,
    )


def write(path: Path, text: str) -> None:
    """Atomically: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)

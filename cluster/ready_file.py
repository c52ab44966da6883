"""The JSON file by which scripts find a running deployment."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from cluster.controller import ProcessView
from cluster.peer import reachable
from router.spec import GatewayReady
from workers.spec import WorkerReady


def render(model: str, launcher_pid: int, processes: Sequence[ProcessView]) -> str:
    """`{model, pid, grpc, http, gateways, workers}`: only processes that serve; grpc and http are where clients
    connect.
    """
    gateways = [(view, view.ready) for view in processes if isinstance(view.ready, GatewayReady)]
    grpc, http = gateways[0][1].client_addresses if gateways else (None, None)
    return json.dumps(
        {
            "model": model,
            "pid": launcher_pid,
            "grpc": grpc and reachable(grpc),
            "http": http and f"http://{reachable(http)}",
            "gateways": [
                {
                    "name": view.slot,
                    "pid": view.pid,
                    "incarnation": view.incarnation,
                    "restarts": view.deaths,
                    "grpc": reachable(ready.grpc_address),
                    "http": f"http://{reachable(ready.http_address)}",
                }
                for view, ready in gateways
            ],
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

"""`headrace serve` with dummy processes: `python cluster_launcher.py MODEL_FOLDER READY_FILE`. Run as a process."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster import launch, prepare, process_backend
from cluster.config import load_config
from cluster.core.lifecycle import Kind
from headrace.errors import StartupError

CHILD = (sys.executable, str(Path(__file__).with_name("cluster_child.py")))


def main() -> int:
    process_backend.COMMANDS = {Kind.WORKER: CHILD, Kind.GATEWAY: CHILD}

    async def folder_itself(path: str, **_: object) -> Path:
        return Path(path)

    prepare.prepare_model = folder_itself
    config = load_config(
        sys.argv[1],
        {
            "cluster.backend": "process",
            "gateway.grpc_port": 0,
            "gateway.http_port": 0,
            "cluster.liveness_s": 2.0,
        },
    )
    try:
        return launch.serve(config, Path(sys.argv[2]))
    except StartupError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

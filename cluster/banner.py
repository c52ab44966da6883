"""What `headrace serve` prints: what runs where, and commands to try."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cluster.config.resolve import Deployment
from cluster.config.units import format_bytes
from cluster.controller import ProcessView
from cluster.peer import reachable
from router.spec import GatewayReady
from workers.spec import WorkerReady


def show(console: Console, deployment: Deployment, processes: Sequence[ProcessView], start_s: float) -> None:
    """Prints the table of processes and the next steps. `start_s` is the time from command to ready."""
    specs = {spec.worker_id: spec for spec in deployment.workers}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("process", "pid", "address", "threads", "KV pool", "KV lane", "memory"):
        table.add_column(column, no_wrap=column != "memory")
    gateway: GatewayReady | None = None
    for view in processes:
        if isinstance(view.ready, GatewayReady):
            gateway = gateway or view.ready
            own = f"grpc {view.ready.grpc_address}\nhttp {view.ready.http_address}"
            table.add_row(view.slot, str(view.pid), own)
        elif isinstance(view.ready, WorkerReady):
            ready, threads = view.ready, str(specs[view.slot].threads)
            table.add_row(view.slot, str(view.pid), ready.address, threads, _pool(ready), _lane(ready), _memory(ready))
    console.print()
    console.print(table)
    served = deployment.gateways[0]
    exact = "on" if any(worker.exact for worker in deployment.workers) else "off"
    console.print(
        f"\n[bold]{served.served_model_name}[/bold] ready in {start_s:.1f} s\n"
        f"backend {deployment.cluster.backend}, mode {served.mode}, exact {exact}, "
        f"max_model_len {served.max_model_len}{_weights(processes)}"
    )
    if gateway is not None:
        if len(deployment.gateways) > 1:
            grpc, http = gateway.client_addresses
            console.print(f"clients go to grpc {grpc}, http {http}: each connection to one of the gateways")
        _try(console, gateway, served.served_model_name, needs_key=bool(served.api_keys))
        if not gateway.grpc_address.startswith(("127.", "localhost")) and not served.api_keys:
            console.print("[yellow]Anyone who reaches this machine may use it: set --api-key.[/yellow]")
    console.print("Ctrl-C stops it.\n")


def _try(console: Console, gateway: GatewayReady, model: str, *, needs_key: bool) -> None:
    grpc_address, http_address = map(reachable, gateway.client_addresses)
    address = "" if grpc_address.endswith(":50051") else f" --address {grpc_address}"
    key = " --api-key KEY" if needs_key else ""
    header = ' -H "Authorization: Bearer KEY"' if needs_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    url = f"http://{http_address}/v1/chat/completions"
    console.print("Try:")
    for line in (
        f'headrace generate --explain{address}{key} "What is the capital of France?"',
        f"headrace status{address}{key}",
        f"curl{header} {url} -H 'Content-Type: application/json' -d '{body}'",
    ):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _pool(ready: WorkerReady) -> str:
    return f"{ready.total_blocks * ready.block_size:,} tokens"


def _memory(ready: WorkerReady) -> str:
    """Uses of at least a MiB."""
    return ", ".join(f"{use} {format_bytes(size)}" for use, size in ready.memory_plan.items() if size >= 1 << 20)


def _weights(processes: Sequence[ProcessView]) -> str:
    kept = {view.ready.weight_storage for view in processes if isinstance(view.ready, WorkerReady)} - {""}
    return f", weights in {' or '.join(sorted(kept))}" if kept else ""


def _lane(ready: WorkerReady) -> str:
    return f"{ready.lane} {ready.lane_gbps:.1f} GB/s" if ready.lane_gbps > 0 else ready.lane

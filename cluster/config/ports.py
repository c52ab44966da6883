"""Which gateway listens where. Pure.

One gateway: at `grpc_port` and `http_port`. Of several, all at those, and gateway i at the ports i + 1 behind them too,
so that each can be meant. Port 0, any free one, has no neighbours: every port is any free one then.
"""

from __future__ import annotations

MAX_PORT = 65_535


def own_port(port: int, index: int, replicas: int) -> int:
    return port + 1 + index if replicas > 1 and port else port


def fault(grpc_port: int, http_port: int, replicas: int) -> str | None:
    """Why these cannot be; None: they can."""
    if grpc_port == http_port != 0:
        return f"grpc_port and http_port are both {http_port}; they must differ"
    for name, port in (("grpc_port", grpc_port), ("http_port", http_port)):
        if own_port(port, replicas - 1, replicas) > MAX_PORT:
            return (
                f"{name} {port}: with {replicas} gateways it must be at most {MAX_PORT - replicas}, for their own ports"
            )
    if replicas > 1 and grpc_port and http_port and abs(grpc_port - http_port) <= replicas:
        return (
            f"grpc_port {grpc_port} and http_port {http_port} must be more than {replicas} apart: each gateway "
            "has ports of its own behind them"
        )
    return None

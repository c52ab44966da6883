"""The ports where clients come, as the launcher sees them: free before anything is started, and held while gateways
share them, so that they are the deployment's also while one of them is replaced.

A held socket is bound and never listens. It is bound alone, so that a port that anybody has is told, and only then lets
those in that share (SO_REUSEPORT; the kernel admits this user's alone). SO_REUSEADDR is for its own binding beside
connections that have just ended; kept, it would let others bind a port where nobody listens.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cluster.config.ports import own_port
from cluster.config.schema import GatewayConfig
from headrace.errors import StartupError


@contextmanager
def held(gateway: GatewayConfig) -> Iterator[tuple[int, int]]:
    """The gRPC and the HTTP port. Those of several gateways are held, and chosen when they are 0.

    Raises StartupError for a port that is taken or an address that is not this machine's.
    """
    fields = [("gateway.grpc_port", gateway.grpc_port, "--grpc-port")]
    fields += [("gateway.http_port", gateway.http_port, "--http-port")]
    with ExitStack() as stack:
        found = []
        for field, port, flag in fields:
            sock = stack.enter_context(_bound(gateway.host, port, field, flag))
            found.append(sock.getsockname()[1] if gateway.replicas > 1 else port)
            if gateway.replicas == 1:
                sock.close()
                continue
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            for index in range(gateway.replicas):
                own = own_port(port, index, gateway.replicas)
                _bound(gateway.host, own, f"{field}: gateway-{index}'s own", flag).close()
        yield found[0], found[1]


def _bound(host: str, port: int, field: str, flag: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        hint = f"; choose another with {flag}" if error.errno == errno.EADDRINUSE else ""
        raise StartupError(f"{field}: {host}:{port}: {error.strerror or error}{hint}") from None
    return sock

"""The clients' ports: told when they are taken, and held for the gateways that share them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from cluster.client_ports import held
from cluster.config.schema import GatewayConfig
from headrace.errors import StartupError
from router.doors import bound

HOST = "127.0.0.1"


def config(**fields: int) -> GatewayConfig:
    return GatewayConfig(**({"grpc_port": 0, "http_port": 0} | fields))


@pytest.fixture
def taken() -> Iterator[int]:
    with bound(HOST, 0, "port") as sock:
        sock.listen()
        yield int(sock.getsockname()[1])


def assert_refused(http_port: int) -> None:
    """Another deployment, of one gateway or of several, cannot have the port."""
    for replicas in (1, 2):
        with pytest.raises(StartupError, match=f"gateway.http_port: {HOST}:{http_port}: .*--http-port"):
            held(config(replicas=replicas, http_port=http_port)).__enter__()


def test_the_ports_of_several_gateways_are_theirs_alone_while_they_are_held() -> None:
    with held(config(replicas=2)) as (grpc_port, http_port):
        assert grpc_port and http_port and grpc_port != http_port
        # 1. Nobody else's before a gateway listens.
        assert_refused(http_port)
        for _ in range(2):
            # 2. All gateways may listen there, and others may not.
            with bound(HOST, http_port, "p", is_shared=True) as one, bound(HOST, http_port, "p", is_shared=True) as two:
                one.listen()
                two.listen()
                assert_refused(http_port)
            # 3. Nor when all gateways have died; their successors may.
            assert_refused(http_port)
    # 4. Nothing holds them afterwards.
    bound(HOST, http_port, "p").close()


def test_ports_with_connections_that_have_just_ended_can_be_held_again() -> None:
    with held(config(replicas=2)) as (_, http_port), bound(HOST, http_port, "p", is_shared=True) as gateway:
        gateway.setblocking(True)
        gateway.listen()
        with socket.create_connection((HOST, http_port), timeout=5) as client:
            gateway.accept()[0].close()
            assert client.recv(1) == b""
    with held(config(replicas=2, http_port=http_port)) as ports:
        assert ports[1] == http_port


def test_a_held_port_takes_no_connection() -> None:
    with held(config(replicas=2)) as (_, http_port), pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, http_port), timeout=5)


def test_one_gateway_binds_its_ports_itself(taken: int) -> None:
    with held(config()) as ports:
        assert ports == (0, 0)
    with pytest.raises(StartupError, match=f"gateway.grpc_port: {HOST}:{taken}: Address already in use; choose"):
        held(config(grpc_port=taken)).__enter__()


def test_a_gateways_own_port_that_is_taken_is_told_with_its_name() -> None:
    with ExitStack() as stack:
        while True:
            sock = stack.enter_context(bound(HOST, 0, "port"))
            taken = int(sock.getsockname()[1])
            with suppress(StartupError):
                for free in (taken - 2, taken - 1):
                    bound(HOST, free, "port").close()
                break
        sock.listen()
        with pytest.raises(StartupError, match=f"gateway.grpc_port: gateway-1's own: {HOST}:{taken}"):
            held(config(replicas=2, grpc_port=taken - 2)).__enter__()

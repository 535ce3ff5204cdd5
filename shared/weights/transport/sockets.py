"""Sockets for weight transfers."""

import socket

from penstock.shared.errors import WeightsError


def tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def own_address(host: str, port: int) -> str:
    """Return this host's address on the route to ``host``, without sending; raises WeightsError without a route."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        try:
            route.connect((host, port))
        except OSError as error:
            raise WeightsError(f"no route to the source at {host}: {error}") from error
        return str(route.getsockname()[0])

"""Sockets as sources and receivers of weights need them."""

import socket

from shared.errors import WeightsError

_ANY = ("", "0.0.0.0", "::")  # noqa: S104 - named to tell them apart, not bound here


def tune(connection: socket.socket) -> None:
    """Send at once, and notice in the end when the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def reachable(host: str) -> str:
    """Return the name by which others reach what listens on ``host``: this host's own where that is "any"."""
    return socket.gethostname() if host in _ANY else host


def own_address(host: str, port: int) -> str:
    """Return the address of this host on the way to ``host``; no packet is sent.

    Raises:
        WeightsError: there is no way.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        try:
            route.connect((host, port))
        except OSError as error:
            raise WeightsError(f"expected a route to the source at {host}, found: {error}") from error
        return str(route.getsockname()[0])

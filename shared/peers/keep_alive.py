"""Notice a peer that vanished without a word, such as a host that lost its power."""

import socket

SILENT_S = 15
"""After which a connection whose peer acknowledges nothing is broken."""


def keep_alive(connection: socket.socket) -> None:
    """Break a TCP connection after ``SILENT_S`` without acknowledgements, also while nothing is sent."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENT_S // 3),
        (socket.TCP_KEEPINTVL, SILENT_S // 3),
        (socket.TCP_KEEPCNT, 2),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENT_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)

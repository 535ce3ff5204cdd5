"""torch's TCPStore bound to one address instead of all.

Stores have no password, so restrict network access to them.
"""

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from penstock.shared.peers.addresses import listen


def serve_store(host: str, port: int, setting: str, timeout: timedelta, **options: Any) -> TCPStore:
    listener = listen(host, port, setting)
    bound = listener.getsockname()[1]
    return TCPStore(
        host,
        bound,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
        **options,
    )


def connect_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """May exceed ``timeout`` if its process is stopped."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

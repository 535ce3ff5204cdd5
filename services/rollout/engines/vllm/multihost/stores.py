"""vLLM's rendezvous: a TCPStore bound to its address only; torch's own listens on all addresses."""

import importlib
import os
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from shared.peers.addresses import rendezvous_address
from shared.peers.tcp_store import serve_store


def bind_stores() -> None:
    """Bind the stores that ``torch.distributed.init_process_group`` serves in this process to one address.

    Only ``tcp://`` stores are expected, as vLLM uses no others.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = _open_store


def _open_store(host_name: str, port: int, *, is_master: bool, timeout: timedelta, **options: Any) -> TCPStore:
    if not is_master:
        return TCPStore(host_name, port, is_master=False, timeout=timeout, **options)
    address = rendezvous_address(host_name, os.environ.get("VLLM_HOST_IP", "127.0.0.1"))
    return serve_store(address, port, "rollout.rendezvous", timeout, **options)

"""Bind vLLM's rendezvous store to one address; torch's own listens on all."""

import importlib
import os
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from penstock.shared.peers.addresses import rendezvous_address
from penstock.shared.peers.tcp_store import serve_store


def bind_stores() -> None:
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = _open_store


def _open_store(host_name: str, port: int, *, is_master: bool, timeout: timedelta, **options: Any) -> TCPStore:
    if not is_master:
        return TCPStore(host_name, port, is_master=False, timeout=timeout, **options)
    address = rendezvous_address(host_name, os.environ.get("VLLM_HOST_IP", "127.0.0.1"))
    return serve_store(address, port, "rollout.rendezvous", timeout, **options)

"""The ranks' process group, without a port that others can reach.

::

    one rank          a store within the process
    one host          a file that the launcher made in a folder of its own (FileStore); gloo and NCCL on loopback
    several hosts     a TCPStore of rank 0 at ``trainer.rendezvous``; gloo and NCCL on the interface of ``run.host``

Ranks wait for each other's commands and decisions in :func:`host_group`.
"""

import functools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store
from torch.distributed.distributed_c10d import _set_pg_timeout

from penstock.services.trainer.launcher import RANKS_STORE
from penstock.shared.errors import SettingsError
from penstock.shared.peers import nccl_transport
from penstock.shared.peers.addresses import rendezvous_address, use_interfaces
from penstock.shared.peers.tcp_store import connect_store, serve_store
from penstock.shared.settings import Settings, TrainerSettings

_MEET = timedelta(minutes=30)
"""Until ranks have started, and for which ranks of several hosts may be silent: a host may have vanished."""
_LONG = timedelta(hours=6)
"""For storage, and for what rank 0 waits for, such as the bus, where the launcher sees ranks that end."""


def start_ranks(device: str, settings: Settings | None = None, own: str = "127.0.0.1") -> tuple[int, int]:
    """``settings`` are for trainers that may span hosts; ``own`` is this host's reachable address."""
    trainer = TrainerSettings() if settings is None else settings.trainer
    use_interfaces(own, spans_hosts=trainer.nodes > 1)
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if device == "cuda" else "gloo"
    if backend == "nccl":
        nccl_transport.record()
    dist.init_process_group(backend, store=_store(trainer, rank, ranks, own), rank=rank, world_size=ranks)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if backend == "nccl" and ranks > 1:
        _check_fabric(settings)
    if ranks > 1:
        host_group()
        _group(dist.group.WORLD, _LONG)
        writers_group()  # now: a host that died just before would be waited for
    return rank, ranks


def host_group() -> dist.ProcessGroup:
    """Return the group of all ranks by gloo, through host memory; collective when first called.

    A rank that waits in a collective of NCCL keeps a kernel running, which takes time from others on its GPU.
    """
    return _group(dist.group.WORLD, _MEET if spans_hosts() else _LONG)


def spans_hosts() -> bool:
    """Whether the ranks are on several hosts, by the launcher's environment."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks


def writers_group() -> dist.ProcessGroup:
    """Return the group of the ranks' threads that write checkpoints; made by :func:`start_ranks`."""
    return _group(dist.group.WORLD, _LONG, "writers")


@functools.cache
def _group(_world: dist.ProcessGroup | None, patience: timedelta, _members: str = "ranks") -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_MEET if spans_hosts() else patience)
    _set_pg_timeout(patience, group)
    return group


def meet_at_storage() -> None:
    """Wait for all ranks, of which some may read from or write to slow storage for hours; collective.

    NCCL would end the ranks after 10 minutes in which one of them waits for another.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(_group(dist.group.WORLD, _LONG))


def _check_fabric(settings: Settings | None) -> None:
    """Connect the ranks, and refuse the transport that NCCL chose unless it is the required one."""
    dist.barrier()
    transports = nccl_transport.recorded()
    if settings is not None and settings.fabric.require == "rdma":
        nccl_transport.require_rdma(transports)


def _store(trainer: TrainerSettings, rank: int, ranks: int, own: str) -> Store:
    if ranks == 1:
        return HashStore()
    if trainer.nodes == 1:
        if RANKS_STORE not in os.environ:
            raise SettingsError(
                f"expected ranks that the trainer itself started, found RANK and WORLD_SIZE = {ranks} of another launcher (torchrun, a "
                "PyTorchJob): unset RANK and set trainer.ranks, on several hosts trainer.nodes, trainer.node and trainer.rendezvous too"
            )
        store = FileStore(os.environ[RANKS_STORE], ranks)
        store.set_timeout(_LONG)  # rank 0 may wait for a shared device first
        return store
    host, _, port = trainer.rendezvous.rpartition(":")
    host = host.strip("[]")
    if rank == 0:
        return serve_store(rendezvous_address(host, own), int(port), "trainer.rendezvous", _MEET, world_size=ranks)
    return connect_store(host, int(port), _MEET)

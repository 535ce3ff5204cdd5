"""Publish the weights of a step, by pull from this process or by file.

::

    step ─▶ fill the snapshot that is not served ─▶ offer it ─▶ commit (driver) ─▶ replicas ask for exactly this version
               A ◀─── versions 0, 2, 4, …    B ◀─── versions 1, 3, 5, …

Two flat snapshots on the device alternate, without locks: a pull that overlaps an overwrite fails on its checksums. On
a shared device there is one, and from rung 2 of the ladder on none while the trainer works. A version is offered before its commit, when replicas learn of it. Adapters alone
(``Settings.publishes_adapters``) go by file. A supervised run has no replicas, and publishes nothing.

With ``weights.snapshots = "sharded"`` every rank keeps, and serves, its share of each snapshot::

    rank 0     buckets 0, N, 2N, …      ─┐ every rank's address and checksums ─▶ the same header on all
    rank 1     buckets 1, N + 1, …      ─┤
    …                                   ─┘ rank 0's source names the others to pullers

All ranks finish publishing before rank 0 answers the driver, so a committed version is whole.
"""

import logging
from collections.abc import Container, Sequence

import torch
import torch.distributed as dist

from penstock.services.trainer.model.adapter import file_configuration
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.rank0.mailbox.results import Whereabouts
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import PeerError
from penstock.shared.peers.handshake import Secret
from penstock.shared.settings import Settings
from penstock.shared.settings.placement import REPLICA_RUNG
from penstock.shared.weights.format import BUCKET_BYTES
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Layout, plan_layout
from penstock.shared.weights.format.snapshot import dtype_name, keep_newest, write_adapter, write_snapshot
from penstock.shared.weights.source.source import WeightSource

log = logging.getLogger(__name__)

_LEAVE_S = 5.0
_BUCKETS_OF_SHARE = 8
"""At least, so that shares are about equal."""


def _unknown() -> bytes:
    raise PeerError("this rank does not know the run's secret yet")


class Publication:
    """Publishes by ``weights.transport``, for replicas that reach ``host``; on the training thread, and closed after
    it. Ranks other than 0 do not know the run's ``secret`` at first.
    """

    def __init__(self, settings: Settings, host: str, secret: Secret = _unknown) -> None:
        self._settings = settings
        self._host = host
        self._secret = secret
        self._dtype = torch.float32 if settings.policy.dtype == "float32" else torch.bfloat16
        self._source: WeightSource | None = None
        self._spare: FlatSnapshot | None = None
        self._offered: FlatSnapshot | None = None
        self._others: Sequence[str] = ()
        self.newest: tuple[PolicyVersion, int] | None = None
        """Version and step."""

    def publish(self, engine: TrainingEngine, version: PolicyVersion, step: int) -> Whereabouts:
        """Make the weights of ``step`` available as ``version``; other ranks call ``engine.take_part``.

        Raises:
            WeightsError: storage refused.
        """
        folder, self.newest = self._settings.snapshot_folder, (version, step)
        if not self._settings.kind.generates:
            return Whereabouts("", "", "")
        if self._settings.publishes_adapters:
            configuration = file_configuration(engine.model)
            written = write_adapter(folder, version, step, engine.factors(), configuration, self._dtype)
            return Whereabouts(written.digest, str(written.location), "")
        if self._settings.weights.transport == "pull":
            return self._offer(engine, version, step)
        as_used = _buffers(engine)
        tensors = ((name, tensor.to(self._published(name, tensor.dtype, as_used))) for name, tensor in engine.tensors())
        written = write_snapshot(folder, version, step, tensors, None, changes=True)
        return Whereabouts(written.digest, str(written.location), "")

    def take_part(self, engine: TrainingEngine, version: PolicyVersion, step: int) -> None:
        """Help rank 0 publish, as another rank."""
        self.newest = version, step
        if not self._settings.kind.generates:
            return
        if not self._settings.publishes_adapters and self._is_sharded(engine):
            self._offer(engine, version, step)
        else:
            engine.take_part(factors=self._settings.publishes_adapters)

    def free(self, rung: int) -> bool:
        """Free the snapshot's memory for training at ``rung``; return whether the version must be offered again.

        The same on every rank. Only while this process holds all replicas' devices.
        """
        if self.newest is None or not self._settings.frees_snapshots or rung < REPLICA_RUNG:
            return False
        if self._source is not None:
            self._source.withdraw(_LEAVE_S)
        self._spare = self._offered = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # else smaller tensors divide the buckets' segments
        return True

    @property
    def buckets(self) -> list[torch.Tensor]:
        return [bucket for snapshot in (self._spare, self._offered) if snapshot for bucket in snapshot.buckets]

    def _offer(self, engine: TrainingEngine, version: PolicyVersion, step: int) -> Whereabouts:
        rank, ranks = (dist.get_rank(), engine.ranks) if self._is_sharded(engine) else (0, 1)
        source = self._source or self._open(f"rank-{rank}" if ranks > 1 else "")
        snapshot = self._spare or FlatSnapshot(self._layout(engine, ranks), engine.device, (rank, ranks))

        def join(own: tuple[str, ...]) -> tuple[str, ...]:
            return own if ranks == 1 else self._join(engine, source.address, own)

        header = snapshot.fill(engine.tensors(), version, step, join)
        source.offer(snapshot, self._others)
        if ranks > 1:  # the driver keeps the newest of whole ones
            keep_newest(self._settings.snapshot_folder / f"rank-{rank}", self._settings.weights.keep)
        # If every replica shares the trainer's device, none pulls while the trainer holds it, so one snapshot is enough.
        self._spare, self._offered = snapshot if self._settings.frees_snapshots else self._offered, snapshot
        return Whereabouts(header.digest, "", source.address)

    def _is_sharded(self, engine: TrainingEngine) -> bool:
        return self._settings.weights.snapshots == "sharded" and engine.ranks > 1

    def _join(self, engine: TrainingEngine, address: str, own: tuple[str, ...]) -> tuple[str, ...]:
        """Return the checksums of all buckets; every rank also learns the other sources and the run's secret."""
        is_first = dist.get_rank() == 0
        shares = engine.gathered((address, own, self._secret() if is_first else b""))
        if not is_first:
            secret = shares[0][2]
            self._secret = lambda: secret
        self._others = [address for address, checksums, _ in shares[1:] if checksums]
        joined = [""] * sum(len(checksums) for _, checksums, _ in shares)
        for rank, (_, checksums, _) in enumerate(shares):
            joined[rank :: len(shares)] = checksums
        return tuple(joined)

    def _open(self, folder: str) -> WeightSource:
        weights = self._settings.weights
        self._source = WeightSource(
            self._host,
            0,  # any free port, sent with each version
            lambda: self._secret(),
            deadline_s=weights.deadline_s,
            file_folder=self._settings.snapshot_folder / folder,
        )
        log.info("weights are served", extra={"address": self._source.address})
        return self._source

    def _layout(self, engine: TrainingEngine, ranks: int) -> Layout:
        named, as_used = engine.shapes(), _buffers(engine)
        shapes = [(name, dtype_name(self._published(name, dtype, as_used)), shape) for name, dtype, shape in named]
        layout = plan_layout(shapes)
        share_bytes = layout.nbytes // ranks
        if ranks == 1 or share_bytes >= _BUCKETS_OF_SHARE * BUCKET_BYTES:
            return layout
        return plan_layout(shapes, share_bytes // _BUCKETS_OF_SHARE)

    def _published(self, name: str, dtype: torch.dtype, as_used: Container[tuple[str, torch.dtype]]) -> torch.dtype:
        is_converted = dtype.is_floating_point and (name.rpartition(".")[2], dtype) not in as_used
        return self._dtype if is_converted else dtype

    def close(self) -> None:
        """Let pulls finish briefly, then stop serving."""
        source, self._source = self._source, None
        if source is not None:
            source.withdraw(_LEAVE_S)
            source.close()


def _buffers(engine: TrainingEngine) -> frozenset[tuple[str, torch.dtype]]:
    """Return the last names and types of the model's buffers, such as the biases of a mixture's routers: they are published in
    the type in which they are used."""
    return frozenset((name.rpartition(".")[2], buffer.dtype) for name, buffer in engine.model.named_buffers())

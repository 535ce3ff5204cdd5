"""Publish the weights of a step, by pull from this process or by file. Rank 0 only.

::

    step ─▶ fill the snapshot that is not served ─▶ offer it ─▶ commit (driver) ─▶ replicas ask for exactly this version
               A ◀─── versions 0, 2, 4, …    B ◀─── versions 1, 3, 5, …

Two flat snapshots on the device alternate, without locks: a pull that overlaps an overwrite fails on its checksums. On
a shared device there is one. A version is offered before its commit, when replicas learn of it.
"""

import logging

import torch

from services.trainer.model.adapter import file_configuration
from services.trainer.model.engine import TrainingEngine
from services.trainer.rank0.results import Whereabouts
from shared.bus.messages import PolicyVersion
from shared.peers.handshake import Secret
from shared.settings import Settings
from shared.weights.format.flat import FlatSnapshot
from shared.weights.format.layout import Layout, plan_layout
from shared.weights.format.snapshot import dtype_name, write_adapter, write_snapshot
from shared.weights.source.source import WeightSource

log = logging.getLogger(__name__)

_LEAVE_S = 5.0
_BUCKET_BYTES = 512 << 20
"""Few transfers, small enough to stage on a GPU."""


class Publication:
    """Publishes by ``weights.transport``, for replicas that reach ``host``; on the training thread, and closed after
    it.

    """

    def __init__(self, settings: Settings, host: str, secret: Secret) -> None:
        self._settings = settings
        self._host = host
        self._secret = secret
        self._dtype = torch.float32 if settings.policy.dtype == "float32" else torch.bfloat16
        self._source: WeightSource | None = None
        self._spare: FlatSnapshot | None = None
        self._offered: FlatSnapshot | None = None

    def publish(self, engine: TrainingEngine, version: PolicyVersion, step: int) -> Whereabouts:
        """Make the weights of ``step`` available as ``version``; other ranks call ``engine.take_part``.

        Raises:
            WeightsError: storage refused.
        """
        folder = self._settings.snapshot_folder
        if self._settings.publishes_adapters:
            configuration = file_configuration(engine.model)
            written = write_adapter(folder, version, step, engine.factors(), configuration, self._dtype)
            return Whereabouts(written.digest, str(written.location), "")
        if self._settings.weights.transport == "pull":
            return self._offer(engine, version, step)
        written = write_snapshot(folder, version, step, engine.tensors(), self._dtype)
        return Whereabouts(written.digest, str(written.location), "")

    @property
    def buckets(self) -> list[torch.Tensor]:
        return [bucket for snapshot in (self._spare, self._offered) if snapshot for bucket in snapshot.buckets]

    def _offer(self, engine: TrainingEngine, version: PolicyVersion, step: int) -> Whereabouts:
        source = self._source or self._open()
        snapshot = self._spare or FlatSnapshot(self._layout(engine), engine.device)
        header = snapshot.fill(engine.tensors(), version, step)
        source.offer(snapshot)
        # If every replica shares the trainer's device, none pulls while the trainer holds it, so one snapshot is enough.
        alone = self._settings.placement.mode == "shared"
        self._spare, self._offered = snapshot if alone else self._offered, snapshot
        return Whereabouts(header.digest, "", source.address)

    @property
    def snapshot_bytes(self) -> int:
        snapshots = {id(snapshot): snapshot for snapshot in (self._spare, self._offered) if snapshot is not None}
        return sum(bucket.nbytes for snapshot in snapshots.values() for bucket in snapshot.buckets)

    def _open(self) -> WeightSource:
        weights = self._settings.weights
        self._source = WeightSource(
            self._host,
            0,  # any free port, sent with each version
            self._secret,
            deadline_s=weights.deadline_s,
            file_folder=self._settings.snapshot_folder,
            file_dtype=self._dtype,
        )
        log.info("weights are served", extra={"address": self._source.address})
        return self._source

    def _layout(self, engine: TrainingEngine) -> Layout:
        shapes = ((name, dtype_name(self._published(dtype)), shape) for name, dtype, shape in engine.shapes())
        return plan_layout(shapes, _BUCKET_BYTES)

    def _published(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if dtype.is_floating_point else dtype

    def close(self) -> None:
        """Let pulls finish briefly, then stop serving."""
        source, self._source = self._source, None
        if source is not None:
            source.withdraw(_LEAVE_S)
            source.close()

"""Make the weights of a step a version that replicas can get, and say how: by pull from this process, or by file.

::

    step ─▶ fill the snapshot that is not served ─▶ offer it ─▶ commit (driver) ─▶ replicas ask for exactly this version
               A ◀─── versions 0, 2, 4, …    B ◀─── versions 1, 3, 5, …

Two flat snapshots on the training device take turns. While B is filled and offered, whoever still pulls A has until the
next step is done; then A is written over, and a pull that reads it then fails on its checksums. No puller ever holds
a lock that training wants.

With adapters that are published alone (``Settings.publishes_adapters``) a version is their folder, by file whatever the transport.

A version is offered before it is committed. Nobody knows of it until then, as replicas ask for the version and digest of
a committed record; and once they know, it is there. A commit that is refused leaves an offer that nobody asks for.

Rank 0 only. It knows no bus and no ledger.
"""

import dataclasses
import logging
import time
from pathlib import Path

import torch

from services.trainer.model.adapter import file_configuration
from services.trainer.model.engine import TrainingEngine
from shared.bus.messages import PolicyVersion
from shared.files.durable import NO_ROOM, no_room, write_whole
from shared.peers.handshake import Secret
from shared.settings import Settings
from shared.weights.format.flat import FlatSnapshot
from shared.weights.format.layout import Layout, plan_layout
from shared.weights.format.snapshot import dtype_name, write_adapter, write_snapshot
from shared.weights.source.source import WeightSource

log = logging.getLogger(__name__)

_LEAVE_S = 5.0
_AGAIN_S = 1.0
"""How long pulls in progress may take when the trainer stops."""
_NOTE = "newest_version"


@dataclasses.dataclass(frozen=True, slots=True)
class Whereabouts:
    """What a record says of where its weights are; see :class:`shared.bus.messages.PolicyRecord`."""

    digest: str
    location: str
    source: str


class Publication:
    """Publishes by ``weights.transport``. It lives on the training thread, and is closed when that has ended.

    Args:
        host: the address at which replicas reach this process.
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
        """Make the weights of ``step`` there for replicas as ``version``; other ranks call ``engine.take_part``.

        Raises:
            WeightsError: the storage of the file transport refused.
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

    def _offer(self, engine: TrainingEngine, version: PolicyVersion, step: int) -> Whereabouts:
        source = self._source or self._open()
        snapshot = self._spare or FlatSnapshot(self._layout(engine), engine.device)
        header = snapshot.fill(engine.tensors(), version, step)
        source.offer(snapshot)
        self._spare, self._offered = self._offered, snapshot
        return Whereabouts(header.digest, "", source.address)

    def _open(self) -> WeightSource:
        weights = self._settings.weights
        self._source = WeightSource(
            self._host,
            weights.source_port,
            self._secret,
            deadline_s=weights.deadline_s,
            file_folder=self._settings.snapshot_folder,
            file_dtype=self._dtype,
        )
        log.info("weights are served", extra={"address": self._source.address})
        return self._source

    def _layout(self, engine: TrainingEngine) -> Layout:
        shapes = ((name, dtype_name(self._published(dtype)), shape) for name, dtype, shape in engine.shapes())
        return plan_layout(shapes, self._settings.weights.bucket_mib << 20)

    def _published(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if dtype.is_floating_point else dtype

    def close(self) -> None:
        """Let pulls in progress finish for a moment, then serve no more."""
        source, self._source = self._source, None
        if source is not None:
            source.withdraw(_LEAVE_S)
            source.close()


def outlives_the_process(settings: Settings) -> bool:
    """Whether a later trainer finds what this one published."""
    return settings.weights.transport == "file" or settings.publishes_adapters


def note_version(folder: Path, version: PolicyVersion) -> None:
    """Write a version's number into the run's folder before it is committed, so that a bus that is lost loses no number.

    While the disk has no room it waits: a number that is not noted might be given to other weights later.
    """
    if version < noted_version(folder):
        return  # written by a trainer that took our place
    said = False
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / _NOTE, str(int(version)))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not said:
                log.warning("training waits for room on disk", extra={"reason": no_room(folder / _NOTE, error)})
            said = True
            time.sleep(_AGAIN_S)
        else:
            return


def noted_version(folder: Path) -> PolicyVersion:
    """Return the largest number that :func:`note_version` wrote; 0 where there is none."""
    try:
        return PolicyVersion(int((folder / _NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return PolicyVersion(0)

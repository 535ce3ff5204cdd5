"""Published weights, checkpoints and the final policy: rank 0 writes, other ranks help gather."""

import dataclasses
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.commits import note_version
from penstock.services.trainer.checkpoint.manifests import CheckpointFile, CheckpointState
from penstock.services.trainer.checkpoint.signatures import open_signer
from penstock.services.trainer.model.adapter import file_configuration
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.policy import export, export_adapter, on_host
from penstock.services.trainer.rank0.mailbox.results import PolicyWritten, Saved, Whereabouts
from penstock.services.trainer.rank0.publication import Publication
from penstock.services.trainer.rank_group import meet_at_storage
from penstock.services.trainer.token_values import TokenRecorder
from penstock.shared.bus.messages import Experience, Float32Array, PolicyVersion
from penstock.shared.files.checkpoint_folder import CHECKPOINTS
from penstock.shared.settings import Settings

log = logging.getLogger(__name__)

_LONGEST_REFUSAL = 500


class Artifacts:
    """A rank other than 0, on the training thread."""

    def __init__(self, settings: Settings, publication: Publication) -> None:
        self._settings = settings
        self._publication = publication

    @property
    def snapshots(self) -> Sequence[Tensor]:
        """Memory of the published weights on this rank's device."""
        return self._publication.buckets

    def publish(self, engine: TrainingEngine, version: PolicyVersion | None, step: int) -> Whereabouts | None:
        assert version is not None
        meet_at_storage()
        self._publication.take_part(engine, version, step)
        return None

    def free(self, rung: int) -> bool:
        """Free the snapshot for training at ``rung``; return whether its version must be offered again."""
        return self._publication.free(rung)

    def offer_again(self, engine: TrainingEngine) -> None:
        """Offer the newest version again, from the same weights."""
        assert self._publication.newest is not None
        self.publish(engine, *self._publication.newest)

    def record_tokens(
        self, version: PolicyVersion | None, group: Experience, logprobs: Mapping[int, Float32Array]
    ) -> None:
        """Record the tokens of a group of the step that made ``version``, before its commit (``TokenRecorder``)."""

    def complete(self, state: CheckpointState | None, files: Mapping[Path, CheckpointFile], refusal: str) -> Saved:
        """Complete a checkpoint, or delete it if storage refused a part."""
        return Saved(None)

    def export(self, engine: TrainingEngine) -> PolicyWritten:
        """Write the final policy in Hugging Face form, adapters also separately."""
        engine.take_part()
        if self._settings.policy.lora.rank:
            engine.take_part(factors=True)
        return PolicyWritten(())


class Rank0Artifacts(Artifacts):
    """Rank 0, on the training thread."""

    def __init__(self, settings: Settings, publication: Publication) -> None:
        super().__init__(settings, publication)
        self._signer = open_signer(settings)
        self._tokens = TokenRecorder(settings)

    def publish(self, engine: TrainingEngine, version: PolicyVersion | None, step: int) -> Whereabouts | None:
        """Record the version's number before its commit, then publish the weights."""
        assert version is not None
        note_version(self._settings.run_folder, version)
        meet_at_storage()  # rank 0 may have waited for room on its disk
        return self._publication.publish(engine, version, step)

    def record_tokens(
        self, version: PolicyVersion | None, group: Experience, logprobs: Mapping[int, Float32Array]
    ) -> None:
        assert version is not None
        self._tokens.record(version, group, logprobs)

    def complete(self, state: CheckpointState | None, files: Mapping[Path, CheckpointFile], refusal: str) -> Saved:
        """Write the marker and rename the folder into place."""
        assert state is not None
        root, base = self._settings.run_folder / CHECKPOINTS, local_store.base_of(self._settings.policy)
        state = dataclasses.replace(state, adapter_of=base)
        if not refusal:
            try:
                return Saved(local_store.make_whole(root, state, files, self._signer))
            except OSError as error:
                refusal = str(error)
        shutil.rmtree(local_store.beside(root, state.step), ignore_errors=True)
        return Saved(None, refusal)

    def export(self, engine: TrainingEngine) -> PolicyWritten:
        policy, adapters = self._settings.run_folder / "policy", self._settings.run_folder / "adapter"
        whole = on_host(engine.tensors())  # first, as the other ranks take part
        factors = on_host(engine.factors()) if self._settings.policy.lora.rank else {}
        try:
            export(engine.model, whole, self._settings.policy, policy)
            if factors:
                export_adapter(factors, file_configuration(engine.model), adapters)
        except Exception as error:  # whatever storage, transformers or a model's own code raises
            log.exception("the final policy could not be written")
            refusal = " ".join(str(error).split())[:_LONGEST_REFUSAL] or type(error).__name__
            return PolicyWritten((), refusal, may_succeed=isinstance(error, OSError))
        return PolicyWritten((adapters, policy) if factors else (policy,))

"""Write one version of a run's policy in Hugging Face form, or its adapter alone for PEFT.

::

    snapshot of N on disk      weights.folder/v00000N; each file's hash is checked
    checkpoint of N            <run folder>/checkpoints, of any ZeRO stage and number of ranks
    stored checkpoint of N     trainer.store, fetched to a temporary folder (TMPDIR)
    version 0                  the initial policy, policy.model

The first available source is used; the result has the published bits. Journals are not replayed, so other versions are
refused.
"""

import dataclasses
import functools
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.remote_store import CheckpointStore, StoredCheckpoint, open_store
from penstock.services.trainer.checkpoint.signatures import open_signer
from penstock.services.trainer.model import adapter as adapters
from penstock.services.trainer.model.engine import saved_tensors
from penstock.services.trainer.model.named_tensors import published
from penstock.services.trainer.model.policy import export, export_adapter, load_model, on_host, outline
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.policy.exports import check_free
from penstock.shared.errors import PenstockError, WeightsError
from penstock.shared.files.checkpoint_folder import CHECKPOINTS
from penstock.shared.settings import Settings
from penstock.shared.weights.format import manifest
from penstock.shared.weights.format.snapshot import committed, read_snapshot

_ADAPTER = "adapter_config.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    version: int
    step: int
    source: str
    """Snapshot, checkpoint, or ``policy.model``."""
    folder: str
    adapter: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyWeights:
    """A version's weights by Hugging Face name, or adapter factors by PEFT name."""

    step: int
    tensors: dict[str, Tensor]
    """Empty: the initial policy."""
    adapter: bool = False


def export_version(
    settings: Settings,
    version: PolicyVersion,
    folder: Path,
    *,
    adapter: bool = False,
    checkpoint: str = "",
) -> Exported:
    """With ``adapter``, write the adapter alone. ``checkpoint``: folder or URI that holds the version, perhaps under
    another number after a rollback.
    """
    if adapter and not settings.policy.lora.rank:
        raise PenstockError(
            "this run trains whole weights and has no adapter (policy.lora.rank = 0): leave --adapter out"
        )
    check_free(folder)
    sources = _sources(settings, version, checkpoint, adapter=adapter)
    reasons = []
    for source in itertools.chain(sources.get(version, []), _stored_sources(settings, version, checkpoint)):
        try:
            weights = source.read()
        except (WeightsError, OSError) as error:  # deleted meanwhile, or damaged
            reasons.append(f"{source.name}: {error}")
            continue
        try:
            _write(weights, settings, folder, adapter=adapter)
        except (PenstockError, OSError):
            raise
        except Exception as error:  # whatever transformers or a model's own code raises
            sentence = " ".join(str(error).split()) or type(error).__name__
            raise PenstockError(f"could not write version {version} in Hugging Face form: {sentence}") from error
        return Exported(int(version), weights.step, source.name, str(folder), adapter)
    raise PenstockError(_refusal(settings, version, sources.keys(), reasons))


def newest_version(settings: Settings, *, adapter: bool = False) -> PolicyVersion:
    """The newest version that :func:`export_version` can write, except the initial policy."""
    known = [version for version in _sources(settings, PolicyVersion(-1), "", adapter=adapter) if version > 0]
    store = None if known else open_store(settings)
    known += [stored.state.version for stored in store.whole()] if store is not None else []
    if not known:
        raise PenstockError(
            f"run {settings.run.id} has no snapshot and no checkpoint in {settings.run_folder}: "
            "trainer.checkpoint_every_steps sets when one is written; --version 0 is the initial policy"
        )
    return max(known)


def _refusal(settings: Settings, version: PolicyVersion, known: Collection[PolicyVersion], reasons: list[str]) -> str:
    there = ", ".join(str(other) for other in sorted(known)) or "none"
    why = "; ".join(reasons) or "no snapshot and no checkpoint holds it"
    return (
        f"there are no weights of version {version} of run {settings.run.id} ({why}). Versions that can be "
        f"exported: {there}. trainer.keep_last sets how many checkpoints are kept"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    name: str
    read: Callable[[], PolicyWeights]


def _sources(
    settings: Settings, target: PolicyVersion, known: str, *, adapter: bool
) -> dict[PolicyVersion, list[_Source]]:
    """Each version's sources, best first; the checkpoint ``known`` also holds ``target``."""
    sources: dict[PolicyVersion, list[_Source]] = defaultdict(list)
    for version, folder in committed(settings.snapshot_folder):
        if not adapter or (folder / _ADAPTER).is_file():
            sources[version].append(_Source(str(folder), functools.partial(_of_snapshot, folder)))
    for checkpoint in local_store.find(settings.run_folder / CHECKPOINTS):
        source = _Source(str(checkpoint.folder), functools.partial(_of_checkpoint, checkpoint, settings))
        for version in {checkpoint.state.version, target} if source.name == known else {checkpoint.state.version}:
            sources[version].append(source)
    if not adapter:
        sources[PolicyVersion(0)].append(_Source(settings.policy.model, lambda: PolicyWeights(0, {})))
    return dict(sources)


def _stored_sources(settings: Settings, version: PolicyVersion, known: str) -> Iterator[_Source]:
    if (store := open_store(settings)) is None:
        return
    for stored in store.whole():
        if stored.state.version == version or stored.uri == known:
            yield _Source(stored.uri, functools.partial(_of_stored, stored, store, settings))


def _of_stored(stored: StoredCheckpoint, store: CheckpointStore, settings: Settings) -> PolicyWeights:
    with tempfile.TemporaryDirectory(prefix="penstock-export-") as folder:
        return _of_checkpoint(store.fetch(stored, Path(folder)), settings)


def _of_snapshot(folder: Path) -> PolicyWeights:
    data = (folder / manifest.FILE).read_bytes()
    tensors = read_snapshot(folder, manifest.digest(data))
    return PolicyWeights(manifest.decode(data, str(folder)).step, tensors, adapter=(folder / _ADAPTER).is_file())


def _of_checkpoint(checkpoint: local_store.Checkpoint, settings: Settings) -> PolicyWeights:
    local_store.check_readable(checkpoint, settings.policy)
    state = checkpoint.state
    weights = "" if state.zero_stage == 3 or state.expert_parallel > 1 else "model_states.pt"
    if reason := local_store.damage(checkpoint.folder, weights, open_signer(settings)):
        raise WeightsError(f"it is damaged ({reason})")
    tensors = saved_tensors(checkpoint.folder / "engine", state.zero_stage, state.expert_parallel)
    if not settings.policy.lora.rank:
        return PolicyWeights(checkpoint.state.step, tensors)
    factors = {adapters.file_name(name): tensor for name, tensor in tensors.items() if adapters.is_factor(name)}
    return PolicyWeights(checkpoint.state.step, factors, adapter=True)


def _write(weights: PolicyWeights, settings: Settings, folder: Path, *, adapter: bool) -> None:
    policy, dtype = settings.policy, getattr(torch, settings.policy.dtype)
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in weights.tensors.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    if adapter:
        configuration = adapters.file_configuration(adapters.add(outline(policy), policy))
        export_adapter(tensors, configuration, folder)
        return
    model = load_model(policy, dtype)
    if weights.adapter:
        model = adapters.add(model, policy)
        adapters.take(model, tensors)
    initial = {part.name: part for part in published(model)}
    whole = {} if weights.adapter else tensors
    missing = sorted(initial.keys() - whole.keys()) if whole else []
    if missing:
        raise PenstockError(
            f"expected {missing[0]} and {len(missing) - 1} more tensors of {policy.model} in {settings.run_folder}, "
            f"but "
            "they are missing: policy.model has changed since the run was started"
        )
    export(
        model,
        on_host((name, whole[name] if whole else part.merged()) for name, part in initial.items()),
        policy,
        folder,
    )

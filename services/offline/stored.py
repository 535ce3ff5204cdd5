"""Find a stored policy: a version of a run's files in Hugging Face form, or a model as it is."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.policy.exports import export_folder
from penstock.shared.errors import SettingsError
from penstock.shared.extras import advice_on
from penstock.shared.settings import Settings

if TYPE_CHECKING:
    from penstock.services.trainer.export.huggingface import Exported


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A policy in Hugging Face form."""

    settings: Settings
    """With ``policy.model`` as this policy."""
    version: int
    step: int


@contextlib.contextmanager
def stored_version(settings: Settings, version: int | None) -> Iterator[Stored]:
    """Export a version (None: newest) of the run of ``settings`` to a temporary folder while it is used.

    Raises:
        PenstockError: the version is not stored.
        SettingsError: a dependency is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-policy-") as folder:
        made = export(settings, version, Path(folder) / "policy")
        yield Stored(with_model(settings, made.folder), made.version, made.step)


def export(settings: Settings, version: int | None, folder: Path | None, *, adapter: bool = False) -> "Exported":
    """Write a version (None: newest) of the run of ``settings`` to ``folder`` (None: ``exports/`` of the run).

    Raises:
        PenstockError: the version is not stored.
        SettingsError: a dependency is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn on standard output
    try:
        from penstock.services.trainer.export.huggingface import export_version, newest_version
    except ImportError as error:
        raise SettingsError(f"a stored version needs more packages: {error}: {advice_on(error)}") from error
    number = newest_version(settings, adapter=adapter) if version is None else PolicyVersion(version)
    return export_version(settings, number, folder or export_folder(settings, number, adapter=adapter), adapter=adapter)


def with_model(settings: Settings, model: str) -> Settings:
    """Return ``settings`` with another policy, whose tokenizer is its own."""
    policy = settings.policy.model_copy(update={"model": model, "tokenizer": ""})
    return settings.model_copy(update={"policy": policy})

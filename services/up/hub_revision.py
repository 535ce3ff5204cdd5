"""Pin datasets on a hub to a commit, so that a continued run reads the same rows."""

import dataclasses
import re
from collections.abc import Sequence

from penstock.shared.dataset_source import hub_dataset
from penstock.shared.errors import SettingsError
from penstock.shared.extras import install_command
from penstock.shared.http.hub import API_TIMEOUT_S, bound_hub


def pinned(source: str, setting: str, known: Sequence[str] = ()) -> str:
    """Return ``source`` with a commit: its own, that of the ``known`` dataset of a resumed run, or the hub's newest.

    Raises:
        SettingsError: the hub has no such dataset.
    """
    dataset = hub_dataset(source)
    if dataset is None or re.fullmatch("[0-9a-f]{40}", dataset.revision):
        return source
    for earlier in filter(None, map(hub_dataset, known)):
        if dataclasses.replace(earlier, revision=dataset.revision) == dataset:
            return str(earlier)
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise SettingsError(
            f"expected the package datasets to read {source}, found none: {install_command('datasets')}, or change {setting} "
            "to a file"
        ) from error
    bound_hub()
    try:
        info = HfApi().dataset_info(dataset.repository, revision=dataset.revision or None, timeout=API_TIMEOUT_S)
    except Exception as error:  # the library raises whatever its HTTP client raises
        sentence = " ".join(str(error).split())[:300] or type(error).__name__
        raise SettingsError(
            f"expected a dataset on the hub at {source}, found: {sentence}: change {setting}, or check HF_ENDPOINT and HF_TOKEN"
        ) from error
    return str(dataclasses.replace(dataset, revision=info.sha or dataset.revision))

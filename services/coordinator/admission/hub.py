"""Read one split of a dataset on a Hugging Face hub; the only module that uses it.

Files are kept in the cache of the library `datasets`, which reads data only: no code of a dataset runs.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.shared.dataset_source import HubDataset
from penstock.shared.errors import SettingsError, TemporaryError
from penstock.shared.extras import install_command
from penstock.shared.http.hub import bound_hub


def read(dataset: HubDataset, setting: str) -> Iterator[tuple[str, dict[str, object]]]:
    yield from _named(dataset, _load(dataset, setting))


def begin(dataset: HubDataset, setting: str, most_rows: int) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the first rows, without downloading many more. Raises TemporaryError: the library cannot read them so."""
    streamed = itertools.islice(_load(dataset, setting, streaming=True), most_rows)
    try:
        yield from _named(dataset, streamed)
    except Exception as error:  # of the library's readers
        raise TemporaryError(f"could not stream {dataset}: {error}") from error


def _named(dataset: HubDataset, rows: Iterable[Mapping[str, object]]) -> Iterator[tuple[str, dict[str, object]]]:
    for number, row in enumerate(rows, start=1):
        yield f"{dataset.repository}/{dataset.split}:{number}", dict(row)


def _load(dataset: HubDataset, setting: str, *, streaming: bool = False) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise SettingsError(
            f"expected the package datasets to read {dataset}, found none: {install_command('datasets')}, "
            f"or change {setting} to a file"
        ) from error
    datasets.disable_progress_bars()
    bound_hub()
    try:
        return datasets.load_dataset(
            dataset.repository,
            dataset.configuration or None,
            split=dataset.split,
            revision=dataset.revision or None,
            streaming=streaming,
        )
    except Exception as error:  # the library raises whatever its HTTP client and readers raise
        if streaming and isinstance(error, NotImplementedError):  # archives, which it unpacks on disk only
            raise TemporaryError(f"could not stream {dataset}: {error}") from error
        sentence = " ".join(str(error).split())[:300] or type(error).__name__
        raise SettingsError(
            f"expected a dataset on the hub at {dataset}, found: {sentence}: change {setting}, or check HF_ENDPOINT and HF_TOKEN"
        ) from error

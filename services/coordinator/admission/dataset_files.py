"""Read dataset rows named ``file:line``: JSONL, Parquet, saved Hugging Face datasets, and splits on a hub."""

import datetime
import decimal
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from services.coordinator.admission import hub
from shared.bus.messages import Json
from shared.dataset_source import check_kind, hub_dataset
from shared.errors import SettingsError
from shared.extras import install_command

_BATCH_ROWS = 1024


class BadRow(Exception):
    """A row that cannot be read."""


DatasetRow: TypeAlias = dict[str, object] | BadRow


def read(source: str, setting: str) -> Iterator[tuple[str, DatasetRow]]:
    """Raises SettingsError: unreadable or of unknown format; names ``setting``."""
    if (on_hub := hub_dataset(source)) is not None:
        yield from hub.read(on_hub, setting)
        return
    path = Path(source)
    if not path.exists():
        raise SettingsError(f"no dataset at {path}: change {setting}")
    try:
        if path.is_dir():
            yield from _saved(path, setting)
        elif path.suffix == ".parquet":
            yield from _parquet(path, setting)
        else:
            check_kind(path, setting)
            yield from _lines(path)
    except OSError as error:
        raise SettingsError(f"could not read the dataset at {path}: {error}: change {setting}") from error


def _lines(path: Path) -> Iterator[tuple[str, DatasetRow]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if content.strip():
                yield f"{path.name}:{number}", _line(content)


def _line(content: bytes) -> DatasetRow:
    try:
        value = json.loads(content)
    except UnicodeDecodeError as error:
        return BadRow(f"expected UTF-8, found {error.reason} at byte {error.start + 1}")
    except (ValueError, RecursionError) as error:
        return BadRow(f"expected a JSON object, but this is not JSON ({error})")
    if not isinstance(value, dict):
        return BadRow(f"expected a JSON object on each line, found {type(value).__name__}")
    return value


def _parquet(path: Path, setting: str) -> Iterator[tuple[str, DatasetRow]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise SettingsError(
            f"reading {path} needs the package pyarrow: {install_command('coordinator')}, or change {setting}"
        ) from error
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path.name}:{number}", row
    except arrow.ArrowException as error:
        raise SettingsError(f"could not read {path} as a Parquet file: {error}: change {setting}") from error


def _saved(path: Path, setting: str) -> Iterator[tuple[str, DatasetRow]]:
    splits = path / "dataset_dict.json"
    if splits.exists():
        names = ", ".join(json.loads(splits.read_text(encoding="utf-8")).get("splits", []))
        raise SettingsError(
            f"expected one split of a Hugging Face dataset, found a DatasetDict ({names}) in {path}: "
            f"change {setting} to the folder of one split, such as {path}/train"
        )
    if not (path / "dataset_info.json").exists():
        raise SettingsError(
            f"expected a Hugging Face dataset saved to disk, found a folder without dataset_info.json at {path}: "
            f"change {setting}"
        )
    for number, row in enumerate(_load_saved(path, setting), start=1):
        yield f"{path.name}:{number}", dict(row)


def _load_saved(path: Path, setting: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise SettingsError(
            f"reading the folder {path} needs the package datasets: {install_command('datasets')}, "
            f"or change {setting} to a .jsonl or .parquet file"
        ) from error
    try:
        return datasets.load_from_disk(str(path))
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(
            f"could not read {path} as a Hugging Face dataset saved to disk: {error}: change {setting}"
        ) from error


def plain(value: object, column: str) -> Json:
    """JSON, with dates and decimals as text. Raises BadRow."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (datetime.date, datetime.time, decimal.Decimal)):
        return str(value)
    if isinstance(value, dict):
        return {str(name): plain(item, column) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, column) for item in value]
    raise BadRow(f"expected a JSON value in {column!r}, found {type(value).__name__}")

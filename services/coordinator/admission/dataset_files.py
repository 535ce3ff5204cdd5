"""Read dataset rows named ``file:line``: JSONL, Parquet, saved Hugging Face datasets, and splits on a hub. Of rows of other
tools, ShareGPT's are read as messages; for others there is :func:`advice`.

Compression makes a small file of Parquet large: its texts are read as dictionaries and rows are made one by one, so that
memory is bounded by what its row groups declare, and what all rows hold by the file's size.
"""

import datetime
import decimal
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from penstock.services.coordinator.admission import hub
from penstock.shared.bus.messages import Json
from penstock.shared.dataset_source import check_kind, hub_dataset
from penstock.shared.errors import PenstockError, SettingsError
from penstock.shared.expression import Condition
from penstock.shared.extras import install_command
from penstock.shared.settings import DataSettings

CHARACTERS = "prompt_characters"
_BATCH_ROWS = 1024
_ROW_BYTES = 16 * 1024**2
_ROW_VALUES = 1_000_000
"""Of a line of JSON, by its separators, those in texts included."""
_GROUP_BYTES = 2 * 1024**3
"""Of a row group, decompressed, with 8 bytes for each value."""
_FILE_BYTES, _EXPANSION = 256 * 1024**2, 1_000
"""A Parquet file's rows may hold the first, and its size this many times."""


_CONVERSATIONS, MESSAGES = "conversations", "messages"
"""Columns of chat messages if data.prompt_field is not set; the first is ShareGPT's."""
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}

_TOOLS = {
    "verl": ("reward_model",),
    "Alpaca": ("instruction", "output"),
    "OpenRLHF": ("input", "label"),
    "preference pairs": ("chosen", "rejected"),
    "GSM8K": ("question", "answer"),
}
"""Who writes rows with such columns."""
PROMPT, ANSWER, COMPLETION, REJECTED = (
    "data.prompt_field",
    "data.answer_field",
    "data.completion_field",
    "data.rejected_field",
)
_COLUMNS = {
    PROMPT: ("question", "problem", "instruction", "query", "input"),
    ANSWER: ("reward_model.ground_truth", "label", "solution", "ground_truth", "target", "output"),
    COMPLETION: ("chosen", "output", "response", "solution", "answer"),
    REJECTED: ("rejected",),
}
"""What others call the column of a setting."""


class BadRow(PenstockError):
    """A row that cannot be read."""


DatasetRow: TypeAlias = dict[str, object] | BadRow


def read(source: str, setting: str) -> Iterator[tuple[str, DatasetRow]]:
    """Raises SettingsError: unreadable or of unknown format; names ``setting``."""
    if (on_hub := hub_dataset(source)) is not None:
        yield from hub.read(on_hub, setting)
        return
    path = Path(source)
    if not path.exists():
        elsewhere = "" if path.suffix else " (on a hub, it is hf://OWNER/NAME)"
        raise SettingsError(f"no dataset at {path}{elsewhere}: change {setting}")
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


def begin(source: str, setting: str, most_rows: int) -> Iterator[tuple[str, DatasetRow]]:
    """Read the first rows. Raises TemporaryError, too: those of a dataset on a hub cannot be read alone."""
    if (on_hub := hub_dataset(source)) is not None:
        yield from hub.begin(on_hub, setting, most_rows)
    else:
        yield from itertools.islice(read(source, setting), most_rows)


def _lines(path: Path) -> Iterator[tuple[str, DatasetRow]]:
    with path.open("rb") as file:
        for number in itertools.count(1):
            if not (line := file.readline(_ROW_BYTES + 1)):
                return
            if len(line) > _ROW_BYTES:
                while not line.endswith(b"\n") and (line := file.readline(_ROW_BYTES)):
                    pass
                yield f"{path.name}:{number}", BadRow(f"expected at most {_ROW_BYTES} bytes on a line, found more")
                continue
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if content.strip():
                yield f"{path.name}:{number}", _line(content)


def _line(content: bytes) -> DatasetRow:
    if (values := 1 + sum(map(content.count, (b",", b"[", b"{")))) > _ROW_VALUES:
        return BadRow(f"expected at most {_ROW_VALUES} values on a line, found {values} separators")
    try:
        value = json.loads(content.decode())  # of bytes it would guess UTF-16
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
        with parquet.ParquetFile(path) as file:
            columns = [file.schema.column(place) for place in range(len(file.schema))]
        texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        number, left = 0, _FILE_BYTES + _EXPANSION * path.stat().st_size
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            _check_groups(path, file.metadata, setting)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for place in range(batch.num_rows):
                    (row,) = batch.slice(place, 1).to_pylist()
                    number, nbytes = number + 1, _size(row)
                    left -= nbytes
                    if nbytes > _ROW_BYTES or left < 0:
                        raise SettingsError(
                            f"expected rows of at most {_ROW_BYTES} bytes, together at most {_FILE_BYTES} more than {_EXPANSION} times "
                            f"the size of {path}, found more at row {number}: shorten its texts, or change {setting}"
                        )
                    yield f"{path.name}:{number}", row
    except arrow.ArrowException as error:
        raise SettingsError(f"could not read {path} as a Parquet file: {error}: change {setting}") from error
    finally:
        arrow.default_memory_pool().release_unused()


def _check_groups(path: Path, metadata: Any, setting: str) -> None:
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(place) for place in range(group.num_columns)]
        nbytes = sum(column.total_uncompressed_size + 8 * column.num_values for column in columns)
        if nbytes > _GROUP_BYTES:
            raise SettingsError(
                f"expected row groups of at most {_GROUP_BYTES} bytes in {path}, found one of {nbytes}: write it again with "
                f"smaller ones (row_group_size of pyarrow), or change {setting}"
            )


def _size(value: object) -> int:
    """Return about how many bytes a row holds."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 8


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


class RowFilter:
    """Chooses training rows by a condition on their columns (``data.filter``)."""

    def __init__(self, text: str) -> None:
        self._condition = Condition(text, "data.filter") if text else None

    def keeps(self, row: Mapping[str, object], characters: int) -> bool:
        if self._condition is None:
            return True
        values = {name: value for name, value in row.items() if isinstance(value, (bool, int, float, str))}
        try:
            return self._condition({**values, CHARACTERS: characters})
        except KeyError as error:
            raise BadRow(
                f"expected a number or text in {error.args[0]!r}, as data.filter needs it, found none"
            ) from error
        except (TypeError, ArithmeticError) as error:
            raise BadRow(f"expected values that fit data.filter, found others: {error}") from error


def at(row: Mapping[str, object], field: str) -> object:
    """Return a column's value, or None; where no column has that name, dots lead into dictionaries.

    >>> at({"reward_model": {"ground_truth": "46"}}, "reward_model.ground_truth")
    '46'
    """
    value: object = row
    for name in [field] if field in row else field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def with_messages(row: Mapping[str, object], data: DataSettings) -> dict[str, object]:
    """Return a row's ``conversations``, after its ``system``, as its ``messages``, unless it has a prompt. Raises BadRow."""
    turns = row.get(_CONVERSATIONS)
    others = (data.prompt_field, MESSAGES)
    if not isinstance(turns, list) or any(row.get(name) is not None for name in others if name != _CONVERSATIONS):
        return dict(row)
    rest = {name: value for name, value in row.items() if name != _CONVERSATIONS}
    messages = [_turn(turn) for turn in turns]
    has_system = any(isinstance(turn, dict) and turn.get("role") == "system" for turn in messages)
    if isinstance(system := row.get("system"), str) and system and not has_system:
        messages.insert(0, {"role": "system", "content": system})
    return {**rest, MESSAGES: messages}


def _turn(turn: object) -> object:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        return turn
    if not isinstance(role := turn["from"], str) or role not in _ROLES:
        raise BadRow(
            f"expected {', '.join(_ROLES)} as 'from' in {_CONVERSATIONS!r}, found {str(role)[:60]!r}: write {MESSAGES!r} "
            "with role and content instead"
        )
    rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {**rest, "role": _ROLES[role], "content": turn["value"]}


def advice(row: Mapping[str, object], settings: Sequence[str]) -> str:
    """Return the flags of those ``settings`` whose column has a name of other tools; "": none has.

    >>> advice({"question": "12+34=", "answer": "46"}, ["data.prompt_field"])
    ', for GSM8K: --data.prompt_field question'
    """
    pairs = at(row, "chosen") is not None and at(row, "rejected") is not None
    before = "`penstock sft` with " if pairs and COMPLETION not in settings else ""
    asked = [*(PROMPT for each in settings if each == PROMPT), COMPLETION, REJECTED] if pairs else settings
    named = {setting: next((name for name in _COLUMNS[setting] if at(row, name) is not None), "") for setting in asked}
    flags = [f"--{setting} {name}" for setting, name in named.items() if name]
    if named.get(PROMPT) == "instruction" and row.get("input"):
        flags.append('--data.user "{prompt} {extra.input}"')
    if not flags:
        return ""
    kind = next((f"for {kind}:" for kind, columns in _TOOLS.items() if row.keys() >= {*columns}), "")
    return f", {kind or 'such as'} {before}{' '.join(flags)}"

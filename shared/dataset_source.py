"""Where a dataset is: a file or folder, or ``hf://owner/name@revision:split``."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from penstock.shared.errors import SettingsError

_HUB = "hf://"
_FILE_KINDS = (".jsonl", ".ndjson", ".json", ".parquet")
_NAME = re.compile(
    r"hf://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:((?P<configuration>[\w.-]+)/)?(?P<split>[\w.-]+))?"
)


@dataclasses.dataclass(frozen=True, slots=True)
class HubDataset:
    repository: str
    revision: str
    """Branch, tag or commit; empty: the default branch."""
    configuration: str
    """Empty: the default one."""
    split: str

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        configuration = f"{self.configuration}/" if self.configuration else ""
        return f"{_HUB}{self.repository}{revision}:{configuration}{self.split}"


def check_kind(path: Path, setting: str) -> None:
    """Raise SettingsError if the file ``path`` is not of a known kind."""
    if path.suffix not in _FILE_KINDS:
        raise SettingsError(
            f"expected .jsonl, .parquet, or a folder of a Hugging Face dataset, found {path}: convert it "
            f"(datasets.Dataset.from_csv(…).to_json(…), for one), or change {setting}"
        )


def hub_dataset(source: str) -> HubDataset | None:
    """None for a path."""
    if not source.startswith(_HUB):
        return None
    parts = _NAME.fullmatch(source)
    assert parts is not None, "checked by the settings"
    named = parts.groupdict(default="")
    return HubDataset(named["repository"], named["revision"], named["configuration"], named["split"] or "train")


def absolute(source: str) -> str:
    """For other working directories."""
    return source if hub_dataset(source) else os.path.abspath(source)  # noqa: PTH100 (does not resolve links)


def _text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _checked(source: str) -> str:
    if source.startswith("hf:") and _NAME.fullmatch(source) is None:
        raise ValueError(
            f"expected hf://owner/name@revision:split, or hf://owner/name@revision:configuration/split, found {source!r}"
        )
    return source


DatasetSource = Annotated[str, BeforeValidator(_text), AfterValidator(_checked), Field(min_length=1)]

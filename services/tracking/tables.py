"""Rollout tables: one row for each completion of a line of ``rollouts.jsonl``.

Texts are model output: they are cut, and what steers a terminal or cannot be encoded is escaped. Each sink shows them as
text, never as its own markup.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from shared.text.terminal import escaped

Table: TypeAlias = dict[str, Any]
"""``{"columns": ["step", …], "rows": [[3, …], …]}``; a cell is a text, a number or None."""

LONGEST_TEXT = 10_000
"""Characters of a text; the rest is cut."""
MOST_ROWS = 64
_BEFORE = ("step", "version", "problem", "prompt", "answer", "completion", "reward")
_AFTER = ("tokens", "finish_reason", "sampled_by")


def table_of(line: Mapping[str, Any]) -> Table:
    """Return the table of a group. Raises KeyError, TypeError, ValueError or AttributeError: the line is another file's."""
    completions = list(line["completions"])[:MOST_ROWS]
    scorers = sorted({str(name) for completion in completions for name in completion["scores"]})
    group = [int(line["step"]), int(line["version"]), *map(_cell, (line["problem"], line["prompt"], line["answer"]))]
    rows = []
    for completion in completions:
        scores = [_number(completion["scores"].get(name, {}).get("value")) for name in scorers]
        sampled_by = ", ".join(str(int(version)) for version in completion["versions"])
        ending = [int(completion["tokens"]), _cell(completion["finish_reason"]), sampled_by]
        rows.append([*group, _cell(completion["text"]), _number(completion["reward"]), *scores, *ending])
    return {"columns": [*_BEFORE, *(f"rewards/{_cell(name)}" for name in scorers), *_AFTER], "rows": rows}


def _cell(value: Any) -> str:
    if isinstance(value, list):
        value = "\n".join(f"{turn['role']}: {_content(turn['content'])}" for turn in value)
    text = "" if value is None else str(value)
    cut = len(text) - LONGEST_TEXT
    return escaped(text[:LONGEST_TEXT]) + (f"… ({cut} characters more)" if cut > 0 else "")


def _content(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


class RolloutLines:
    """Read the complete lines of a growing ``rollouts.jsonl``, in their order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = ("0-0", 0)
        """The entry of a line that was returned before, and where the line ends."""

    def following(self, after: str, newest_version: int, count: int) -> list[dict[str, Any]]:
        """Return up to ``count`` lines after entry ``after``, and stop before a version newer than ``newest_version``.

        Return nothing while the file does not exist. Raises OSError: it cannot be read.
        """
        lines: list[dict[str, Any]] = []
        known, start = self._known
        for line, end in self._lines(start if _order(known) <= _order(after) else 0):
            if _order(line["entry"]) > _order(after):
                version = line.get("version")
                if len(lines) == count or (isinstance(version, int) and version > newest_version):
                    break
                lines.append(line)
            self._known = (line["entry"], end)
        return lines

    def _lines(self, start: int) -> Iterator[tuple[dict[str, Any], int]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            end = file.seek(start)  # lines that were read stay: only a torn last one is cut off
            for raw in file:
                end += len(raw)
                if raw.endswith(b"\n") and (line := _parsed(raw)) is not None:
                    yield line, end


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
        _order(line["entry"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _order(entry: str) -> tuple[int, int]:
    at_ms, _, number = entry.partition("-")
    return int(at_ms), int(number or 0)


def entry_time_s(entry: str) -> float:
    """Return when an entry was added to the bus.

    >>> entry_time_s("1500-0")
    1.5
    """
    return _order(entry)[0] / 1000

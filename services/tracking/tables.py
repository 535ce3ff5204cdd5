"""Rollout tables: one row for each completion of a line of ``rollouts.jsonl``.

Texts are model output: they are cut, and what steers a terminal or cannot be encoded is escaped. Each sink shows them as
text, never as its own markup.
"""

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from penstock.shared.text.terminal import escaped

log = logging.getLogger(__name__)

Table: TypeAlias = dict[str, Any]
"""``{"columns": ["step", …], "rows": [[3, …], …]}``; a cell is a text, a number or None."""

LONGEST_TEXT = 10_000
"""Characters of a text; the rest is cut."""
MOST_ROWS = 64
MOST_SCORERS = 64
"""Scorers with a column."""
LONGEST_LINE = 1 << 26
"""Bytes of a line; a longer one is skipped."""
_LARGEST = (1 << 63) - 1
"""What every tracker can store as an integer."""
_ENTRY = re.compile(r"[0-9]{1,14}-[0-9]{1,19}")
"""An entry of the bus: milliseconds up to the year 5138, which every tracker can show as a date, and a number."""
_BEFORE = ("step", "version", "problem", "prompt", "answer", "completion", "reward")
_AFTER = ("tokens", "finish_reason", "sampled_by")


def table_of(line: Mapping[str, Any]) -> Table:
    """Return the table of a group. Raises ValueError: the line is damaged, or another file's."""
    try:
        return _table(line)
    except (KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"expected the line of a group: {error!r}") from error


def _table(line: Mapping[str, Any]) -> Table:
    completions = list(line["completions"])[:MOST_ROWS]
    names = sorted({str(name) for completion in completions for name in completion["scores"]})[:MOST_SCORERS]
    scorers = {f"rewards/{_cell(name)}": name for name in names}
    problem, prompt, answer = map(_cell, (line["problem"], line["prompt"], line["answer"]))
    group = [_integer(line["step"]), _integer(line["version"]), problem, prompt, answer]
    rows = []
    for completion in completions:
        scores = [_number(completion["scores"].get(name, {}).get("value")) for name in scorers.values()]
        sampled_by = _cell(", ".join(str(_integer(version)) for version in completion["versions"]))
        ended = completion.get("ended") or completion["finish_reason"]
        ending = [_integer(completion["tokens"]), _cell(ended), sampled_by]
        text = completion.get("turns") or completion["text"]
        rows.append([*group, _cell(text), _number(completion["reward"]), *scores, *ending])
    return {"columns": [*_BEFORE, *scorers, *_AFTER], "rows": rows}


def _cell(value: Any) -> str:
    if isinstance(value, list):
        value = "\n".join(map(_message, value))
    text = "" if value is None else str(value)
    cut = len(text) - LONGEST_TEXT
    return escaped(text[:LONGEST_TEXT]) + (f"… ({cut} characters more)" if cut > 0 else "")


def _message(turn: Mapping[str, Any]) -> str:
    """Return a message of a prompt, or of an episode: its answers have numbers."""
    content = turn.get("content", "")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    calls = [f"{call['name']}({call['arguments']})" for call in turn.get("calls", ())]
    number = f", turn {_integer(turn['turn']) + 1}" if "turn" in turn else ""
    branch = f", a branch ({turn['fork']})" if turn.get("fork") else ""
    return f"{turn['role']}{number}{branch}: {' '.join(filter(None, [text, *calls]))}"


def _number(value: Any) -> float | None:
    """Return a number that every tracker can show; None for what is not finite."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _integer(value: Any) -> int:
    number = int(value)
    if not 0 <= number <= _LARGEST:
        raise ValueError(f"expected 0 to 2⁶³ - 1, found {number:.3g}")
    return number


class RolloutLines:
    """Read the complete lines of a growing ``rollouts.jsonl``, in their order; what is no line of it is skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = ("0-0", 0, False)
        """The entry of the last line that was returned, where reading continues, and whether that is inside a line."""

    def following(self, after: str, newest_version: int, count: int) -> list[dict[str, Any]]:
        """Return up to ``count`` lines after entry ``after``, and stop before a version newer than ``newest_version``.

        Return nothing while the file does not exist. Raises OSError: it cannot be read.
        """
        if _order(self._known[0]) > _order(after) or self._size() < self._known[1]:
            self._known = ("0-0", 0, False)
        lines: list[dict[str, Any]] = []
        known, start, within = self._known
        for line, end, inside in self._lines(start, within):
            if line is not None and _order(line["entry"]) > _order(after):
                if len(lines) == count or self._must_wait(line.get("version"), newest_version, end):
                    break
                lines.append(line)
            known = known if line is None else line["entry"]
            self._known = (known, end, inside)
        return lines

    def _must_wait(self, version: Any, newest_version: int, end: int) -> bool:
        """Return whether a line is of a step to come. Versions ascend: one above that of the next line is damaged."""
        if not isinstance(version, int) or version <= newest_version:
            return False
        later = next((line.get("version") for line, _, _ in self._lines(end) if line is not None), None)
        return not (isinstance(later, int) and later < version)

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.is_file() else 0

    def _lines(self, start: int, inside: bool = False) -> Iterator[tuple[dict[str, Any] | None, int, bool]]:
        """Yield each line, None for what is skipped, with its end and whether that is inside a line too long."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            end = file.seek(start)  # lines that were read stay: only a torn last one is cut off
            while raw := file.readline(LONGEST_LINE):
                end += len(raw)
                whole, was_inside = raw.endswith(b"\n"), inside
                if not whole and len(raw) < LONGEST_LINE:
                    return
                inside = not whole
                if inside and not was_inside:
                    log.warning("rollouts line too long", extra={"line_end_bytes": end, "most_bytes": LONGEST_LINE})
                yield (_parsed(raw) if whole and not was_inside else None), end, inside


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("entry"), str):
        return None
    return line if _ENTRY.fullmatch(line["entry"]) else None


def _order(entry: str) -> tuple[int, int]:
    at_ms, _, number = entry.partition("-")
    return int(at_ms), int(number)


def entry_time_s(entry: str) -> float:
    """Return when an entry was added to the bus.

    >>> entry_time_s("1500-0")
    1.5
    """
    return _order(entry)[0] / 1000

"""Print API answers: a table, or JSON for scripts."""

import json
import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.services.up.display import console
from penstock.shared.text.terminal import escaped, escaped_line

COLUMNS: dict[str, tuple[str, ...]] = {
    "policies": (
        "version",
        "parent",
        "step",
        "state",
        "checkpoint",
        "pinned",
        "released",
        "accuracy",
        "metrics.reward_mean",
    ),
    "services": ("replica", "service", "state", "version", "versions_behind", "cordon", "healthy", "last_error"),
    "dead": ("stream", "entry", "group", "attempts", "buried_at_s", "reason"),
    "events": ("at_s", "source", "name", "detail"),
    "operations": ("id", "kind", "state", "phase", "detail", "changed_at_s"),
    "runs": ("run_id", "state", "step", "head", "here", "reason"),
}
"""Columns by command; dots select nested fields."""
_UNBROKEN = frozenset(
    {"checkpoint", "replica", "service", "version", "step", "state", "source", "at_s", "stream", "entry"}
)
"""Columns that stay whole on a narrow terminal."""


def show(command: str, items: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        console.say_json(list(items))
        return
    if not items:
        console.say(f"no {command.replace('dead', 'dead letters')}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS[command]:
        heading = (
            name.rpartition(".")[2].removesuffix("_at_s").removesuffix("_s").removeprefix("versions_").replace("_", " ")
        )
        longest = max(map(len, heading.split()))
        table.add_column(heading, overflow="fold", no_wrap=name in _UNBROKEN, min_width=longest)
    for item in items:
        table.add_row(*(Text(cell(item, name)) for name in COLUMNS[command]))
    console.show(table)
    if command == "dead":
        console.say(
            "\n`penstock dead show STREAM ENTRY` prints one. Once its cause is removed, `penstock dead requeue STREAM ENTRY` has it "
            "tried again; `penstock dead discard STREAM ENTRY` gives it up."
        )


def show_one(item: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        console.say_json(item)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in item.items():
        shown = json.dumps(value, indent=1) if isinstance(value, (dict, list)) else cell(item, name)
        table.add_row(escaped_line(name), Text(escaped(shown), overflow="fold"))
    console.show(table)


def event_line(event: dict[str, Any]) -> str:
    line = f"{_clock(event['at_s'])}  {event['source']:<14} {event['name']}: {event['detail']}"
    return escaped_line(line)


def cell(item: dict[str, Any], name: str) -> str:
    """Return a value as displayed in a table.

    >>> cell({"version": None, "pinned": True, "metrics": {"kl": 0.12345}}, "metrics.kl")
    '0.1235'
    """
    value: Any = item
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else ""
    if name.endswith("at_s"):
        return _clock(value)
    return f"{value:.4g}" if isinstance(value, float) else escaped(str(value))


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))

"""report.html: the run's curves and rollouts in one offline file.

Data are JSON that ``report.js`` shows as text; the content security policy admits this script only.
"""

import base64
import collections
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import tomli_w
from pydantic import ValidationError

from penstock.services.coordinator.records.curves import Curves
from penstock.services.coordinator.records.jsonl import finite, read
from penstock.services.coordinator.records.memory import MEMORY_FILE, thinned
from penstock.services.coordinator.records.summary import mean_ends
from penstock.services.coordinator.schemas.records import RolloutView, TokensView, excerpt, rollout_view, tokens_view
from penstock.shared.bus.messages import Json
from penstock.shared.errors import SettingsError
from penstock.shared.files.durable import read_object, write_whole
from penstock.shared.files.token_records import read_record
from penstock.shared.settings import SETTINGS_FILE, load
from penstock.shared.settings.reading.published import published
from penstock.shared.text.redaction import redacted_values

DATA = "data"
"""Event source for data warnings."""
_PAGE = Path(__file__).parents[1] / "api" / "page"
_SCRIPTS = (
    "dom.js",
    "charts.js",
    "values.js",
    "cursor.js",
    "curves.js",
    "memory.js",
    "tokens.js",
    "rollouts.js",
    "report.js",
)
_POINTS = 240
_ENDS = ("reward_mean", "loss", "evaluation_loss")
_ROLLOUTS, _CHARACTERS = 8, 4000
_TOKENS, _TOKENS_OF_COMPLETION = 12_000, 500
_EVENTS = 40
_REPORTS = 300
_DOCUMENT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Penstock</title><style>{style}</style></head>
<body>
<noscript><p class="card">This page needs JavaScript; <code>summary.json</code> beside it does not.</p></noscript>
{body}
<script id="data" type="application/json">{data}</script>
<script type="module">{script}</script>
</body></html>
"""
_BODY = """<main id="main" hidden><div id="head"></div><div id="tiles" class="tiles"></div>
<h2 id="h-curves">Curves</h2><p id="range" class="soft"></p>
<div id="curves" class="grid-of" tabindex="0" role="group" aria-labelledby="h-curves" aria-describedby="range"></div>
<h2 id="h-memory">Memory</h2><div id="memory" class="grid-of" tabindex="0" role="group" aria-labelledby="h-memory"></div>
<h2>Totals</h2><div id="tables" class="grid-of"></div>
<h2>Rollouts</h2><div id="rollouts"></div>
<h2>Records</h2><div id="records"></div></main>"""


def write_report(run_folder: Path, writing: Callable[[], AbstractContextManager[None]] = nullcontext) -> Path:
    """Write report.html, in a context that ``writing`` returns."""
    path = run_folder / "report.html"
    text = document(_BODY, _SCRIPTS, records(run_folder))
    with writing():
        write_whole(path, text)
    return path


def document(body: str, scripts: Sequence[str], data: dict[str, Json]) -> str:
    """Return a page of ``body`` that ``scripts``, of the coordinator's page, fill with ``data``."""
    style, script = (_PAGE / "look.css").read_text(encoding="utf-8"), _script(scripts)
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'; form-action 'none'"
    text = json.dumps(finite(data)).replace("<", "\\u003c")
    return _DOCUMENT.format(policy=policy, style=style, body=body, script=script, data=text)


def records(run_folder: Path) -> dict[str, Json]:
    summary = redacted_values(read_object(run_folder / "summary.json"))
    curves = Curves(run_folder)
    while not curves.catch_up():
        pass
    seconds, lags, of_ends = _totals(curves.lines())
    events = [redacted_values(event) for event in read(run_folder / "events.jsonl")]
    doubts = {str(event.get("name")): event.get("detail") for event in events if event.get("source") == DATA}
    return {
        "run_id": summary.get("run_id") or run_folder.resolve().name,
        "written_at_s": time.time(),
        "summary": summary,
        "curves": curves.view(_POINTS),
        "seconds": seconds,
        "lags": lags,
        "ends": {name: list[Json](mean_ends(values)) for name, values in of_ends.items()},
        "evaluations": list(read(run_folder / "evaluations.jsonl")),
        "rollouts": _rollouts(run_folder, run_folder / "rollouts.jsonl"),
        "doubts": list(doubts.values()),
        "events": list[Json](events[-_EVENTS:]),
        "memory": _memory(run_folder),
        "settings": _settings(run_folder),
    }


def _script(scripts: Sequence[str]) -> str:
    """Return the modules as one script: files cannot import."""
    text = "".join((_PAGE / name).read_text(encoding="utf-8") for name in scripts)
    return re.sub(r"^(import .*;\n|export )", "", text, flags=re.MULTILINE)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _totals(lines: Iterable[dict[str, Json]]) -> tuple[dict[str, Json], dict[str, Json], dict[str, list[float]]]:
    """Return mean seconds by name, samples by lag, and the values of ``_ENDS``. A phase that few steps have is averaged over all."""
    sums, counts, lags = (
        collections.defaultdict[str, float](float),
        collections.Counter[str](),
        collections.Counter[str](),
    )
    of_ends: dict[str, list[float]] = {name: [] for name in _ENDS}
    steps = 0
    for steps, line in enumerate(lines, 1):  # noqa: B007 (its last value is the number of steps)
        for name, value in line.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                if name.endswith("_s") or name.endswith("_s_mean"):
                    sums[name] += value
                    counts[name] += 1
                if name in of_ends:
                    of_ends[name].append(float(value))
        if isinstance(counted := line.get("lag_counts"), dict):
            lags.update({lag: count for lag, count in counted.items() if isinstance(count, int)})
    means: dict[str, Json] = {
        name: total / (counts[name] if name.endswith("_mean") else steps) for name, total in sums.items()
    }
    return means, dict(lags), of_ends


def _rollouts(run_folder: Path, file: Path) -> list[Json]:
    """Return some groups over the whole run; the file, which is read twice, may be larger than memory."""
    lines, left = sum(1 for _ in read(file)), _TOKENS
    count = min(_ROLLOUTS, lines)
    places = {round(index * (lines - 1) / max(1, count - 1)) for index in range(count)}
    groups: list[Json] = []
    for line in reversed([line for place, line in enumerate(read(file)) if place in places]):
        try:
            view = rollout_view(line)
        except (KeyError, ValidationError):
            continue
        tokens = _tokens(run_folder, view)
        view.has_tokens = bool(tokens) and sum(len(each.ids) for each in tokens) <= left
        if view.has_tokens:
            left -= sum(len(each.ids) for each in tokens)
        group = excerpt(view, _CHARACTERS, turns=True).model_dump(mode="json")
        groups.append({**group, "tokens": [each.model_dump() for each in tokens]} if view.has_tokens else group)
    return groups


def _tokens(run_folder: Path, group: RolloutView) -> list[TokensView]:
    """Return the last tokens of each completion, as its text is cut; none if they are not recorded."""
    recorded = () if group.version is None else read_record(run_folder, group.version, group.group)
    try:
        views = [
            tokens_view(values, max(0, len(values["ids"]) - _TOKENS_OF_COMPLETION), _TOKENS_OF_COMPLETION)
            for values in recorded
        ]
    except (KeyError, TypeError, ValidationError):
        return []
    return views if len(views) == len(group.completions) else []


def _memory(run_folder: Path) -> list[Json]:
    """Return the memory timeline, thinned out for the drawing."""
    lines = [line for line in read(run_folder / MEMORY_FILE) if {"entry", "replica", "samples"} <= line.keys()]
    while len(lines) > _REPORTS and len(fewer := thinned(lines)) < len(lines):
        lines = fewer
    return [{"id": line["entry"], "replica": line["replica"], "samples": line["samples"]} for line in lines]


def _settings(run_folder: Path) -> str:
    """Return what may be published of the run's settings: reports are passed on."""
    try:
        settings = load(run_folder / SETTINGS_FILE, environment={})
    except SettingsError:
        return ""
    return f"# Without texts and paths, which are in {SETTINGS_FILE} in the run's folder.\n{tomli_w.dumps(published(settings))}"

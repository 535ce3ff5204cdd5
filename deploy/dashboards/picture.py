"""``python -m deploy.dashboards.picture http://127.0.0.1:9090 docs/img/overview.png --run my-run``: the Overview, drawn from a real Prometheus.

For places where no Grafana is. It asks for the same expressions over the time of the run; legends and units are the dashboard's.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from deploy.dashboards import overview
from deploy.dashboards.board import Panel, Query

_POINTS = 150
_COLUMNS = 3
_WINDOW = "20s"
_MEBIBYTE = 2.0**20


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One series of a query."""

    legend: str
    times_s: Sequence[float]
    """Since the start of the run."""
    values: Sequence[float]


class Source:
    """One run in one Prometheus."""

    def __init__(self, url: str, run: str) -> None:
        self._url = url
        self._run = run
        stamps = [stamp for _, points in self._ask("query", query=f'up{{run="{run}"}}[10y]') for stamp, _ in points]
        if not stamps:
            raise SystemExit(f"expected a run {run!r} in the Prometheus at {url}, found no series of it: change --run")
        self.start_s, self.end_s = min(stamps), max(stamps)

    def lines(self, query: Query) -> list[Line]:
        """Return every series of a query over the time of the run."""
        text = (
            query.expression.replace("$__rate_interval", _WINDOW).replace("$run", self._run).replace("$replica", ".+")
        )
        step_s = max(1.0, (self.end_s - self.start_s) / _POINTS)
        found = self._ask("query_range", query=text, start=self.start_s, end=self.end_s, step=step_s)
        return [
            Line(
                _filled(query.legend, labels),
                [stamp - self.start_s for stamp, _ in points],
                [float(value) for _, value in points],
            )
            for labels, points in found
        ]

    def _ask(self, kind: str, **parameters: str | float) -> list[tuple[dict[str, str], list[tuple[float, str]]]]:
        """Return (labels, [(Unix seconds, value)]) of every series."""
        answer = httpx.get(f"{self._url}/api/v1/{kind}", params=parameters, timeout=30)
        answer.raise_for_status()
        return [(found["metric"], found["values"]) for found in answer.json()["data"]["result"]]


def _filled(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda name: labels.get(name.group(1), ""), legend)


def draw(source: Source, file: Path, note: str) -> None:
    """Write the picture."""
    panels = [panel for panel in overview.BOARD.panels if panel.kind != "figure"]
    rows = math.ceil(len(panels) / _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(13, 2.5 * rows), squeeze=False)
    for panel, ax in zip(panels, axes.flat, strict=False):
        _draw_panel(panel, source, ax)
    for ax in list(axes.flat)[len(panels) :]:
        ax.axis("off")
    figure.suptitle(f"{overview.BOARD.title}: {note}", fontsize=10)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)


def _draw_panel(panel: Panel, source: Source, ax: Axes) -> None:
    scale = _MEBIBYTE if panel.unit == "bytes" else 1.0
    lines = [line for query in panel.queries for line in source.lines(query)]
    if panel.kind == "stack":
        _stack(lines, ax)
    else:
        for line in lines:
            ax.plot(line.times_s, [value / scale for value in line.values], linewidth=1.1, label=line.legend)
    unit = {"bytes": "MiB", "percentunit": "share"}.get(panel.unit, panel.unit.removeprefix("suffix: "))
    ax.set_title(panel.title if unit == "short" else f"{panel.title} ({unit})", fontsize=9, loc="left")
    ax.tick_params(labelsize=7)
    ax.set_xlim(0, source.end_s - source.start_s)
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    ax.grid(alpha=0.2)
    if 1 <= len(lines) <= 12:
        ax.legend(fontsize=6, ncols=2, framealpha=0.5)


def _stack(lines: Sequence[Line], ax: Axes) -> None:
    times = sorted({time for line in lines for time in line.times_s})
    tables = [dict(zip(line.times_s, line.values, strict=True)) for line in lines]
    heights = [[max(0.0, table.get(time, 0.0)) for time in times] for table in tables]
    ax.stackplot(times, *heights, labels=[line.legend for line in lines], alpha=0.8)


def main() -> None:
    """Draw one picture."""
    parser = argparse.ArgumentParser(description="Draw the Overview dashboard of a run from a Prometheus.")
    parser.add_argument("url", help="of Prometheus: http://127.0.0.1:9090")
    parser.add_argument("file", type=Path, help="the PNG to write")
    parser.add_argument("--run", required=True, help="the run's id")
    parser.add_argument("--note", default="", help="what stands beside the title")
    given = parser.parse_args()
    draw(Source(given.url, given.run), given.file, given.note or given.run)


if __name__ == "__main__":
    main()

"""``python -m deploy.dashboards.picture http://127.0.0.1:9090 docs/img/overview.png --run my-run``: the Overview, drawn from a real Prometheus.

For places where no Grafana is. It asks for the same expressions over the time of the run; legends and units are the dashboard's.
"""

import argparse
import math
import re
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


class Source:
    """One run in one Prometheus."""

    def __init__(self, url: str, run: str) -> None:
        self._url = url
        self._run = run
        times = self._ask("query", query=f'up{{run="{run}"}}[10y]')
        if not times:
            raise SystemExit(f"expected a run {run!r} in the Prometheus at {url}, found no series of it: give --run")
        stamps = [stamp for found in times for stamp, _ in found["values"]]
        self.start_s, self.end_s = min(stamps), max(stamps)

    def lines(self, query: Query) -> list[tuple[str, list[float], list[float]]]:
        """Return (legend, seconds since the start, values) of every series of a query."""
        text = (
            query.expression.replace("$__rate_interval", _WINDOW).replace("$run", self._run).replace("$replica", ".+")
        )
        step_s = max(1.0, (self.end_s - self.start_s) / _POINTS)
        found = self._ask("query_range", query=text, start=self.start_s, end=self.end_s, step=step_s)
        return [
            (
                re.sub(r"{{(\w+)}}", lambda name, labels=row["metric"]: labels.get(name.group(1), ""), query.legend),
                [float(stamp) - self.start_s for stamp, _ in row["values"]],
                [float(value) for _, value in row["values"]],
            )
            for row in found
        ]

    def _ask(self, kind: str, **parameters: str | float) -> list[dict[str, object]]:
        answer = httpx.get(f"{self._url}/api/v1/{kind}", params=parameters, timeout=30)
        answer.raise_for_status()
        result: list[dict[str, object]] = answer.json()["data"]["result"]
        return result


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
        for legend, times, values in lines:
            ax.plot(times, [value / scale for value in values], linewidth=1.1, label=legend)
    unit = {"bytes": "MiB", "percentunit": "share"}.get(panel.unit, panel.unit.removeprefix("suffix: "))
    ax.set_title(panel.title if unit == "short" else f"{panel.title} ({unit})", fontsize=9, loc="left")
    ax.tick_params(labelsize=7)
    ax.set_xlim(0, source.end_s - source.start_s)
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    ax.grid(alpha=0.2)
    if 1 <= len(lines) <= 12:
        ax.legend(fontsize=6, ncols=2, framealpha=0.5)


def _stack(lines: list[tuple[str, list[float], list[float]]], ax: Axes) -> None:
    times = sorted({time for _, found, _ in lines for time in found})
    tables = [dict(zip(found, values, strict=True)) for _, found, values in lines]
    heights = [[max(0.0, table.get(time, 0.0)) for time in times] for table in tables]
    ax.stackplot(times, *heights, labels=[legend for legend, _, _ in lines], alpha=0.8)


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

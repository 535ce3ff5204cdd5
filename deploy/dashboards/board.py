"""Dashboards as rows of panels of queries.

In a query, ``metric<>`` selects the chosen runs and replicas; ``metric<label="x">`` adds a condition.
"""

import dataclasses
import re
from typing import Literal

CHOICE = 'namespace=~"$namespace",run=~"$run",instance=~"$replica"'
_MARK = re.compile(r"(?<=[\w:])<([^<>]*)>")


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """One expression and its legend."""

    text: str
    legend: str = "{{instance}}"

    @property
    def expression(self) -> str:
        """The PromQL, with Grafana's variables.

        >>> Query('up<service="trainer">').expression
        'up{namespace=~"$namespace",run=~"$run",instance=~"$replica",service="trainer"}'
        """
        return _MARK.sub(lambda mark: "{" + ",".join(filter(None, (CHOICE, mark.group(1)))) + "}", self.text)


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    description: str
    """Shown as its help text."""
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["lines", "stack", "figure"] = "lines"
    width: Literal[4, 6, 8, 12, 24] = 8
    """Of 24 columns."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Board:
    """One dashboard; ``name`` is its file and stable uid."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Every panel, in order."""
        return tuple(panel for row in self.rows for panel in row.panels)


def quantiles(metric: str, by: str = "", marks: str = "") -> tuple[Query, ...]:
    """Return a histogram's median and 99th percentile."""
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return tuple(
        Query(
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket<{marks}>[$__rate_interval])))",
            f"{name}{legend}",
        )
        for q, name in ((0.5, "median"), (0.99, "p99"))
    )


def rate(metric: str, by: str = "instance", marks: str = "") -> Query:
    """Return a counter's increase per second, summed by a label."""
    return Query(f"sum by ({by}) (rate({metric}<{marks}>[$__rate_interval]))", "{{" + by.split(", ")[-1] + "}}")

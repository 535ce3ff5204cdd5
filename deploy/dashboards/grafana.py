"""Convert a board to JSON for Grafana 11. The only module that uses ``grafana_foundation_sdk``.

Versions, rollbacks and pauses are annotations.
"""

import itertools

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models

from deploy.dashboards.board import Board, Panel

TAG = "penstock"
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_HEIGHT = {"lines": 8, "stack": 8, "figure": 5}
_MARKS = (
    ("Versions", "changes(penstock_coordinator_head_version{namespace=~\"$namespace\",run=~\"$run\"}[$__interval]) > 0", "blue", False),
    ("Rollbacks", "increase(penstock_coordinator_rollbacks_total{namespace=~\"$namespace\",run=~\"$run\"}[$__rate_interval]) > 0", "red", True),
    ("Pauses", "max by (namespace, run) (penstock_coordinator_run_state{namespace=~\"$namespace\",run=~\"$run\",state=\"paused\"}) > 0", "orange", True),
)  # fmt: skip
"""Name, expression, color, enabled by default."""


def text(board: Board) -> str:
    """Return a dashboard's JSON, deterministically."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(f"penstock-{board.name}")
        .description(board.description)
        .tags([TAG])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Penstock").type(models.DashboardLinkType.DASHBOARDS).tags([TAG]).as_dropdown(True)
        )
        .annotations([_annotation(*mark) for mark in _MARKS])
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_choice("namespace", "Namespace", "label_values(penstock_build_info, namespace)", ".*"))
        .with_variable(_choice("run", "Run", 'label_values(penstock_build_info{namespace=~"$namespace"}, run)'))
        .with_variable(
            _choice(
                "replica",
                "Replica",
                'label_values(penstock_build_info{namespace=~"$namespace",run=~"$run"}, instance)',
            )
        )
    )
    numbers = itertools.count(1)
    for row in board.rows:
        made.with_row(dashboard.Row(row.title).id(next(numbers)))
        for panel in row.panels:
            made.with_panel(_panel(panel, next(numbers)))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def _choice(name: str, label: str, query: str, every: str = ".+") -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(_SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(every)
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _annotation(name: str, expression: str, color: str, shown: bool) -> dashboard.AnnotationQuery:
    return dashboard.AnnotationQuery().name(name).datasource(_SOURCE).expr(expression).icon_color(color).enable(shown)


def _panel(panel: Panel, number: int) -> timeseries.Panel | stat.Panel:
    made: timeseries.Panel | stat.Panel
    if panel.kind == "figure":
        made = stat.Panel().reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
    else:
        made = (
            timeseries.Panel()
            .line_width(1)
            .fill_opacity(40 if panel.kind == "stack" else 5)
            .show_points(common.VisibilityMode.NEVER)
            .legend(VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM))
        )
        if panel.kind == "stack":
            made.stacking(StackingConfig().mode(common.StackingMode.NORMAL))
    made.id(number).title(panel.title).description(panel.description).unit(panel.unit).datasource(_SOURCE)
    made.span(panel.width).height(_HEIGHT[panel.kind])
    for query, letter in zip(panel.queries, "ABCDEFGH", strict=False):
        made.with_target(
            prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(letter).datasource(_SOURCE)
        )
    return made

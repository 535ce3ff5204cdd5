"""A Prometheus process for the run, with its data in the run's folder.

It scrapes ``targets`` and, in a checkout, evaluates the chart's alert rules.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from penstock.services.up.metrics.targets import targets_file
from penstock.services.up.plan import PROMETHEUS, ProcessPlan, free_port
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings

RULES = Path(__file__).parents[4] / "deploy" / "k8s" / "penstock-monitoring" / "rules"
_PORT = 9090
"""Default; another free port if taken."""
_HOST = "127.0.0.1"
_SCRAPE_EVERY = "2s"
_EVALUATE_EVERY = "5s"


def find_program() -> str:
    program = shutil.which("prometheus")
    if program is None:
        raise SettingsError(
            "--prometheus needs the program prometheus on PATH: install it (Debian and Ubuntu: "
            "the package prometheus), or leave --prometheus out"
        )
    return program


def plan(settings: Settings, run_folder: Path, environment: Mapping[str, str]) -> ProcessPlan:
    program, folder = find_program(), run_folder / "prometheus"
    folder.mkdir(exist_ok=True)
    config = folder / "prometheus.yml"
    config.write_text(json.dumps(configuration(run_folder), indent=2) + "\n", encoding="utf-8")  # JSON is YAML
    port = _free_port(_PORT)
    return ProcessPlan(
        name=PROMETHEUS,
        service=PROMETHEUS,
        command=(
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={_HOST}:{port}",
            "--log.level=warn",
        ),
        environment=dict(environment),
        address=(_HOST, port),
    )


def configuration(run_folder: Path) -> dict[str, object]:
    return {
        "global": {"scrape_interval": _SCRAPE_EVERY, "evaluation_interval": _EVALUATE_EVERY},
        "rule_files": [str(rules) for rules in sorted(RULES.glob("*.yaml"))],
        "scrape_configs": [
            {
                "job_name": "penstock",
                "file_sd_configs": [{"files": [str(targets_file(run_folder))], "refresh_interval": "5s"}],
            }
        ],
    }


def _free_port(port: int) -> int:
    try:
        return free_port(_HOST, port)
    except OSError:
        return free_port(_HOST)


def url(process: ProcessPlan) -> str:
    assert process.address is not None
    return f"http://{process.address[0]}:{process.address[1]}"

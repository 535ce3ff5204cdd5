"""``penstock deploy``, ``logs`` and ``delete``; the other commands find a deployed run by its record."""

import functools
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.services.cli.cluster import programs
from penstock.services.cli.cluster.deployment import Deployment, find
from penstock.services.cli.cluster.upgrade import compared, confirm
from penstock.services.cli.connection import LATEST, RunArgument, RunOption, existing, named
from penstock.services.up.display import console
from penstock.shared.errors import PenstockError, SettingsError
from penstock.shared.text.terminal import escaped_line

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_OLDEST_HELM = (3, 17)
"""Its templates can read TOML."""
_READERS = "app.kubernetes.io/component in (pod,trainer,rollout,reward)"
"""Pods that read the run's TOML and do not restart by themselves."""
_SECRET = re.compile(r"^kind: Secret$", re.MULTILINE)


def add_to(app: typer.Typer, panel: str) -> None:
    """Add these commands to ``app``."""
    for command in (deploy, logs, delete):
        app.command(rich_help_panel=panel)(command)


def deploy(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.")],
    on: Annotated[Path, typer.Option("--on", metavar="CLUSTER", help="The cluster's TOML file.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The run's name. Default: CONFIG's.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the manifests, and change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before a change that gives GPUs back.")] = False,
) -> None:
    """Start a run on Kubernetes, or change one that was deployed. Needs `helm` and `kubectl`.

    `status`, `logs`, `stop`, `delete` and the commands that operate a run then find it as they find a local one.

    **Examples:** `penstock deploy my-run.toml --on cluster.toml` · `penstock deploy my-run.toml --on cluster.toml --dry-run`
    """
    from penstock.services.cli.cluster import cluster_file
    from penstock.shared.settings import load
    from penstock.shared.settings.reading.published import check_public

    settings, cluster = load(config), cluster_file.read(on)
    name = name or settings.run.id or config.stem.lower().replace("_", "-").replace(".", "-")
    if _NAME.fullmatch(name) is None:
        raise SettingsError(
            f"expected a name of 1 to 40 lower-case letters, digits and '-', found {name!r}: give --name"
        )
    toml = config.read_text(encoding="utf-8-sig")
    check_public(toml, str(config))
    helm = functools.partial(programs.command, "helm", cluster.context, cluster.namespace)
    words = ["upgrade", name, cluster.chart_place, "--install", "--values", "-"]
    words += ["--version", cluster.version] if cluster.version else []
    words += _over_others(programs.output(helm(["version"])))
    run = {**cluster.values.get("run", {}), "config": toml}
    values = json.dumps({**cluster.values, "run": run})
    rendered = programs.output(helm([*words, "--dry-run=server"]), values)
    if dry_run:
        console.say(without_secrets(rendered))
        return
    deployed = Deployment(
        name, cluster.namespace, cluster.context, cluster.values.get("api", {}).get("existingSecret", "")
    )
    restart = deployed.kubectl("delete", "pod", "--wait=false", "-l", f"{deployed.selector},{_READERS}")
    upgrade = compared(_manifest(helm(["get", "manifest", name])), rendered)
    confirm(upgrade, name, yes)
    programs.output(helm(words), values)
    if upgrade.restarts:
        programs.output(restart)
    folder = settings.run.folder / name
    deployed.write(folder)
    console.say(f"{name} is deployed: `penstock status` shows it, `penstock stop` ends it ({folder})")


def _manifest(words: Sequence[str]) -> str:
    """Return the manifest of the release that is there, or "" before the first install."""
    try:
        return programs.output(words)
    except PenstockError as error:
        if "release: not found" in str(error):
            return ""
        raise


def _over_others(version: str) -> list[str]:
    """Return what has Helm 4 set numbers of replicas that the coordinator or ``kubectl scale`` has set, as Helm 3 does.

    Raises PenstockError: Helm is older than the chart's templates.
    """
    match = re.search(r"\bv(\d+)\.(\d+)", version)
    if match is not None and (int(match[1]), int(match[2])) < _OLDEST_HELM:
        raise PenstockError(f"expected Helm 3.17 or newer, found {match[0]}: update it (https://helm.sh)")
    return ["--server-side=true", "--force-conflicts"] if match is not None and int(match[1]) >= 4 else []


def without_secrets(manifests: str) -> str:
    """Return Helm's output without its Secrets, which an upgrade reads from the cluster."""
    documents = manifests.split("\n---\n")
    kept = [document for document in documents if not _SECRET.search(document)]
    return "\n---\n".join([*kept, f"# {len(documents) - len(kept)} Secrets are not shown"])


def logs(
    run: RunArgument = LATEST,
    run_option: RunOption = None,
    service: Annotated[str, typer.Option("--service", metavar="SERVICE", help="Only of this service: trainer, …")] = "",
    lines: Annotated[int, typer.Option("--lines", min=0, metavar="N", help="Lines of each replica.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", help="Print new lines until Ctrl-C.")] = False,
) -> None:
    """Print the newest log lines of a run's replicas.

    **Example:** `penstock logs --service trainer --follow`
    """
    run = existing(named(run_option or run))
    if (deployed := find(run)) is not None:
        selector = deployed.selector + (f",app.kubernetes.io/component={service}" if service else "")
        words = deployed.kubectl("logs", "-l", selector, "--prefix", "--tail", str(lines), "--max-log-requests", "100")
        words += ["--follow"] if follow else []
    else:
        files = sorted((run / "logs").glob(f"{service}*.log"))
        if not files:
            raise PenstockError(f"no log files in {run / 'logs'}: give RUN, or another --service")
        words = ["tail", "-n", str(lines), *(["-F"] if follow else []), *map(str, files)]
    if _print(words):
        raise PenstockError(f"could not read the logs: {' '.join(words[:3])} … failed: see the lines above")


def _print(words: Sequence[str]) -> int:
    """Print a command's output without what controls a terminal; return its exit code."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, errors="backslashreplace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            typer.echo(escaped_line(line.rstrip("\n")))
    return process.returncode


def delete(run: RunArgument = LATEST, run_option: RunOption = None) -> None:
    """Remove a deployed run from its cluster. Its claims stay, with records and checkpoints; so does its local folder.

    **Example:** `penstock delete runs/my-run`
    """
    run = existing(named(run_option or run))
    if (deployed := find(run)) is None:
        raise PenstockError(
            f"{run} was not started by `penstock deploy`: end a local run with `penstock stop` or Ctrl-C"
        )
    programs.output(programs.command("helm", deployed.context, deployed.namespace, ["uninstall", deployed.name]))
    console.say(f"{deployed.name} is removed from {deployed.namespace}; its claims and {run} stay")

"""Laws of a run on a cluster: one command starts it, and the others find it. No real cluster was available."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from penstock.services.cli.cluster.commands import without_secrets
from penstock.services.cli.cluster.upgrade import Upgrade, compared
from tests.cli.test_cli import ROOT, Coordinator, coordinator, penstock
from tests.support import cluster_programs

__all__ = ["coordinator"]
CLUSTER = """
namespace = "research"
context = "gpus"
[values]
image.registry = "registry.test/team"
"""


@pytest.fixture
def place(helm: None, tmp_path: Path) -> Mapping[str, str]:
    """The environment of a machine with ``helm`` and ``kubectl``, whose cluster's state is in ``tmp_path``."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "demo.toml").write_text((ROOT / "config/arithmetic.toml").read_text())
    programs = cluster_programs.install(tmp_path / "programs")
    return {"PATH": f"{programs}:{os.environ['PATH']}", "CLUSTER_STATE": str(tmp_path)}


def test_a_dry_run_prints_the_manifests_without_secrets_and_changes_nothing(
    place: Mapping[str, str], tmp_path: Path
) -> None:
    shown = penstock("deploy", "demo.toml", "--on", "cluster.toml", "--dry-run", folder=tmp_path, **place)
    assert shown.returncode == 0, shown.stderr
    objects = [manifest for manifest in yaml.safe_load_all(shown.stdout.partition("MANIFEST:\n")[2]) if manifest]
    kinds = {manifest["kind"] for manifest in objects}
    assert {"JobSet", "Deployment", "StatefulSet", "ConfigMap"} <= kinds
    assert "Secret" not in kinds
    assert "# 3 Secrets are not shown" in shown.stdout  # one is the run's TOML, which may contain keys
    assert not (tmp_path / "runs").exists()


def test_one_command_deploys_and_one_each_shows_stops_and_deletes(
    place: Mapping[str, str], tmp_path: Path, coordinator: Coordinator
) -> None:
    own = {**place, "COORDINATOR_PORT": coordinator.url.rpartition(":")[2]}
    deployed = penstock("deploy", "demo.toml", "--on", "cluster.toml", folder=tmp_path, **own)
    assert deployed.stdout == ("demo is deployed: `penstock status` shows it, `penstock stop` ends it (runs/demo)\n"), (
        deployed.stderr
    )
    waiting = penstock("status", folder=tmp_path, **place)
    assert waiting.returncode == 1
    assert "no coordinator of demo runs in namespace research (error: unable to forward port" in waiting.stderr
    assert "`penstock doctor --cluster demo --namespace research` says why" in waiting.stderr
    shown = penstock("status", "--json", folder=tmp_path, **own)
    assert json.loads(shown.stdout)["step"] == 100, shown.stderr
    assert "the run is finished already" in penstock("stop", folder=tmp_path, **own).stderr
    assert coordinator.asked == ["/v1/run/stop"]
    assert "a line of the log" in penstock("logs", "--service", "trainer", folder=tmp_path, **own).stdout
    deleted = penstock("delete", "--run", "runs/demo", folder=tmp_path, **own)
    assert deleted.stdout == "demo is removed from research; its claims and runs/demo stay\n"
    chart = ROOT / "deploy/k8s/penstock"
    at_place, helm_place = "--namespace research --context gpus", "--namespace research --kube-context gpus"
    assert [line for line in cluster_programs.calls(tmp_path) if "kubectl get" not in line] == [
        f"helm version {helm_place}",
        f"helm upgrade demo {chart} --install --values - --server-side=true --force-conflicts --dry-run=server {helm_place}",
        f"helm get manifest demo {helm_place}",
        f"helm upgrade demo {chart} --install --values - --server-side=true --force-conflicts {helm_place}",
        *[f"kubectl port-forward service/demo-penstock-coordinator --address 127.0.0.1 :8000 {at_place}"] * 3,
        "kubectl logs -l app.kubernetes.io/instance=demo,app.kubernetes.io/component=trainer --prefix --tail 20 "
        f"--max-log-requests 100 {at_place}",
        f"helm uninstall demo {helm_place}",
    ]


def test_helm_3_knows_no_conflicts_of_field_managers(place: Mapping[str, str], tmp_path: Path) -> None:
    shown = penstock("deploy", "demo.toml", "--on", "cluster.toml", folder=tmp_path, HELM_VERSION="v3.19.2", **place)
    assert shown.returncode == 0, shown.stderr
    assert "--force-conflicts" not in cluster_programs.calls(tmp_path)[-1]


def test_helm_without_toml_in_its_templates_is_refused(place: Mapping[str, str], tmp_path: Path) -> None:
    shown = penstock("deploy", "demo.toml", "--on", "cluster.toml", folder=tmp_path, HELM_VERSION="v3.16.4", **place)
    assert "expected Helm 3.17 or newer, found v3.16" in shown.stderr


def test_what_gives_gpus_back_needs_consent_and_a_changed_toml_does_not(
    place: Mapping[str, str], tmp_path: Path
) -> None:
    def deploy(*words: str) -> tuple[int, str, str]:
        shown = penstock("deploy", "demo.toml", "--on", "cluster.toml", *words, folder=tmp_path, **place)
        return shown.returncode, shown.stderr, cluster_programs.calls(tmp_path)[-1].partition(" --namespace")[0]

    assert deploy()[0] == 0
    first = (tmp_path / "manifest.yaml").read_text()
    with (tmp_path / "demo.toml").open("a") as file:
        file.write("\n# new\n")
    readers = "app.kubernetes.io/instance=demo,app.kubernetes.io/component in (pod,trainer,rollout,reward)"
    assert deploy() == (0, "", f"kubectl delete pod --wait=false -l {readers}")
    assert compared(first, (tmp_path / "manifest.yaml").read_text()) == Upgrade((), restarts=True)
    (tmp_path / "cluster.toml").write_text(CLUSTER + "rollout.replicas = 3\n")
    returncode, said, last = deploy()
    assert (returncode, last) == (1, "helm get manifest demo")
    assert "this replaces JobSet demo-penstock-" in said
    assert "nothing was changed: give --yes to accept that" in said
    assert deploy("--yes")[0] == 0
    assert "completions: 3" in (tmp_path / "manifest.yaml").read_text()


def test_what_the_chart_refuses_is_told_in_its_words(place: Mapping[str, str], tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER + 'trainer.nodse = 2\nrun.kind = "jobset"\n')
    shown = penstock("deploy", "demo.toml", "--on", "cluster.toml", folder=tmp_path, **place)
    assert shown.returncode == 1
    assert "additional properties 'nodse' not allowed" in shown.stderr


@pytest.mark.parametrize(
    ("cluster", "words", "sentence"),
    [
        (CLUSTER, (), "expected the program helm in PATH: install it (https://helm.sh)"),
        ("[values]", (), "cluster.toml: namespace: Field required; a cluster's file has namespace, context, chart"),
        ('namespace = "a"\nnodes = 2', (), "nodes: Extra inputs are not permitted"),
        (
            CLUSTER,
            ("--name", "My Run"),
            "expected a name of 1 to 40 lower-case letters, digits and '-', found 'My Run'",
        ),
    ],
)
def test_what_is_wrong_is_a_sentence(tmp_path: Path, cluster: str, words: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "cluster.toml").write_text(cluster)
    config = str(ROOT / "config/arithmetic.toml")
    shown = penstock("deploy", config, "--on", "cluster.toml", *words, folder=tmp_path, PATH=str(tmp_path))
    assert sentence in shown.stderr


def test_a_local_run_is_not_deleted_and_its_logs_are_files(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer-0.log").write_text("first\nsecond\n")
    assert "second" in penstock("logs", str(tmp_path), "--lines", "1").stdout
    assert "was not started by `penstock deploy`" in penstock("delete", "--run", str(tmp_path)).stderr
    assert "no run at" in penstock("delete", str(tmp_path / "missing")).stderr


def test_secrets_are_left_out_wherever_they_are() -> None:
    text = "kind: Secret\na: 1\n---\nkind: ConfigMap\ndata: |\n  kind: Secret\n---\nb: 2\nkind: Secret\n"
    assert without_secrets(text) == "kind: ConfigMap\ndata: |\n  kind: Secret\n---\n# 2 Secrets are not shown"

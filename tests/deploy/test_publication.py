"""Laws of what is published, and of the SkyPilot task. No registry and no cloud was available."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from penstock.shared.settings import given, loads
from tests.support.chart import ALL_CRDS, EPISODES, NEWEST, ROOT, TRACKED, play_all, values

REGISTRY = "registry.test/team"
PUBLISHED = subprocess.run(
    [ROOT / "deploy/publish", REGISTRY, "--dry-run"], capture_output=True, text=True, check=True, cwd="/"
).stdout.splitlines()


@pytest.mark.usefixtures("helm")
def test_every_image_that_the_chart_names_is_published_and_no_other() -> None:
    cases = [
        values(run={"config": TRACKED}, executor={"enabled": True}),
        values(run={"config": EPISODES}),
        values(run={"config": TRACKED, "kind": "pod"}),
    ]
    played = play_all([[case] for case in cases], version=NEWEST, crds=ALL_CRDS)
    pods = [pod for (release,) in played for _, pod in release.pods()]
    named = {box["image"] for pod in pods for box in pod["spec"]["containers"]}
    assert {line.split()[-1] for line in PUBLISHED if line.startswith("docker push")} == named


def test_every_image_has_its_digest_in_the_values_that_are_written_and_its_own_lock(tmp_path: Path) -> None:
    """The builder and Helm are programs of the test, as no registry was available."""
    for name, script in (
        (
            "buildah",
            'while [ $# -gt 0 ]; do [ "$1" = --digestfile ] && printf "sha256:%064d" "${#3}" > "$2"; shift; done',
        ),
        ("helm", ":"),
    ):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n{script}\n')
        (tmp_path / name).chmod(0o755)
    checkout = tmp_path / "checkout"
    (checkout / "deploy").mkdir(parents=True)
    for part in ("publish", "docker", "k8s"):
        (checkout / "deploy" / part).symlink_to(ROOT / "deploy" / part)
    own = {"BUILDER": "buildah", "LOCK": "reward-models", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([checkout / "deploy/publish", REGISTRY], check=True, env=own)
    written = yaml.safe_load((checkout / "images.yaml").read_text())
    assert written.pop("image").keys() == {"registry", "tag", "arch"}
    assert written.keys() == {
        "coordinator",
        "episodes",
        "executor",
        "pod",
        "reward",
        "rollout",
        "tracking",
        "trainer",
        "valkey",
    }
    for role, given_values in written.items():
        name = "valkey/valkey" if role == "valkey" else f"penstock-{role}"
        assert re.fullmatch(rf"{REGISTRY}/{name}@sha256:[0-9]{{64}}", given_values["image"])
    built = [line for line in (tmp_path / "calls").read_text().splitlines() if " --build-arg " in line]
    assert built == [
        f"buildah build -f deploy/docker/reward.Dockerfile --build-arg LOCK=reward-models -t {REGISTRY}/penstock-reward:0.2.0 ."
    ]


def test_both_charts_are_pushed_in_the_form_of_oci() -> None:
    assert [line for line in PUBLISHED if line.startswith("helm")] == [
        "helm package deploy/k8s/penstock --destination /tmp/charts",
        f"helm push /tmp/charts/penstock-0.2.0.tgz oci://{REGISTRY}/charts",
        "helm package deploy/k8s/penstock-monitoring --destination /tmp/charts",
        f"helm push /tmp/charts/penstock-monitoring-0.2.0.tgz oci://{REGISTRY}/charts",
    ]


def test_the_skypilot_task_has_fields_of_skypilot_and_settings_and_extras_of_ours() -> None:
    task = yaml.safe_load((ROOT / "deploy/skypilot.yaml").read_text())
    fields = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run"}
    assert task.keys() <= fields  # of docs.skypilot.co, "SkyPilot YAML"
    assert task["resources"].keys() <= {"infra", "accelerators", "cpus", "memory", "use_spot", "disk_size", "image_id"}
    assert re.fullmatch(r"\w+:8", task["resources"]["accelerators"])
    extras = re.findall(r"\.\[([\w,-]+)\]", task["setup"])[0].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= project["optional-dependencies"].keys()
    program, command, config, *flags = shlex.split(task["run"])
    assert (program, command, config) == ("penstock", "up", "$RUN.toml")
    flags = [flag if flag.startswith("--") else {"$RUN": "my-run"}.get(flag, "s3://bucket/prefix") for flag in flags]
    settings = loads("", "run.toml", flags)
    assert (settings.run.id, settings.trainer.store.uri) == ("my-run", "s3://bucket/prefix")
    assert given(flags).keys() == {"run.id", "trainer.store.uri"}

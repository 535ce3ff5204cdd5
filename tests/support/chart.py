"""Render the chart with real Helm against a fake cluster."""

import atexit
import base64
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.fake_kubernetes import JOB_SET, KEDA, LEADER_WORKER_SET, OPERATOR, FakeKubernetes

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/k8s/penstock"
MONITORING = ROOT / "deploy/k8s/penstock-monitoring"
EXAMPLES = ROOT / "deploy/k8s/examples"
OLDEST, NEWEST = 28, 37
"""Supported minor versions of Kubernetes 1."""
ALL_CRDS = {**KEDA, **OPERATOR, **JOB_SET, **LEADER_WORKER_SET}
WORKLOADS = ("Deployment", "StatefulSet", "Job", "LeaderWorkerSet")
"""Kinds whose pods have one role; a JobSet is its Jobs here."""
GPU = "nvidia.com/gpu"
STAGE = "penstock/stage"
"""Label of workloads that have no pods until the run is over."""
Json = dict[str, Any]
Kinds = Mapping[str, Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Release:
    """One revision made by Helm (objects, hooks, notes), or its error."""

    objects: Sequence[Json]
    hooks: Sequence[Json]
    notes: str
    error: str
    manifest: str
    """As Helm prints it."""

    def of(self, kind: str, role: str = "") -> list[Json]:
        return [
            manifest
            for manifest in self.objects
            if manifest["kind"] == kind and role in ("", labels(manifest)["app.kubernetes.io/component"])
        ]

    def one(self, kind: str, role: str) -> Json:
        (manifest,) = self.of(kind, role)
        return manifest

    @property
    def config(self) -> str:
        """The run's TOML, as its pods read it."""
        return base64.b64decode(self.one("Secret", "run")["data"]["run.toml"]).decode()

    def workload(self, role: str) -> Json:
        workloads = [
            workload
            for workload in self.workloads()
            if labels(workload)["app.kubernetes.io/component"] == role and STAGE not in labels(workload)
        ]
        if len(workloads) == 2:  # the JobSet's replicas, and those that KEDA adds
            workloads = [workload for workload in workloads if workload["kind"] == "Job"]
        (workload,) = workloads
        return workload

    def workloads(self) -> Iterator[Json]:
        for manifest in self.objects:
            if manifest["kind"] == "JobSet":
                yield from jobs_of(manifest)
            elif manifest["kind"] in WORKLOADS:
                yield manifest

    def pods(self) -> Iterator[tuple[str, Json]]:
        for workload in self.workloads():
            yield labels(workload)["app.kubernetes.io/component"], template_of(workload)
        for hook in self.hooks:
            yield labels(hook)["app.kubernetes.io/component"], hook


def jobs_of(job_set: Json) -> Iterator[Json]:
    """Yield a JobSet's Jobs as its controller makes them (one replica each), with the labels of their pods."""
    name = job_set["metadata"]["name"]
    for job in job_set["spec"]["replicatedJobs"]:
        assert job["replicas"] == 1
        own = {**labels(job_set), **job["template"]["spec"]["template"]["metadata"]["labels"]}
        metadata = {"name": f"{name}-{job['name']}-0", "labels": own}
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job["template"]["spec"]}


def template_of(workload: Json) -> Json:
    if workload["kind"] == "LeaderWorkerSet":
        worker: Json = workload["spec"]["leaderWorkerTemplate"]["workerTemplate"]  # the leader's too
        return worker
    template: Json = workload["spec"]["template"]
    return template


def labels(manifest: Json) -> Mapping[str, str]:
    manifest_labels: Mapping[str, str] = manifest["metadata"]["labels"]
    return manifest_labels


def values(example: str = "", **more: Any) -> Json:
    """Return installable values: an example's or the defaults, updated by ``more``."""
    example_values: Json = {"image": {"registry": "registry.test/team"}}
    if example:
        example_values = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())
    config = (ROOT / "config/arithmetic.toml").read_text()
    return merged({**example_values, "run": {"config": config}}, more)


def merged(old: Json, new: Json) -> Json:
    both = {key: merged(old[key], new[key]) for key in old.keys() & new.keys() if isinstance(new[key], dict)}
    return {**old, **new, **both}


def play(
    steps: Sequence[Json], *, version: int = NEWEST, crds: Kinds | None = None, chart: Path = CHART
) -> list[Release]:
    """Install ``steps[0]``, then upgrade to the others, on a cluster of that version with those CRDs."""
    (releases,) = play_all([steps], version=version, crds=crds, chart=chart)
    return releases


def play_all(
    releases: Sequence[Sequence[Json]], *, version: int, crds: Kinds | None, chart: Path = CHART
) -> list[list[Release]]:
    """Like :func:`play`, for several releases named demo in their own namespaces, the first in `research`."""
    fake = FakeKubernetes(version, crds)
    job = {
        "kubeconfig": fake.kubeconfig,
        "chart": str(chart),
        "releases": [
            {"namespace": f"research-{number}" if number else "research", "name": "demo", "steps": steps}
            for number, steps in enumerate(releases)
        ],
    }
    player = _player()
    assert player.stdin is not None
    assert player.stdout is not None
    try:
        print(json.dumps(job), file=player.stdin, flush=True)
        answer = player.stdout.readline()
    finally:
        fake.close()
    assert answer, f"expected an answer of Helm, which ended: {player.poll()}"
    return [[_release(step) for step in release] for release in json.loads(answer)]


@functools.cache
def _player() -> subprocess.Popen[str]:
    """Start Helm once: to import it takes longer than a chart. It ends with its standard input."""
    player = subprocess.Popen(
        [sys.executable, "-m", "tests.support.helm_player"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HELM_DRIVER": "memory"},
    )
    atexit.register(player.communicate)
    return player


def render(chart_values: Json, **cluster: Any) -> Release:
    (release,) = play([chart_values], **cluster)
    assert not release.error, release.error
    return release


def refusal(chart_values: Json, **cluster: Any) -> str:
    (release,) = play([chart_values], **cluster)
    assert release.error
    return release.error


def _release(rendered: Json) -> Release:
    if "error" in rendered:
        return Release((), (), "", rendered["error"], "")
    objects = [manifest for manifest in yaml.load_all(rendered["manifest"], yaml.CSafeLoader) if manifest]
    hooks = [yaml.load(hook["manifest"], yaml.CSafeLoader) for hook in rendered.get("hooks") or ()]
    return Release(objects, hooks, rendered["info"].get("notes", ""), "", rendered["manifest"])


def environment(container: Json) -> Mapping[str, Any]:
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container["env"]}


EPISODES = values()["run"]["config"] + '\n[episodes]\nagent = "my_agent:run"\nreplicas = 2\n'
AGENTS = {"app": "agents"}
TRACKED = values()["run"]["config"] + '\n[tracking]\nsinks = ["mlflow"]\n'
EVERYTHING: Json = {
    "run": {"config": TRACKED},
    "executor": {"enabled": True, "runtimeClassName": "gvisor"},
    "commonLabels": {"team": "research"},
    "storage": {"data": {"existingClaim": "models"}},
    "bus": {"caSecret": "bus-ca"},
    "tracking": {"existingSecret": "trackers"},
    "defaults": {
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/part-of": "penstock"}},
            }
        ],
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    },
    "fabric": {"topologyKey": "fabric"},
    "image": {"pullSecrets": [{"name": "pull"}]},
}
CASES: Mapping[str, Json] = {
    "defaults": values(),
    **{path.stem: values(path.stem) for path in sorted(EXAMPLES.glob("*.yaml"))},
    "everything": values("two-pools", **EVERYTHING),
    "episodes": values(
        run={"config": EPISODES}, networkPolicy={"agentsFrom": [{"podSelector": {"matchLabels": AGENTS}}]}
    ),
    "two-nodes-per-engine": values(
        "two-nodes-per-engine",
        run={"config": values()["run"]["config"] + "\n[rollout.vllm]\ntensor_parallel_size = 16\n"},
    ),
}

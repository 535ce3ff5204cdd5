"""Laws of a run's life on Kubernetes: it is admitted as a whole, and holds no GPU when it is over.

Kueue, the JobSet controller and the API server are simulated from the rendered manifests; no cluster was available.
"""

import collections
import copy
import dataclasses
import json
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from penstock.services.coordinator.run.release import KubernetesScale, Release
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat
from tests.support import chart
from tests.support.chart import (
    ALL_CRDS,
    CASES,
    EXAMPLES,
    GPU,
    NEWEST,
    Json,
    environment,
    jobs_of,
    labels,
    merged,
    play,
    play_all,
    template_of,
    values,
)
from tests.support.chart import Release as Rendered
from tests.support.fake_kubernetes import KEDA, LEADER_WORKER_SET, OPERATOR, FakeKubernetes
from tests.support.scale_server import ScaleServer

pytestmark = pytest.mark.usefixtures("helm")
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
WITHOUT_JOB_SET = {**KEDA, **OPERATOR, **LEADER_WORKER_SET}
QUEUE = "kueue.x-k8s.io/queue-name"


@pytest.fixture(scope="module")
def runs(helm: None) -> Mapping[tuple[str, str], Rendered]:
    """Every example, as a JobSet, as workloads and as one pod; each in a namespace of its own."""
    releases: dict[tuple[str, str], Rendered] = {}
    for kind, crds in (("jobset", ALL_CRDS), ("workloads", WITHOUT_JOB_SET), ("pod", WITHOUT_JOB_SET)):
        names = names_of(kind)
        queue = {} if kind != "workloads" else {"kueue": {"queue": ""}}
        steps = [[merged(CASES[name], {"run": {"kind": kind}, **queue})] for name in names]
        played = play_all(steps, version=NEWEST, crds=crds)
        releases |= {(name, kind): release for name, (release,) in zip(names, played, strict=True)}
    assert not [release.error for release in releases.values() if release.error]
    return releases


def names_of(kind: str) -> list[str]:
    return [name for name in NAMES if kind != "jobset" or name != "two-nodes-per-engine"]


def namespace_of(name: str, kind: str) -> str:
    number = names_of(kind).index(name)  # as ``play_all`` numbers them
    return f"research-{number}" if number else "research"


# ---------------------------------------------------------------- the end


def gpu_pods(release: Rendered) -> dict[str, int]:
    """Return the number of pods that request GPUs, by workload, after controllers acted on the objects."""
    replicas_with_gpus: dict[str, int] = {}
    for workload in release.workloads():
        gpus = [box["resources"]["requests"].get(GPU, 0) for box in template_of(workload)["spec"]["containers"]]
        replicas = pods_of(release, workload)
        if any(gpus) and replicas:
            replicas_with_gpus[f"{workload['kind']}/{workload['metadata']['name']}"] = replicas
    return replicas_with_gpus


def pods_of(release: Rendered, workload: Json) -> int:
    """Return a workload's number of pods; KEDA sets what the manifest does not, and has just scaled it up."""
    spec, name = workload["spec"], workload["metadata"]["name"]
    if workload["kind"] == "Job":
        return int(spec.get("completions", 1))
    if "replicas" in spec:
        return int(spec["replicas"])
    (scaled,) = [
        manifest for manifest in release.of("ScaledObject") if manifest["spec"]["scaleTargetRef"]["name"] == name
    ]
    return max(1, int(scaled["spec"]["minReplicaCount"]))


def keda_acts(release: Rendered) -> None:
    for scaled in release.of("ScaledObject"):
        for workload in release.workloads():
            if workload["metadata"]["name"] == scaled["spec"]["scaleTargetRef"]["name"] and workload["kind"] != "Job":
                spec = workload["spec"]
                spec["replicas"] = max(spec.get("replicas", 1), scaled["spec"]["minReplicaCount"])


def job_sets_act(release: Rendered, ended: str) -> None:
    """Remove the Jobs of every JobSet that is complete, now that the Job of the role ``ended`` is; and that of a pod."""
    objects = list(release.objects)
    for manifest in objects:
        policy = manifest["spec"]["successPolicy"] if manifest["kind"] == "JobSet" else {}
        if policy.get("targetReplicatedJobs") == [ended] or (manifest["kind"] == "Job" and ended == "pod"):
            objects.remove(manifest)
    object.__setattr__(release, "objects", objects)


async def over(bus: Bus) -> Ledger:
    ledger = Ledger(bus)
    await ledger.create()
    await ledger.transition(RunState.STOPPED, "the test is over", [RunState.CREATED])
    await ledger.close()
    return ledger


def coordinator_of(release: Rendered) -> Mapping[str, str]:
    (container,) = template_of(release.workload("coordinator"))["spec"]["containers"]
    return environment(container)


@pytest.mark.parametrize("kind", ["jobset", "workloads", "pod"])
async def test_no_example_has_a_gpu_pod_60_seconds_after_its_end(
    runs: Mapping[tuple[str, str], Rendered], kind: str, bus: Bus, tmp_path: Path
) -> None:
    ledger = await over(bus)
    before: dict[str, int] = {}
    after: dict[str, Mapping[str, int]] = {}
    for name in names_of(kind):
        release = copy.deepcopy(runs[name, kind])
        before[name] = sum(gpu_pods(release).values())
        ending = [
            workload for workload in release.workloads() if labels(workload)["app.kubernetes.io/component"] != "bus"
        ]
        graces = [template_of(workload)["spec"]["terminationGracePeriodSeconds"] for workload in ending]
        if kind != "pod":
            targets = json.loads(coordinator_of(release).get("PENSTOCK__INTERNAL__RELEASE", "[]"))
            (folder := tmp_path / f"{name}-{kind}").mkdir()
            replicas = release.workload("coordinator")["spec"]["replicas"]
            server = ScaleServer(release, namespace_of(name, kind), folder)
            try:
                cluster = KubernetesScale(server.environment, server.account)
                releasing = Release(bus, ledger, targets, list, 1, cluster)
                await releasing.look()
            finally:
                server.close()
            assert releasing.notices() == []
            keda_acts(release)
            own, *resting = release.of("Deployment", "coordinator")
            assert [owner["spec"]["replicas"] for owner in (own, *resting)] == (
                [0, replicas] if resting else [replicas]
            )
        if kind == "jobset":
            (trainer,) = template_of(release.workload("trainer"))["spec"]["containers"]
            assert environment(trainer)["PENSTOCK__INTERNAL__LEAVE_WHEN_OVER"] == "true"
        job_sets_act(release, {"jobset": "trainer", "pod": "pod"}.get(kind, ""))
        after[name] = gpu_pods(release)
        assert (
            kind == "pod" or max(graces) <= 40
        )  # which leaves 20 s: the trainer looks every 2 s, the coordinator every second
    assert {name for name, count in before.items() if not count} == ({"cpu-smoke"} if kind != "pod" else set())
    assert after == {name: {} for name in before}


@pytest.fixture
async def scaling(runs: Mapping[tuple[str, str], Rendered], tmp_path: Path) -> AsyncIterator[ScaleServer]:
    where = namespace_of("two-pools", "workloads")
    server = ScaleServer(copy.deepcopy(runs["two-pools", "workloads"]), where, tmp_path)
    yield server
    server.close()


def beat(**values: float) -> Heartbeat:
    return Heartbeat("trainer", "trainer-0", "waiting", None, "host", 1, "", 0.0, 0.0, 0, "", values)


TARGETS = ("apps/v1/deployments/demo-penstock-rollout", "apps/v1/statefulsets/demo-penstock-trainer")


async def test_a_release_is_tried_until_it_succeeds_and_says_why_it_did_not(bus: Bus, scaling: ScaleServer) -> None:
    releasing = Release(bus, await over(bus), TARGETS, list, 1, KubernetesScale(scaling.environment, scaling.account))
    scaling.failures = [503]
    await releasing.look()
    (said,) = releasing.notices()
    assert said.level == "error"
    assert said.text.startswith("could not scale deployments/demo-penstock-rollout to zero: 503 ")
    assert "`helm uninstall` frees the GPUs too" in said.text
    await releasing.look()
    await releasing.look()
    assert releasing.notices() == []
    assert scaling.patched == ["statefulsets/demo-penstock-trainer", "deployments/demo-penstock-rollout"]  # each once


async def test_a_coordinator_stays_until_its_successor_is_created(
    bus: Bus, runs: Mapping[tuple[str, str], Rendered], tmp_path: Path
) -> None:
    release = copy.deepcopy(runs["one-gpu-node", "jobset"])
    targets = json.loads(coordinator_of(release)["PENSTOCK__INTERNAL__RELEASE"])
    server = ScaleServer(release, namespace_of("one-gpu-node", "jobset"), tmp_path)
    try:
        cluster = KubernetesScale(server.environment, server.account)
        releasing = Release(bus, await over(bus), targets, list, 1, cluster)
        server.failures = [503]
        await releasing.look()
        assert server.patched == []
        await releasing.look()
        assert server.patched == [f"deployments/demo-penstock-coordinator{stage}" for stage in ("-after", "")]
    finally:
        server.close()


async def test_the_role_allows_nothing_but_the_run_s_own_numbers_of_replicas(bus: Bus, scaling: ScaleServer) -> None:
    others = ("apps/v1/deployments/demo-penstock-coordinator", "apps/v1/statefulsets/demo-penstock-bus")
    cluster = KubernetesScale(scaling.environment, scaling.account)
    releasing = Release(bus, await over(bus), others, list, 1, cluster)
    await releasing.look()
    assert "403" in releasing.notices()[0].text
    (role,) = scaling.release.of("Role")
    powers = {(verb, resource) for rule in role["rules"] for verb in rule["verbs"] for resource in rule["resources"]}
    assert powers == {("patch", "deployments/scale"), ("patch", "statefulsets/scale"), ("delete", "scaledobjects")}
    assert all(rule["resourceNames"] for rule in role["rules"])
    assert scaling.patched == []


async def test_a_run_that_goes_on_or_whose_copies_are_not_stored_keeps_its_workloads(
    bus: Bus, scaling: ScaleServer
) -> None:
    cluster, ledger = KubernetesScale(scaling.environment, scaling.account), Ledger(bus)
    await ledger.create()
    storing = [beat(stored=0.0)]
    releasing = Release(bus, ledger, TARGETS, lambda: storing, 2, cluster)
    await releasing.look()
    await ledger.transition(RunState.FINISHED, "", [RunState.CREATED])
    await ledger.close()
    await releasing.look()  # finished at step 0 of 2: it is about to be extended
    await ledger.transition(RunState.STOPPED, "", [RunState.FINISHED])
    await releasing.look()  # a copy of the last checkpoint is on its way
    assert scaling.patched == []
    storing[0] = beat(stored=1.0)
    await releasing.look()
    assert len(scaling.patched) == 2


async def test_coordinators_of_an_older_pod_template_do_not_release_again_what_helm_has_scaled_up(
    bus: Bus, runs: Mapping[tuple[str, str], Rendered], scaling: ScaleServer
) -> None:
    variables: Mapping[str, object] = coordinator_of(runs["two-pools", "workloads"])
    field = {"fieldRef": {"fieldPath": "metadata.labels['pod-template-hash']"}}
    assert variables["PENSTOCK__INTERNAL__POD_TEMPLATE"] == field
    ledger, patched = await over(bus), []
    for pod_template in ("old", "old", "new", "new"):  # each a new leader, the third after an upgrade to as many steps
        cluster = KubernetesScale(scaling.environment, scaling.account)
        await Release(bus, ledger, TARGETS, list, 1, cluster, pod_template).look()
        patched.append(len(scaling.patched))
    assert patched == [2, 2, 4, 4]
    await ledger.reopen()  # a longer run, which ends too
    await ledger.close()
    await Release(bus, ledger, TARGETS, list, 1, cluster, "new").look()
    assert len(scaling.patched) == 6


def test_helm_makes_a_deleted_scaled_object_again_when_a_longer_run_is_deployed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    created: list[str] = []

    class Released(FakeKubernetes):
        """Its ScaledObjects are gone after each step."""

        def answer(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
            answered = super().answer(method, path, body)
            for gone in [name for name in self.objects if "/scaledobjects/" in name]:
                created.append(gone.rpartition("/")[2])
                del self.objects[gone]
            return answered

    monkeypatch.setattr(chart, "FakeKubernetes", Released)
    steps = [values("two-pools"), values("two-pools", image={"registry": "registry.test/team", "tag": "0.2.0"})]
    assert [release.error for release in play(steps, crds=ALL_CRDS)] == ["", ""]
    assert sorted(created) == ["demo-penstock-reward"] * 2 + ["demo-penstock-rollout"] * 2


async def test_outside_of_a_cluster_a_release_is_a_sentence(bus: Bus, tmp_path: Path) -> None:
    releasing = Release(bus, await over(bus), TARGETS, list, 1, KubernetesScale({}, tmp_path))
    await releasing.look()
    assert releasing.notices()[0].text.startswith("could not scale deployments/demo-penstock-rollout to zero: ")


# ---------------------------------------------------------------- the queue


@dataclasses.dataclass
class Workload:
    """What Kueue admits at once: the pod sets of a JobSet, of a Job, or one pod of another workload."""

    run: int
    roles: Mapping[str, int]
    """Pods by role."""
    gpus: Mapping[str, int]
    """By flavor, which is the product that the pods select."""
    admitted: bool = False


def workloads_of(release: Rendered, run: int) -> Iterator[Workload]:
    for manifest in release.objects:
        if QUEUE not in labels(manifest):
            continue
        jobs = list(jobs_of(manifest)) if manifest["kind"] == "JobSet" else [manifest]
        grouped = manifest["kind"] in ("JobSet", "Job")
        count = 1 if grouped else pods_of(release, manifest)
        for _ in range(count):
            gpus: collections.Counter[str] = collections.Counter()
            roles: collections.Counter[str] = collections.Counter()
            for job in jobs:
                pod = template_of(job)["spec"]
                pods = job["spec"].get("completions", 1) if grouped else 1
                flavor = pod.get("nodeSelector", {}).get(f"{GPU}.product", "any")
                gpus[flavor] += pods * sum(int(box["resources"]["requests"].get(GPU, 0)) for box in pod["containers"])
                roles[labels(job)["app.kubernetes.io/component"]] += pods
            yield Workload(run, roles, gpus)


def admit(workloads: Sequence[Workload], quota: Mapping[str, int], chance: random.Random) -> Iterator[None]:
    """Admit, preempt and finish in any order; yield after each change. All pod sets of a workload at once, or none."""
    for _ in range(40):
        candidate = chance.choice(workloads)
        used: collections.Counter[str] = collections.Counter()
        for other in workloads:
            if other.admitted and other is not candidate:
                used.update(other.gpus)
        candidate.admitted = not candidate.admitted and all(
            used[flavor] + need <= quota[flavor] for flavor, need in candidate.gpus.items()
        )
        yield


def half_admitted(workloads: Sequence[Workload]) -> bool:
    """Whether a run's trainer is admitted and none of its rollout replicas."""
    roles: collections.defaultdict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for workload in workloads:
        if workload.admitted:
            roles[workload.run].update(workload.roles)
    return any(own["trainer"] and not own["rollout"] for own in roles.values())


def test_no_queue_admits_a_trainer_without_rollout(runs: Mapping[tuple[str, str], Rendered]) -> None:
    queued = {
        kind: play_all(
            [[merged(CASES[name], {"run": {"kind": kind}, "kueue": {"queue": "q"}})] for name in NAMES],
            version=NEWEST,
            crds=ALL_CRDS,
        )
        for kind in ("auto", "workloads")
    }
    refused = {name for name, (release,) in zip(NAMES, queued["auto"], strict=True) if release.error}
    assert refused == {"two-nodes-per-engine"}
    assert all("kueue.queue needs run.kind = jobset" in release.error for (release,) in queued["workloads"])
    states = bad = admitted = 0
    for (release,) in queued["auto"]:
        for seed in range(0 if release.error else 40):
            chance = random.Random(seed)
            workloads = [workload for run in range(3) for workload in workloads_of(release, run)]
            total = sum(sum(workload.gpus.values()) for workload in workloads)
            quota = {flavor: chance.randint(0, total) for workload in workloads for flavor in workload.gpus}
            for _ in admit(workloads, quota, chance):
                states, bad = states + 1, bad + half_admitted(workloads)
                admitted += any(workload.admitted and workload.roles.get("trainer") for workload in workloads)
    assert (states, bad) == (5 * 40 * 40, 0)
    assert admitted > 1000


def test_the_law_of_the_queue_sees_a_trainer_that_is_alone() -> None:
    """Roles with queue labels of their own, as charts usually have them."""
    workloads = [Workload(0, {role: 1}, {"any": 8}) for role in ("trainer", "rollout")]
    assert any(half_admitted(workloads) for _ in admit(workloads, {"any": 8}, random.Random(0)))

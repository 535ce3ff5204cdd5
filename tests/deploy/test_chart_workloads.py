"""Multi-pod workloads: multi-node trainers, engines across pods, and replica counts."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given, settings

from penstock.services.coordinator.run.monitor import SHOWN, STREAM_ENTRIES
from penstock.shared.bus.keys import Keys
from penstock.shared.bus.streams import EVAL_PROMPTS, EVAL_ROLLOUTS, PROMPTS, ROLLOUTS
from penstock.shared.settings import load
from tests.support.chart import (
    ALL_CRDS,
    CASES,
    EPISODES,
    GPU,
    NEWEST,
    ROOT,
    Json,
    Kinds,
    Release,
    environment,
    jobs_of,
    labels,
    merged,
    play_all,
    render,
    template_of,
    values,
)
from tests.support.fake_kubernetes import EXTERNAL_METRICS, KEDA, LEADER_WORKER_SET, OPERATOR

pytestmark = pytest.mark.usefixtures("helm")


@pytest.fixture(scope="module")
def job_sets(helm: None) -> Mapping[str, Sequence[Release]]:
    def of(kind: str = "auto", nodes: int = 3, run: Json | None = None, **more: Any) -> Json:
        return merged(values(trainer={"nodes": nodes}, **more), {"run": {"kind": kind, **(run or {})}})

    scaled = {"enabled": True, "minReplicas": 2, "maxReplicas": 6}
    cases: Mapping[str, Sequence[Json]] = {
        "auto": [of()],
        "asked for": [of("jobset")],
        "not wanted": [of("workloads")],
        "long name": [of(nodes=64, fullnameOverride="p" * 40)],
        "upgraded": [
            values(),
            values(coordinator={"replicas": 1}),
            values(image={"tag": "0.2.1"}),
            of(nodes=1, run={"maxRestarts": 7}),
        ],
        "queued": [of(kueue={"queue": "research", "priorityClass": "high"})],
        "scaled": [of(rollout={"autoscaling": scaled}, reward={"autoscaling": {"enabled": True}})],
        "fixed": [of(rollout={"autoscaling": {**scaled, "maxReplicas": 2}})],
        "episodes": [of(run={"config": EPISODES}, rollout={"autoscaling": scaled})],
        "kept": [of(run={"onFinish": "keep"})],
        "limited": [of(run={"activeDeadlineSeconds": 3600})],
    }
    played = dict(zip(cases, play_all(list(cases.values()), version=NEWEST, crds=ALL_CRDS), strict=True))
    assert not [rendered.error for release in played.values() for rendered in release if rendered.error]
    return played


def test_trainer_rollout_and_rewards_are_one_job_set_or_where_a_cluster_has_none_workloads(
    job_sets: Mapping[str, Sequence[Release]],
) -> None:
    for name in ("auto", "asked for"):
        (release,) = job_sets[name]
        assert [release.workload(role)["kind"] for role in ("trainer", "rollout", "reward")] == ["Job", "Job", "Job"]
        assert [labels(deployment)["app.kubernetes.io/component"] for deployment in release.of("Deployment")] == [
            "coordinator"
        ]
        budget = release.one("PodDisruptionBudget", "trainer")["spec"]
        assert (budget["minAvailable"], "maxUnavailable" in budget) == (3, False)  # a Job's pods know nothing else
        assert not release.of("Service", "trainer")  # the controller makes it
        assert "wait pod --for=condition=Ready" in release.notes
    for release in (*job_sets["not wanted"], render(values())):
        trainer = release.workload("trainer")
        assert (trainer["kind"], trainer["spec"]["podManagementPolicy"]) == ("StatefulSet", "Parallel")
        assert release.one("PodDisruptionBudget", "trainer")["spec"]["maxUnavailable"] == 0
        assert release.one("Service", "trainer")["spec"]["publishNotReadyAddresses"] is True
        several = trainer["spec"]["replicas"] > 1  # new pods would wait for ranks of old ones, one pod after the other
        assert trainer["spec"].get("updateStrategy") == ({"type": "OnDelete"} if several else None)
        assert ("replace its pods all at once" in release.notes) == several
        assert "wait pod --for=condition=Ready" in release.notes


def test_the_trainer_s_pods_meet_at_its_first_and_each_job_restarts_its_own(
    job_sets: Mapping[str, Sequence[Release]],
) -> None:
    (release,) = job_sets["auto"]
    (job_set,) = release.of("JobSet")
    name, spec = job_set["metadata"]["name"], job_set["spec"]
    job = release.workload("trainer")["spec"]
    variables = environment(job["template"]["spec"]["containers"][0])
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True}
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"], job["backoffLimit"]) == (100, 0, 300)
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert (variables["PENSTOCK__TRAINER__NODES"], variables["PENSTOCK__TRAINER__NODE"]) == ("3", "$(JOB_INDEX)")
    assert variables["PENSTOCK__TRAINER__RENDEZVOUS"] == f"{name}-trainer-0-0.{name}:29500"
    assert variables["JOB_INDEX"] == index
    (monitor,) = release.of("PodMonitor")  # pods change names, replicas do not
    (kept,) = [
        relabeling
        for relabeling in monitor["spec"]["podMetricsEndpoints"][0]["relabelings"]
        if relabeling.keys() >= {"regex", "targetLabel"}
    ]
    role, number = "jobset_sigs_k8s_io_replicatedjob_name", "batch_kubernetes_io_job_completion_index"
    assert kept["sourceLabels"][0] == f"__meta_kubernetes_pod_label_{role}"
    assert kept["sourceLabels"][1] == f"__meta_kubernetes_pod_annotation_{number}"
    assert re.fullmatch(kept["regex"], kept["separator"].join(["rollout", "0"]))
    assert not re.fullmatch(kept["regex"], kept["separator"].join(["coordinator", ""]))


def test_a_job_set_which_cannot_be_changed_is_followed_by_another(job_sets: Mapping[str, Sequence[Release]]) -> None:
    first, same, other, patient = (release.one("JobSet", "jobset") for release in job_sets["upgraded"])
    assert first == same
    assert len({job_set["metadata"]["name"] for job_set in (first, other, patient)}) == 3


def test_the_longest_name_leaves_room_for_those_of_a_job_set_s_pods(job_sets: Mapping[str, Sequence[Release]]) -> None:
    (release,) = job_sets["long name"]
    assert len(f"{release.one('JobSet', 'jobset')['metadata']['name']}-trainer-0-63-x7k2p") <= 63


def test_one_queue_and_one_priority_class_admit_the_run(job_sets: Mapping[str, Sequence[Release]]) -> None:
    (release,) = job_sets["queued"]
    queued = [manifest for manifest in release.objects if "kueue.x-k8s.io/queue-name" in labels(manifest)]
    assert [manifest["kind"] for manifest in queued] == ["JobSet"]
    assert labels(queued[0])["kueue.x-k8s.io/priority-class"] == "high"


def test_keda_adds_replicas_to_those_of_the_job_set(job_sets: Mapping[str, Sequence[Release]]) -> None:
    (release,), (fixed,) = job_sets["scaled"], job_sets["fixed"]
    assert release.workload("rollout")["spec"]["completions"] == 2
    spec = release.one("ScaledObject", "rollout")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, 4)
    assert spec["advanced"]["scalingModifiers"]["formula"] == "max(prompts + eval_prompts - 512, 0)"
    assert release.workload("reward")["kind"] == "Deployment"
    assert not fixed.of("ScaledObject", "rollout")
    assert not fixed.of("Deployment", "rollout")


def test_episodes_are_beside_the_job_set_whose_replicas_follow_their_streams(
    job_sets: Mapping[str, Sequence[Release]],
) -> None:
    (release,) = job_sets["episodes"]
    spec = release.one("ScaledObject", "rollout")["spec"]
    assert spec["advanced"]["scalingModifiers"]["formula"] == "max(episodes + eval_episodes - 512, 0)"
    assert [trigger["name"] for trigger in spec["triggers"]] == ["episodes", "eval_episodes"]
    (container,) = release.workload("episodes")["spec"]["template"]["spec"]["containers"]
    assert environment(container)["PENSTOCK__EPISODES__LISTEN"] == "$(POD_IP):8100"
    (coordinator,) = template_of(release.workload("coordinator"))["spec"]["containers"]
    released = json.loads(environment(coordinator)["PENSTOCK__INTERNAL__RELEASE"])
    assert "apps/v1/deployments/demo-penstock-episodes" in released
    assert not [
        name
        for of in job_sets.values()
        for each in of[:1]
        if each is not release
        for name in each.of("Deployment", "episodes")
    ]


def test_every_pool_is_a_job_of_the_job_set_to_which_keda_adds() -> None:
    scaling = {"enabled": True, "minReplicas": 0, "maxReplicas": 5, "entriesPerReplica": 256, "cooldownSeconds": 60}
    pools = [{"name": "big", "replicas": 2}, {"name": "spot", "autoscaling": scaling}]
    alone = [{"name": "spot", "autoscaling": scaling}]
    (release,), (refused,) = play_all(
        [[values(rollout={"pools": pools})], [values(rollout={"pools": alone})]], version=NEWEST, crds=ALL_CRDS
    )
    assert "run.kind = jobset needs a pool with rollout replicas" in refused.error
    (job_set,) = release.of("JobSet")
    jobs = {job["metadata"]["name"].rpartition(f"{job_set['metadata']['name']}-")[2]: job for job in jobs_of(job_set)}
    assert {name: job["spec"]["completions"] for name, job in jobs.items()} == {
        "trainer-0": 1,
        "rollout-big-0": 2,
        "reward-0": 2,
    }
    (replica,) = template_of(jobs["rollout-big-0"])["spec"]["containers"]
    assert replica["command"][-1] == "rollout-big-$(JOB_INDEX)"
    (scaler,) = release.of("ScaledObject")
    assert scaler["spec"]["advanced"]["scalingModifiers"]["formula"] == "max(prompts + eval_prompts - 512, 0)"
    (coordinator,) = template_of(release.workload("coordinator"))["spec"]["containers"]
    assert json.loads(environment(coordinator)["PENSTOCK__INTERNAL__RELEASE"]) == [
        "keda.sh/v1alpha1/scaledobjects/demo-penstock-rollout-spot",
        "apps/v1/deployments/demo-penstock-rollout-spot",
    ]


def test_a_run_that_keeps_its_gpus_or_has_a_deadline_says_so_to_its_services(
    job_sets: Mapping[str, Sequence[Release]],
) -> None:
    (kept,), (limited,) = job_sets["kept"], job_sets["limited"]
    assert not kept.of("Role")
    (trainer,) = template_of(kept.workload("trainer"))["spec"]["containers"]
    assert "PENSTOCK__INTERNAL__LEAVE_WHEN_OVER" not in environment(trainer)
    (coordinator,) = template_of(limited.workload("coordinator"))["spec"]["containers"]
    assert environment(coordinator)["PENSTOCK__INTERNAL__DEADLINE_S"] == "3600"
    assert limited.workload("trainer")["spec"]["activeDeadlineSeconds"] == 3720  # if the coordinator does not stop it


def test_the_pods_of_one_replica_have_the_engine_s_gpus_between_them_and_meet_at_their_first() -> None:
    (release,), (defaults,) = play_all(
        [[CASES["two-nodes-per-engine"]], [CASES["defaults"]]], version=NEWEST, crds=ALL_CRDS
    )
    group = release.workload("rollout")
    spec = group["spec"]
    (container,) = template_of(group)["spec"]["containers"]
    variables = environment(container)
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (2, 2)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["startupPolicy"] == "LeaderCreated"  # a leader is ready only with the others
    assert container["resources"]["limits"][GPU] == 8  # × 2 pods = tensor_parallel_size
    assert {"name": "rendezvous", "containerPort": 29500} in container["ports"]
    assert variables["PENSTOCK__ROLLOUT__NODES"] == "2"
    assert variables["PENSTOCK__ROLLOUT__NODE"] == "$(LWS_WORKER_INDEX)"
    assert variables["PENSTOCK__ROLLOUT__RENDEZVOUS"] == "$(LWS_LEADER_ADDRESS):29500"
    index = {"fieldRef": {"fieldPath": "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
    assert variables["GROUP_INDEX"] == index
    assert container["command"][-2:] == [
        "--replica",
        "demo-penstock-rollout-$(GROUP_INDEX)",
    ]
    assert "A replica of rollout is 2 pods" in release.notes
    assert defaults.workload("rollout")["kind"] == "Job"


def test_a_pod_of_several_gets_settings_and_a_secret_that_upgrades_keep(tmp_path: Path) -> None:
    case = CASES["two-nodes-per-engine"]
    given = merged(case, {"rollout": {"existingSecret": "ours"}})
    (first, again), (other,) = play_all([[case, case], [given]], version=NEWEST, crds=ALL_CRDS)
    config = tmp_path / "run.toml"
    config.write_text(first.config)
    (container,) = template_of(first.workload("rollout"))["spec"]["containers"]
    plain = {name: source for name, source in environment(container).items() if isinstance(source, str)}
    says = {
        "$(LWS_WORKER_INDEX)": "1",
        "$(LWS_LEADER_ADDRESS):29500": "demo-penstock-rollout-0.demo-penstock-rollout.research:29500",
    }
    settings = load(config, environment={name: says.get(text, text) for name, text in plain.items()})
    assert (settings.rollout.nodes, settings.rollout.node) == (2, 1)
    assert settings.rollout.rendezvous == "demo-penstock-rollout-0.demo-penstock-rollout.research:29500"
    assert settings.rollout.secret_file is not None
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounted[str(settings.rollout.secret_file.parent)] == "engine"
    secrets = [release.one("Secret", "rollout")["stringData"]["secret"] for release in (first, again)]
    assert secrets[0] == secrets[1]
    assert len(secrets[0]) == 40
    assert other.of("Secret", "rollout") == []
    (volume,) = [
        volume for volume in template_of(other.workload("rollout"))["spec"]["volumes"] if volume["name"] == "engine"
    ]
    assert volume["secret"] == {"secretName": "ours", "defaultMode": 0o440}


@pytest.mark.parametrize("crds", [KEDA, EXTERNAL_METRICS])
def test_what_scales_replicas_scales_groups_of_pods(crds: Kinds) -> None:
    scaling = {"rollout": {"autoscaling": {"enabled": True, "minReplicas": 1}}}
    release = render(merged(CASES["two-nodes-per-engine"], scaling), crds={**crds, **LEADER_WORKER_SET})
    (scaler,) = [*release.of("ScaledObject", "rollout"), *release.of("HorizontalPodAutoscaler", "rollout")]
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "demo-penstock-rollout"}
    assert scaler["spec"]["scaleTargetRef"] == target
    assert "replicas" not in release.workload("rollout")["spec"]


def test_without_keda_an_autoscaler_reads_what_the_coordinator_exports_and_keeps_one_replica() -> None:
    scaling = {"autoscaling": {"enabled": True, "minReplicas": 1, "cooldownSeconds": 7200}}
    to_zero = values(reward={"autoscaling": {"enabled": True}})
    steps = [[values(rollout=scaling, reward=scaling)], [to_zero]]
    (release,), (refused,) = play_all(steps, version=NEWEST, crds={**OPERATOR, **EXTERNAL_METRICS})
    assert (
        "expected reward.autoscaling.minReplicas of at least 1 in a cluster without KEDA, found 0: a "
        "HorizontalPodAutoscaler does not scale to zero; set it to 1, or install KEDA"
    ) in refused.error
    assert not release.of("ScaledObject")
    (exported,) = STREAM_ENTRIES.collect()
    for role, stream, most, entries in (("rollout", PROMPTS, 4, "256"), ("reward", ROLLOUTS, 8, "32")):
        spec = release.one("HorizontalPodAutoscaler", role)["spec"]
        ((metric,), target) = spec["metrics"], spec["scaleTargetRef"]
        assert stream in SHOWN
        assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"demo-penstock-{role}"}
        assert (spec["minReplicas"], spec["maxReplicas"]) == (1, most)
        assert metric["external"]["metric"]["name"] == exported.name
        assert metric["external"]["metric"]["selector"] == {"matchLabels": {"run": "demo", "stream": stream.name}}
        assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": entries}
        assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 3600  # Kubernetes' maximum
        assert "replicas" not in release.workload(role)["spec"]


def test_keda_is_preferred_to_an_autoscaler() -> None:
    scaling = {"autoscaling": {"enabled": True}}
    release = render(values(rollout=scaling), crds={**KEDA, **EXTERNAL_METRICS})
    assert release.one("ScaledObject", "rollout")["spec"]["minReplicaCount"] == 0
    assert not release.of("HorizontalPodAutoscaler")


def test_the_rule_for_prometheus_adapter_passes_on_that_series_once_whoever_exports_it() -> None:
    text = (ROOT / "docs/kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n(rules:.*?)```", text, re.S)
    (rule,) = yaml.safe_load(block)["rules"]["external"]
    (exported,) = STREAM_ENTRIES.collect()
    assert rule["seriesQuery"].partition("{")[0] == rule["name"]["as"] == exported.name
    assert (
        rule["metricsQuery"] == "max by (run, stream) (<<.Series>>{<<.LabelMatchers>>})"
    )  # two coordinators export it


def test_backlogs_of_the_run_set_the_number_of_replicas() -> None:
    release = render(CASES["two-pools"], crds=ALL_CRDS)
    for role, streams, most, entries in (
        ("rollout", (PROMPTS, EVAL_PROMPTS), 15, "512"),
        ("reward", (ROLLOUTS, EVAL_ROLLOUTS), 8, "32"),
    ):
        scaled = release.one("ScaledObject", role)["spec"]
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"demo-penstock-{role}"}
        assert scaled["scaleTargetRef"] == target
        assert scaled["maxReplicaCount"] == most
        asked = {trigger["name"]: trigger["metadata"] for trigger in scaled["triggers"]}
        assert asked == {
            stream.name: {"stream": Keys("demo").of(stream), "streamLength": entries} for stream in streams
        }
        assert {trigger["type"] for trigger in scaled["triggers"]} == {"redis-streams"}
        assert "replicas" not in release.one("Deployment", role)["spec"]  # two would set it


@given(
    entries=st.lists(st.integers(0, 3000), min_size=2, max_size=2),
    target=st.integers(1, 256),
    replicas=st.integers(1, 1000),
    tolerance=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=400)
def test_keda_reaches_as_many_replicas_as_entries_need_from_any_number(
    scaled_object: Json, entries: list[int], target: int, replicas: int, tolerance: float
) -> None:
    spec = json.loads(json.dumps(scaled_object).replace("512", str(target)))
    lengths = dict(zip((trigger["name"] for trigger in spec["triggers"]), entries, strict=True))
    least = 1  # the JobSet's
    needed = max(least, math.ceil(sum(entries) / target))
    for _ in range(50):
        before, replicas = replicas, autoscaled(spec, lengths, replicas, tolerance)
        if before == replicas:
            break
    rest = sum(entries) - least * target
    assert least + replicas == needed or abs(rest / (target * replicas) - 1) <= tolerance


@pytest.fixture(scope="module")
def scaled_object() -> Json:
    spec: Json = render(CASES["two-pools"], crds=ALL_CRDS).one("ScaledObject", "rollout")["spec"]
    return spec


def autoscaled(spec: Json, lengths: Mapping[str, int], replicas: int, tolerance: float) -> int:
    """Return an HPA's next number of replicas (kubernetes.io/docs, "Algorithm details"), which KEDA feeds.

    With a formula there is one metric, its value; without, one for each trigger, and the largest result counts.
    """
    modifiers = spec.get("advanced", {}).get("scalingModifiers")
    if modifiers:
        assert modifiers["metricType"] == "AverageValue"
        value = eval(modifiers["formula"], {"max": max}, dict(lengths))
        metrics = [(value, int(modifiers["target"]))]
    else:
        metrics = [(lengths[trigger["name"]], int(trigger["metadata"]["streamLength"])) for trigger in spec["triggers"]]
    proposals = []
    for value, target in metrics:
        if not replicas:  # KEDA, not the HPA, starts the first
            proposals.append(int(value > int(modifiers["activationTarget"])))
            continue
        same = abs(value / (target * replicas) - 1) <= tolerance
        proposals.append(replicas if same else math.ceil(value / target))
    return max(int(spec["minReplicaCount"]), *proposals)


@pytest.mark.parametrize(
    ("topology", "kind", "address"),
    [
        ("standalone", "redis-streams", "address"),
        ("sentinel", "redis-sentinel-streams", "addresses"),
        ("cluster", "redis-cluster-streams", "addresses"),
    ],
)
def test_keda_is_told_which_servers_and_as_whom(topology: str, kind: str, address: str) -> None:
    bus = {"existingSecret": "redis", "topology": topology, "secretKeys": ["username"]}
    release = render(values("two-pools", bus=bus), crds=ALL_CRDS)
    triggers = release.one("ScaledObject", "reward")["spec"]["triggers"]
    assert {trigger["type"] for trigger in triggers} == {kind}
    (authentication,) = release.of("TriggerAuthentication")
    asked = {
        (reference["parameter"], reference["name"], reference["key"])
        for reference in authentication["spec"]["secretTargetRef"]
    }
    assert asked == {(key, "redis", key) for key in (address, "password", "username")}
